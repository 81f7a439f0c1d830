"""Giving outer updates out: a holder serves a large one to two peers, and sends the others to those.

The peers that it served pass it on, to two each, and so on: a tree that grows by itself. In it nobody uploads
much more than twice the update, whatever the number of members. A small one goes to three peers each, as a
whole; a tiny one everybody gets from the holder. Of a large one a peer passes on what has come so far, in
pieces, while the rest is still on its way to it (`Arriving`). So a level of the tree costs an eighth of a
transfer and not a whole one. Nobody has to be believed: the digest in the version's header decides. Whoever
is disappointed comes back to the holder and insists (`daemon.bulk.updates.gathering`), and is then served.

Rules: docs/protocol/following.md, section 4.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.capacity import Meter
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.rates import Rates
from p2pdiloco.daemon.bulk.updates.arriving import LEAST_BYTES, WAIT_S, Arriving
from p2pdiloco.daemon.bulk.updates.fetching import known_bytes
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.ports import Buffer, PullSource, Refusal
from p2pdiloco.util import BoundedDict, MovingAverage

DEGREE = 2
"""Number of peers to which a holder gives an update by itself."""
SMALL_DEGREE = 3
"""Number of peers for an update below `LEAST_BYTES`: few are sent round then, in a group of four nobody."""
TINY_BYTES = 16 * 1024
"""Size below which everybody gets an update at once: the labels of a version and a request weigh as much."""
IDLE_S = 5.0
"""Time after which a peer with a part of an update that does not ask for more loses its place."""
FRESH_S = 30.0
"""Time after which an update that nobody asked for is given out anew."""
PATIENCE_S = 30.0
"""Patience of those sent elsewhere, while nothing is known of our link."""
LEAST_PATIENCE_S, MOST_PATIENCE_S = 3.0, 120.0
MAX_GIVEN = 256
MAX_PEERS = 64
"""Number of peers that are served with one update, and remembered."""
MAX_WAITING = 32
MAX_WAITING_PER_PEER = 4
"""Number of a peer's pulls of updates that are arriving here, which may wait."""


class _Taker:
    """Peer that gets an update from us."""

    def __init__(self, relays: bool, now: float) -> None:
        self.relays = relays
        self.streams = 0
        self.whole = False
        self.last_s = now

    def holds_place(self, now: float) -> bool:
        return self.whole or self.streams > 0 or now - self.last_s < IDLE_S


class _Given:
    """Update that we give out."""

    def __init__(self, now: float) -> None:
        self.takers: BoundedDict[str, _Taker] = BoundedDict(MAX_PEERS)
        self.last_s = now

    def old(self, now: float) -> bool:
        """Tell whether nobody gets it or asked for it lately."""
        return now - self.last_s > FRESH_S and not any(taker.streams for taker in self.takers.values())


