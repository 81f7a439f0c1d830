"""Transfers of bulk over one byte stream, whatever carries it.

libp2p streams end silently when a peer dies, have no message bounds, and lose the last bytes when the
sender closes first. So every length is capped and known before anything is read, a payload has an explicit
end, and after a transfer the server waits for the next one: who closes is the client, or time
(`KeptStreams`).

    client                                   server
    PUSH  header, payload size          →
                                        ←    ACCEPT most, offset | REFUSE answer | ERROR reason
    chunks from the offset on …, END    →
                                        ←    GOT …, DONE answer | ERROR reason (also before the END)

    PULL  most, request                 →
                                        ←    GIVE header, payload size | REFUSE answer | ERROR reason
    GOT …                               →
                                        ←    chunks …, END
    ACK (of all the rest)               →

After an ERROR the server closes. Chunks and GOT: `adapters.framing`. `most` is how many bytes the
receiver wants on their way to it at most, `offset` how many it has from a stream that was cut. A peer
that breaks a rule loses the stream: `RemoteError`. A cut or a pause that is too long is a `TransportError`.
Nothing else comes out of this module.

`push`, `pull` and `serve` make transfers. `KeptStreams` and `KeptIncoming` keep idle streams, `Places` bounds
incoming ones, and `RequestAllowance` bounds the requests of peers that are no members.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum

from p2pdiloco.adapters.dials import Attempts
from p2pdiloco.adapters.flow import CHUNK_BYTES, Sending
from p2pdiloco.adapters.framing import (
    ACCEPT,
    ACK,
    DONE,
    ERROR,
    GIVE,
    MAX_ANSWER_BYTES,
    MAX_HEADER_BYTES,
    OTHERS_HEADER_BYTES,
    PULL,
    PUSH,
    REFUSE,
    U32,
    U64,
    ByteReader,
    ByteWriter,
    Channel,
    encode_refusal,
)
from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.errors import RemoteError, TransportError, invariant
from p2pdiloco.ports import Buffer, PullSink, PullSource, PushSink, Refusal, TransportHandlers
from p2pdiloco.util import Action, BoundedDict, Say, cancelled, loop_s

LINGER_S = 2.0
LINGER_BYTES = 8 * 1024 * 1024
Answer = asyncio.Task[tuple[int, bytes]]


async def push(
    channel: Channel,
    header: bytes,
    payload: Sequence[Buffer],
    before_end: Action | None = None,
) -> tuple[bool, bytes]:
    """Push a payload, as the client: (accepted, answer). `before_end`: see `Transport.push`. Raises:
    RemoteError, TransportError."""
    invariant(len(header) <= MAX_HEADER_BYTES, f"push header of {len(header)} bytes")
    total = sum(memoryview(part).nbytes for part in payload)
    await channel.send_sized(bytes([PUSH]), header)
    await channel.write(U64.pack(total))
    status, body = await channel.answer()
    if status == REFUSE:
        return False, body
    if status != ACCEPT or len(body) != U32.size + U64.size:
        raise RemoteError("garbage", f"status {status:#x} to a push")
    (most,), (offset,) = U32.unpack_from(body), U64.unpack_from(body, U32.size)
    if offset > total:
        raise RemoteError("garbage", f"to go on at {offset} of {total} bytes")
    async with _listening(channel, total - offset, most) as (sending, final):
        try:
            rest = _from(payload, offset)
            whole = await channel.send_payload(rest, sending, final, ask_at_end=True, before_end=before_end)
        except TransportError:
            # The server closes after an ERROR; what it said explains the cut better than the cut does.
            await asyncio.wait({final}, timeout=LINGER_S)
            if not final.done() or not isinstance(final.exception(), RemoteError):
                raise
        status, body = await channel.said(final, sending)
    if status != DONE or not whole:
        raise RemoteError("garbage", f"status {status:#x} at the end of a push")
    return True, body


async def pull(channel: Channel, request: bytes, sink: PullSink) -> Refusal | None:
    """Pull a payload, as the client. Raises: RemoteError (damaged, refused, or not taken), TransportError."""
    invariant(len(request) <= MAX_ANSWER_BYTES, f"pull request of {len(request)} bytes")
    async with channel.admitted() as most:
        await channel.send_sized(bytes([PULL]) + U32.pack(most), request)
        status, body = await channel.answer()
        if status == REFUSE:
            channel.unused(most, 0)
            return Refusal(body)
        if status != GIVE:
            raise RemoteError("garbage", f"status {status:#x} to a pull")
        (size,) = U64.unpack(await channel.exact(8))
        channel.unused(most, size)
        sink.begin(body, size)

        async def take(offset: int, chunk: memoryview) -> None:
            sink.write(offset, chunk)

        await channel.receive_payload(size, most, take)
        with suppress(TransportError):  # all of it is here: whoever died meanwhile takes nothing of it away
            await channel.write(bytes([ACK]))
        return None


class Collected:
    """Sink that keeps all of a payload of bounded size."""

    def __init__(self, max_payload_bytes: int) -> None:
        self._most = max_payload_bytes
        self.header = b""
        self.payload = bytearray()

    def begin(self, header: bytes, payload_bytes: int) -> None:
        if payload_bytes > self._most:
            raise RemoteError("oversized", f"payload of {payload_bytes} bytes, at most {self._most}")
        self.header, self.payload = header, bytearray()

    def write(self, offset: int, chunk: memoryview) -> None:
        """The payload grows as chunks come, in order."""
        self.payload[offset : offset + len(chunk)] = chunk


@asynccontextmanager
async def _listening(channel: Channel, size: int, most: int) -> AsyncIterator[tuple[Sending, Answer]]:
    """Context while a payload goes out: its acknowledgements are counted, and whatever else comes is the
    answer.

    An ERROR may come at any time.
    """
    sending = channel.sending(size, most)
    final = asyncio.create_task(channel.answer(sending))
    try:
        yield sending, final
    finally:
        try:
            await cancelled([final])
        finally:
            sending.close()


def _from(payload: Sequence[Buffer], offset: int) -> list[memoryview]:
    """All but the first `offset` bytes."""
    rest = []
    for part in payload:
        view = memoryview(part).cast("B")
        rest.append(view[min(offset, len(view)) :])
        offset = max(0, offset - len(view))
    return rest


async def serve(
    channel: Channel,
    sender: str,
    handlers: TransportHandlers,
    kind: int | None = None,
    others: bool = False,
) -> int:
    """Serve one transfer, and return the bytes of its payload. `kind`: its first byte, where that was read
    already. `others`: the sender is none of our run's members, so its header is short.

    Raises:
        RemoteError: the client broke a rule, or a handler refused it; the client has been told.
        TransportError: cut, or idle for too long.
    """
    try:
        if kind is None:
            kind = (await channel.exact(1))[0]
        if kind == PUSH:
            header = await _header(channel, MAX_HEADER_BYTES, others)
            return await _serve_push(channel, sender, handlers, header)
        elif kind == PULL:
            (most,) = U32.unpack(await channel.exact(U32.size))
            request = await _header(channel, MAX_ANSWER_BYTES, others)
            return await _serve_pull(channel, sender, handlers, request, most)
        raise RemoteError("garbage", f"stream of kind {kind:#x}")
    except RemoteError as error:
        await refuse(channel, error)
        raise


async def refuse(channel: Channel, error: RemoteError) -> None:
    """Tell the client why, then swallow what it is still sending so that our words are not lost."""
    swallowed = 0
    with suppress(TransportError, TimeoutError):  # the client went away, which ends the matter
        async with asyncio.timeout(LINGER_S):
            await channel.send_status(ERROR, encode_refusal(error))
            while swallowed < LINGER_BYTES:
                swallowed += len(await channel.some(CHUNK_BYTES))


async def _header(channel: Channel, cap: int, others: bool) -> bytes:
    """A header or a request. Raises: RemoteError (longer than this peer's may be)."""
    (size,) = U32.unpack(await channel.exact(4))
    if others and OTHERS_HEADER_BYTES < size <= cap:
        raise RemoteError(StreamRefusal.LONG_HEADER.value, f"{size} bytes of at most {OTHERS_HEADER_BYTES}")
    if size > cap:
        raise RemoteError("oversized", f"{size} bytes of at most {cap}")
    return await channel.body(size)


async def _serve_push(channel: Channel, sender: str, handlers: TransportHandlers, header: bytes) -> int:
    size: int
    (size,) = U64.unpack(await channel.exact(8))
    sink = await handlers.on_push(sender, header)
    if isinstance(sink, Refusal):
        await channel.send_status(REFUSE, sink.answer)
        return 0
    answer = await _fill(channel, sink, size)
    await channel.send_status(DONE, answer)
    return size


async def _fill(channel: Channel, sink: PushSink, size: int) -> bytes:
    """Exactly one of finish and abort is called."""
    complete = False
    start = sink.offset
    try:
        if size != sink.payload_bytes:
            raise RemoteError("wrong-size", f"{size} bytes announced, {sink.payload_bytes} expected")
        async with channel.admitted() as most:
            channel.unused(most, size - start)
            await channel.send_status(ACCEPT, U32.pack(most) + U64.pack(start))
            await channel.receive_payload(size - start, most, lambda at, chunk: sink.write(start + at, chunk))
        complete = True
    finally:
        if not complete:
            sink.abort()
    return await sink.finish()


async def _serve_pull(
    channel: Channel, sender: str, handlers: TransportHandlers, request: bytes, most: int
) -> int:
    source = await handlers.on_pull(sender, request)
    if isinstance(source, Refusal):
        await channel.send_status(REFUSE, source.answer)
        return 0
    try:
        size = await _give(channel, source, most)
        source.delivered()
        return size
    finally:
        source.release()


async def _give(channel: Channel, source: PullSource, most: int) -> int:
    invariant(len(source.header) <= MAX_HEADER_BYTES, f"pull header of {len(source.header)} bytes")
    size = sum(memoryview(part).nbytes for part in source.payload)
    await channel.send_status(GIVE, source.header)
    await channel.write(U64.pack(size))
    async with _listening(channel, size, most) as (sending, final):
        whole = await channel.send_payload(source.payload, sending, final, source.pace)
        status, _ = await channel.said(final, sending)
    if status != ACK or not whole:
        raise RemoteError("garbage", "no acknowledgement")
    return size


KEEP_S = 15.0
"""Seconds after which a client ends an idle stream. Fragments are due seconds apart."""
SERVER_KEEPS_S = 30.0
"""Seconds after which a server ends an idle stream: longer, so that it hardly ever ends one on which
something is coming."""
MOST_KEPT, MOST_KEPT_PER_PEER = 24, 4
"""Most idle streams of ours; more than that many at a time to one peer are rare."""
MOST_KEPT_IN, MOST_KEPT_IN_PER_PEER = 64, 6
"""Most idle streams of others; of one peer some more than it keeps, since both ends choose by themselves."""
Stream = tuple[ByteReader, ByteWriter]


class KeptStreams:
    """Idle streams of a client, by peer: a stream carries a transfer, and then the next one to the same peer.

    Opening a stream costs more than a small transfer on it. So the client keeps a stream on which all went
    well, for a while, and the server waits there for what comes next (`KeptIncoming`). Neither end's idle
    streams count as transfers; both are bounded, and the end that has too many ends the one that was idle for
    longest. A stream on which anything went wrong is never kept.
    """

    def __init__(self) -> None:
        self._idle: OrderedDict[int, tuple[str, Stream, float]] = OrderedDict()
        """Idle streams, the longest idle first: number -> (peer, stream, idle since)."""
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, peer: str) -> Stream | None:
        """Take an idle stream to the peer, the one used last; None: there is none that is known to be
        whole."""
        for number in [n for n, (whose, _, _) in reversed(self._idle.items()) if whose == peer]:
            _, stream, _ = self._idle.pop(number)
            if is_whole_stream(stream[0]):
                return stream
            end_stream(stream[1], False)
        return None

    def put(self, peer: str, stream: Stream) -> None:
        """Keep a stream on which all went well."""
        loop = asyncio.get_running_loop()
        mine = [number for number, (whose, _, _) in self._idle.items() if whose == peer]
        if len(mine) >= MOST_KEPT_PER_PEER:
            self._end(mine[0])
        elif len(self._idle) >= MOST_KEPT:
            self._end(next(iter(self._idle)))
        self._next += 1
        self._idle[self._next] = (peer, stream, loop_s())
        if self._timer is None:
            self._timer = loop.call_later(KEEP_S, self._end_old)

    def clear(self) -> None:
        """End all of them."""
        for number in list(self._idle):
            self._end(number)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, number: int) -> None:
        _, (_, writer), _ = self._idle.pop(number)
        end_stream(writer, True)

    def _end_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for number, (_, (reader, _), since_s) in list(self._idle.items()):
            # As the timer reckons, or it would spin.
            if loop_s() >= since_s + KEEP_S or not is_whole_stream(reader):
                self._end(number)
        if self._idle:
            oldest_s = next(iter(self._idle.values()))[2]
            self._timer = loop.call_at(oldest_s + KEEP_S, self._end_old)


