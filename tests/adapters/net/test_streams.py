"""Bulk framing against arbitrary bytes: only RemoteError and TransportError may come out."""

from __future__ import annotations

import asyncio
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from net_helpers import Recorder

from p2pdiloco.adapters import framing, streams
from p2pdiloco.adapters.flow import OVERHEAD, Allowance, Limits
from p2pdiloco.adapters.framing import (
    FIRST_BYTES,
    MAX_REASON_BYTES,
    SPARE_BYTES,
    DirectStream,
    encode_refusal,
    refused_by_peer,
)
from p2pdiloco.errors import InvariantViolation, RemoteError, TransportError
from p2pdiloco.ports import Refusal
from p2pdiloco_lab.bulk_world.bulk_plan import in_virtual_time
from p2pdiloco_lab.memory_net import AtOnce, Pipe, PipeWriter


class Deaf:
    """A writer whose other side takes everything and says nothing."""

    def write(self, data: object) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class Script:
    """A reader that plays recorded bytes, in pieces of at most `piece`."""

    def __init__(self, data: bytes, piece: int = 1 << 20) -> None:
        self.data, self.piece = data, piece

    async def read(self, n: int) -> bytes:
        n = min(n, self.piece)
        out, self.data = self.data[:n], self.data[n:]
        return out


def channel(data: bytes, piece: int = 1 << 20) -> framing.Channel:
    return framing.Channel(Script(data, piece), Deaf(), idle_s=1.0)


def joined(idle_s: float = 5.0, limits: Limits | None = None) -> tuple[framing.Channel, framing.Channel]:
    """A client, which has these limits, and a server."""
    there, back = Pipe(AtOnce()), Pipe(AtOnce())
    client = framing.Channel(back, PipeWriter(there, back), idle_s, limits=limits or Limits())
    return client, framing.Channel(there, PipeWriter(back, there), idle_s)


def only_known_errors(exchange: Awaitable[object]) -> None:
    async def run() -> None:
        with suppress(RemoteError, TransportError):
            await exchange

    asyncio.run(run())


u32 = st.integers(0, 2**32 - 1).map(lambda n: struct.pack(">I", n))
small = st.integers(0, 40).map(lambda n: struct.pack(">I", n))
u64 = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 64)).map(lambda n: struct.pack(">Q", n))
status = st.sampled_from([bytes([n]) for n in (0x51, 0x52, *range(0x60, 0x68))])
scripts = st.lists(st.one_of(status, u32, small, u64, st.binary(max_size=40)), max_size=12).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(scripts, st.sampled_from([1, 7, 1 << 20]))
def test_server_side_survives_arbitrary_bytes(data: bytes, piece: int) -> None:
    recorder = Recorder()
    recorder.payload = [b"payload"]
    recorder.sink_bytes = 8
    only_known_errors(streams.serve(channel(data, piece), "somebody", recorder))
    for sink in recorder.sinks:  # whatever happened, every sink has been told the end exactly once
        assert sink.finished != sink.aborted
    assert recorder.released <= 1


@settings(max_examples=300, deadline=None)
@given(scripts)
def test_client_side_survives_arbitrary_bytes(data: bytes) -> None:
    only_known_errors(streams.push(channel(data), b"header", [b"payload"]))
    only_known_errors(streams.pull(channel(data), b"request", streams.Collected(64)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=3000), max_size=5), st.binary(max_size=100), st.sampled_from([1, 100, 70_000])
)
def test_what_is_sent_arrives(parts: list[bytes], header: bytes, piece: int) -> None:
    async def run() -> None:
        recorder = Recorder()
        recorder.sink_bytes = sum(map(len, parts))
        recorder.payload = list(parts)
        for kind in ("push", "pull"):
            client, server = joined()
            serving = asyncio.create_task(streams.serve(server, "peer", recorder))
            if kind == "push":
                assert (await streams.push(client, b"h" + header, parts))[0]
                assert bytes(recorder.sinks[0].data) == b"".join(parts)
            else:
                got = streams.Collected(1 << 20)
                assert await streams.pull(client, b"p" + header, got) is None
                assert (got.header, bytes(got.payload)) == (b"header", b"".join(parts))
            await serving

    asyncio.run(run())


