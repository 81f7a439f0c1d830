"""Measuring a link to a live peer: how fast bytes that mean nothing go there and come back.

They take the streams that everything else takes. What arrives is forgotten.

Anybody may ask, so whoever answers is stingy (`ProbeGate`): one measurement at a time, at most
`wire.MAX_PROBE_BYTES` each way, one a minute for a peer. Peer ids cost nothing, so the turn of one, 20 s,
also bounds what all of them together can ask for: 3.4 Mbit/s.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from p2pdiloco.adapters.framing import RefusedByPeer
from p2pdiloco.core.api.reasons import ProbeRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.links.link import LINK_OVERHEAD, Link
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError, UserError
from p2pdiloco.ports import PullSource, Refusal, Transport

TURN_S = 20.0
AGAIN_S = 60.0
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


# --- who answers -------------------------------------------------------------------------------------


_NOISE = os.urandom(64 * 1024)
"""Random bytes, since something on the way might compress zeros."""


def _noise(size_bytes: int) -> tuple[bytes, ...]:
    whole, rest = divmod(size_bytes, len(_NOISE))
    return (*[_NOISE] * whole, _NOISE[:rest])


class ProbeGate:
    """Admission of peers that measure the link to us: who, and how much."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
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
        self._turns = {p: began for p, began in self._turns.items() if now - began < AGAIN_S}
        left_s = self._turns.get(self._peer, -TURN_S) + TURN_S - now
        if left_s <= 0 or peer != self._peer:
            if peer in self._turns:
                return _again_in(ProbeRefusal.TOO_OFTEN, self._turns[peer] + AGAIN_S - now)
            if left_s > 0:
                return _again_in(ProbeRefusal.BUSY, left_s)
            self._peer, self._turns[peer], self._used_bytes = peer, now, {"in": 0, "out": 0}
        used = self._used_bytes[way] + max(size_bytes, LEAST_CHARGE_BYTES)
        if used > wire.MAX_PROBE_BYTES:
            return _again_in(ProbeRefusal.TOO_MUCH, self._turns[peer] + AGAIN_S - now)
        self._used_bytes[way] = used
        return None


def _again_in(why: ProbeRefusal, left_s: float) -> wire.ProbeRefused:
    return wire.ProbeRefused(why, max(0, round(left_s)))


class Forgetful:
    """Sink that keeps nothing. Implements `ports.PushSink`."""

    offset = 0

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes

    async def write(self, offset: int, chunk: memoryview) -> None:
        """See `ports.PushSink.write`."""

    async def finish(self) -> bytes:
        """See `ports.PushSink.finish`."""
        return b""

    def abort(self, reason: str) -> None:
        """See `ports.PushSink.abort`."""


# --- who asks ----------------------------------------------------------------------------------------


class MeasuredLink(Struct, frozen=True):
    """Measurement of a link to one peer."""

    round_trip_s: float
    upload_bits_per_s: float
    """Rate on the link: headers and encryption included, as a provider counts."""
    download_bits_per_s: float
    moved_bytes: int
    """Bytes of both directions together."""
    took_s: float

    @property
    def link(self) -> Link:
        """Measured rates and latency as `daemon.links.linkplan` takes them."""
        return Link(self.upload_bits_per_s, self.download_bits_per_s, self.round_trip_s / 2)


T = TypeVar("T")
Move = Callable[[int], Awaitable[None]]


async def measure(
    transport: Transport,
    peer: str,
    now: Callable[[], float] = time.monotonic,
    give_up_s: float = GIVE_UP_S,
) -> MeasuredLink:
    """Measure the link to a peer: about 2 s or 8 MiB each way, whichever comes first.

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


async def _round_trip_s(transport: Transport, peer: str, now: Callable[[], float]) -> float:
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


async def _rate(move: Move, now: Callable[[], float], give_up_s: float) -> tuple[float, int]:
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
