"""Frames of one bulk stream: sized messages, and payloads in acknowledged, checksummed chunks.

A chunk is its length (4 bytes, big endian, at most 256 KiB), 8 bytes of checksum, and its bytes; length 0 is
the END. With the highest bit of the length, ASK, the sender asks for an acknowledgement: the receiver then
says how many bytes it has dealt with since the last (GOT, 4 bytes). An ASK may come without bytes. The
sender's window is kept by that (`adapters.flow`). What a payload is, its signed label says: there is a digest
in it, which the receiver checks elsewhere. `Channel` speaks these frames; `DirectStream` is the byte stream
below it.

Listed in docs/reference/wire.md, section 3.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2pdiloco.adapters.flow import CHUNK_BYTES, MOST_WINDOW_BYTES, Flow, Limits, Sending
from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.errors import RemoteError, TransportError, invariant
from p2pdiloco.ports import Buffer
from p2pdiloco.util import Action, cancelled, loop_s

MAX_HEADER_BYTES = 6 * 1024 * 1024
"""Most bytes of the header of a push, or of what is given. A label names each of up to `MAX_CONTRIBUTORS`
learners in about 100 bytes; a state's header has as many watermarks on top."""
OTHERS_HEADER_BYTES = 64 * 1024
"""Most bytes of a header, or a request, of somebody who is no member of our run."""
STEP_BYTES = 64 * 1024
"""Memory for what was announced is taken in steps of so many bytes, each when the one before is full."""
MAX_ANSWER_BYTES = 256 * 1024
"""Most bytes of a pull request, and of an answer to a push."""
MIN_BYTES_PER_S = 4096
"""Least rate of a payload: one that is slower on the whole is given up, so that no peer holds a slot for
ever."""
HEADER_S = 10.0
"""Time for a header, beside that of its bytes."""
PIECE_BYTES_PER_S = 16 * 1024
"""Least rate of a header, and of a chunk. A sender's chunk is a small part of what the link carries at a
time, so it is on its way for seconds also where many share 1 Mbit/s; what is slow are the pauses between."""

PUSH, PULL = 0x51, 0x52
ACCEPT, REFUSE, ERROR, DONE, GIVE, ACK, GOT = range(0x61, 0x68)
U32, U64 = struct.Struct(">I"), struct.Struct(">Q")
CHUNK_HEAD = struct.Struct(">I8s")
ASK = 1 << 31
MORE_FRAMES = 64
BYTES_PER_FRAME = 1024
"""Mean bytes of an honest sender's frames, at least; a few, the ends of buffers, are shorter."""
_GMAC, _NONE = AESGCM(bytes(16)), bytes(8)
_NO_LIMITS = Limits()


def checksum(chunk: Buffer) -> bytes:
    """Compute 8 bytes that tell damage, not malice: GMAC with a key that everybody knows. Where the processor
    has AES it is five times as fast as CRC-32."""
    return _GMAC.encrypt(bytes(12), b"", chunk)[:8]


class ByteReader(Protocol):
    """Interface of a stream's reader: the part of asyncio.StreamReader that is used here."""

    async def read(self, n: int) -> bytes:
        """Read between 1 and n bytes; empty at the end of the stream."""


class ByteWriter(Protocol):
    """Interface of a stream's writer: the part of asyncio.StreamWriter that is used here."""

    def write(self, data: Any) -> None:
        """Queue bytes."""

    async def drain(self) -> None:
        """Wait until the queue is short again."""

    def close(self) -> None:
        """Flush and end both directions."""


