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

`ProbeGate` and `measure` are of measuring the link to a live peer.

Rules: docs/protocol/links.md, section 1.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.framing import RefusedByPeer
from p2pdiloco.config.values import is_public, rate_text
from p2pdiloco.core.api.reasons import ProbeRefusal
from p2pdiloco.core.api.types import REACH_WORDS, Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import LINK_OVERHEAD, LinkCapacity
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError, UserError
from p2pdiloco.ports import PullSource, Refusal, Transport
from p2pdiloco.util import BoundedDict, Frozen, Now, T, loop_s

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
Outlook = tuple[bool, bool, bool, bool]
BY_IP6 = True, False
"""Beginning of the outlook of a peer that is outside of our network, and connected by IPv6."""
Standing = tuple[bool, Outlook]
"""Standing of those who are heard: whether they are members or chosen, and their outlook."""


class Voice(Frozen):
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
        """Tell how far from us that peer is: outside of our network, there by IPv4, on another machine, on
        another interface."""
        found = [(False, False, False, False)]
        for text in self.ips:
            ip = ipaddress.ip_address(text)
            far = ip.is_global and _site(text) not in map(_site, own_ips)
            found.append((far, far and ip.version == 4, text not in own_ips, not ip.is_loopback))
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
        now: Now = time.monotonic,
        router: Router | None = None,
    ) -> None:
        """`chosen`: peers that a person named to join through. `router`: once it is asked."""
        self._transport = transport
        self._wish = wish
        self._chosen = frozenset(chosen)
        self._is_member: Callable[[str], bool] = lambda _peer: False
        self._now = now
        self._router = router
        self._dialable: bool | None = {"public": True, "private": False}.get(wish)
        self._named = NamedPlaces()
        self._against: set[str] = set()
        """Names of the voices that said no in all rounds since one said yes."""
        self._bad_rounds = 0
        self._by_ip6 = False
        """True: somebody outside could dial this node by IPv6."""
        self._standing = (False, (False, False, False, False))
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

    @property
    def words(self) -> str:
        """Word the reach, for people."""
        words = REACH_WORDS[self.reach]
        return f"{words} (direct by IPv6)" if self._by_ip6 and self._dialable is False else words

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
        own_ips = await asyncio.to_thread(multiaddrs.own_ips)
        heard = decisive(voices, own_ips)
        outlook = heard[0].outlook(own_ips)
        if not self._counts((known, outlook)):
            return
        self._by_ip6 |= any(voice.reached for voice in voices if voice.outlook(own_ips)[:2] == BY_IP6)
        ip4 = self._told_ip4()
        said: dict[str, bool] = {}
        for voice in heard:
            yes = bool(voice.reached)
            # Whoever has IPv4 only could not dial a syncer that is reached by IPv6 alone. And a router that
            # forwards the port of IPv4 may let nothing of IPv6 through.
            if outlook[:2] == BY_IP6:
                yes = bool(ip4 - own_ips or (ip4 and yes))
            said[voice.name] = said.get(voice.name, False) or yes
        if 2 * sum(said.values()) >= len(said):
            self._against, self._bad_rounds = set(), 0
            await self._look_outside(voices, own_ips)
            verdict = True
        elif not known:
            return
        else:
            self._against |= {name for name, yes in said.items() if not yes}
            self._bad_rounds += 1
            if self._router is not None and not self._router.answered.is_set():
                return
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
        now = self._now()
        for place in self._named.add(voices, own_ips, now)[:MAX_IPS]:
            if await self._transport.answers_at(self._transport.peer_id, *place, DIAL_S):
                self._named.proved(place, now)
        self._transport.found_outside(self._named.addresses())

    def _told_ip4(self) -> set[str]:
        """List addresses of the IPv4 Internet, and names, at which others are told to dial this node."""
        told = [a for a in self._transport.addresses() if is_public(a) and not multiaddrs.relayed(a)]
        return {host for kind, host in (multiaddrs.parse(a)[0] for a in told) if kind != "ip6"}

    async def _act_on(self, dialable: bool) -> None:
        if dialable:
            logger.info("others can dial this node")
            return
        family = " by IPv4, only by IPv6" if self._by_ip6 else ""
        logger.warning(
            "others cannot dial this node%s (a NAT or firewall is between): it takes part over connections "
            "that it makes itself, and is never syncer while somebody else can be",
            family,
        )
        await self._transport.hide()

    async def watch(self, tell: Callable[[Reach], None]) -> None:
        """Check for ever, and call `tell` with what is new."""
        told = None
        checked_s = loop_s()
        while True:
            if self.reach is not told:
                told = self.reach
                tell(told)
            await asyncio.sleep(SOON_S)
            settled = self._dialable is not None and not (self._dialable and self._bad_rounds)
            if loop_s() - checked_s >= (AGAIN_S if settled else SOON_S):
                await self.check()
                checked_s = loop_s()

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


