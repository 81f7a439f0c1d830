"""Whether others can dial this node, and under which address: asked of peers, never concluded by ourselves.

The question names ports only. Who is asked dials the IP address from which the asker is connected to it,
with a connection of its own, and looks whether that very peer answers there. So nobody can be made to dial
a third party, and a single question costs a few handshakes at most (`DialBack`).

Answers count for as much as they know of the world: those of peers that see us under a public address
before those of neighbours in our own network. Two in a row must say no before a node that could be dialled
counts as hidden. A hidden node is reached over connections that it keeps itself, and, for a first word,
through a relay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Literal

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.core.reach import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport

ASKED = 3
"""Peers that are asked in one round."""
DIAL_S = 3.0
ANSWER_S = 5.0
SOON_S = 3.0
"""Until the next round, while nothing is known or a change is to be confirmed."""
AGAIN_S = 120.0
MAX_IPS = 2
SAME_PEER_S = 2.0
MAX_A_MINUTE = 60
MAX_AT_ONCE = 8
Wish = Literal["auto", "public", "private"]
logger = logging.getLogger(__name__)


class DialBack:
    """Answers peers that want to know whether they can be dialled."""

    def __init__(self, transport: Transport, now: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._now = now
        self._asked: dict[str, float] = {}
        """Peer -> when; of the last minute only."""
        self._running = 0

    async def answer(self, sender: str, query: wire.ReachQuery) -> wire.ReachAnswer:
        """Raises: RemoteError (too often, or no direct connection to tell an address from)."""
        self._admit(sender)
        link = await self._transport.link(sender)
        if link is None or not link.ips:
            raise RemoteError("not-connected", "no direct connection to the asker")
        ips = link.ips[:MAX_IPS]
        places = [(ip, port) for ip in ips for port in query.ports]
        self._running += 1
        try:
            tries = [self._transport.answers_at(sender, ip, port, DIAL_S) for ip, port in places]
            found = await asyncio.gather(*tries)
        finally:
            self._running -= 1
        return wire.ReachAnswer(ips, tuple(place for place, ok in zip(places, found, strict=True) if ok))

    def _admit(self, sender: str) -> None:
        now = self._now()
        self._asked = {peer: at_s for peer, at_s in self._asked.items() if now - at_s < 60.0}
        often = now - self._asked.get(sender, -SAME_PEER_S) < SAME_PEER_S
        if often or len(self._asked) >= MAX_A_MINUTE or self._running >= MAX_AT_ONCE:
            raise RemoteError("dial-back-too-often")
        self._asked[sender] = now


def judge(answers: Sequence[wire.ReachAnswer], own_ips: set[str]) -> bool | None:
    """Whether others can dial us, by those who know most of the world; None: nobody said."""
    if not answers:
        return None
    best = max(_outlook(answer, own_ips) for answer in answers)
    said = [bool(answer.reached) for answer in answers if _outlook(answer, own_ips) == best]
    return 2 * sum(said) >= len(said)


def _outlook(answer: wire.ReachAnswer, own_ips: set[str]) -> tuple[bool, bool, bool]:
    """How far from us that peer is: it sees us under a public address, under another one than our own."""
    found = [(False, False, False)]
    for text in answer.seen:
        ip = ipaddress.ip_address(text)
        found.append((ip.is_global, text not in own_ips, not ip.is_loopback))
    return max(found)


def outside_addresses(answers: Sequence[wire.ReachAnswer], own_ips: set[str]) -> list[str]:
    """Addresses that are not ours but lead to us (a forwarded port), as two peers say, if two were asked."""
    counts: dict[tuple[str, int], int] = {}
    for answer in answers:
        for place in set(answer.reached):
            counts[place] = counts.get(place, 0) + 1
    agreed = [place for place, n in sorted(counts.items()) if n >= min(2, len(answers))]
    return [f"/ip{4 if '.' in ip else 6}/{ip}/tcp/{port}" for ip, port in agreed if ip not in own_ips]


class Reachability:
    """What this node is, looked at again and again."""

    def __init__(self, transport: Transport, wish: Wish = "auto") -> None:
        self._transport = transport
        self._wish = wish
        self._dialable: bool | None = {"public": True, "private": False}.get(wish)
        self._doubted = False

    @property
    def reach(self) -> Reach:
        """As far as is known now."""
        if self._dialable is None:
            return Reach.UNKNOWN
        if self._dialable:
            return Reach.DIRECT
        relayed = any(multiaddrs.relayed(address) for address in self._transport.addresses())
        return Reach.RELAYED if relayed else Reach.OUTBOUND

    async def check(self) -> None:
        """One round of questions. Never fails; takes `ANSWER_S` at most."""
        if self._wish != "auto":
            return
        answers = await self._answers()
        own_ips = {*multiaddrs.interface_addresses("ip4"), *multiaddrs.interface_addresses("ip6")}
        verdict = judge(answers, own_ips)
        if verdict is None:
            return
        if verdict:
            self._transport.found_outside(outside_addresses(answers, own_ips))
        elif self._dialable and not self._doubted:
            self._doubted = True
            return
        self._doubted = False
        if verdict != self._dialable:
            self._dialable = verdict
            await self._act_on(verdict)

    async def _act_on(self, dialable: bool) -> None:
        if dialable:
            logger.info("others can dial this node")
            return
        logger.warning(
            "others cannot dial this node (a NAT or firewall is between): it takes part over connections "
            "that it makes itself, and is never syncer while somebody else can be"
        )
        await self._transport.hide()

    async def watch(self, tell: Callable[[Reach], None]) -> None:
        """Look for ever, and tell what is new."""
        told = None
        loop = asyncio.get_running_loop()
        checked_s = loop.time()
        while True:
            if self.reach is not told:
                told = self.reach
                tell(told)
            await asyncio.sleep(SOON_S)
            settled = self._dialable is not None and not self._doubted
            if loop.time() - checked_s >= (AGAIN_S if settled else SOON_S):
                await self.check()
                checked_s = loop.time()

    async def _answers(self) -> list[wire.ReachAnswer]:
        transport = self._transport
        ports = tcp_ports(transport.addresses())[: wire.MAX_PORTS]
        peers = transport.connected()
        if not ports or not peers:
            return []
        query = wire.QUERY + wire.encode(wire.ReachQuery(tuple(ports)))
        chosen = random.sample(peers, min(ASKED, len(peers)))
        replies = await asyncio.gather(*(self._ask(peer, query) for peer in chosen))
        return [reply for reply in replies if reply is not None]

    async def _ask(self, peer: str, query: bytes) -> wire.ReachAnswer | None:
        try:
            answer = wire.decode(await self._transport.send(peer, query, ANSWER_S), wire.ReachAnswer)
            for text in (*answer.seen, *(ip for ip, _ in answer.reached)):
                ipaddress.ip_address(text)
            return answer
        except (RemoteError, TransportError, ValueError) as error:
            logger.debug("%s does not say whether it can dial us: %s", peer, error)
            return None


def tcp_ports(addresses: Sequence[str]) -> list[int]:
    """Ports of the plain TCP addresses among these, each once."""
    found = (multiaddrs.tcp_of(address) for address in addresses)
    return list(dict.fromkeys(place[1] for place in found if place is not None))
