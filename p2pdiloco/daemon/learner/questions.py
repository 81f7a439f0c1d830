"""Questions to the learner that are waited for: the held-out loss, and what contributions do to the loss.

It answers between two inner steps. Whoever waits is told if it ends first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdiloco.learner import channel_messages as ch


class Questions:
    """Questions to the learner of one node, one of each kind at a time."""

    def __init__(self, ask: Callable[[ch.Command], bool]) -> None:
        """`ask`: posts a question; False: there is nobody to take it."""
        self._ask = ask
        self._waits: dict[type[ch.LearnerEvent], asyncio.Future[ch.LearnerEvent | None]] = {}

    async def evaluate(self) -> float | None:
        """Let it measure the held-out loss of the global parameters, and wait until it has. Returns the
        seconds that it took; None: it has ended, takes no commands, or rests for its owner."""
        found = await self._answer(ch.Evaluate(), ch.Evaluated)
        return found.took_s if isinstance(found, ch.Evaluated) else None

    async def appraise(self, question: ch.Appraise) -> ch.Appraised | None:
        """Let it measure two contributions, and wait until it has. None: as above."""
        found = await self._answer(question, ch.Appraised)
        return found if isinstance(found, ch.Appraised) else None

    async def _answer(self, question: ch.Command, kind: type[ch.LearnerEvent]) -> ch.LearnerEvent | None:
        self._waits[kind] = waits = asyncio.get_running_loop().create_future()
        return await waits if self._ask(question) else None

    def heard(self, event: ch.LearnerEvent) -> None:
        """Take in what the learner says."""
        waits = self._waits.pop(type(event), None)
        if waits is not None and not waits.done():
            waits.set_result(event)

    def ended(self) -> None:
        """Take in that the learner has ended: it answers nothing any more."""
        for waits in self._waits.values():
            if not waits.done():
                waits.set_result(None)
        self._waits.clear()