class KeptIncoming:
    """Idle streams of a server: each is a task that waits for the next request on it."""

    def __init__(self) -> None:
        self._idle: OrderedDict[asyncio.Task[None], tuple[str, ByteWriter]] = OrderedDict()
        """Idle streams, the longest idle first."""

    def __len__(self) -> int:
        return len(self._idle)

    def put(self, task: asyncio.Task[None], peer: str, writer: ByteWriter) -> None:
        """Let a stream's task wait from now on. Where there are too many, one ends: of the same peer's, or of
        the peer that has most."""
        counts = Counter(whose for whose, _ in self._idle.values())
        if counts[peer] >= MOST_KEPT_IN_PER_PEER:
            self._end_oldest(peer)
        elif len(self._idle) >= MOST_KEPT_IN:
            self._end_oldest(counts.most_common(1)[0][0])
        self._idle[task] = (peer, writer)

    def take(self, task: asyncio.Task[None]) -> bool:
        """Take a stream on which something came, or which ended. False: it was ended here, so what came is
        asked for elsewhere."""
        return self._idle.pop(task, None) is not None

    def _end_oldest(self, peer: str) -> None:
        task = next(task for task, (whose, _) in self._idle.items() if whose == peer)
        _, writer = self._idle.pop(task)
        end_stream(writer, True)


