"""States of fragments: copied from several holders by newcomers (`Copying`), given to them (`Donating`).

`Courtesy` has states stand back for contributions and updates, which rounds wait for.

Rules: docs/protocol/transfers.md, sections 2 and 3.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import FIRST_COMPLETED
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from p2pdiloco.adapters.framing import MIN_BYTES_PER_S
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.pushes import Rates, Versions
from p2pdiloco.daemon.bulk.updates import LeftOut, known_bytes
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import PullSource, Refusal, Transport
from p2pdiloco.tensors.outer_update import Loan, Pin
from p2pdiloco.util import Now, cancelled

MAX_HOLDERS = 4
"""Number of holders of one fragment's state that are asked at one time."""
MAX_STREAMS = 16
"""Number of streams at one time, of all fragments."""
LOOK_S = 0.5
"""Time after which a worker that has nothing to do looks again whether somebody is too slow."""
SILENT_S = 3.0
"""Time in which a holder must begin to give a piece, or lose it to who has nothing to do."""
BEGIN_S = 20.0
"""Time in which the holder that the core names must begin: others can help only once its header has said
which version is copied."""
PAUSE_S = 15.0


@dataclass
class Copying:
    """Transfer of states on the newcomer's side: from several holders of one version, straight into the
    vault's spare.

    The holder that the core names is asked first; its header says which version is copied. Then up to three
    others that hold the same one give pieces, the fastest first as far as we know. A piece that crawls while
    another holder has nothing to do is taken from its giver. A holder that fails costs what it had not sent
    yet of one piece. What came stays, also when all fail: the next attempt goes on with it, as long as the
    version is to be had and nothing else was made in the spare.

    The digest of the whole decides. Where several gave and it is wrong, all is asked for once more, from the
    holder that the core named, and only that counts against it. The others help nobody for a while, unless it
    was the holder.
    """

    versions: Versions
    _transport: Transport
    _compute: Compute
    now: Now

    def __post_init__(self) -> None:
        self._kept: dict[int, StateCopy] = {}
        self._streams: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._rates = Rates(self.now)
        self._left_out = LeftOut(self.now)
        self.bytes_in = 0
        self.from_others_bytes = 0
        """Bytes of them that came from others than the core named."""

    def here_bytes(self, fragment: int) -> int:
        """Count what is here of a fragment's state, as far as it is being copied."""
        copy = self._kept.get(fragment)
        return 0 if copy is None else copy.here_bytes

    async def fetch(self, effect: ev.FetchState) -> wire.StateHeader:
        """Fetch a whole state into the spare, checked. Raises: TransportError, RemoteError."""
        named = effect.peer
        while not self._free(named):
            self._freed.clear()
            await self._freed.wait()
        self._take_place(named)
        try:
            return await self._fetch(effect)
        finally:
            self._leave_place(named)

    async def _fetch(self, effect: ev.FetchState) -> wire.StateHeader:
        fragment, named = effect.fragment, effect.peer
        suspects: set[str] = set()
        for alone in (False, True):
            copy = await self._begin(fragment, anew=alone)
            await self._complete(copy, effect, alone)
            assert copy.header is not None
            del self._kept[fragment]
            version = copy.header.version.header
            try:
                take = self._compute.vault.take_loan
                if await self._compute.run(take, fragment, version.number, copy.loan) == copy.digest:
                    return copy.header
                raise RemoteError("digest-differs")
            except RemoteError:
                if copy.givers == {named}:
                    self._left_out.forgive(*suspects)  # it was the holder
                    raise
                suspects = copy.givers - {named}
                self._left_out.add(*suspects)
        raise RemoteError("digest-differs")

    async def _begin(self, fragment: int, anew: bool) -> StateCopy:
        """Take up what is here of a state of this fragment, or nothing of it."""
        before = None if anew else self._kept.get(fragment)
        loan = await self._compute.run(self._compute.vault.lend_spare, fragment, before and before.loan)
        if before is None or before.loan is not loan:
            before = StateCopy(self.versions.state_bytes(fragment), loan)
        before.ask_anew()
        self._kept[fragment] = before
        return before

    async def _complete(self, copy: StateCopy, effect: ev.FetchState, alone: bool) -> None:
        """Fetch until all of it is here. Raises: TransportError, RemoteError (of the holder that was
        named)."""
        error: BaseException = TransportError("too slow")
        until_s = self.now() + BEGIN_S
        workers: dict[asyncio.Future[None], str] = {
            asyncio.ensure_future(self._work(copy, effect.peer, effect)): effect.peer
        }
        begun = asyncio.ensure_future(copy.begun.wait())
        waiting: set[asyncio.Future[Any]] = {begun}
        asked = {effect.peer}
        try:
            while workers and not copy.complete:
                left_s = None if begun.done() else until_s - self.now()
                done, _ = await asyncio.wait(
                    waiting | set(workers), timeout=left_s, return_when=FIRST_COMPLETED
                )
                if not done:
                    break  # others can help only once its header says of which version it is
                waiting.difference_update(done)
                for task in [worker for worker in workers if worker in done]:
                    peer, found = workers.pop(task), task.exception()
                    if found is not None and not isinstance(found, TransportError | RemoteError):
                        raise found
                    if found is not None and peer == effect.peer:
                        error = found
                if begun.done() and not alone:  # who fails is replaced
                    for peer in self._helpers(copy, effect.fragment, asked)[: MAX_HOLDERS - len(workers)]:
                        if self._free(peer):  # others have taken places since
                            asked.add(peer)
                            workers[self._help(copy, peer, effect)] = peer
        finally:
            await cancelled([begun, *workers])
        if not copy.complete:
            raise error

    def _help(self, copy: StateCopy, peer: str, effect: ev.FetchState) -> asyncio.Future[None]:
        self._take_place(peer)
        worker = asyncio.ensure_future(self._work(copy, peer, effect))
        worker.add_done_callback(lambda _: self._leave_place(peer))
        return worker

    def _helpers(self, copy: StateCopy, fragment: int, asked: set[str]) -> list[str]:
        """List others that hold the same version and were not asked yet, fast and unknown ones first."""
        assert copy.header is not None
        if not copy.missing:
            return []
        digest = copy.header.version.header.digest()
        able = [
            peer
            for peer in self.versions.holders(fragment, digest)
            if peer not in asked
            and peer != self._transport.peer_id
            and peer not in self._left_out
            and self._free(peer)
        ]
        able.sort(key=lambda peer: (self._streams[peer], -self._rates.of(peer, float("inf"))))
        return able

    def _free(self, peer: str) -> bool:
        return self._streams[peer] < SHARE and self._streams.total() < MAX_STREAMS

    def _take_place(self, peer: str) -> None:
        self._streams[peer] += 1

    def _leave_place(self, peer: str) -> None:
        self._streams -= Counter([peer])
        self._freed.set()

    async def _work(self, copy: StateCopy, peer: str, effect: ev.FetchState) -> None:
        """Fetch pieces from one holder. Raises: TransportError, RemoteError."""
        while not copy.complete:
            part = copy.take()
            if part is None:
                copy.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await copy.changed.wait()
                self._take_over(copy, peer)
            elif not await self._pull(copy, part, peer, effect):
                return

    def _take_over(self, copy: StateCopy, peer: str) -> None:
        """Give a piece back of which the rest comes sooner from this peer than from who gives it."""
        mine, now = self._rates.of(peer, 0.0), self.now()
        for part in copy.active:
            if part.began_s:
                slow = part.rate(now) < mine / 4 and now - part.began_s > LOOK_S
            else:
                slow = now - part.asked_s > SILENT_S
            if slow and part.pull is not None and not part.stolen and not copy.missing:
                part.steal()
                return

    async def _pull(self, copy: StateCopy, part: StatePart, peer: str, effect: ev.FetchState) -> bool:
        """Pull one piece. False: it was taken from this holder, which is too slow.

        Raises:
            TransportError, RemoteError.
        """
        sink = _PieceSink(self, copy, part, peer, effect.fragment)
        answer = await self._into(sink, copy, part, peer, effect)
        if answer is None:
            return False
        if isinstance(answer, Refusal):
            raise wire.refused(answer)
        if not sink.received_bytes:
            raise RemoteError("garbage", "nothing where something was asked for")
        return True

    async def _into(
        self, sink: _PieceSink, copy: StateCopy, part: StatePart, peer: str, effect: ev.FetchState
    ) -> Refusal | bool | None:
        """Pull one piece into the sink. None: it was taken from this holder. Raises: TransportError,
        RemoteError."""
        request = wire.PullState(
            self.versions.run,
            effect.fragment,
            effect.number,
            part.have,
            copy.digest,
            part.end - part.have,
            exact=not sink.first,
        )
        encoded = wire.encode(request)
        pull = asyncio.ensure_future(self._transport.pull_into(peer, encoded, sink, PAUSE_S))
        part.asked(pull, self.now())
        try:
            return await pull or True
        except asyncio.CancelledError:
            if _ends():
                raise
            if part.stolen:
                return None
            raise TransportError("cut") from None
        finally:
            if not pull.done():
                await cancelled([pull])
            self.bytes_in += sink.received_bytes
            self.from_others_bytes += sink.received_bytes if peer != effect.peer else 0
            if sink.received_bytes:
                # With the round trip: of two with the same bandwidth the nearer one is faster.
                self._rates.measured(peer, sink.received_bytes, self.now() - part.asked_s)
            copy.done(part)


