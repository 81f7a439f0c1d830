"""Holes in NATs: two members behind routers get a direct line by the word of a peer that both are connected
to.

libp2p punches a hole only once four peers have seen a node's address. Here one is enough. Bootstraps and
hidden nodes listen by UDP (QUIC), too. Whoever wants to reach a hidden member asks a peer to join through,
which tells each end where it sees the other, and both dial at once. The first packet of each opens its own
router for the other's packets. A router that takes another port for every destination (symmetric) shows the
bootstrap a port that is of no use to others: there a hole comes about only if the other router lets in
packets from everywhere.

Where to dial is believed of peers only that a person named to join through.

Rules: docs/protocol/links.md, section 2.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from p2pdiloco.adapters.dials import Attempts
from p2pdiloco.daemon import wire
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.util import BoundedDict, Rests, loop_s

WORDS, WORDS_S = 64, 60.0
"""Wishes of one peer that are heard in so much time."""
MAX_NOTED = 4096
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
        self._rests: Rests[str] = Rests(REST_S, MOST_REST_S)
        self._dials: set[asyncio.Task[bool]] = set()

    async def answer(self, sender: str, query: wire.Punch) -> wire.PunchAnswer:
        """Tell both ends where the other is; or, as one of them, begin to dial.

        Raises:
            RemoteError: they are not both connected here by UDP; too often; or who names addresses is nobody
                whom we join through.
        """
        words = self._words[sender] = self._words.get(sender) or Attempts(WORDS, WORDS_S)
        if not words.take(loop_s()):
            raise RemoteError("punches-too-often")
        if query.addresses:
            if sender not in self._chosen:
                raise RemoteError("not-chosen")
            dial = asyncio.create_task(self._dial(query.peer, query.addresses))
            self._dials.add(dial)
            dial.add_done_callback(self._dials.discard)
            return wire.PunchAnswer(())
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
                wanted = [peer for peer in sorted(without) if not self._rests.rests(peer)]
                chosen = random.sample(wanted, min(len(wanted), MOST_AT_ONCE))
                await asyncio.gather(*map(self.punch, chosen))
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
            if answer.addresses and await self._dial(peer, answer.addresses):
                self._rests.pop(peer, None)
                logger.info("a direct line to %(peer)s, through both routers", {"peer": peer})
                return True
        return False

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> bool:
        try:
            await self._transport.dial_anew(peer, addresses)
        except PeerUnreachable as error:
            logger.debug("no hole to %s: %s", peer, error)
            return False
        link = await self._transport.link(peer)
        return link is not None and bool(link.ips)
