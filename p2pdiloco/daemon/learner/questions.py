"""Questions to the learner that are waited for: the held-out loss, and what contributions do to the loss.

It answers between two inner steps. Whoever waits is told if it ends first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from p2pdiloco.learner import channel as ch


class Questions:
    """Questions to the learner of one node: one for the held-out loss at a time, and one about each file."""

    def __init__(self, ask: Callable[[ch.Command], bool], appraises: Callable[[], bool]) -> None:
        """`ask`: posts a question; False: there is nobody to take it. `appraises`: tells whether a learner is
        here that can measure contributions."""
        self._ask, self._appraises = ask, appraises
        self._waits: dict[Path | None, asyncio.Future[ch.LearnerEvent | None]] = {}
        """Waits for answers, by the question's file; None: for the held-out loss."""

    async def evaluate(self) -> float | None:
        """Let it measure the held-out loss of the global parameters, and wait until it has. Returns the
        seconds that it took; None: it has ended, takes no commands, or rests for its owner."""
        found = await self._answer(ch.Evaluate(), None)
        return found.took_s if isinstance(found, ch.Evaluated) else None

    @property
    def appraises(self) -> bool:
        """True: there is a learner that can measure contributions."""
        return self._appraises()

    async def appraise(self, question: ch.Appraise) -> ch.Appraised | None:
        """Let it measure two contributions, and wait until it has. None: as above. What it says of a file
        for which nobody waits any more counts for nothing."""
        found = await self._answer(question, question.path)
        return found if isinstance(found, ch.Appraised) else None

    async def _answer(self, question: ch.Command, file: Path | None) -> ch.LearnerEvent | None:
        self._waits[file] = waits = asyncio.get_running_loop().create_future()
        try:
            return await waits if self._ask(question) else None
        finally:
            if self._waits.get(file) is waits:
                del self._waits[file]

    def heard(self, event: ch.Evaluated | ch.Appraised) -> None:
        """Take in what the learner says."""
        waits = self._waits.pop(event.path if isinstance(event, ch.Appraised) else None, None)
        if waits is not None and not waits.done():
            waits.set_result(event)

    def ended(self) -> None:
        """Take in that the learner has ended: it answers nothing any more."""
        for waits in self._waits.values():
            if not waits.done():
                waits.set_result(None)
        self._waits.clear()
