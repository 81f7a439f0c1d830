"""Outer updates: fetched (`Gathering`), given out (`Fanout`), passed on while they arrive (`Arriving`).

`Pulling` asks one peer, and keeps what came of a stream that was cut (`UnfinishedUpdates`).

Rules: docs/protocol/transfers.md, section 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace

from p2pdiloco.core.api.reasons import FetchFailure, PullRefusal, Verdict, VersionFault
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.capacity import Meter
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.pushes import ChainView, PushesIn, Rates, failure_of
from p2pdiloco.daemon.payloads import Memory
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Buffer, PullSource, Refusal, Transport
from p2pdiloco.util import BoundedDict, MovingAverage, Now, loop_s

LEAST_BYTES = 256 * 1024
"""Size below which updates are passed on as a whole."""
PIECES = 8
"""Number of pieces of one update, about: what is still arriving goes on when at least this part of it, and
`LEAST_BYTES`, are new."""
PIECE_S = 0.1
"""Time whose bytes make a piece at least. A piece is a stream of its own, which costs more than it saves
where the rest is here at once."""
WAIT_S = 4.0
"""Time for which a peer waits for the next piece before it hears "later"."""

PAUSE_S = 15.0
"""Longest pause in a stream before it counts as cut."""
NAMED_PAUSE_S = 6.0
"""Longest pause of a peer that a holder named: there are others. Longer than `WAIT_S`."""


MAX_PULLS = 40
"""Number of requests to others for one update."""
MAX_PATIENCE_S = 120.0
LEAST_STALL_S = WAIT_S + 3.0
"""Least time that we wait while nothing comes; a third of the patience, if that is more. An honest peer
that has nothing new takes less to say "later"."""
FULL = 0.9
"""Share of that time after which a peer that had it to itself, and gave nothing, is left out."""
FORGIVE_S = 60.0
"""Time for which a peer is left out that was named and was not reached, gave something wrong, or nothing
in time."""
NO_WORSE = (FetchFailure.GONE, FetchFailure.NOT_READY, FetchFailure.BUSY)
"""Reasons for which a named peer refuses and is no worse for it."""
MAX_PEERS = 256
MEASURED_BYTES = 64 * 1024


class NotAsSigned(RemoteError):
    """Error: an update is not what its syncer signed. Where several gave of it, that is not the holder's
    fault."""

    def __init__(self, why: Verdict | VersionFault) -> None:
        super().__init__(why.value)


class LeftOut:
    """Peers that are left out for `FORGIVE_S`: what they gave may be wrong, or did not come in time."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._until: BoundedDict[str, float] = BoundedDict(MAX_PEERS)

    def add(self, *peers: str) -> None:
        """Leave these peers out from now on."""
        for peer in peers:
            self._until[peer] = self._now() + FORGIVE_S

    def forgive(self, *peers: str) -> None:
        """Count on these peers again: it was somebody else."""
        for peer in peers:
            self._until.pop(peer, None)

    def __contains__(self, peer: str) -> bool:
        return self._until.get(peer, -math.inf) > self._now()


