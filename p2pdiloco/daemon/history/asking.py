"""Asking members of a run who did how much of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from p2pdiloco.daemon.finding.asking import ask
from p2pdiloco.daemon.history.queries import CreditsAnswer, CreditsQuery
from p2pdiloco.ports import Transport

EVERY_S = 60.0
"""Pause between two questions for credits."""
MOST_ASKED = 8


def believed(answers: Mapping[str, CreditsAnswer]) -> str:
    """Choose the keeper in the middle, by the tokens of which it knows whose they are: one liar among three
    is not believed, also where it says that it alone knows all."""
    known = {peer: told.fragment_tokens - told.before_fragment_tokens for peer, told in answers.items()}
    return sorted(known, key=lambda peer: known[peer])[len(known) // 2]


class AskedCredits:
    """Credits of a run as its members tell them, asked now and then."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._asked_at_s = -EVERY_S
        self.answer: CreditsAnswer | None = None
        """Answer that is believed; None: nobody that was asked keeps the history."""

    async def look(self, transport: Transport, run: str, peers: Sequence[str]) -> None:
        """Ask these members, which are connected, if it is time."""
        if not peers or self._now() - self._asked_at_s < EVERY_S:
            return
        self._asked_at_s = self._now()
        asked, query = peers[:MOST_ASKED], CreditsQuery(run)
        told = await asyncio.gather(*(ask(transport, peer, query, CreditsAnswer) for peer in asked))
        answers = {peer: answer for peer, answer in zip(asked, told, strict=True) if answer is not None}
        if answers:
            self.answer = answers[believed(answers)]
