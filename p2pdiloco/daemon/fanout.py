"""Giving outer updates out: a holder serves a large one to two peers, and sends the others to those.

The peers that it served pass it on, to two each, and so on: a tree that grows by itself, in which nobody
uploads much more than twice the update, whatever the number of members. A peer passes on what has come so
far, in pieces, while the rest is still on its way to it (`Arriving`), so a level of the tree costs an eighth
of a transfer and not a whole one. Nobody has to be believed: the digest in the version's header decides, and
whoever is disappointed comes back to the holder and insists (`daemon.gathering`), and is then served.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress

from p2pdiloco.core.types import SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.fetching import Unfinished, known_bytes
from p2pdiloco.daemon.rates import Rates
from p2pdiloco.ports import Buffer, PullSource, Refusal

DEGREE = 2
"""To so many peers a holder gives an update by itself."""
LEAST_BYTES = 256 * 1024
"""Smaller updates are given to everybody: another way round costs more than it saves."""
PIECES = 8
"""What is still arriving goes on in pieces of about this part of it, and of at least `LEAST_BYTES`,"""
PIECE_S = 0.1
"""and of what comes in this time: a piece is a stream of its own, which costs more than it saves where the
rest is here at once."""
WAIT_S = 4.0
"""So long we let a peer wait for the next piece before it hears "later"."""
IDLE_S = 5.0
"""A peer with a part of an update that does not ask for more loses its place."""
FRESH_S = 30.0
"""An update that nobody asked for in this time is given out anew."""
PATIENCE_S = 30.0
"""Of those sent elsewhere, while nothing is known of our link."""
LEAST_PATIENCE_S, MOST_PATIENCE_S = 3.0, 120.0
MAX_GIVEN = 256
MAX_PEERS = 64
"""Served with one update, and remembered."""
MAX_WAITING = 32
MAX_WAITING_PER_PEER = 4
"""Pulls of updates that are arriving here."""


class Arriving:
    """An update that is being fetched, or was: others get what is here of it."""

    def __init__(self, number: int, now: Callable[[], float]) -> None:
        self.number = number
        self._now = now
        self._began_s = 0.0
        self._began_bytes = 0
        self.version: SignedVersion | None = None
        self.unfinished: Unfinished | None = None
        self.ended = False
        """It failed: nothing more comes."""
        self._changed = asyncio.Event()

    def begun(self, version: SignedVersion, unfinished: Unfinished) -> None:
        """It is coming."""
        self.version, self.unfinished = version, unfinished
        self._began_s, self._began_bytes = self._now(), unfinished.have_bytes
        self._changed.set()

    def grew(self) -> None:
        """More of it is here."""
        self._changed.set()

    def fail(self) -> None:
        """Nothing more comes."""
        self.ended = True
        self._changed.set()

    async def started(self, until_s: float) -> None:
        """Wait until it is known of which version it is, until then at most."""
        await self._wait(lambda: self.ended or self.version is not None, until_s)

    async def piece(
        self, pull: wire.PullUpdate, until_s: float
    ) -> tuple[SignedVersion, memoryview, int] | None:
        """A piece that is worth a stream: (version, all that is here, size of the whole). None: not now."""
        await self._wait(lambda: self._enough(pull), until_s)
        version, unfinished = self.version, self.unfinished
        if self.ended or version is None or unfinished is None:
            return None
        size = len(unfinished.payload)
        if unfinished.have_bytes <= known_bytes(pull, version.header.update_digest, size):
            return None
        return version, memoryview(unfinished.payload)[: unfinished.have_bytes], size

    async def _wait(self, enough: Callable[[], bool], until_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while not enough():
                    self._changed.clear()
                    await self._changed.wait()

    def _enough(self, pull: wire.PullUpdate) -> bool:
        version, unfinished = self.version, self.unfinished
        if self.ended:
            return True
        if version is None or unfinished is None:
            return False
        size, here = len(unfinished.payload), unfinished.have_bytes
        news = here - known_bytes(pull, version.header.update_digest, size)
        came, took_s = here - self._began_bytes, max(self._now() - self._began_s, 1e-6)
        return here == size or news >= max(LEAST_BYTES, size // PIECES, came / took_s * PIECE_S)


class _Taker:
    """A peer that gets an update from us."""

    def __init__(self, relays: bool, now: float) -> None:
        self.relays = relays
        self.streams = 0
        self.whole = False
        self.last_s = now

    def holds_place(self, now: float) -> bool:
        return self.whole or self.streams > 0 or now - self.last_s < IDLE_S


class _Given:
    """An update that we give out."""

    def __init__(self, now: float) -> None:
        self.takers: dict[str, _Taker] = {}
        self.last_s = now


class Fanout:
    """Who gets which update from us, and who is sent elsewhere."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._given: OrderedDict[tuple[int, int, bytes], _Given] = OrderedDict()
        self._arriving: dict[int, Arriving] = {}
        self._waiting: Counter[str] = Counter()
        self._rates = Rates(now)
        """At which peers took what we gave them."""
        self._rate = 0.0
        """The same, of all, averaged; 0: nothing is known."""
        self.sent_elsewhere = 0

    # --- what we are fetching ------------------------------------------------------------------------

    def arriving(self, fragment: int, number: int) -> Arriving:
        """We begin to fetch this update. Of each fragment there is one, the last."""
        before = self._arriving.get(fragment)
        if before is not None:
            before.fail()
        found = self._arriving[fragment] = Arriving(number, self._now)
        return found

    def failed(self, fragment: int, arriving: Arriving) -> None:
        """It was not fetched."""
        arriving.fail()
        self.over(fragment, arriving)

    def over(self, fragment: int, arriving: Arriving) -> None:
        """It is in the log, or nobody wants it any more: we do not keep it."""
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
                return refuse("gone")
            if size < LEAST_BYTES:
                return _source(version, memoryview(payload), size, pull)
            answer = self._admit(sender, pull, version.header.digest(), size)
            if isinstance(answer, wire.Elsewhere):
                return Refusal(wire.encode(answer))
            return self._give(sender, answer, _source(version, memoryview(payload), size, pull), size)
        arriving = self._arriving.get(pull.fragment)
        if not pull.version or arriving is None or arriving.number != pull.number:
            return refuse("gone")
        return await self._pass_on(sender, pull, arriving)

    async def _pass_on(self, sender: str, pull: wire.PullUpdate, arriving: Arriving) -> PullSource | Refusal:
        if self._waiting.total() >= MAX_WAITING or self._waiting[sender] >= MAX_WAITING_PER_PEER:
            return refuse("later")
        self._waiting[sender] += 1
        try:
            return await self._piece(sender, pull, arriving)
        finally:
            self._waiting -= Counter([sender])

    async def _piece(self, sender: str, pull: wire.PullUpdate, arriving: Arriving) -> PullSource | Refusal:
        until_s = asyncio.get_running_loop().time() + WAIT_S
        await arriving.started(until_s)
        if arriving.version is None:
            return refuse("gone" if arriving.ended else "later")
        if arriving.version.header.digest() != pull.version:  # anybody can invent one: it costs no memory
            return refuse("gone")
        answer = self._admit(sender, pull, pull.version, 0)
        if isinstance(answer, wire.Elsewhere):
            return Refusal(wire.encode(answer))
        answer.streams += 1
        try:
            piece = await arriving.piece(pull, until_s)
        finally:
            answer.streams -= 1
            answer.last_s = self._now()
        if piece is None:
            return refuse("gone" if arriving.ended else "later")
        version, payload, size = piece
        if version.header.digest() != pull.version:  # it began anew
            return refuse("gone")
        return self._give(sender, answer, _source(version, payload, size, pull), size)

    def _admit(self, sender: str, pull: wire.PullUpdate, digest: bytes, size: int) -> _Taker | wire.Elsewhere:
        now = self._now()
        key = (pull.fragment, pull.number, digest)
        given = self._given.pop(key, None)
        if given is None or now - given.last_s > FRESH_S:
            given = _Given(now)
        self._given[key] = given
        while len(self._given) > MAX_GIVEN:
            self._given.popitem(last=False)
        given.last_s = now
        takers = given.takers
        placed = [peer for peer, taker in takers.items() if peer != sender and taker.holds_place(now)]
        names = [peer for peer in placed if takers[peer].relays]
        if not pull.insist and sender not in takers and len(placed) >= DEGREE and names:
            names.sort(key=lambda peer: (takers[peer].whole, self._rates.of(peer, 0.0)), reverse=True)
            self.sent_elsewhere += 1
            return wire.Elsewhere(digest, self._patience_ms(size), tuple(names[: wire.MAX_NAMED]))
        taker = takers.setdefault(sender, _Taker(pull.relays, now))
        taker.last_s = now
        while len(takers) > MAX_PEERS:
            del takers[next(iter(takers))]
        return taker

    def _patience_ms(self, size: int) -> int:
        """Twice what the same stream takes from us: beyond that we had better serve it ourselves."""
        if not self._rate:
            return int(1000 * PATIENCE_S)
        patience_s = LEAST_PATIENCE_S + 2 * size / self._rate
        return int(1000 * min(patience_s, MOST_PATIENCE_S))

    def _give(self, sender: str, taker: _Taker, source: PullSource, size: int) -> PullSource:
        began_s = self._now()
        nbytes = memoryview(source.payload[0]).nbytes
        rest = size - wire.decode(source.header, wire.UpdateHeader).offset
        taker.streams += 1

        def delivered() -> None:
            taker.whole = nbytes == rest
            if nbytes >= LEAST_BYTES:
                self._measured(sender, nbytes, self._now() - began_s)

        def release() -> None:
            taker.streams -= 1
            taker.last_s = self._now()

        return PullSource(source.header, source.payload, release, delivered)

    def _measured(self, peer: str, nbytes: int, seconds: float) -> None:
        rate = self._rates.measured(peer, nbytes, seconds)
        self._rate = (3 * self._rate + rate) / 4 if self._rate else rate


def _source(version: SignedVersion, here: memoryview, size: int, pull: wire.PullUpdate) -> PullSource:
    """What of `here` (the beginning, or all, of `size` bytes) the asker does not have."""
    offset = known_bytes(pull, version.header.update_digest, here.nbytes)
    header = wire.encode(wire.UpdateHeader(version, offset, size))
    return PullSource(header, (here[offset:],), lambda: None)


def refuse(reason: str) -> Refusal:
    """A pull's refusal, encoded."""
    return Refusal(wire.encode(wire.Refused(reason)))