async def test_a_silent_peer_costs_only_the_idle_time() -> None:
    client, _ = joined(0.05)
    with pytest.raises(TransportError, match="nothing received"):
        await streams.pull(client, b"request", streams.Collected(10))
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(TransportError, match="nothing acknowledged"):
        await client.send_payload([bytes(4_000_000)], client.sending(4_000_000, 1 << 23), never)


class Dribble:
    """A reader that has a byte of a recording every 0.9 s."""

    def __init__(self, data: bytes, at_once: int) -> None:
        self.data, self.at_once = data, at_once

    async def read(self, n: int) -> bytes:
        if self.at_once <= 0:
            await asyncio.sleep(0.9)
        size = min(n, max(1, self.at_once))
        self.at_once -= size
        out, self.data = self.data[:size], self.data[size:]
        return out


@pytest.mark.parametrize("at_once", [5, 40])
def test_a_byte_now_and_then_does_not_hold_a_slot(at_once: int) -> None:
    """In a header, and in a chunk: every pause is short enough."""
    header = b"200000"
    head = struct.pack(">I", 150_000) + bytes(8)
    data = (
        b"\x51" + struct.pack(">I", len(header)) + header + struct.pack(">Q", 200_000) + head + bytes(150_000)
    )

    async def run() -> float:
        slow = framing.Channel(Dribble(data, at_once), Deaf(), idle_s=1.0)
        with pytest.raises(TransportError, match="slower than"):
            await streams.serve(slow, "peer", Recorder())
        return asyncio.get_running_loop().time()

    most_s = 4 * framing.HEADER_S + 200_000 / framing.PIECE_BYTES_PER_S
    assert in_virtual_time(run()) < most_s, "header, size, and the two parts of a chunk"


def test_memory_for_a_header_is_taken_as_it_comes() -> None:
    """Sixty-four streams that announced 4 MiB each, and sent a byte, took 270 MiB."""
    announced = b"\x51" + struct.pack(">I", framing.MAX_HEADER_BYTES)
    came = framing.STEP_BYTES + 10

    async def run() -> float:
        slow = framing.Channel(Dribble(announced + bytes(1000 + came), 5 + came), Deaf(), idle_s=20.0)
        with pytest.raises(TransportError, match="slower than"):
            await streams.serve(slow, "peer", Recorder())
        return asyncio.get_running_loop().time()

    tracemalloc.start()
    try:
        took_s = in_virtual_time(run())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took_s <= framing.HEADER_S + framing.MAX_HEADER_BYTES / framing.PIECE_BYTES_PER_S
    assert peak_bytes < 10 * framing.STEP_BYTES < framing.MAX_HEADER_BYTES


def test_acknowledgements_of_a_few_bytes_now_and_then_do_not_hold_a_payload() -> None:
    got = b"\x67" + struct.pack(">I", 1)
    accepted = b"\x61" + struct.pack(">I", 12) + struct.pack(">IQ", 1 << 20, 0)

    async def run() -> float:
        slow = framing.Channel(Dribble(accepted + got * 1000, len(accepted)), Deaf(), idle_s=5.0)
        with pytest.raises(TransportError, match=r"slower than|nothing acknowledged"):
            await streams.push(slow, b"header", [bytes(30_000)])
        return asyncio.get_running_loop().time()

    assert in_virtual_time(run()) < 5.0 + 30_000 / framing.MIN_BYTES_PER_S + 6.0


@pytest.mark.parametrize("size", [0, 100_001])
async def test_false_acknowledgements_end_the_stream(size: int) -> None:
    accepted = b"\x61" + struct.pack(">I", 12) + struct.pack(">IQ", 1 << 32 - 1, 0)
    got = b"\x67" + struct.pack(">I", size)
    with pytest.raises(RemoteError, match="garbage"):
        await streams.push(channel(accepted + got), b"header", [bytes(100_000)])


