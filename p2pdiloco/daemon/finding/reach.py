"""Reachability of this node: whether others can dial it, and where. Peers are asked.

A node never concludes it by itself. The question names ports only. Who is asked dials the IP address from
which the asker is connected to it, with a connection of its own, and looks whether that very peer answers
there. So nobody who is asked can be made to dial a third party, and a single question costs a few handshakes
at most (`DialBack`). Who asks dials what the answers name, since only it can prove that it is reached there.
A liar can have it make a connection to any address, at a port of its own, but only one for each place that
the liar is at, two a round.

Asked are members of the run that count by their work or by the owner's word, and whomever a person named to
join through. Anybody can hold a connection to us: others are asked only while none of those is connected, and
of them only a yes is believed.

Answers count for as much as they know of the world: those of peers at a public address before those of
neighbours in our own network. Where a peer is, our own connection to it says, not the peer. Two *voices* must
say no before a node counts as hidden, in two rounds if it could be dialled before. Voices are peers at
different places: one liar, under whatever names, demotes nobody who has others to ask. p2pd does not say
which connections it accepted and which it made, so accepted ones are no evidence.

An address that is not ours is told to others once two voices have named it, or once this node has reached
itself there, with the same proof. A hidden node is reached over connections that it keeps itself, and, for a
first word, through a relay.

Rules: docs/protocol/links.md, section 1.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from msgspec import Struct

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.core.api.types import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.finding.dial_back import DIAL_S, MAX_IPS
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.util import BoundedDict

ASKED = 3
"""Number of peers that are asked in one round."""
ANSWER_S = 5.0
SOON_S = 3.0
"""Pause until the next round, while nothing is known or a change is to be confirmed."""
AGAIN_S = 120.0
VOICES = 2
"""Number of peers at different places that must agree."""
ROUNDS_ALONE = 4
"""Number of rounds in which no second voice was found, after which the one is believed."""
KEEP_S = 3 * AGAIN_S
"""Time for which an answer counts: about an address, and of those who know more of the world than others."""
MAX_NAMED = 64
Wish = Literal["auto", "public", "private"]
logger = logging.getLogger(__name__)


Place = tuple[str, int]
"""Pair of IP address and port."""
Outlook = tuple[bool, bool, bool]
Standing = tuple[bool, Outlook]
"""Standing of those who are heard: whether they are members or chosen, and their outlook."""


class Voice(Struct, frozen=True):
    """Answer of one peer."""

    peer: str
    ips: tuple[str, ...]
    """Addresses at which the peer is, as our connection to it says."""
    reached: tuple[Place, ...]
    """Places at which it says that it reached us."""

    @property
    def name(self) -> str:
        """Name by which voices are told apart: a site on the Internet, where everybody can have many peer
        ids, else the peer id."""
        public = sorted(_site(ip) for ip in self.ips if ipaddress.ip_address(ip).is_global)
        return public[0] if public else self.peer

    def outlook(self, own_ips: set[str]) -> Outlook:
        """Tell how far from us that peer is: at a public address, on another machine, on another
        interface."""
        found = [(False, False, False)]
        for text in self.ips:
            ip = ipaddress.ip_address(text)
            found.append((ip.is_global, text not in own_ips, not ip.is_loopback))
        return max(found)


def _site(ip: str) -> str:
    """Reduce an address to what one customer of a provider has at least: an IPv4 address, or 64 bits of an
    IPv6 one."""
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ":" in ip else ip


def decisive(voices: Sequence[Voice], own_ips: set[str]) -> list[Voice]:
    """Select the voices that know most of the world."""
    best = max((voice.outlook(own_ips) for voice in voices), default=None)
    return [voice for voice in voices if voice.outlook(own_ips) == best]


class NamedPlaces:
    """Addresses that are not ours but lead to us (a forwarded port), as peers say: who named which, when."""

    def __init__(self) -> None:
        self._when: BoundedDict[tuple[Place, str], float] = BoundedDict(MAX_NAMED)
        self._proved: dict[Place, float] = {}

    def add(self, voices: Sequence[Voice], own_ips: set[str], now: float) -> list[Place]:
        """Take a round's answers in; return the places that nobody has confirmed yet.

        It is one place of each voice, the last that it named; those of the voices heard last come first.
        """
        for voice in voices:
            for place in voice.reached:
                if place[0] not in own_ips:
                    self._when[place, voice.name] = now
        for key, when_s in list(self._when.items()):
            if now - when_s > KEEP_S:
                del self._when[key]
        named = {place for place, _ in self._when}
        self._proved = {p: s for p, s in self._proved.items() if now - s <= KEEP_S and p in named}
        settled = {*self._agreed(), *self._proved}
        doubtful: dict[str, Place] = {}
        for place, name in reversed(self._when):
            if place not in settled:
                doubtful.setdefault(name, place)
        return list(dict.fromkeys(doubtful.values()))

    def proved(self, place: Place, now: float) -> None:
        """Note that we reached ourselves there."""
        self._proved[place] = now

    def addresses(self) -> list[str]:
        """List the addresses that may be told to others, as multiaddrs."""
        good = sorted({*self._agreed(), *self._proved})
        return [f"/ip{4 if '.' in ip else 6}/{ip}/tcp/{port}" for ip, port in good]

    def _agreed(self) -> list[Place]:
        counts = Counter(place for place, _ in self._when)
        return [place for place, voices in counts.items() if voices >= VOICES]


class Reachability:
    """Reachability of this node, looked at again and again."""

    def __init__(
        self,
        transport: Transport,
        wish: Wish = "auto",
        chosen: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chosen`: peers that a person named to join through."""
        self._transport = transport
        self._wish = wish
        self._chosen = frozenset(chosen)
        self._is_member: Callable[[str], bool] = lambda _peer: False
        self._now = now
        self._dialable: bool | None = {"public": True, "private": False}.get(wish)
        self._named = NamedPlaces()
        self._against: set[str] = set()
        """Names of the voices that said no in all rounds since one said yes."""
        self._bad_rounds = 0
        self._standing: Standing = (False, (False, False, False))
        """Standing of those who were believed last; `_heard_s`: when that was."""
        self._heard_s = -1e18

    @property
    def reach(self) -> Reach:
        """Reach as far as it is known now."""
        if self._dialable is None:
            return Reach.UNKNOWN
        if self._dialable:
            return Reach.DIRECT
        relayed = any(multiaddrs.relayed(address) for address in self._transport.addresses())
        return Reach.RELAYED if relayed else Reach.OUTBOUND

    def believe(self, is_member: Callable[[str], bool]) -> None:
        """Believe, from now on, those too of whom `is_member` says that they count in our run."""
        self._is_member = is_member

    def _electorate(self) -> tuple[list[str], bool]:
        """List the connected peers that are asked; True: they are members or chosen."""
        peers = self._transport.connected()
        known = [peer for peer in peers if peer in self._chosen or self._is_member(peer)]
        return (known, True) if known else (list(peers), False)

    async def check(self) -> None:
        """Ask one round of questions. Never fails.

        It takes `ANSWER_S` at most and, for an address that is not ours, `DIAL_S` more.
        """
        if self._wish != "auto":
            return
        peers, known = self._electorate()
        voices = await self._ask_some(peers)
        if not voices:
            return
        own = await asyncio.to_thread(multiaddrs.own_addresses)
        own_ips = {*own["ip4"], *own["ip6"]}
        heard = decisive(voices, own_ips)
        if not self._counts((known, heard[0].outlook(own_ips))):
            return
        said: dict[str, bool] = {}
        for voice in heard:
            said[voice.name] = said.get(voice.name, False) or bool(voice.reached)
        if 2 * sum(said.values()) >= len(said):
            self._against, self._bad_rounds = set(), 0
            await self._look_outside(voices, own_ips)
            verdict = True
        elif not known:
            return
        else:
            self._against |= {name for name, yes in said.items() if not yes}
            self._bad_rounds += 1
            alone = len(peers) <= len(voices) or self._bad_rounds >= ROUNDS_ALONE
            if (self._dialable and self._bad_rounds < 2) or not (alone or len(self._against) >= VOICES):
                return
            verdict = False
        if verdict != self._dialable:
            self._dialable = verdict
            await self._act_on(verdict)

    def _counts(self, standing: Standing) -> bool:
        """Tell whether nobody who counts for more, or knows more of the world, has been heard lately."""
        now = self._now()
        if standing < self._standing and now - self._heard_s < KEEP_S:
            return False
        if standing != self._standing:
            self._against, self._bad_rounds = set(), 0
        self._standing, self._heard_s = standing, now
        return True

    async def _look_outside(self, voices: Sequence[Voice], own_ips: set[str]) -> None:
        """Look for addresses that lead to us from outside, and tell the transport those that are proved."""
        now = self._now()
        for place in self._named.add(voices, own_ips, now)[:MAX_IPS]:
            if await self._transport.answers_at(self._transport.peer_id, *place, DIAL_S):
                self._named.proved(place, now)
        self._transport.found_outside(self._named.addresses())

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
        """Check for ever, and call `tell` with what is new."""
        told = None
        loop = asyncio.get_running_loop()
        checked_s = loop.time()
        while True:
            if self.reach is not told:
                told = self.reach
                tell(told)
            await asyncio.sleep(SOON_S)
            settled = self._dialable is not None and not (self._dialable and self._bad_rounds)
            if loop.time() - checked_s >= (AGAIN_S if settled else SOON_S):
                await self.check()
                checked_s = loop.time()

    async def _ask_some(self, peers: Sequence[str]) -> list[Voice]:
        ports = tcp_ports(self._transport.addresses())[: wire.MAX_PORTS]
        if not ports or not peers:
            return []
        chosen = random.sample(peers, min(ASKED, len(peers)))
        replies = await asyncio.gather(*(self._ask(peer, ports) for peer in chosen))
        return [reply for reply in replies if reply is not None]

    async def _ask(self, peer: str, ports: Sequence[int]) -> Voice | None:
        query = wire.QUERY + wire.encode(wire.ReachQuery(tuple(ports)))
        try:
            answer = wire.decode(await self._transport.send(peer, query, ANSWER_S), wire.ReachAnswer)
            if not all(port in ports and ipaddress.ip_address(ip) for ip, port in answer.reached):
                raise ValueError("reached what was not asked for")
            link = await self._transport.link(peer)
        except (RemoteError, TransportError, ValueError) as error:
            logger.debug("%s does not say whether it can dial us: %s", peer, error)
            return None
        return Voice(peer, link.ips, answer.reached) if link is not None and link.ips else None


def tcp_ports(addresses: Sequence[str]) -> list[int]:
    """List the ports of the plain TCP addresses among these, each once."""
    found = (multiaddrs.tcp_of(address) for address in addresses)
    return list(dict.fromkeys(place[1] for place in found if place is not None))