@dataclass
class Gathering:
    """Fetching of updates from whoever has them, with a memory of who was fast and who did not deliver.

    The holder that the core names may name others. Those are tried in turn, and whoever they name. A peer
    that delivered fast before comes first, equals in an order that differs between askers. They are tried as
    long as something comes, for two minutes at most; while nothing comes, for a third of what the holder said
    that it would take; in a bounded number of requests. Then we come back to the holder and insist. What came
    so far stays, whoever gave it. Bytes of several peers that turn out wrong say nothing against the holder:
    it is asked once more, for all of them.
    """

    _pulling: Pulling
    _now: Now

    def __post_init__(self) -> None:
        self._rates = Rates(self._now)
        self._failed = LeftOut(self._now)
        self.from_others = 0
        """Number of updates of which nothing came from the holder that was asked first."""

    async def fetch(
        self,
        holder: str,
        request: wire.PullUpdate,
        check: Callable[[Fetch], Awaitable[None]],
        watcher: Arriving,
    ) -> Fetch:
        """Fetch all of an update, checked; `watcher` hears of what comes.

        Raises:
            TransportError, RemoteError: from the holder, or `check`.
        """
        found = await self._ask(holder, request, watcher)
        givers: set[str] = set()
        others = None
        if isinstance(found, wire.Elsewhere):
            others = await self._elsewhere(holder, request, found, givers, watcher)
            fetch = others or await self._insist(holder, request, watcher)
        else:
            fetch = _all_of(found)
        try:
            await check(fetch)
        except NotAsSigned:
            if not (others or fetch.header.offset):
                raise  # all of it came from the holder
            self._failed.add(*givers)
            fetch, others = await self._insist(holder, request, watcher), None
            await check(fetch)
        self.from_others += others is not None
        return fetch

    async def _insist(self, holder: str, request: wire.PullUpdate, watcher: Arriving) -> Fetch:
        found = await self._ask(holder, replace(request, insist=True), watcher)
        if isinstance(found, wire.Elsewhere):
            raise wire.PullRefused(PullRefusal.BUSY)
        return _all_of(found)

    async def _elsewhere(
        self,
        holder: str,
        request: wire.PullUpdate,
        answer: wire.Elsewhere,
        givers: set[str],
        watcher: Arriving,
    ) -> Fetch | None:
        """Fetch all of the version that the holder named from others (`givers`); None: not in time."""
        wanted = replace(request, version=answer.version)
        known = {holder, self._pulling.me}
        queue = self._ordered(answer.peers, known, request)
        patience_s = min(answer.patience_ms / 1000, MAX_PATIENCE_S)
        stall_s = max(LEAST_STALL_S, patience_s / 3)
        heard_s = self._now()
        last = heard_s + MAX_PATIENCE_S
        for _ in range(MAX_PULLS):
            if not queue:
                return None
            peer, have = queue.pop(0), self._pulling.have_bytes(request.fragment)
            asked_s, until_s = self._now(), min(last, heard_s + stall_s)
            try:
                async with asyncio.timeout_at(until_s):
                    found = await self._ask(peer, wanted, watcher)
            except TimeoutError:
                if self._pulling.have_bytes(request.fragment) == have:
                    if until_s - asked_s >= FULL * stall_s:  # not who had what others left of it
                        self._failed.add(peer)  # the others of the queue were not asked
                    return None
                givers.add(peer)
                if self._now() < last:
                    queue.insert(0, peer)
                    heard_s = self._now()
                    continue
                return None
            except TransportError:
                self._failed.add(peer)
                continue
            except RemoteError as error:
                failure = failure_of(error)
                if failure is FetchFailure.LATER:
                    queue.append(peer)
                elif failure not in NO_WORSE:
                    self._failed.add(peer)
                continue
            if isinstance(found, wire.Elsewhere):
                queue = self._ordered(found.peers, known, request) + queue
                continue
            givers.add(peer)
            if found.complete:
                return found
            if not found.received_bytes:
                self._failed.add(peer)
                continue
            heard_s = self._now()
            queue.insert(0, peer)
        return None

    async def _ask(self, peer: str, request: wire.PullUpdate, watcher: Arriving) -> Fetch | wire.Elsewhere:
        asked_s = self._now()
        found = await self._pulling.pull(peer, request, watcher)
        if isinstance(found, Fetch) and found.received_bytes >= MEASURED_BYTES:
            # With the round trip, as in `daemon.bulk.states`: of two with the same bandwidth the
            # nearer one is faster. Not with what it waited for itself: that is its place in the tree, this
            # time.
            waited_s = min(found.header.waited_ms / 1000, max(0.0, found.began_s - asked_s))
            self._rates.measured(peer, found.received_bytes, self._now() - asked_s - waited_s)
        return found

    def _ordered(self, peers: Sequence[str], known: set[str], request: wire.PullUpdate) -> list[str]:
        """Order the peers that are new as we try them; from now on they are known."""
        fresh = {peer for peer in peers if peer not in known and peer not in self._failed}
        known.update(fresh)
        unknown = max((self._rates.of(peer, 1.0) for peer in fresh), default=1.0)

        def key(peer: str) -> tuple[int, bytes]:
            rate = self._rates.of(peer, unknown)
            mine = hashlib.sha256(f"{self._pulling.me}/{peer}/{request.fragment}/{request.number}".encode())
            return -round(math.log2(max(rate, 1.0))), mine.digest()

        return sorted(fresh, key=key)


def _all_of(fetch: Fetch) -> Fetch:
    if not fetch.complete:
        raise RemoteError("garbage", "a part where all was asked for")
    return fetch


