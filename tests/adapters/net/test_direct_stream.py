"""Bytes land where they are wanted; who is slow, silent or gone is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from p2pdiloco.adapters.framing import FIRST_BYTES, SPARE_BYTES, DirectStream
from p2pdiloco.errors import TransportError

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
