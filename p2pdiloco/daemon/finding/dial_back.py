"""Answers to peers that want to know whether they can be dialled (`daemon.finding.reach`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import Transport

DIAL_S = 3.0
MAX_IPS = 2
SAME_PEER_S = 2.0
MAX_A_MINUTE, MAX_AT_ONCE = 60, 8
STRANGERS_A_MINUTE, STRANGERS_AT_ONCE = 40, 5
"""Part of that for all who are no members: a peer id costs nothing. Members have the rest to themselves."""


class DialBack:
    """Answers to peers that want to know whether they can be dialled."""

    def __init__(self, transport: Transport, now: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._now = now
        self._asked: dict[str, tuple[float, bool]] = {}
        """Time at which each peer asked, and whether as a stranger; of the last minute only."""
        self._running: list[bool] = []
        """Dials under way, for each whether it is a stranger's."""

    async def answer(self, sender: str, query: wire.ReachQuery, stranger: bool = False) -> wire.ReachAnswer:
        """Dial the asker where it is seen, at the ports that it names; answer where it proved to be itself.

        Raises:
            RemoteError: it asks too often, or there is no direct connection to tell an address from.
        """
        self._admit(sender, stranger)
        link = await self._transport.link(sender)
        if link is None or not link.ips:
            raise RemoteError("not-connected", "no direct connection to the asker")
        ips = link.ips[:MAX_IPS]
        places = [(ip, port) for ip in ips for port in query.ports]
        self._running.append(stranger)
        try:
            tries = [self._transport.answers_at(sender, ip, port, DIAL_S) for ip, port in places]
            found = await asyncio.gather(*tries)
        finally:
            self._running.remove(stranger)
        return wire.ReachAnswer(tuple(place for place, ok in zip(places, found, strict=True) if ok))

    def _admit(self, sender: str, stranger: bool) -> None:
        now = self._now()
        self._asked = {peer: asked for peer, asked in self._asked.items() if now - asked[0] < 60.0}
        often = sender in self._asked and now - self._asked[sender][0] < SAME_PEER_S
        full = len(self._asked) >= MAX_A_MINUTE or len(self._running) >= MAX_AT_ONCE
        if stranger:
            asked = sum(strange for _, strange in self._asked.values())
            full = full or asked >= STRANGERS_A_MINUTE or sum(self._running) >= STRANGERS_AT_ONCE
        if often or full:
            raise RemoteError("dial-back-too-often")
        self._asked[sender] = (now, stranger)