@dataclass
class Pulling:
    """Requests for updates, one peer at a time, and what is kept of those that were cut."""

    chain: ChainView
    _transport: Transport
    _memory: Memory
    _pushes_in: PushesIn
    """Keeper of others' cut streams, which make room."""
    _downlink: Meter
    """Meter that runs while bytes come, not while we ask."""

    def __post_init__(self) -> None:
        self.unfinished = UnfinishedUpdates(loop_s)
        self.bytes_in = 0

    @property
    def me(self) -> str:
        """Our peer id."""
        return self._transport.peer_id

    def have_bytes(self, fragment: int) -> int:
        """Return how much of a fragment's update is here when no pull is under way."""
        return self.unfinished.have_bytes(fragment)

    async def pull(self, peer: str, request: wire.PullUpdate, watcher: Arriving) -> Fetch | wire.Elsewhere:
        """Pull the payload, after what is here of it already. `watcher` hears of what comes.

        Raises:
            TransportError, RemoteError.
        """
        fragment, limit = request.fragment, self.chain.most_update_bytes(request.fragment)
        self.unfinished.forget_old()
        self._pushes_in.forget_old()
        left = before = self.unfinished.take(
            fragment
        )  # what is reserved for the whole counts it from here on
        if not self._memory.fits_fetch(limit):
            self.unfinished.forget_all()
            self._pushes_in.forget_all()
        if before is not None:
            request = replace(request, have_bytes=before.have_bytes, have=before.digest)
        pause_s = NAMED_PAUSE_S if request.version else PAUSE_S
        try:
            with self._memory.fetching(limit), ExitStack() as stack:
                fetch = Fetch(
                    request, limit, before, watcher, lambda: stack.enter_context(self._downlink.moving())
                )
                try:
                    refusal = await self._transport.pull_into(peer, wire.encode(request), fetch, pause_s)
                    left = fetch.unfinished
                    if refusal is None and fetch.complete:
                        self.unfinished.forget(fragment)
                        left = None
                except (TransportError, asyncio.CancelledError):
                    left = fetch.unfinished
                    raise
                except RemoteError:
                    if fetch.received_bytes:  # else it was busy, say: another holder may have the rest
                        left = None
                    raise
                finally:
                    self.bytes_in += fetch.received_bytes
        finally:
            self.unfinished.keep(fragment, left)
        if refusal is None:
            return fetch
        answer = wire.decode(refusal.answer, cast(Any, wire.Refused | wire.Elsewhere))
        if isinstance(answer, wire.Elsewhere):
            return answer
        raise wire.PullRefused(answer.reason)


Asked = wire.PullUpdate | wire.PullState
KEEP_S = 120.0


class Unfinished:
    """Payload of which a part is here."""

    def __init__(self, digest: bytes, size: int) -> None:
        self.digest = digest
        self.payload = bytearray(size)
        self.have_bytes = 0


