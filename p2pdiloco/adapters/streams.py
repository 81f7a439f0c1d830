"""Framing of bulk transfers over one byte stream, whatever carries it.

libp2p streams end silently when a peer dies, have no message bounds, and lose the last bytes when the
sender closes first. So every length is capped and known before anything is read, a payload ends with an
explicit END and its SHA-256, and the server closes only after the client's acknowledgement.

    client                                   server
    PUSH  header, payload size          →
                                        ←    ACCEPT | REFUSE answer | ERROR reason
    chunks …, END digest                →
                                        ←    DONE answer | ERROR reason (also before the END)
    ACK                                 →    closes

    PULL  request                       →
                                        ←    GIVE header, payload size | REFUSE answer | ERROR reason
                                        ←    chunks …, END digest
    ACK                                 →    closes

A chunk is its length (4 bytes, big endian, at most 256 KiB) and its bytes; length 0 is the END.
Whoever breaks a rule costs himself the stream: `RemoteError`. A cut or a pause that is too long is a
`TransportError`. Nothing else comes out of this module.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from p2pdiloco.errors import RemoteError, TransportError, invariant
from p2pdiloco.ports import Buffer, PullSource, PushSink, Refusal, TransportHandlers

CHUNK_BYTES = 256 * 1024
MAX_HEADER_BYTES = 4 * 1024 * 1024
"""Of a push or of what is given. A label names each of up to `MAX_CONTRIBUTORS` learners in about 100 bytes;
a state's header has as many watermarks on top. 64 incoming streams hold at most 256 MiB of them, and only
of what was really sent."""
MAX_ANSWER_BYTES = 256 * 1024
"""Of a pull request, and of an answer to a push."""
MAX_REASON_BYTES = 1024
MIN_BYTES_PER_S = 4096
"""A payload that is slower than this on the whole is given up: no peer holds a slot for ever."""
LINGER_S = 2.0
LINGER_BYTES = 8 * 1024 * 1024

Pace = Callable[[int], Awaitable[None]]
"""Called with the size of every chunk before it is sent; waiting in it slows the transfer down."""

_PUSH, _PULL = 0x51, 0x52
_ACCEPT, _REFUSE, _ERROR, _DONE, _GIVE, _ACK = range(0x61, 0x67)
_U32, _U64 = struct.Struct(">I"), struct.Struct(">Q")


class Reader(Protocol):
    """The half of asyncio.StreamReader that is used here."""

    async def read(self, n: int) -> bytes:
        """Between 1 and n bytes; empty at the end of the stream."""


class Writer(Protocol):
    """The part of asyncio.StreamWriter that is used here."""

    def write(self, data: Any) -> None:
        """Queue bytes."""

    async def drain(self) -> None:
        """Wait until the queue is short again."""

    def close(self) -> None:
        """Flush and end both directions."""


class Channel:
    """A byte stream with an idle time-out on every pause and bounded reads."""

    def __init__(self, reader: Reader, writer: Writer, idle_s: float, pace: Pace | None = None) -> None:
        self._reader = reader
        self._writer = writer
        self.idle_s = idle_s
        self._pace = pace

    async def some(self, at_most: int, idle_s: float | None = -1.0) -> bytes:
        """What has arrived, at most that much. `idle_s`: None waits for ever, negative as the channel.

        Raises: TransportError (cut, idle for too long).
        """
        if idle_s is not None and idle_s < 0:
            idle_s = self.idle_s
        try:
            async with asyncio.timeout(idle_s):
                data = await self._reader.read(at_most)
        except TimeoutError:
            raise TransportError(f"nothing received for {idle_s:g} s") from None
        except OSError as error:
            raise TransportError(f"stream cut: {error}") from error
        if not data:
            raise TransportError("stream cut")
        return data

    async def exact(self, size: int) -> bytes:
        """Exactly that many bytes; the caller has capped `size`."""
        data = await self.some(size) if size else b""
        if len(data) == size:
            return data
        parts = bytearray(data)
        while len(parts) < size:
            parts += await self.some(size - len(parts))
        return bytes(parts)

    async def sized(self, cap: int) -> bytes:
        """A length and that many bytes. Raises: RemoteError (longer than cap)."""
        (size,) = _U32.unpack(await self.exact(4))
        if size > cap:
            raise RemoteError("oversized", f"{size} bytes of at most {cap}")
        return await self.exact(size)

    async def write(self, *parts: Buffer) -> None:
        """Send the parts, waiting while the other side is slower. Raises: TransportError."""
        try:
            for part in parts:
                self._writer.write(part)
            async with asyncio.timeout(self.idle_s):
                await self._writer.drain()
        except TimeoutError:
            raise TransportError(f"nothing taken for {self.idle_s:g} s") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: uvloop's answer when already closed
            raise TransportError(f"stream cut: {error}") from error

    async def send_status(self, status: int, body: bytes) -> None:
        await self.send_sized(bytes([status]), body)

    async def send_sized(self, tag: bytes, body: bytes) -> None:
        """What `sized` reads after the tag; a long body in pieces, so that no pause covers all of it."""
        await self.write(tag + _U32.pack(len(body)) + body[:CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(body), CHUNK_BYTES):
            await self.write(body[start : start + CHUNK_BYTES])

    async def acknowledge(self) -> None:
        """Tell the server that it may close. It closes at once, so a cut here is no failure."""
        with suppress(TransportError):
            await self.write(bytes([_ACK]))

    async def send_payload(self, payload: Sequence[Buffer], stop: asyncio.Future[Any] | None = None) -> bool:
        """Send all buffers in chunks, END and digest; False when `stop` was done before the end."""
        digest = hashlib.sha256()
        for buffer in payload:
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                if stop is not None and stop.done():
                    return False
                chunk = view[start : start + CHUNK_BYTES]
                if self._pace is not None:
                    await self._pace(len(chunk))
                digest.update(chunk)
                await self.write(_U32.pack(len(chunk)), chunk)
        await self.write(_U32.pack(0) + digest.digest())
        return True

    async def receive_payload(self, size: int, take: Callable[[int, memoryview], Awaitable[None]]) -> None:
        """Hand `size` bytes to `take` piece by piece, in order, then check END and digest.

        Raises: RemoteError (chunk too long, more or fewer bytes than announced, wrong digest).
        """
        digest = hashlib.sha256()
        offset = 0
        now = asyncio.get_running_loop().time
        deadline = now() + self.idle_s + size / MIN_BYTES_PER_S
        while True:
            if now() > deadline:
                raise TransportError(f"slower than {MIN_BYTES_PER_S} bytes/s")
            (chunk_bytes,) = _U32.unpack(await self.exact(4))
            if chunk_bytes == 0:
                break
            if chunk_bytes > CHUNK_BYTES:
                raise RemoteError("chunk-oversized", f"{chunk_bytes} bytes")
            if offset + chunk_bytes > size:
                raise RemoteError("payload-too-long", f"more than the announced {size} bytes")
            end = offset + chunk_bytes
            while offset < end:
                piece = await self.some(end - offset)
                digest.update(piece)
                await take(offset, memoryview(piece))
                offset += len(piece)
        if offset != size:
            raise RemoteError("payload-too-short", f"{offset} of the announced {size} bytes")
        if await self.exact(32) != digest.digest():
            raise RemoteError("wrong-digest")

    async def answer(self, patient: bool = False) -> tuple[int, bytes]:
        """The server's next status and its body; `patient`: the first byte may take for ever.

        Raises: RemoteError (the peer's ERROR among others), TransportError.
        """
        status = (await self.some(1, None if patient else self.idle_s))[0]
        if status == _ERROR:
            raise refused_by_peer(await self.sized(MAX_REASON_BYTES))
        return status, await self.sized(MAX_HEADER_BYTES if status == _GIVE else MAX_ANSWER_BYTES)


class RefusedByPeer(RemoteError):
    """The peer refused us, with its reason. Not an offence of the peer: never counted against it."""


def refused_by_peer(body: bytes) -> RefusedByPeer:
    """The error that a peer's encoded refusal stands for."""
    reason, _, detail = body.decode("utf-8", "replace").partition("\n")
    return RefusedByPeer(reason[:64] or "unknown", detail)


def encode_refusal(error: RemoteError) -> bytes:
    """Reason and detail as they go to the peer, capped."""
    detail = str(error).removeprefix(error.reason).removeprefix(": ")
    text = f"{error.reason}\n{detail}".encode()[:MAX_REASON_BYTES]
    return text.decode("utf-8", "ignore").encode()


async def push(channel: Channel, header: bytes, payload: Sequence[Buffer]) -> tuple[bool, bytes]:
    """Client side of a push: (accepted, answer). Raises: RemoteError, TransportError."""
    invariant(len(header) <= MAX_HEADER_BYTES, f"push header of {len(header)} bytes")
    total = sum(memoryview(part).nbytes for part in payload)
    await channel.send_sized(bytes([_PUSH]), header)
    await channel.write(_U64.pack(total))
    status, body = await channel.answer()
    if status == _REFUSE:
        await channel.acknowledge()
        return False, body
    if status != _ACCEPT:
        raise RemoteError("garbage", f"status {status:#x} to a push")
    # An ERROR may come while we are still sending: listen for it all the time.
    final = asyncio.create_task(channel.answer(patient=True))
    try:
        try:
            await channel.send_payload(payload, stop=final)
        except TransportError:
            # The server closes after an ERROR; what it said explains the cut better than the cut does.
            await asyncio.wait({final}, timeout=LINGER_S)
            if not final.done() or not isinstance(final.exception(), RemoteError):
                raise
        await asyncio.wait({final}, timeout=channel.idle_s)
        if not final.done():
            raise TransportError(f"no answer for {channel.idle_s:g} s")
        status, body = final.result()
    finally:
        if not final.done():
            final.cancel()
        await asyncio.gather(final, return_exceptions=True)
    if status != _DONE:
        raise RemoteError("garbage", f"status {status:#x} at the end of a push")
    await channel.acknowledge()
    return True, body


async def pull(channel: Channel, request: bytes, max_payload_bytes: int) -> tuple[bytes, bytearray] | Refusal:
    """Client side of a pull. Raises: RemoteError (oversized, wrong digest, refused), TransportError."""
    invariant(len(request) <= MAX_ANSWER_BYTES, f"pull request of {len(request)} bytes")
    await channel.write(bytes([_PULL]) + _U32.pack(len(request)) + request)
    status, body = await channel.answer()
    if status == _REFUSE:
        await channel.acknowledge()
        return Refusal(body)
    if status != _GIVE:
        raise RemoteError("garbage", f"status {status:#x} to a pull")
    (size,) = _U64.unpack(await channel.exact(8))
    if size > max_payload_bytes:
        raise RemoteError("oversized", f"payload of {size} bytes, at most {max_payload_bytes}")
    payload = bytearray(size)
    view = memoryview(payload)

    async def take(offset: int, piece: memoryview) -> None:
        view[offset : offset + len(piece)] = piece

    await channel.receive_payload(size, take)
    await channel.acknowledge()
    return body, payload


async def serve(channel: Channel, sender: str, handlers: TransportHandlers) -> None:
    """Server side of one stream, until the client has acknowledged or gone.

    Raises:
        RemoteError: the client broke a rule, or a handler refused it; the client has been told.
        TransportError: cut, or idle for too long.
    """
    try:
        kind = (await channel.exact(1))[0]
        if kind == _PUSH:
            await _serve_push(channel, sender, handlers)
        elif kind == _PULL:
            await _serve_pull(channel, sender, handlers)
        else:
            raise RemoteError("garbage", f"stream of kind {kind:#x}")
        if await channel.exact(1) != bytes([_ACK]):
            raise RemoteError("garbage", "no acknowledgement")
    except RemoteError as error:
        await refuse(channel, error)
        raise


async def refuse(channel: Channel, error: RemoteError) -> None:
    """Tell the client why, then swallow what it is still sending so that our words are not lost."""
    swallowed = 0
    try:
        async with asyncio.timeout(LINGER_S):
            await channel.send_status(_ERROR, encode_refusal(error))
            while swallowed < LINGER_BYTES:
                swallowed += len(await channel.some(CHUNK_BYTES))
    except (TransportError, TimeoutError):
        return  # the client went away, which ends the matter


async def _serve_push(channel: Channel, sender: str, handlers: TransportHandlers) -> None:
    header = await channel.sized(MAX_HEADER_BYTES)
    (size,) = _U64.unpack(await channel.exact(8))
    sink = await handlers.on_push(sender, header)
    if isinstance(sink, Refusal):
        await channel.send_status(_REFUSE, sink.answer)
        return
    answer = await _fill(channel, sink, size)
    await channel.send_status(_DONE, answer)


async def _fill(channel: Channel, sink: PushSink, size: int) -> bytes:
    """Stream the payload into the sink; exactly one of finish and abort is called."""
    reason = "cancelled"
    complete = False
    try:
        if size != sink.payload_bytes:
            raise RemoteError("wrong-size", f"{size} bytes announced, {sink.payload_bytes} expected")
        await channel.send_status(_ACCEPT, b"")
        await channel.receive_payload(size, sink.write)
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


async def _serve_pull(channel: Channel, sender: str, handlers: TransportHandlers) -> None:
    source = await handlers.on_pull(sender, await channel.sized(MAX_ANSWER_BYTES))
    if isinstance(source, Refusal):
        await channel.send_status(_REFUSE, source.answer)
        return
    try:
        await _give(channel, source)
    finally:
        source.release()


async def _give(channel: Channel, source: PullSource) -> None:
    invariant(len(source.header) <= MAX_HEADER_BYTES, f"pull header of {len(source.header)} bytes")
    size = sum(memoryview(part).nbytes for part in source.payload)
    await channel.send_status(_GIVE, source.header)
    await channel.write(_U64.pack(size))
    await channel.send_payload(source.payload)