def is_whole_stream(reader: ByteReader) -> bool:
    """Tell whether nothing is known against an idle stream: its end, or bytes that nobody asked for."""
    return bool(getattr(reader, "idle", True))


def end_stream(writer: ByteWriter, complete: bool) -> None:
    """Close after a complete exchange; otherwise drop what is queued, which may point into lent buffers."""
    transport = getattr(writer, "transport", None)
    if complete or transport is None:
        writer.close()
    else:
        transport.abort()


MAX_STREAMS_IN = 64
"""Number of transfers that peers have under way here, while nobody is a member yet (and of a bootstrap)."""
STREAMS_OF_MEMBERS, STREAMS_OF_OTHERS = 48, 16
"""Number of those of a node that is a member: of its fellow members, and of all others."""
POOL_SHARES = 4
"""A peer's share of a pool is one of so many; the last one is never had by a peer that has all others."""


class StreamRefusal(Enum):
    """Reasons for which an incoming stream is not served, as they are counted."""

    MEMBERS_FULL = "streams-of-members"
    OTHERS_FULL = "streams-of-others"
    ONE_PEERS_SHARE = "streams-of-one-peer"
    GAVE_WAY = "streams-gave-way"
    """Stream that was ended so that another peer has its share."""
    TOO_SLOW = "stream-too-slow"
    LONG_HEADER = "header-of-others"
    """Header of somebody who is no member, longer than theirs may be."""