DIAL_S = 3.0
MAX_IPS = 2
SAME_PEER_S = 2.0
MAX_A_MINUTE, MAX_AT_ONCE = 60, 8
STRANGERS_A_MINUTE, STRANGERS_AT_ONCE = 40, 5
"""Part of that for all who are no members: a peer id costs nothing. Members have the rest to themselves."""


@dataclass
class DialBack:
    """Answers to peers that want to know whether they can be dialled."""

    _transport: Transport
    _now: Now = time.monotonic

    def __post_init__(self) -> None:
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


TURN_S = 20.0
PROBE_AGAIN_S = 60.0
LEAST_CHARGE_BYTES = 16 * 1024
"""Bytes that every request counts as at least, which bounds the number of requests."""
FIRST_BYTES = 32 * 1024
GROWTH = 4
"""Factor by which each transfer may be longer than the last."""
AIM_S = 2.0
"""Time to measure in each direction."""
GIVE_UP_S = 6.0
PINGS = 4
EMPTY = 3
"""Number of transfers of nothing, of which the quickest counts."""
PAUSE_S = 5.0


_NOISE = os.urandom(64 * 1024)
"""Random bytes, since something on the way might compress zeros."""


def _noise(size_bytes: int) -> tuple[bytes, ...]:
    whole, rest = divmod(size_bytes, len(_NOISE))
    return (*[_NOISE] * whole, _NOISE[:rest])


class ProbeGate:
    """Admission of peers that measure the link to us: who, and how much.

    Anybody may ask, so the answer is stingy: one measurement at a time, at most `wire.MAX_PROBE_BYTES` each
    way, one a minute for a peer. Peer ids cost nothing, so the turn of one, 20 s, also bounds what all of
    them together can ask for: 3.4 Mbit/s.
    """

    def __init__(self, now: Now = time.monotonic) -> None:
        self._now = now
        self._peer = ""
        self._used_bytes = {"in": 0, "out": 0}
        self._turns: dict[str, float] = {}
        """Beginning of each peer's turn; of the last minute only, so a few."""

    def give(self, peer: str, request: wire.PullProbe) -> PullSource | Refusal:
        """Give bytes to a peer, or say why not now, or not so many."""
        refusal = self._why_not(peer, "out", request.size_bytes)
        if refusal is not None:
            return Refusal(wire.encode(refusal))
        return PullSource(b"", _noise(request.size_bytes), lambda: None)

    def take(self, peer: str, request: wire.PushProbe) -> Forgetful | Refusal:
        """Take bytes from a peer, or say why not now, or not so many."""
        refusal = self._why_not(peer, "in", request.size_bytes)
        return Forgetful(request.size_bytes) if refusal is None else Refusal(wire.encode(refusal))

    def _why_not(self, peer: str, way: str, size_bytes: int) -> wire.ProbeRefused | None:
        now = self._now()
        self._turns = {p: began for p, began in self._turns.items() if now - began < PROBE_AGAIN_S}
        left_s = self._turns.get(self._peer, -TURN_S) + TURN_S - now
        if left_s <= 0 or peer != self._peer:
            if peer in self._turns:
                return _again_in(ProbeRefusal.TOO_OFTEN, self._turns[peer] + PROBE_AGAIN_S - now)
            if left_s > 0:
                return _again_in(ProbeRefusal.BUSY, left_s)
            self._peer, self._turns[peer], self._used_bytes = peer, now, {"in": 0, "out": 0}
        used = self._used_bytes[way] + max(size_bytes, LEAST_CHARGE_BYTES)
        if used > wire.MAX_PROBE_BYTES:
            return _again_in(ProbeRefusal.TOO_MUCH, self._turns[peer] + PROBE_AGAIN_S - now)
        self._used_bytes[way] = used
        return None


def _again_in(why: ProbeRefusal, left_s: float) -> wire.ProbeRefused:
    return wire.ProbeRefused(why, max(0, round(left_s)))


@dataclass
class Forgetful:
    """Sink that keeps nothing. Implements `ports.PushSink`."""

    offset = 0

    payload_bytes: int

    async def write(self, offset: int, chunk: memoryview) -> None:
        pass

    async def finish(self) -> bytes:
        return b""

    def abort(self) -> None:
        pass


class MeasuredLink(Frozen):
    """Measurement of a link to one peer."""

    round_trip_s: float
    upload_bits_per_s: float
    """Rate on the link: headers and encryption included, as a provider counts."""
    download_bits_per_s: float
    moved_bytes: int
    """Bytes of both directions together."""
    took_s: float

    @property
    def link(self) -> LinkCapacity:
        """Measured rates and latency as `daemon.network.link` takes them."""
        return LinkCapacity(self.upload_bits_per_s, self.download_bits_per_s, self.round_trip_s / 2)

    def words(self) -> str:
        """Word the rates and the round trip."""
        up, down = rate_text(self.upload_bits_per_s), rate_text(self.download_bits_per_s)
        return f"{up}bit/s up, {down}bit/s down, round trip {self.round_trip_s * 1e3:.3g} ms"


Move = Callable[[int], Awaitable[None]]