class UnfinishedUpdates:
    """Payloads of which a part is here: what came of a stream that was cut is kept, and only the rest asked
    for.

    Of each fragment one is kept, by its digest, so that any other holder of the same can go on with it. It
    goes when something of the fragment has been fetched, and after a while. States have
    `daemon.bulk.states.StateCopy`.
    """

    def __init__(self, now: Now) -> None:
        self._now = now
        self._kept: dict[int, tuple[Unfinished, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that all of them take."""
        return sum(len(unfinished.payload) for unfinished, _ in self._kept.values())

    def take(self, key: int) -> Unfinished | None:
        """Take the part of a fragment's update to go on with: it is kept no longer."""
        return self._kept.pop(key, (None, 0.0))[0]

    def keep(self, key: int, unfinished: Unfinished | None) -> None:
        """Keep a part for whoever asks next, if there is anything of it."""
        if unfinished is not None and unfinished.have_bytes:
            self._kept[key] = (unfinished, self._now())

    def have_bytes(self, key: int) -> int:
        """Return how much of a fragment's update is kept."""
        return self._kept[key][0].have_bytes if key in self._kept else 0

    def forget(self, fragment: int) -> None:
        """Drop the part of a fragment of which something has come."""
        self._kept.pop(fragment, None)

    def forget_all(self) -> None:
        """Drop all parts, for want of room."""
        self._kept.clear()

    def forget_old(self) -> None:
        """Drop what nobody asked for in a while: the world has moved on."""
        for key, (_, since_s) in list(self._kept.items()):
            if self._now() - since_s > KEEP_S:
                del self._kept[key]


@dataclass
class Fetch:
    """Sink of one request for an update. Implements `ports.PullSink`."""

    _request: wire.PullUpdate
    _most: int
    unfinished: Unfinished | None
    _watcher: Arriving
    _comes: Callable[[], object] = lambda: None
    """Function that is called when the payload begins to come."""

    def __post_init__(self) -> None:
        self._header: wire.UpdateHeader | None = None
        self.received_bytes = 0
        self.began_s = 0.0

    @property
    def complete(self) -> bool:
        """True: all of the payload is here."""
        return self.unfinished is not None and self.unfinished.have_bytes == len(self.unfinished.payload)

    @property
    def header(self) -> wire.UpdateHeader:
        """Header of the stream: what the payload is."""
        assert self._header is not None
        return self._header

    @property
    def payload(self) -> bytearray:
        """Payload, all of it."""
        assert self.unfinished is not None
        return self.unfinished.payload

    def begin(self, header: bytes, payload_bytes: int) -> None:
        self._header = found = wire.decode(header, wire.UpdateHeader)
        digest, before = found.version.header.update_digest, self.unfinished
        size = payload_bytes + found.offset
        if found.total and found.total < size:
            raise RemoteError("garbage", "a part that is longer than the whole")
        if self._request.version not in (b"", found.version.header.digest()):
            raise RemoteError("wrong-version", "not the version that was asked for")
        size = found.total or size
        if size > self._most:
            raise RemoteError("oversized", f"payload of {size} bytes, at most {self._most}")
        if not found.offset:
            before = self.unfinished = Unfinished(digest, size)
        elif before is None or (digest, found.offset) != (before.digest, before.have_bytes):
            raise RemoteError("garbage", "goes on with something else than was asked for")
        elif len(before.payload) != size:
            self.unfinished = None  # who gave the beginning, or who gives the rest: begin anew
            raise TransportError("of another size than what came before")
        self.began_s = loop_s()
        self._watcher.begun(found.version, before)
        self._comes()

    def write(self, offset: int, chunk: memoryview) -> None:
        assert self.unfinished is not None
        at = self.header.offset + offset
        self.unfinished.payload[at : at + len(chunk)] = chunk
        self.unfinished.have_bytes = at + len(chunk)
        self.received_bytes += len(chunk)
        self._watcher.grew()


def known_bytes(pull: Asked, digest: bytes, size: int) -> int:
    """Return how much of what is served the asker has already."""
    return pull.have_bytes if pull.have == digest and pull.have_bytes <= size else 0


class Arriving:
    """Update that is being fetched, or was: others get what is here of it, by `Fanout`."""

    def __init__(self, number: int, now: Now) -> None:
        self.number = number
        self._now = now
        self._began_s = 0.0
        self._began_bytes = 0
        self.version: SignedVersion | None = None
        self.unfinished: Unfinished | None = None
        self.ended = False
        """True: it failed, and nothing more comes."""
        self._changed = asyncio.Event()

    def begun(self, version: SignedVersion, unfinished: Unfinished) -> None:
        """Note the version of which it is, and where its bytes are: it begins to come."""
        self.version, self.unfinished = version, unfinished
        self._began_s, self._began_bytes = self._now(), unfinished.have_bytes
        self._changed.set()

    def grew(self) -> None:
        """Note that more of it is here."""
        self._changed.set()

    def fail(self) -> None:
        """Note that nothing more comes."""
        self.ended = True
        self._changed.set()

    async def started(self, until_s: float) -> None:
        """Wait until it is known of which version it is, until then at most."""
        await self._wait(lambda: self.ended or self.version is not None, until_s)

    async def piece(
        self, pull: wire.PullUpdate, until_s: float
    ) -> tuple[SignedVersion, memoryview, int] | None:
        """Wait for a piece that is worth a stream: (version, all that is here, size of the whole). None:
        not now."""
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
MAX_SERVED = 64
"""Number of peers that are served with one update, and remembered."""
MAX_WAITING = 32
MAX_WAITING_PER_PEER = 4
"""Number of a peer's pulls of updates that are arriving here, which may wait."""


@dataclass(eq=False)
class _Taker:
    """Peer that gets an update from us."""

    relays: bool
    last_s: float

    def __post_init__(self) -> None:
        self.streams = 0
        self.whole = False

    def holds_place(self, now: float) -> bool:
        return self.whole or self.streams > 0 or now - self.last_s < IDLE_S


class _Given:
    """Update that we give out."""

    def __init__(self, now: float) -> None:
        self.takers: BoundedDict[str, _Taker] = BoundedDict(MAX_SERVED)
        self.last_s = now

    def old(self, now: float) -> bool:
        """Tell whether nobody gets it or asked for it lately."""
        return now - self.last_s > FRESH_S and not any(taker.streams for taker in self.takers.values())


@dataclass
class Fanout:
    """Service of updates: who gets which one from us, and who is sent elsewhere.

    A holder serves a large update to two peers, and sends the others to those, which pass it on to two each,
    and so on: a tree that grows by itself. In it nobody uploads much more than twice the update, whatever the
    number of members. A small one goes to three peers each, as a whole; a tiny one everybody gets from the
    holder. Of a large one a peer passes on what has come so far, in pieces, while the rest is still on its
    way to it (`Arriving`). So a level of the tree costs an eighth of a transfer and not a whole one. Nobody
    has to be believed: the digest in the version's header decides. A disappointed peer comes back to the
    holder and insists (`Gathering`), and is served.
    """

    _me: str
    _meter: Meter
    """Meter of the uplink while updates are given out; it leaves out what is too short."""
    _now: Now

    def __post_init__(self) -> None:
        self._given: BoundedDict[tuple[int, int, bytes], _Given] = BoundedDict(MAX_GIVEN)
        self._arriving: dict[int, Arriving] = {}
        self._waiting: Counter[str] = Counter()
        self._rates = Rates(self._now)
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
        until_s = loop_s() + WAIT_S
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