class Channel:
    """A byte stream with an idle time-out on every pause and bounded reads."""

    def __init__(
        self,
        reader: ByteReader,
        writer: ByteWriter,
        idle_s: float,
        flow: Flow | None = None,
        limits: Limits = _NO_LIMITS,
    ) -> None:
        """Wrap a stream. `flow`: of the peer; None: one of this stream alone."""
        self._reader = reader
        self._writer = writer
        self.idle_s = idle_s
        self._flow = flow
        self._limits = limits
        self.heard = False
        """True: something has come."""

    async def some(self, at_most: int, idle_s: float | None = -1.0) -> bytes:
        """Read what has arrived, at most that much. `idle_s`: None waits for ever, negative as the channel.

        Raises: TransportError (cut, idle for too long).
        """
        if isinstance(self._reader, DirectStream) and (data := self._reader.here(at_most)):
            self.heard = True
            return data
        if idle_s is not None and idle_s < 0:
            idle_s = self.idle_s
        try:
            async with asyncio.timeout(idle_s):
                data = await self._reader.read(at_most)
        except TimeoutError:
            raise PeerSilent(f"nothing received for {idle_s:g} s") from None
        except OSError as error:
            raise TransportError(f"stream cut: {error}") from error
        if not data:
            raise TransportError("stream cut")
        self.heard = True
        return data

    async def exact(self, size: int) -> bytes:
        """Read exactly that many bytes, a few, of which the first may come after a pause.

        Raises: TransportError (cut, idle for too long), TooSlow.
        """
        data = await self.some(size)
        return data if len(data) == size else data + await self.body(size - len(data))

    async def body(self, size: int) -> bytes:
        """Read exactly that many bytes, which are due now; the caller has capped `size`. Memory is taken as
        they come, whatever was announced.

        Raises: TransportError (cut, idle for too long), TooSlow.
        """
        deadline_s = loop_s() + HEADER_S + size / PIECE_BYTES_PER_S
        parts = []
        for start in range(0, size, STEP_BYTES):
            part = bytearray(min(size - start, STEP_BYTES))
            await self.fill(memoryview(part), deadline_s)
            parts.append(part)
        return b"".join(parts)

    async def fill(self, space: memoryview, deadline_s: float) -> None:
        """Read exactly as many bytes as there is space for, until then at the latest, so that nobody makes a
        chunk or a header last for ever with a byte now and then.

        Raises: TransportError (cut, idle for too long), TooSlow.
        """
        size, have = len(space), 0
        if isinstance(self._reader, DirectStream):
            if not await self._reader.fill(space, self.idle_s, deadline_s):
                self._in_time(deadline_s, PIECE_BYTES_PER_S)
                raise TransportError(f"nothing received for {self.idle_s:g} s")
            return
        while have < size:
            left_s = deadline_s - loop_s()
            try:
                piece = await self.some(size - have, max(0.0, min(self.idle_s, left_s)))
            except PeerSilent:
                self._in_time(deadline_s, PIECE_BYTES_PER_S)
                raise
            space[have : have + len(piece)] = piece
            have += len(piece)

    def _deadline_s(self, size: int, bytes_per_s: int = MIN_BYTES_PER_S) -> float:
        return loop_s() + self.idle_s + size / bytes_per_s

    @staticmethod
    def _in_time(deadline_s: float, bytes_per_s: int = MIN_BYTES_PER_S) -> None:
        if loop_s() >= deadline_s:
            raise TooSlow(f"slower than {bytes_per_s} bytes/s")

    async def sized(self, cap: int) -> bytes:
        """Read a length and that many bytes. Raises: RemoteError (longer than cap)."""
        (size,) = U32.unpack(await self.exact(4))
        if size > cap:
            raise RemoteError("oversized", f"{size} bytes of at most {cap}")
        return await self.body(size)

    async def write(self, *parts: Buffer) -> None:
        """Send the parts, waiting while the other side is slower. Raises: TransportError."""
        try:
            for part in parts:
                self._writer.write(part)
            if isinstance(self._writer, DirectStream) and self._writer.drained:
                return
            async with asyncio.timeout(self.idle_s):
                await self._writer.drain()
        except TimeoutError:
            raise PeerSilent(f"nothing taken for {self.idle_s:g} s") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: uvloop's answer when already closed
            raise TransportError(f"stream cut: {error}") from error

    async def send_status(self, status: int, body: bytes) -> None:
        await self.send_sized(bytes([status]), body)

    async def send_sized(self, tag: bytes, body: bytes) -> None:
        """Send what `sized` reads after the tag; a long body in pieces, so that no pause covers all of it."""
        await self.write(tag + U32.pack(len(body)) + body[:CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(body), CHUNK_BYTES):
            await self.write(body[start : start + CHUNK_BYTES])

    def sending(self, size: int, most_bytes: int) -> Sending:
        """Begin to send a payload of `size` bytes, of which the receiver wants at most `most_bytes` on the
        way."""
        now = loop_s
        return Sending(self._flow or Flow(now), max(1, most_bytes), now, self._deadline_s(size))

    async def send_payload(
        self,
        payload: Sequence[Buffer],
        sending: Sending,
        stop: asyncio.Future[Any],
        pace: Callable[[int], Awaitable[None]] | None = None,
        ask_at_end: bool = False,
        before_end: Action | None = None,
    ) -> bool:
        """Send all buffers in chunks, and END; False when `stop`, which reads what the receiver says
        meanwhile, was done before. `pace`: see `ports.PullSource`. `ask_at_end`: the answer to the END may
        take a while, so what came before it is acknowledged by itself. `before_end`: see `Transport.push`.

        Raises: TransportError (also: nothing acknowledged for `idle_s`)."""
        for buffer in payload:
            view = memoryview(buffer).cast("B")
            start = 0
            while start < len(view):
                upload = self._limits.upload
                most = sending.chunk_bytes if upload is None else min(sending.chunk_bytes, upload.chunk_bytes)
                chunk = view[start : start + most]
                start += len(chunk)
                if pace is not None:
                    await pace(len(chunk))
                if upload is not None:
                    # Before the chunk counts as sent: our own limit is no delay of the link.
                    await upload.take(len(chunk))
                if not await self._may_go(sending, len(chunk), stop):
                    return False
                ask = ASK if sending.wants_answer(upload is not None) else 0
                self._limits.handed_over(len(chunk))
                await self.write(CHUNK_HEAD.pack(ask | len(chunk), checksum(chunk)), chunk)
        if before_end is not None:
            before_end()
        asking = CHUNK_HEAD.pack(ASK, _NONE) if ask_at_end else b""
        await self.write(asking + CHUNK_HEAD.pack(0, _NONE))
        return True

    async def _may_go(self, sending: Sending, size: int, stop: asyncio.Future[Any]) -> bool:
        if stop.done():
            return False
        self._in_time(sending.deadline_s)
        if sending.claim_now(size):
            return True
        if sending.wants_answer(now=True):
            await self.write(CHUNK_HEAD.pack(ASK, _NONE))
        claim = asyncio.ensure_future(sending.claim(size))
        try:
            await asyncio.wait({claim, stop}, timeout=self.idle_s, return_when=asyncio.FIRST_COMPLETED)
            if claim.done():
                return True
            if stop.done():
                return False
            raise TransportError(f"nothing acknowledged for {self.idle_s:g} s")
        finally:
            if not claim.done():
                await cancelled([claim])

    async def said(self, final: asyncio.Task[tuple[int, bytes]], sending: Sending) -> tuple[int, bytes]:
        """Read the answer after the END; acknowledgements that come before it are signs of life, up to a
        time."""
        while not final.done():
            before = sending.unacknowledged_bytes
            await asyncio.wait({final}, timeout=self.idle_s)
            if not final.done() and sending.unacknowledged_bytes == before:
                raise TransportError(f"no answer for {self.idle_s:g} s")
            if not final.done():
                self._in_time(sending.deadline_s)
        status, body = final.result()
        if status == ACK and sending.unacknowledged_bytes:  # of all the rest
            self._limits.sent(sending.unacknowledged_bytes)
            sending.arrived(sending.unacknowledged_bytes)
        return status, body

    async def receive_payload(
        self, size: int, prepaid_bytes: int, take: Callable[[int, memoryview], Awaitable[None]]
    ) -> None:
        """Hand `size` bytes to `take` chunk by chunk, in order, acknowledging them, then check the END.

        `prepaid_bytes`: that we allowed the sender to have on its way at once, which `admitted` took from the
        allowance already.

        Raises: RemoteError (chunk too long or damaged, too many, more or fewer bytes than announced).
        """
        offset = acknowledged = 0
        deadline_s = self._deadline_s(size)
        frames = MORE_FRAMES + size // BYTES_PER_FRAME
        room = memoryview(b"")
        while True:
            self._in_time(deadline_s)
            length, expected = CHUNK_HEAD.unpack(await self.exact(CHUNK_HEAD.size))
            chunk_bytes, frames = length & ~ASK, frames - 1
            if length == 0:
                break
            if chunk_bytes > CHUNK_BYTES:
                raise RemoteError("chunk-oversized", f"{chunk_bytes} bytes")
            if offset + chunk_bytes > size:
                raise RemoteError("payload-too-long", f"more than the announced {size} bytes")
            if frames < 0:
                raise RemoteError("chunks-too-small", f"{offset} bytes in too many of them")
            if chunk_bytes:
                if chunk_bytes > len(room):
                    room = memoryview(bytearray(chunk_bytes))
                chunk = room[:chunk_bytes]
                await self.fill(chunk, self._deadline_s(chunk_bytes, PIECE_BYTES_PER_S))
                if checksum(chunk) != expected:
                    raise RemoteError("damaged-chunk")
                await take(offset, chunk)
                offset += chunk_bytes
                self._limits.received(chunk_bytes)
            if length & ASK and offset > acknowledged:
                await self._allow(acknowledged, offset, size, prepaid_bytes)
                await self.write(bytes([GOT]) + U32.pack(offset - acknowledged))
                acknowledged = offset
        if offset != size:
            raise RemoteError("payload-too-short", f"{offset} of the announced {size} bytes")

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[int]:
        """Context for the receiving of one payload: waits until the first bytes may come, and gives how many
        may then be on their way at most. What is allowed is shared by all that are receiving."""
        download = self._limits.download
        if download is None:
            yield MOST_WINDOW_BYTES
            return
        with download.shared() as most:
            await download.take(most)
            yield most

    def unused(self, most_bytes: int, size: int) -> None:
        """Give back what `admitted` let come beyond `size` bytes."""
        if self._limits.download is not None and size < most_bytes:
            self._limits.download.give_back(most_bytes - size)

    async def _allow(self, start: int, end: int, size: int, prepaid_bytes: int) -> None:
        """Wait until the bytes are allowed that an acknowledgement lets come."""
        if self._limits.download is not None:
            more = min(size, end + prepaid_bytes) - min(size, start + prepaid_bytes)
            if more > 0:
                await self._limits.download.take(more)

    async def answer(self, sending: Sending | None = None) -> tuple[int, bytes]:
        """Read the other side's next status and its body. `sending`: acknowledgements of what is being sent
        come before it, and its first byte may take for ever.

        Raises: RemoteError (the peer's ERROR among others), TransportError.
        """
        status = (await self.some(1, self.idle_s if sending is None else None))[0]
        while status == GOT and sending is not None:
            (size,) = U32.unpack(await self.exact(4))
            if not sending.arrived(size):
                raise RemoteError(
                    "garbage", f"{size} bytes acknowledged, {sending.unacknowledged_bytes} sent"
                )
            self._limits.sent(size)
            status = (await self.some(1, None))[0]
        if status == ACK:
            return status, b""
        if status == ERROR:
            raise refused_by_peer(await self.sized(MAX_REASON_BYTES))
        return status, await self.sized(MAX_HEADER_BYTES if status == GIVE else MAX_ANSWER_BYTES)


class PeerSilent(TransportError):
    """Error: too long a pause; the peer may be there, but does nothing."""


class TooSlow(TransportError):
    """Error: bytes come, but below the least rate."""


FIRST_BYTES, SPARE_BYTES = 4 * 1024, 128 * 1024
"""Bytes of the buffer for what nobody waits for: at first, for most streams carry little of it, and when more
came."""
WRITE_BYTES = 512 * 1024
"""Queued bytes above which `drain` waits: one chunk goes out while the next is prepared."""


class DirectStream(asyncio.BufferedProtocol):
    """Connection in both directions: reader and writer in one. One task reads, one writes.

    Bytes land where they are wanted, without a buffer in between. asyncio's StreamReader copies everything
    three times, and wakes its reader for every piece that arrives. Here the kernel writes into the space that
    a waiting `fill` was given, and the task wakes when all of it is there. What arrives while nobody waits
    goes to a small buffer; when that is full the other side has to wait.
    """

    def __init__(self, connected: Callable[[DirectStream], None] | None = None) -> None:
        """Make a stream without a connection; `connected` is called when the connection is there."""
        self._connected = connected
        self.transport: Any = None
        self._spare = memoryview(bytearray(FIRST_BYTES))
        self._start = self._end = 0
        """Begin and end of what lies in the spare buffer."""
        self._unfilled: memoryview | None = None
        """Memory that a waiting `fill` still needs to be filled."""
        self._arrived_bytes = 0
        self._ended: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._held_up: asyncio.Future[None] | None = None
        self._paused = False

    # --- asyncio.BufferedProtocol --------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if self._connected is not None:
            self._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Never empty: reading pauses before."""
        return self._spare[self._end :] if self._unfilled is None else self._unfilled

    def buffer_updated(self, nbytes: int) -> None:
        self._arrived_bytes += nbytes
        if self._unfilled is None:
            self._end += nbytes
            if self._end == FIRST_BYTES == len(self._spare):
                self._spare = memoryview(bytearray(self._spare) + bytes(SPARE_BYTES - FIRST_BYTES))
            elif self._end == len(self._spare):
                self._paused = True
                self.transport.pause_reading()
            self._wake()
        else:
            self._unfilled = self._unfilled[nbytes:]
            if not self._unfilled:
                self._unfilled = None
                self._wake()

    def eof_received(self) -> bool:
        """The writing half stays open."""
        self._end_with(TransportError("stream cut"))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_with(TransportError("stream cut" if exc is None else f"stream cut: {exc}"))
        self.resume_writing()

    def pause_writing(self) -> None:
        self._held_up = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        held_up, self._held_up = self._held_up, None
        if held_up is not None and not held_up.done():
            held_up.set_result(None)

    def _end_with(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def idle(self) -> bool:
        """Tell whether the stream is whole as far as we know, and nothing lies here unread."""
        return self._ended is None and self._start == self._end and not self.transport.is_closing()

    # --- reading -------------------------------------------------------------------------------------

    def _taken(self, space: memoryview) -> int:
        """Move what lies in the spare buffer."""
        size = min(len(space), self._end - self._start)
        space[:size] = self._spare[self._start : self._start + size]
        self._passed(size)
        return size

    def _passed(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0
            if self._paused:
                self._paused = False
                self.transport.resume_reading()

    async def _wait(self) -> None:
        invariant(self._waiter is None, "two tasks read one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def here(self, n: int) -> bytes:
        """Take at most n bytes of what has arrived already."""
        end = min(self._start + n, self._end)
        out = bytes(self._spare[self._start : end])
        self._passed(end - self._start)
        return out

    async def read(self, n: int) -> bytes:
        """Read between 1 and n bytes; empty at the end of the stream. At most `SPARE_BYTES` at a time."""
        while self._start == self._end and self._ended is None:
            await self._wait()
        return self.here(n)

    async def readexactly(self, n: int) -> bytes:
        """Read exactly n bytes. Raises: asyncio.IncompleteReadError."""
        parts = b""
        while len(parts) < n:
            part = await self.read(n - len(parts))
            if not part:
                raise asyncio.IncompleteReadError(parts, n)
            parts += part
        return parts

    async def fill(self, space: memoryview, idle_s: float, deadline_s: float) -> bool:
        """Read exactly as many bytes as there is space for. False: not in time; the stream is then of no use.

        `idle_s`: longest pause; `deadline_s`: when all must be here, by the loop's clock.

        Raises: TransportError (cut).
        """
        unfilled = space[self._taken(space) :]
        if not unfilled:
            return True
        if self._ended is not None:
            raise self._ended
        self._unfilled = unfilled
        loop = asyncio.get_running_loop()
        before = self._arrived_bytes
        in_time = True
        watch: asyncio.TimerHandle

        def look() -> None:
            nonlocal before, in_time, watch
            if self._arrived_bytes == before or loop.time() >= deadline_s:
                in_time = False
                self._wake()
            else:
                before = self._arrived_bytes
                watch = loop.call_at(min(loop.time() + idle_s, deadline_s), look)

        watch = loop.call_at(min(loop.time() + idle_s, deadline_s), look)
        try:
            await self._wait()
        finally:
            watch.cancel()
            missing, self._unfilled = self._unfilled, None
        if missing is not None and in_time and self._ended is not None:
            raise self._ended
        return missing is None

    # --- writing -------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Queue bytes; they must not change until they are sent."""
        self.transport.write(data)

    @property
    def drained(self) -> bool:
        """Tell whether the queue is short, so that there is nothing to wait for."""
        return self._held_up is None and not self.transport.is_closing()

    async def drain(self) -> None:
        """Wait until the queue is short again. Raises: ConnectionResetError."""
        if self._held_up is not None:
            await asyncio.shield(self._held_up)
        if self.transport.is_closing():
            raise ConnectionResetError("stream cut")

    def close(self) -> None:
        """Flush and end both directions."""
        self.transport.close()


MAX_REASON_BYTES = 1024
"""Most bytes of a refusal: reason and detail, as they cross a stream."""


class RefusedByPeer(RemoteError):
    """Error: the peer refused us, with its reason. Not an offence of the peer: never counted against it."""

    def __init__(self, reason: str, detail: str, unheard: Unheard | None) -> None:
        """`unheard`: why it did not even look at what we asked; None: it found fault with that."""
        super().__init__(reason, detail)
        self.unheard = unheard


_UNHEARD = {why.value: why for why in Unheard}


def refused_by_peer(body: bytes) -> RefusedByPeer:
    """Make the error that a peer's encoded refusal stands for."""
    reason, _, detail = body.decode("utf-8", "replace").partition("\n")
    return RefusedByPeer(reason[:64] or "unknown", detail, _UNHEARD.get(reason))


def encode_refusal(error: RemoteError) -> bytes:
    """Encode reason and detail as they go to the peer, capped."""
    detail = str(error).removeprefix(error.reason).removeprefix(": ")
    text = f"{error.reason}\n{detail}".encode()[:MAX_REASON_BYTES]
    return text.decode("utf-8", "ignore").encode()
