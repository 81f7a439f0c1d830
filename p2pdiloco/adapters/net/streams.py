"""Transfers of bulk over one byte stream, whatever carries it.

libp2p streams end silently when a peer dies, have no message bounds, and lose the last bytes when the
sender closes first. So every length is capped and known before anything is read, a payload has an explicit
end, and after a transfer the server waits for the next one: who closes is the client, or time
(`adapters.net.kept_streams`).

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

After an ERROR the server closes. Chunks and GOT: `adapters.net.framing`. `most` is how many bytes the
receiver wants on their way to it at most, `offset` how many it has from a stream that was cut. Whoever breaks
a rule costs himself the stream: `RemoteError`. A cut or a pause that is too long is a `TransportError`.
Nothing else comes out of this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from p2pdiloco.adapters.net.flow import CHUNK_BYTES, Sending
from p2pdiloco.adapters.net.framing import (
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
    Channel,
)
from p2pdiloco.adapters.net.places import StreamRefusal
from p2pdiloco.adapters.net.refusals import encode_refusal
from p2pdiloco.errors import RemoteError, TransportError, invariant
from p2pdiloco.ports import Buffer, PullSink, PullSource, PushSink, Refusal, TransportHandlers

LINGER_S = 2.0
LINGER_BYTES = 8 * 1024 * 1024
Answer = asyncio.Task[tuple[int, bytes]]


async def push(
    channel: Channel,
    header: bytes,
    payload: Sequence[Buffer],
    before_end: Callable[[], None] | None = None,
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
        """See `ports.PullSink.begin`."""
        if payload_bytes > self._most:
            raise RemoteError("oversized", f"payload of {payload_bytes} bytes, at most {self._most}")
        self.header, self.payload = header, bytearray()

    def write(self, offset: int, chunk: memoryview) -> None:
        """See `ports.PullSink.write`. The payload grows as chunks come, in order."""
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
        if not final.done():
            final.cancel()
        try:
            await asyncio.gather(final, return_exceptions=True)
        finally:
            sending.close()


def _from(payload: Sequence[Buffer], offset: int) -> list[memoryview]:
    """Cut off the first `offset` bytes of all buffers."""
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
    """Read a header or a request. Raises: RemoteError (longer than this peer's may be)."""
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
    """Stream the payload into the sink; exactly one of finish and abort is called."""
    reason = "cancelled"
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
    except RemoteError as error:
        reason = error.reason
        raise
    except TransportError as error:
        reason = str(error)
        raise
    finally:
        if not complete:
            sink.abort(reason)
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