class Counted(PipeWriter):
    """A writer that notes when it was given how much."""

    def __init__(self, out: Pipe, back: Pipe, went: list[tuple[float, int]]) -> None:
        super().__init__(out, back)
        self.went = went

    def write(self, data: object) -> None:
        self.went.append((asyncio.get_running_loop().time(), memoryview(data).nbytes))  # type: ignore[arg-type]
        super().write(data)


@pytest.mark.parametrize("kind", ["push", "pull"])
@pytest.mark.parametrize("limited", ["sender", "receiver"])
def test_limits_are_kept_over_any_ten_seconds_by_many_streams(kind: str, limited: str) -> None:
    rate, streams_, size = 500e3, 8, 2_000_000
    went: list[tuple[float, int]] = []

    async def one(limits: Limits) -> None:
        none, recorder = Limits(), Recorder()
        recorder.payload = [bytes(size)]
        there, back = Pipe(AtOnce()), Pipe(AtOnce())
        push = kind == "push"
        client_limits, server_limits = (limits, none) if push == (limited == "sender") else (none, limits)
        client = framing.Channel(back, Counted(there, back, went if push else []), 15.0, limits=client_limits)
        server = framing.Channel(
            there, Counted(back, there, [] if push else went), 15.0, limits=server_limits
        )
        serving = asyncio.create_task(streams.serve(server, "peer", recorder))
        if push:
            assert (await streams.push(client, b"%d" % size, recorder.payload))[0]
        else:
            assert await streams.pull(client, b"", streams.Collected(size)) is None
        await serving

    async def run() -> float:
        bucket = Allowance(rate, asyncio.get_running_loop().time)
        limits = Limits(upload=bucket) if limited == "sender" else Limits(download=bucket)
        await asyncio.gather(*(one(limits) for _ in range(streams_)))
        return asyncio.get_running_loop().time()

    took_s = in_virtual_time(run())
    first = within = 0
    for at_s, size in went:
        within += size
        while went[first][0] <= at_s - 10.0:
            within -= went[first][1]
            first += 1
        assert within * OVERHEAD <= 1.05 * 10.0 * rate
    assert sum(size for _, size in went) * OVERHEAD > 0.95 * rate * took_s, "and what is allowed is used"


async def test_progress_resets_the_idle_time() -> None:
    """A transfer may take many times the idle time-out as long as it moves."""
    idle_s, pauses = 0.2, 6
    size = pauses * framing.CHUNK_BYTES
    slow = Allowance(size / (pauses * idle_s / 2), asyncio.get_running_loop().time)
    client, server = joined(idle_s, Limits(upload=slow))
    serving = asyncio.create_task(streams.serve(server, "peer", Recorder()))
    assert (await streams.push(client, b"%d" % size, [bytes(size)]))[0]
    await serving


async def test_what_is_announced_is_capped_before_it_is_read_and_only_labels_may_be_long() -> None:
    long = framing.MAX_ANSWER_BYTES + 1
    label = b"\x51" + struct.pack(">I", framing.MAX_HEADER_BYTES + 1) + bytes(10)
    request = b"\x52" + struct.pack(">II", 1 << 20, long) + bytes(long)
    for asked in (label, request):
        with pytest.raises(RemoteError, match="oversized"):
            await streams.serve(channel(asked), "peer", Recorder())
    payload = b"\x65" + struct.pack(">I", 1) + b"h" + struct.pack(">Q", 2**60)
    refusal = b"\x62" + struct.pack(">I", long) + bytes(long)
    for answer in (payload, refusal):
        with pytest.raises(RemoteError, match="oversized"):
            await streams.pull(channel(answer), b"", streams.Collected(10))


async def test_a_refusal_keeps_reason_and_detail_and_is_capped() -> None:
    body = encode_refusal(RemoteError("reason", "détail " * 1000))
    assert len(body) <= MAX_REASON_BYTES
    error = refused_by_peer(body)
    assert error.reason == "reason" and str(error).startswith("reason: détail détail")
    answer = await streams.pull(channel(b"\x62" + struct.pack(">I", 2) + b"no"), b"", streams.Collected(10))
    assert answer == Refusal(b"no")