class PutOff(RemoteError):
    """Refusal for now. The peer hears `busy`; `counted` says what there was too much of."""

    def __init__(self, counted: str = Unheard.BUSY.value) -> None:
        super().__init__(Unheard.BUSY.value, "too many requests")
        self.counted = counted


class Busy(PutOff):
    """Refusal: a limit of concurrent requests is reached."""


class StreamPlace:
    """Place of one stream while a request on it is served."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.task = asyncio.current_task()
        self.gave_way = False


class _Pool:
    def __init__(self, full: StreamRefusal) -> None:
        self.full = full
        self.places: list[StreamPlace] = []

    def count(self, peer: str) -> int:
        return sum(place.peer == peer for place in self.places)


class Places:
    """Places of all streams that come in: of the members of our run, of all others, and of one peer among
    them.

    A peer that is no member takes none of the members' places: strangers cost nothing, and there are as many
    as somebody likes. Within a pool a peer may have most places while nobody else wants one. Where all are
    taken, one that has less than its share gets a place of the peer that has most.

    Listed in docs/reference/bounds.md, section 4.
    """

    def __init__(self, gave_way: Action) -> None:
        """`gave_way`: called for a stream that was ended so that another peer has its share."""
        self._members, self._others = _Pool(StreamRefusal.MEMBERS_FULL), _Pool(StreamRefusal.OTHERS_FULL)
        self._gave_way = gave_way

    def __len__(self) -> int:
        return len(self._members.places) + len(self._others.places)

    @contextmanager
    def taken(self, peer: str, member: bool | None) -> Iterator[StreamPlace]:
        """Context in which the current task serves a request of the peer's. `member`: None where there are no
        members.

        Raises: Busy.
        """
        pool = self._members if member else self._others
        most = MAX_STREAMS_IN if member is None else STREAMS_OF_MEMBERS if member else STREAMS_OF_OTHERS
        share = most // POOL_SHARES
        mine = pool.count(peer)
        if mine >= most - share:
            raise Busy(StreamRefusal.ONE_PEERS_SHARE.value)
        if len(pool.places) >= most and not (mine < share and self._make_way(pool, share)):
            raise Busy(pool.full.value)
        place = StreamPlace(peer)
        pool.places.append(place)
        try:
            yield place
        finally:
            if not place.gave_way:
                pool.places.remove(place)

    def _make_way(self, pool: _Pool, share: int) -> bool:
        """Only of a peer that has more than its share: the newest stream ends."""
        (peer, count), *_ = Counter(place.peer for place in pool.places).most_common(1)
        if count <= share:
            return False
        place = next(place for place in reversed(pool.places) if place.peer == peer)
        pool.places.remove(place)
        place.gave_way = True
        self._gave_way()
        if place.task is not None:
            place.task.cancel()
        return True


PEER_AT_ONCE, PEER_PER_S = 64, 4.0
"""Requests of one peer. A newcomer had some 40 in its first five seconds, and then its heartbeats, two a
second, and the versions that it pulls."""
OTHERS_AT_ONCE, OTHERS_PER_S = 256, 64.0
"""Requests of all strangers together."""
MOST_WAIT_S = 2.0
"""Longest time for which a request waits for its turn. It bounds their number: 8 of a peer, 128 of all."""
LATE_S, MOST_LATE = 4.0, 64
"""Time after which a peer hears that it is refused, and most requests that are held back for that; if there
are more, they are refused at once."""
MOST_REFUSED = 64
"""Requests of one peer that are refused in a row before it is disconnected. To be dialled again costs as much
as some of them."""
MAX_PEERS = 4096


class Excess(Enum):
    """Kinds of what a peer asked too much, as refusals are counted."""

    HELD_BACK = "requests-held-back"
    """Request that was answered late."""
    OF_ONE_PEER = "requests-of-one-peer"
    OF_OTHERS = "requests-of-others"
    DISCONNECTED = "peer-disconnected"
    """Connection that was ended, of a peer that went on."""


class _Requests(Attempts):
    refused: int = 0
    """Number of requests that were refused since the last one that had not to wait."""


@dataclass
class RequestAllowance:
    """Allowance of requests of each peer that is no member, and of all strangers together: so many at once,
    then so many a second.

    A peer that asks for more is answered late: its request waits for its turn unread, so a peer that asks one
    thing after the other is slowed down, and costs next to nothing. Where too many of its requests wait
    already it is refused, late as well, and a peer that goes on nevertheless is disconnected. Peer ids cost
    nothing, so all strangers have one more allowance together.

    Listed in docs/reference/bounds.md, section 7.
    """

    _count: Callable[[Excess], None]
    """Function that is told of what was held back."""
    _disconnect: Say
    """Function that is told of a peer that goes on although it is refused."""

    def __post_init__(self) -> None:
        self._peers: BoundedDict[str, _Requests] = BoundedDict(MAX_PEERS)
        self._others = Attempts(OTHERS_AT_ONCE, OTHERS_AT_ONCE / OTHERS_PER_S)
        self._late = 0
        """Requests whose refusal is held back."""

    async def turn(self, peer: str, stranger: bool) -> None:
        """Wait until a request of a peer's may be looked at. `stranger`: it has a part of what all strangers
        have together.

        Raises: Busy (too many wait already).
        """
        now, bucket = loop_s(), self._bucket(peer)
        wait_s = bucket.wait_s(now)
        if wait_s > MOST_WAIT_S:
            if not self._goes_on(peer, bucket):
                await self._hold_back()
            raise Busy(Excess.OF_ONE_PEER.value)
        if wait_s == 0.0:
            bucket.refused = 0
        if stranger:
            wait_s = max(wait_s, self._others.wait_s(now))
            if wait_s > MOST_WAIT_S:
                await self._hold_back()
                raise Busy(Excess.OF_OTHERS.value)
            self._others.use(now)
        bucket.use(now)
        if wait_s > 0.0:
            self._count(Excess.HELD_BACK)
            await asyncio.sleep(wait_s)

    def give_back(self, peer: str) -> None:
        """Count a request no more, of which something else was the measure."""
        self._bucket(peer).give_back()

    def _bucket(self, peer: str) -> _Requests:
        bucket = self._peers.get(peer) or _Requests(PEER_AT_ONCE, PEER_AT_ONCE / PEER_PER_S)
        self._peers[peer] = bucket
        return bucket

    def _goes_on(self, peer: str, bucket: _Requests) -> bool:
        """True: the peer was disconnected for it."""
        bucket.refused += 1
        if bucket.refused < MOST_REFUSED:
            return False
        bucket.refused = 0
        self._disconnect(peer)
        return True

    async def _hold_back(self) -> None:
        if self._late < MOST_LATE:
            self._late += 1
            try:
                await asyncio.sleep(LATE_S)
            finally:
                self._late -= 1
