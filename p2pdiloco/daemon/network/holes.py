"""Holes in NATs: two members behind routers get a direct line by the word of a peer that both are connected
to.

libp2p punches a hole only once four peers have seen a node's address. Here one is enough. Bootstraps and
hidden nodes listen by UDP (QUIC), too. A hidden node that wants to reach another asks a bootstrap through
which it joined. The bootstrap tells each end where it sees the other, and both dial at once. The first packet
of each opens its own router for the other's packets. A router that takes another port for every destination
(symmetric) shows the bootstrap a port that is of no use to others: there a hole comes about only if the other
router lets in packets from everywhere.

A node believes where to dial only of peers that a person named to join through. IPv4 alone is dialled: by
IPv6 there is no NAT between.

Rules: docs/protocol/links.md, section 2.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from p2pdiloco.adapters.dials import Attempts
from p2pdiloco.adapters.endpoint import report_end
from p2pdiloco.daemon import wire
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.util import BoundedDict, Rests, loop_s

WISHES, WORDS, WORDS_S = 64, 8, 60.0
"""Wishes of one peer that a bootstrap hears in so much time, and those that another hears of from it."""
MAX_NOTED, MAX_DIALS = 4096, 16
"""Peers whose wishes and words are counted, and dials under way at the words of others."""
ASK_S, TELL_S = 5.0, 3.0
LOOK_S, MOST_AT_ONCE = 3.0, 8
REST_S, MOST_REST_S = 4.0, 600.0
"""Time after which a hole is tried once more, doubled at every failure up to the second."""
logger = logging.getLogger(__name__)


@dataclass
class Holes:
    """Punching of holes: for this node, and between others that are connected to it."""

    _transport: Transport
    _chosen: frozenset[str] = frozenset()
    """Peers that a person named to join through."""

    def __post_init__(self) -> None:
        self._words: BoundedDict[str, Attempts] = BoundedDict(MAX_NOTED)
        self._wishes: BoundedDict[str, Attempts] = BoundedDict(MAX_NOTED)
        self._rests: Rests[str] = Rests(REST_S, MOST_REST_S)
        self._dials: dict[str, asyncio.Task[bool]] = {}
        """Dials under way, one to a peer: a second one would end what the first has found."""

    async def answer(self, sender: str, query: wire.Punch) -> wire.PunchAnswer:
        """Tell both ends where the other is; or, as one of them, begin to dial.

        Raises:
            RemoteError: they are not both connected here by UDP; the peer asks too often; or no person named
                the peer that tells where to dial.
        """
        if query.addresses:
            if sender not in self._chosen:
                raise RemoteError("not-chosen")
            if len(self._dials) >= MAX_DIALS or not _may(self._words, query.peer, WORDS):
                raise RemoteError("punches-too-often")
            self._begin(query.peer, query.addresses)
            return wire.PunchAnswer(())
        if not _may(self._wishes, sender, WISHES):
            raise RemoteError("punches-too-often")
        if self._transport.hidden:
            raise RemoteError("not-connected", "a hidden node helps nobody")
        asker, wanted = [await self._transport.link(peer) for peer in (sender, query.peer)]
        if asker is None or wanted is None or not asker.udp or not wanted.udp:
            raise RemoteError("not-connected", "not both are connected by UDP")
        word = wire.QUERY + wire.encode(wire.Punch(sender, asker.udp[: wire.MAX_PORTS]))
        try:
            await self._transport.send(query.peer, word, TELL_S)
        except (RemoteError, TransportError) as error:
            raise RemoteError("not-connected", str(error)) from error
        return wire.PunchAnswer(wanted.udp[: wire.MAX_PORTS])

    async def watch(self, hidden: Callable[[], Collection[str]]) -> None:
        """Punch holes to hidden members for ever, while this node is one."""
        while True:
            if self._transport.hidden:
                without = set(hidden()).difference(self._transport.direct())
                connected = self._transport.connected()
                wanted = [peer for peer in sorted(without) if not self._rests.rests(peer)]
                random.shuffle(wanted)  # anybody may have a record: those who answered come first
                wanted.sort(key=lambda peer: peer not in connected)
                await asyncio.gather(*map(self.punch, wanted[:MOST_AT_ONCE]))
            await asyncio.sleep(LOOK_S)

    async def punch(self, peer: str) -> bool:
        """Try to get a direct line to a peer; True: there is one."""
        self._rests.lengthen(peer)
        query = wire.QUERY + wire.encode(wire.Punch(peer, ()))
        for helper in sorted(self._chosen.intersection(self._transport.connected())):
            try:
                answer = wire.decode(await self._transport.send(helper, query, ASK_S), wire.PunchAnswer)
            except (RemoteError, TransportError) as error:
                logger.debug("%s does not help to reach %s: %s", helper, peer, error)
                continue
            dial = self._begin(peer, answer.addresses)
            if await asyncio.shield(dial):
                self._rests.pop(peer, None)
                return True
        return False

    def _begin(self, peer: str, addresses: tuple[str, ...]) -> asyncio.Task[bool]:
        """Dial a peer, unless that is under way."""
        if peer not in self._dials:
            self._dials[peer] = dial = asyncio.create_task(self._dial(peer, addresses))
            dial.add_done_callback(lambda _: self._dials.pop(peer))
            dial.add_done_callback(partial(report_end, "hole"))
        return self._dials[peer]

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> bool:
        try:
            await self._transport.dial_anew(peer, [at for at in addresses if _is_global(at)])
        except PeerUnreachable as error:
            logger.debug("no hole to %s: %s", peer, error)
            return False
        logger.info("a direct line to %(peer)s, through both routers", {"peer": peer})
        return True


def _may(kept: BoundedDict[str, Attempts], peer: str, most: int) -> bool:
    attempts = kept[peer] = kept.get(peer) or Attempts(most, WORDS_S)
    return attempts.take(loop_s())


def _is_global(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("/")[2]).is_global
    except ValueError:
        return False