async def measure(
    transport: Transport,
    peer: str,
    now: Now = time.monotonic,
    give_up_s: float = GIVE_UP_S,
) -> MeasuredLink:
    """Measure the link to a peer, by bytes that mean nothing: about 2 s or 8 MiB each way, whichever comes
    first.

    They take the streams that everything else takes. What arrives is forgotten.

    Raises:
        UserError: the peer is not reachable, refuses, does not know this, or the link is too slow or was cut.
    """
    began = now()
    try:
        round_trip_s = await _round_trip_s(transport, peer, now)
        down, received = await _rate(lambda size: _pull(transport, peer, size), now, give_up_s)
        up, sent = await _rate(lambda size: _push(transport, peer, size), now, give_up_s)
    except TimeoutError:
        raise UserError(
            f"the link to {peer} is too slow to measure: {FIRST_BYTES >> 10} KiB did not arrive in "
            f"{give_up_s:g} s",
            "give the link's rate with --upload and --download",
        ) from None
    except RemoteError as error:
        raise _refused(peer, error) from error
    except PeerUnreachable as error:
        raise UserError(
            f"{peer} cannot be reached: {error}", "is it still running, and no firewall between?"
        ) from error
    except TransportError as error:
        raise UserError(f"the link to {peer} was cut while it was measured: {error}", "try again") from error
    bits = 8 * LINK_OVERHEAD
    return MeasuredLink(round_trip_s, up * bits, down * bits, sent + received, now() - began)


class _NotNow(RemoteError):
    """Error: the peer does not measure the link now."""

    def __init__(self, answer: wire.ProbeRefused) -> None:
        super().__init__(answer.reason.value)
        self.words = f"{answer.reason} (again in {answer.again_s} s)"


def _refused(peer: str, error: RemoteError) -> UserError:
    words = ""
    if isinstance(error, _NotNow):
        words = error.words
    elif isinstance(error, RefusedByPeer) and error.unheard is not None:
        words = str(error.unheard)
    if words:
        return UserError(f"{peer} {words}", "try again later, or give the rate with --upload")
    return UserError(
        f"{peer} does not know how to measure a link (it answers: {error})",
        "it runs another version of p2pdiloco; ask another peer, or give the rate with --upload",
    )


async def _round_trip_s(transport: Transport, peer: str, now: Now) -> float:
    """Take the best of a few round trips, without the one that dials."""
    query = wire.QUERY + wire.encode(wire.RunsQuery())
    took = []
    for _ in range(PINGS):
        sent_s = now()
        await _twice(lambda: transport.send(peer, query, PAUSE_S))
        took.append(now() - sent_s)
    return min(took)


async def _twice(work: Callable[[], Awaitable[T]]) -> T:
    """Try twice: a peer out of breath resets a stream now and then, so the second failure counts."""
    try:
        return await work()
    except TransportError:
        return await work()


async def _rate(move: Move, now: Now, give_up_s: float) -> tuple[float, int]:
    """Measure a rate: (bytes per second, bytes moved).

    Transfers become longer, and the last and longest counts, less what one without any bytes takes (at most
    nine tenths: of a long fast link it is a lower bound). A transfer that does not end is an upper bound.

    Raises:
        TimeoutError: not even the first came through.
    """
    began = sent_s = now()
    rate, size, moved, overhead_s = 0.0, 0, 0, math.inf
    try:
        async with asyncio.timeout(give_up_s):
            for _ in range(EMPTY):
                sent_s = now()
                await _twice(lambda: move(0))
                overhead_s = min(overhead_s, now() - sent_s)
                moved += 2 * LEAST_CHARGE_BYTES  # the peer may have counted both attempts
            following, began = FIRST_BYTES, now()
            while following > size:
                size, sent_s = following, now()
                moved += size
                await move(size)
                took_s = now() - sent_s
                rate = size / max(took_s - overhead_s, took_s / 10, 1e-6)
                left_s = AIM_S - (now() - began)
                following = min(int(0.8 * rate * left_s), GROWTH * size, wire.MAX_PROBE_BYTES - moved)
    except TimeoutError:
        if not rate:
            raise
        # What is short can fly through a queue that is empty yet: so much is not carried for long.
        rate = min(rate, size / (now() - sent_s))
    return rate, moved


async def _pull(transport: Transport, peer: str, size_bytes: int) -> None:
    answer = await transport.pull(peer, wire.encode(wire.PullProbe(size_bytes)), size_bytes, PAUSE_S)
    if isinstance(answer, Refusal):
        raise _NotNow(wire.decode(answer.answer, wire.ProbeRefused))
    if len(answer[1]) != size_bytes:
        raise RemoteError("bad-probe", "not what was asked for")


async def _push(transport: Transport, peer: str, size_bytes: int) -> None:
    request = wire.encode(wire.PushProbe(size_bytes))
    accepted, answer = await transport.push(peer, request, _noise(size_bytes), PAUSE_S)
    if not accepted:
        raise _NotNow(wire.decode(answer, wire.ProbeRefused))
