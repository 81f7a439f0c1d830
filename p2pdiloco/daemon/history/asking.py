"""Asking members of a run who did how much of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.history.queries import CreditsAnswer, CreditsQuery
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport

ASK_TIMEOUT_S = 5.0
EVERY_S = 60.0
"""Pause between two questions for credits."""
MOST_ASKED = 8


async def ask_credits(transport: Transport, peer: str, run: str, offset: int = 0) -> CreditsAnswer | None:
    """Ask a peer; None: it keeps no history, or does not answer."""
    query = wire.QUERY + wire.encode(CreditsQuery(run, offset))
    try:
        return wire.decode(await transport.send(peer, query, ASK_TIMEOUT_S), CreditsAnswer)
    except (TransportError, RemoteError):
        return None


class AskedCredits:
    """Credits of a run as its members tell them, asked now and then. Of several answers the one in the
    middle, by what is known, is believed."""

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
        told = await asyncio.gather(*(ask_credits(transport, peer, run) for peer in peers[:MOST_ASKED]))
        answers = [answer for answer in told if answer is not None]
        if answers:
            answers.sort(key=lambda answer: answer.fragment_tokens - answer.before_fragment_tokens)
            self.answer = answers[len(answers) // 2]