async def test_the_longest_label_arrives() -> None:
    recorder = Recorder()
    client, server = joined()
    serving = asyncio.create_task(streams.serve(server, "peer", recorder))
    recorder.sink_bytes = 3
    label = b"h" * framing.MAX_HEADER_BYTES
    assert (await streams.push(client, label, [b"abc"]))[0]
    await serving
    with pytest.raises(InvariantViolation):
        await streams.push(client, label + b"h", [b"abc"])


# Bytes land where they are wanted; who is slow, silent or gone is told.

FAR_S = 1e9


@pytest.fixture
async def ends() -> AsyncIterator[tuple[DirectStream, socket.socket]]:
    """A stream, and the other end as a non-blocking socket."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, stream = await asyncio.get_running_loop().create_unix_connection(DirectStream, sock=ours)
    try:
        yield stream, theirs
    finally:
        stream.transport.abort()
        theirs.close()


async def test_what_arrived_before_and_after_is_one(ends: tuple[DirectStream, socket.socket]) -> None:
    stream, theirs = ends
    loop = asyncio.get_running_loop()
    whole = bytes(range(256)) * 4096
    sending = asyncio.create_task(loop.sock_sendall(theirs, whole))
    assert await stream.readexactly(3) == whole[:3]
    room = bytearray(300_000)
    assert await stream.fill(memoryview(room), 5.0, FAR_S)
    assert room == whole[3:300_003]
    rest = bytearray(len(whole) - 300_003)
    assert await stream.fill(memoryview(rest), 5.0, FAR_S)
    assert rest == whole[300_003:]
    await sending


async def test_who_reads_nothing_holds_the_sender_up(ends: tuple[DirectStream, socket.socket]) -> None:
    stream, theirs = ends
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(theirs, bytes(4_000_000)))
    while not stream._paused:  # noqa: ASYNC110 - asyncio itself sets it
        await asyncio.sleep(0)
    assert stream._end == SPARE_BYTES and not sending.done()
    assert await stream.fill(memoryview(bytearray(4_000_000)), 5.0, FAR_S)
    await sending


async def test_what_is_here_is_taken_without_waiting(ends: tuple[DirectStream, socket.socket]) -> None:
    stream, theirs = ends
    assert stream.here(10) == b"" and stream.drained
    assert len(stream._spare) == FIRST_BYTES, "a stream on which little comes takes little memory"
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(theirs, bytes(1_000_000)))
    while not stream._paused:  # noqa: ASYNC110 - asyncio itself sets it
        await asyncio.sleep(0)
    assert stream.here(5) == bytes(5) and stream._paused
    assert len(stream.here(SPARE_BYTES)) == SPARE_BYTES - 5 and not stream._paused
    assert await stream.fill(memoryview(bytearray(1_000_000 - SPARE_BYTES)), 5.0, FAR_S)
    await sending
    stream.write(bytes(4_000_000))
    assert not stream.drained


async def test_silence_and_slowness_are_not_in_time(ends: tuple[DirectStream, socket.socket]) -> None:
    stream, theirs = ends
    assert not await stream.fill(memoryview(bytearray(10)), 0.01, FAR_S)
    theirs.send(b"x")
    assert not await stream.fill(memoryview(bytearray(10)), 0.01, 0.0)


async def test_a_cut_is_told_after_what_came(ends: tuple[DirectStream, socket.socket]) -> None:
    stream, theirs = ends
    theirs.send(b"last words")
    theirs.close()
    assert await stream.read(100) == b"last words"
    assert await stream.read(100) == b""
    with pytest.raises(TransportError, match="cut"):
        await stream.fill(memoryview(bytearray(10)), 5.0, FAR_S)
    with pytest.raises(asyncio.IncompleteReadError):
        await stream.readexactly(1)


async def test_a_cut_ends_who_waits(ends: tuple[DirectStream, socket.socket]) -> None:
    stream, theirs = ends
    waiting = asyncio.create_task(stream.fill(memoryview(bytearray(10)), 5.0, FAR_S))
    theirs.send(b"half")
    theirs.close()
    with pytest.raises(TransportError, match="cut"):
        await waiting