def _ends() -> bool:
    """Tell whether the current task is to end, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


PIECES = 16
LEAST_PIECE_BYTES = 1 << 20
MOST_PIECE_BYTES = 32 << 20


class StatePart:
    """Bytes start to end of a state, of which those up to `have` are here."""

    def __init__(self, start: int, end: int) -> None:
        self.have, self.end = start, end
        self.asked_s = self.began_s = 0.0
        """Times at which it was asked for, and began to come; 0: not yet."""
        self.began_at = start
        self.pull: asyncio.Future[Any] | None = None
        self.stolen = False

    def asked(self, pull: asyncio.Future[Any], now: float) -> None:
        """Note that it is asked for."""
        self.pull, self.asked_s = pull, now

    def began(self, now: float) -> None:
        """Note that it begins to come."""
        self.began_s, self.began_at = now, self.have

    def came(self, to: int) -> None:
        """Note that all before that byte is here."""
        self.have = to

    def steal(self) -> None:
        """Take it from who gives it too slowly."""
        self.stolen = True
        if self.pull is not None:
            self.pull.cancel()

    def rate(self, now: float) -> float:
        """Return the rate in bytes per second since it began to come."""
        return (self.have - self.began_at) / max(now - self.began_s, 1e-6)


class StateCopy:
    """Version of a fragment of which parts are here, on their way, or missing."""

    def __init__(self, size: int, loan: Loan) -> None:
        self.size = size
        self.loan = loan
        self.header: wire.StateHeader | None = None
        self.givers: set[str] = set()
        self.missing: deque[tuple[int, int]] = deque([(0, size)])
        self.active: list[StatePart] = []
        self.begun, self.changed = asyncio.Event(), asyncio.Event()

    @property
    def digest(self) -> bytes:
        """Digest of the state; empty: not known yet."""
        return self.header.version.header.state_digest if self.header else b""

    @property
    def here_bytes(self) -> int:
        """Number of bytes that are here."""
        missing = sum(end - start for start, end in self.missing)
        return self.size - missing - sum(part.end - part.have for part in self.active)

    @property
    def complete(self) -> bool:
        """True: all of it is here."""
        return not self.missing and not self.active

    def ask_anew(self) -> None:
        """Begin with another holder: nobody has begun to give yet."""
        self.begun = asyncio.Event()

    def begins(self, giver: str, header: wire.StateHeader | None) -> None:
        """Note that a holder begins to give; `header`: of what is copied, if this is the first."""
        self.header = header or self.header
        self.givers.add(giver)
        self.begun.set()

    def take(self) -> StatePart | None:
        """Take a piece that nobody fetches; None: there is none."""
        if not self.missing:
            return None
        start, end = self.missing.popleft()
        most = min(max(self.size // PIECES, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        if end - start > most:
            self.missing.appendleft((start + most, end))
            end = start + most
        part = StatePart(start, end)
        self.active.append(part)
        return part

    def done(self, part: StatePart) -> None:
        """Note that nobody fetches this part any more; what is missing of it is missing."""
        self.active.remove(part)
        if part.have < part.end:
            self.missing.appendleft((part.have, part.end))
        self.changed.set()

    def anew(self, part: StatePart) -> None:
        """Begin anew: another version comes than the one of which something is here."""
        self.givers.clear()
        part.have = part.began_at = 0
        part.end = min(part.end, self.size)
        self.missing = deque([(part.end, self.size)] if part.end < self.size else [])


@dataclass
class _PieceSink:
    """Sink of one piece."""

    _copying: Copying
    _copy: StateCopy
    _part: StatePart
    _peer: str
    _fragment: int

    def __post_init__(self) -> None:
        self.first = not self._copy.begun.is_set()
        self.received_bytes = 0

    def begin(self, header: bytes, payload_bytes: int) -> None:
        copy, part = self._copy, self._part
        found = wire.decode(header, wire.StateHeader)
        version = found.version.header
        if version.fragment != self._fragment:
            raise RemoteError("wrong-fragment")
        goes_on = (version.state_digest, found.offset) == (copy.digest, part.have)
        if not goes_on and (not self.first or found.offset):
            raise RemoteError("garbage", "goes on with something else than was asked for")
        if self.first:
            if not self._copying.versions.signed(found.version):
                raise RemoteError("version-signature")
            if not goes_on:
                copy.anew(part)
        if payload_bytes > part.end - part.have:
            raise RemoteError("oversized", f"payload of {payload_bytes} bytes, asked for less")
        part.began(self._copying.now())
        copy.begins(self._peer, found if self.first else None)

    def write(self, offset: int, chunk: memoryview) -> None:
        part = self._part
        self._copy.loan.write(part.began_at + offset, chunk)
        part.came(part.began_at + offset + len(chunk))
        self.received_bytes += len(chunk)


MAX_PINS = 16
"""Number of states that are being read by others at one time."""
SHARE = 4
"""Number of them for one peer."""
LEASE_S = 20.0
"""Time for which a state stays pinned for a peer that does not read it."""


@dataclass(eq=False)
class _Lease:
    """State that is pinned for one peer."""

    peer: str
    header: wire.StateHeader
    pin: Pin
    streams: int = 0
    last_s: float = 0.0


@dataclass
class Donating:
    """Transfer of states on the donor's side, in pieces: a newcomer asks several holders for parts of one
    version."""

    _compute: Compute
    _courtesy: Courtesy
    _now: Now

    def __post_init__(self) -> None:
        self._leases: list[_Lease] = []
        """Leases; the one read last comes last."""
        self._pinning: list[str] = []
        """Peers for which a state is about to be pinned."""
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_out = 0

    @property
    def pins(self) -> int:
        """Number of states that are pinned for others."""
        return len(self._leases) + len(self._pinning)

    async def serve(self, sender: str, pull: wire.PullState) -> PullSource | Refusal:
        """Serve a piece of a state, or all the rest. The caller has checked run and fragment."""
        self.expire()
        lease = self._of(sender, pull)
        if lease is None:
            if not self._room(sender):
                return refuse(PullRefusal.BUSY)
            lease = await self._pin(sender, pull.fragment)
        header = lease.header.version.header
        if header.number < pull.number or (pull.exact and header.state_digest != pull.have):
            self._drop(lease)
            return refuse(PullRefusal.GONE if pull.exact else PullRefusal.BEHIND)
        return self._give(lease, pull)

    def _of(self, sender: str, pull: wire.PullState) -> _Lease | None:
        """Find what is pinned for that peer already, if it wants that one."""
        for lease in self._leases:
            header = lease.header.version.header
            if lease.peer == sender and header.fragment == pull.fragment and header.state_digest == pull.have:
                return lease
        return None

    def _room(self, sender: str) -> bool:
        """Tell whether another state may be pinned for that peer; if need be instead of one that nobody
        reads."""
        mine = self._pinning.count(sender) + sum(lease.peer == sender for lease in self._leases)
        idle = [x for x in self._leases if not x.streams and (mine < SHARE or x.peer == sender)]
        if mine < SHARE and self.pins < MAX_PINS:
            return True
        if idle:
            self._drop(idle[0])
        return bool(idle)

    async def _pin(self, sender: str, fragment: int) -> _Lease:
        self._pinning.append(sender)
        pinning: asyncio.Future[Any] = asyncio.ensure_future(self._compute.run(self._compute.pin, fragment))
        try:
            header, pin = await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(lambda done: self._unpin(sender, done))
            raise
        self._pinning.remove(sender)
        lease = _Lease(sender, header, pin)
        lease.last_s = self._now()
        self._leases.append(lease)
        return lease

    def _unpin(self, sender: str, pinning: asyncio.Future[Any]) -> None:
        """Release a state that nobody waits for any more."""
        self._pinning.remove(sender)
        if not pinning.cancelled() and pinning.exception() is None:
            pinning.result()[1].release()

    def _give(self, lease: _Lease, pull: wire.PullState) -> PullSource:
        size = sum(buffer.nbytes for buffer in lease.pin.buffers)
        offset = known_bytes(pull, lease.header.version.header.state_digest, size)
        end = min(size, offset + pull.most_bytes) if pull.most_bytes else size
        header = replace(lease.header, offset=offset)
        lease.streams += 1
        self.bytes_out += end - offset
        self._leases.remove(lease)
        self._leases.append(lease)
        loop = asyncio.get_running_loop()

        def release() -> None:
            lease.streams -= 1
            lease.last_s = self._now()
            if self._timer is None:
                self._timer = loop.call_later(LEASE_S, self._on_timer)

        pieces = _piece(lease.pin.buffers, offset, end)
        return PullSource(wire.encode(header), pieces, release, pace=self._courtesy.pace)

    def _on_timer(self) -> None:
        self._timer = None
        self.expire()
        if self._leases:
            self._timer = asyncio.get_running_loop().call_later(LEASE_S, self._on_timer)

    def expire(self) -> None:
        """Give up what nobody goes on with."""
        late = self._now() - LEASE_S
        for lease in [x for x in self._leases if not x.streams and x.last_s < late]:
            self._drop(lease)

    def _drop(self, lease: _Lease) -> None:
        if not lease.streams and lease in self._leases:
            self._leases.remove(lease)
            lease.pin.release()


def _piece(buffers: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    found, base = [], 0
    for buffer in buffers:
        part = buffer[max(0, start - base) : max(0, end - base)]
        base += buffer.nbytes
        if part.nbytes:
            found.append(part)
    return found


COURTESY_SHARE = 0.5
"""Share of the uplink, as far as it is known, for all states together."""
TRICKLE_S = 5.0
"""Longest wait of a stream for each chunk, while something urgent goes out."""
TRICKLE_BYTES_PER_S = 1.5 * MIN_BYTES_PER_S
"""Rate below which no stream is held back: what is slower on the whole than `MIN_BYTES_PER_S` is given up."""
URGENT_S = 60.0
"""Time after which what is urgent counts no more: it is not slow on our account."""
COURTESY_LOOK_S = 1.0
"""Time over which what goes out is measured."""
MOST_S = 6.0
"""Longest wait for the share: a link is never as slow as that would be."""


@dataclass
class Courtesy:
    """Order on our uplink: states for newcomers stand back for contributions and updates.

    Control messages never wait (`adapters.flow`). While anything urgent goes out, a state's stream gets a
    chunk now and then, so that nobody takes it for dead or gives it up for its slowness. It stands back no
    further where the uplink is known and all that goes out takes less than a share of it: then the urgent is
    slow on its receiver's account. At other times all states together get that share of what the uplink
    carries. While nothing is known of it, only the windows of `adapters.flow` hold them back, which give way
    to whatever else uses the link.
    """

    _uplink: LinkMeters
    _now: Now

    def __post_init__(self) -> None:
        self._looked_s, self._looked_bytes = self._now(), 0
        self._rate = math.inf
        """Rate of everything that goes out, while something urgent does."""
        self._urgent: dict[int, float] = {}
        self._next = 0
        self._none_urgent = asyncio.Event()
        self._none_urgent.set()
        self._paid_until_s = 0.0

    def begin(self) -> int:
        """Note that something urgent goes out; return the token for `end`."""
        self._next += 1
        if not self._urgent:
            self._looked_s, self._looked_bytes, self._rate = self._now(), self._uplink.sent_bytes, math.inf
        self._urgent[self._next] = self._now()
        self._none_urgent.clear()
        return self._next

    def end(self, token: int) -> None:
        """Note that it is over."""
        self._urgent.pop(token, None)
        if not self._urgent:
            self._none_urgent.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Context in which something urgent goes out."""
        token = self.begin()
        try:
            yield
        finally:
            self.end(token)

    def _roomy(self) -> bool:
        """Tell whether the uplink has room beside what is urgent."""
        now, sent = self._now(), self._uplink.sent_bytes
        if now - self._looked_s >= COURTESY_LOOK_S:
            self._rate = (sent - self._looked_bytes) / (now - self._looked_s)
            self._looked_s, self._looked_bytes = now, sent
        uplink = self._uplink.uplink_bytes_per_s
        return uplink < math.inf and self._rate < COURTESY_SHARE * uplink

    async def pace(self, size: int) -> None:
        """Wait until so many bytes of a state may go out (`ports.PullSource.pace`)."""
        late = self._now() - URGENT_S
        for token in [token for token, since_s in self._urgent.items() if since_s < late]:
            self.end(token)
        trickle_s = self._now() + min(TRICKLE_S, size / TRICKLE_BYTES_PER_S)
        while self._urgent and not self._roomy() and (left_s := trickle_s - self._now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(COURTESY_LOOK_S, left_s)):
                    await self._none_urgent.wait()
        rate = COURTESY_SHARE * self._uplink.uplink_bytes_per_s
        if rate < math.inf:
            now = self._now()
            start = max(self._paid_until_s, now)
            self._paid_until_s = min(start + size / max(rate, 1.0), now + MOST_S)
            await asyncio.sleep(start - now)
