"""Bulk framing against arbitrary bytes: only RemoteError and TransportError may come out."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from net_helpers import Recorder

from p2pdiloco.adapters import streams
from p2pdiloco.adapters.memory_net import _Pipe, _Writer
from p2pdiloco.errors import InvariantViolation, RemoteError, TransportError
from p2pdiloco.ports import Refusal


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


def channel(data: bytes, piece: int = 1 << 20) -> streams.Channel:
    return streams.Channel(Script(data, piece), Deaf(), idle_s=1.0)


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
        assert sink.finished != (sink.aborted is not None)
    assert recorder.released <= 1


@settings(max_examples=300, deadline=None)
@given(scripts)
def test_client_side_survives_arbitrary_bytes(data: bytes) -> None:
    only_known_errors(streams.push(channel(data), b"header", [b"payload"]))
    only_known_errors(streams.pull(channel(data), b"request", 64))


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
            there, back = _Pipe(), _Pipe()
            client = streams.Channel(back, _Writer(there, back), 5.0)
            server = streams.Channel(there, _Writer(back, there), 5.0)
            serving = asyncio.create_task(streams.serve(server, "peer", recorder))
            if kind == "push":
                assert (await streams.push(client, b"h" + header, parts))[0]
                assert bytes(recorder.sinks[0].data) == b"".join(parts)
            else:
                assert await streams.pull(client, b"p" + header, 1 << 20) == (b"header", b"".join(parts))
            await serving

    asyncio.run(run())


async def test_a_silent_peer_costs_only_the_idle_time() -> None:
    there, back = _Pipe(), _Pipe()
    client = streams.Channel(back, _Writer(there, back), 0.05)
    with pytest.raises(TransportError, match="nothing received"):
        await streams.pull(client, b"request", 10)
    with pytest.raises(TransportError, match="nothing taken"):
        await client.send_payload([bytes(4_000_000)])


async def test_progress_resets_the_idle_time() -> None:
    """A transfer may take many times the idle time-out as long as it moves."""
    idle_s, pauses = 0.2, 6
    there, back = _Pipe(), _Pipe()

    async def pace(chunk_bytes: int) -> None:
        await asyncio.sleep(idle_s / 3)

    recorder = Recorder()
    client = streams.Channel(back, _Writer(there, back), idle_s, pace)
    server = streams.Channel(there, _Writer(back, there), idle_s)
    serving = asyncio.create_task(streams.serve(server, "peer", recorder))
    size = pauses * streams.CHUNK_BYTES
    assert (await streams.push(client, b"%d" % size, [bytes(size)]))[0]
    await serving


async def test_an_announced_header_is_capped_before_it_is_read() -> None:
    huge = b"\x51" + struct.pack(">I", streams.MAX_HEADER_BYTES + 1) + bytes(10)
    with pytest.raises(RemoteError, match="oversized"):
        await streams.serve(channel(huge), "peer", Recorder())
    with pytest.raises(RemoteError, match="oversized"):
        await streams.pull(channel(b"\x65" + struct.pack(">I", 1) + b"h" + struct.pack(">Q", 2**60)), b"", 10)


async def test_only_labels_may_be_long() -> None:
    long = streams.MAX_ANSWER_BYTES + 1
    with pytest.raises(RemoteError, match="oversized"):
        await streams.serve(channel(b"\x52" + struct.pack(">I", long) + bytes(long)), "peer", Recorder())
    with pytest.raises(RemoteError, match="oversized"):
        await streams.pull(channel(b"\x62" + struct.pack(">I", long) + bytes(long)), b"", 10)


async def test_a_refusal_keeps_reason_and_detail_and_is_capped() -> None:
    body = streams.encode_refusal(RemoteError("reason", "détail " * 1000))
    assert len(body) <= streams.MAX_REASON_BYTES
    error = streams.refused_by_peer(body)
    assert error.reason == "reason" and str(error).startswith("reason: détail détail")
    answer = await streams.pull(channel(b"\x62" + struct.pack(">I", 2) + b"no"), b"", 10)
    assert answer == Refusal(b"no")


async def test_the_longest_label_arrives() -> None:
    recorder = Recorder()
    there, back = _Pipe(), _Pipe()
    client = streams.Channel(back, _Writer(there, back), 5.0)
    server = streams.Channel(there, _Writer(back, there), 5.0)
    serving = asyncio.create_task(streams.serve(server, "peer", recorder))
    recorder.sink_bytes = 3
    label = b"h" * streams.MAX_HEADER_BYTES
    assert (await streams.push(client, label, [b"abc"]))[0]
    await serving
    with pytest.raises(InvariantViolation):
        await streams.push(client, label + b"h", [b"abc"])