class Fanout:
    """Service of updates: who gets which one from us, and who is sent elsewhere."""

    def __init__(self, me: str, meter: Meter, now: Callable[[], float]) -> None:
        """`meter`: meter of the uplink while updates are given out; it leaves out what is too short."""
        self._me = me
        self._meter = meter
        self._now = now
        self._given: BoundedDict[tuple[int, int, bytes], _Given] = BoundedDict(MAX_GIVEN)
        self._arriving: dict[int, Arriving] = {}
        self._waiting: Counter[str] = Counter()
        self._rates = Rates(now)
        """Rates at which peers took what we gave them."""
        self._rate = MovingAverage(0.25)
        """Average of all these rates."""
        self.sent_elsewhere = 0
        self.given_bytes = 0
        """Bytes given out of updates of versions that we made."""
        self.passed_on_bytes = 0
        """Bytes given out of all other updates."""

    # --- what we are fetching ------------------------------------------------------------------------

    def arriving(self, fragment: int, number: int) -> Arriving:
        """Note that we begin to fetch this update. Of each fragment there is one, the last."""
        before = self._arriving.get(fragment)
        if before is not None:
            before.fail()
        found = self._arriving[fragment] = Arriving(number, self._now)
        return found

    def failed(self, fragment: int, arriving: Arriving) -> None:
        """Note that it was not fetched."""
        arriving.fail()
        self.over(fragment, arriving)

    def over(self, fragment: int, arriving: Arriving) -> None:
        """Let go of it: it is in the log, or nobody wants it any more."""
        if self._arriving.get(fragment) is arriving:
            del self._arriving[fragment]

    # --- what peers ask ------------------------------------------------------------------------------

    async def serve(
        self, sender: str, pull: wire.PullUpdate, found: tuple[SignedVersion, Buffer] | None
    ) -> PullSource | Refusal:
        """Answer a peer. `found`: the update, if our chain has it."""
        if found is not None:
            version, payload = found
            size = memoryview(payload).nbytes
            here = self._arriving.get(pull.fragment)
            if here is not None and here.number <= pull.number:
                del self._arriving[pull.fragment]  # it is in the log by now
            if pull.version and pull.version != version.header.digest():
                return refuse(PullRefusal.GONE)
            answer = self._admit(sender, pull, version.header.digest(), size)
            if isinstance(answer, wire.Elsewhere):
                return Refusal(wire.encode(answer))
            return self._give(sender, answer, version, memoryview(payload), size, pull)
        arriving = self._arriving.get(pull.fragment)
        if not pull.version or arriving is None or arriving.number != pull.number:
            return refuse(PullRefusal.GONE)
        return await self._pass_on(sender, pull, arriving)

    async def _pass_on(self, sender: str, pull: wire.PullUpdate, arriving: Arriving) -> PullSource | Refusal:
        if self._waiting.total() >= MAX_WAITING or self._waiting[sender] >= MAX_WAITING_PER_PEER:
            return refuse(PullRefusal.LATER)
        self._waiting[sender] += 1
        try:
            return await self._piece(sender, pull, arriving)
        finally:
            self._waiting -= Counter([sender])

    async def _piece(self, sender: str, pull: wire.PullUpdate, arriving: Arriving) -> PullSource | Refusal:
        began_s = self._now()
        until_s = asyncio.get_running_loop().time() + WAIT_S
        await arriving.started(until_s)
        if arriving.version is None:
            return refuse(PullRefusal.GONE if arriving.ended else PullRefusal.LATER)
        if arriving.version.header.digest() != pull.version:  # anybody can invent one: it costs no memory
            return refuse(PullRefusal.GONE)
        assert arriving.unfinished is not None
        answer = self._admit(sender, pull, pull.version, len(arriving.unfinished.payload))
        if isinstance(answer, wire.Elsewhere):
            return Refusal(wire.encode(answer))
        answer.streams += 1
        try:
            piece = await arriving.piece(pull, until_s)
        finally:
            answer.streams -= 1
            answer.last_s = self._now()
        if piece is None:
            return refuse(PullRefusal.GONE if arriving.ended else PullRefusal.LATER)
        version, payload, size = piece
        if version.header.digest() != pull.version:  # it began anew
            return refuse(PullRefusal.GONE)
        return self._give(sender, answer, version, payload, size, pull, self._now() - began_s)

    def _admit(self, sender: str, pull: wire.PullUpdate, digest: bytes, size: int) -> _Taker | wire.Elsewhere:
        now = self._now()
        key = (pull.fragment, pull.number, digest)
        given = self._given.get(key)
        if given is None or given.old(now):
            given = _Given(now)
        self._given[key] = given
        given.last_s = now
        takers = given.takers
        placed = [peer for peer, taker in takers.items() if peer != sender and taker.holds_place(now)]
        names = [peer for peer in placed if takers[peer].relays]
        if not pull.insist and sender not in takers and len(placed) >= degree(size) and names:
            names.sort(key=lambda peer: (takers[peer].whole, self._rates.of(peer, 0.0)), reverse=True)
            self.sent_elsewhere += 1
            return wire.Elsewhere(digest, self._patience_ms(size), tuple(names[: wire.MAX_NAMED]))
        taker = takers.setdefault(sender, _Taker(pull.relays, now))
        taker.last_s = now
        return taker

    def _patience_ms(self, size: int) -> int:
        """Work out the patience of those sent elsewhere, in milliseconds: twice what the same stream takes
        from us.

        Beyond that we had better serve it ourselves.
        """
        if self._rate.empty:
            return int(1000 * PATIENCE_S)
        patience_s = LEAST_PATIENCE_S + 2 * size / self._rate.value
        return int(1000 * min(patience_s, MOST_PATIENCE_S))

    def _give(
        self,
        sender: str,
        taker: _Taker,
        version: SignedVersion,
        here: memoryview,
        size: int,
        pull: wire.PullUpdate,
        waited_s: float = 0.0,
    ) -> PullSource:
        began_s = self._now()
        offset = known_bytes(pull, version.header.update_digest, here.nbytes)
        nbytes, rest = here.nbytes - offset, size - offset
        if version.header.syncer == self._me:
            self.given_bytes += nbytes
        else:
            self.passed_on_bytes += nbytes
        taker.streams += 1
        stream = ExitStack()
        stream.enter_context(self._meter.moving())

        def delivered() -> None:
            taker.whole = nbytes == rest
            if nbytes >= LEAST_BYTES:
                self._measured(sender, nbytes, self._now() - began_s)

        def release() -> None:
            stream.close()
            taker.streams -= 1
            taker.last_s = self._now()

        header = wire.encode(wire.UpdateHeader(version, offset, size, int(1000 * waited_s)))
        return PullSource(header, (here[offset:],), release, delivered)

    def _measured(self, peer: str, nbytes: int, seconds: float) -> None:
        self._rate.add(self._rates.measured(peer, nbytes, seconds))


def degree(size: int) -> float:
    """Return the number of peers to which a holder gives an update of so many bytes by itself."""
    if size < TINY_BYTES:
        return math.inf
    return DEGREE if size >= LEAST_BYTES else SMALL_DEGREE
