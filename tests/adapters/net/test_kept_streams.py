"""One stream carries one transfer after the other; what went wrong is not used again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from conftest import Swarm
from deadlines import within_s
from net_helpers import Sink, until

from p2pdiloco.adapters import endpoint, framing, streams
from p2pdiloco.adapters.endpoint import Endpoint
from p2pdiloco.adapters.streams import MOST_KEPT, MOST_KEPT_IN_PER_PEER, MOST_KEPT_PER_PEER, end_stream
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Buffer, Refusal


class Opened:
    """Counts the streams that a transport opens."""

    def __init__(self, transport: Endpoint) -> None:
        self.count, self._before = 0, transport._open
        transport._open = self._open  # type: ignore[method-assign]

    async def _open(self, peer: str, timeout_s: float):  # type: ignore[no-untyped-def]
        self.count += 1
        return await self._before(peer, timeout_s)


async def pair(swarm: Swarm):  # type: ignore[no-untyped-def]
    a, b = await swarm.add(), await swarm.add()
    return a, b, swarm.handlers_of(b), Opened(a)


async def push(a: Endpoint, b: Endpoint, size: int = 5) -> None:
    assert await a.push(b.peer_id, b"%d" % size, [bytes(size)], 5.0) == (True, b"got %d" % size)


async def test_transfers_of_all_kinds_share_a_stream(swarm: Swarm) -> None:
    a, b, at_b, opened = await pair(swarm)
    at_b.payload = [bytes(700_000)]
    for _ in range(3):
        await push(a, b, 600_000)
        assert len((await a.pull(b.peer_id, b"state", 700_000, 5.0))[1]) == 700_000
        assert await a.push(b.peer_id, b"refuse", [b"x"], 5.0) == (False, b"stale base")
        assert await a.pull(b.peer_id, b"refuse", 10, 5.0) == Refusal(b"have it not")
        await push(a, b, 0)
    assert opened.count == 1 and at_b.released == 3
    # No more at a time than b keeps: of more it would choose, too, and might end one that a goes on with.
    await asyncio.gather(*(push(a, b, 300_000) for _ in range(MOST_KEPT_IN_PER_PEER)))
    before = opened.count
    assert len(a._kept) <= MOST_KEPT_PER_PEER
    await until(lambda: len(b._kept_in) <= MOST_KEPT_PER_PEER and not len(b._places))
    await asyncio.gather(*(push(a, b) for _ in range(MOST_KEPT_PER_PEER)))
    assert opened.count == before


@asynccontextmanager
async def unreadable(at_b, sink: Sink):  # type: ignore[no-untyped-def]
    async def on_push(sender: str, header: bytes) -> Sink:
        return sink

    normal, at_b.on_push = at_b.on_push, on_push
    yield
    at_b.on_push = normal


async def test_a_stream_on_which_something_went_wrong_is_not_used_again(swarm: Swarm) -> None:
    a, b, at_b, opened = await pair(swarm)
    await push(a, b)
    with pytest.raises(RemoteError, match="bad-header"):  # at the server
        await a.push(b.peer_id, b"error", [b"x"], 5.0)
    await push(a, b)
    assert opened.count == 2
    at_b.payload = [bytes(1000)]
    with pytest.raises(RemoteError, match="oversized"):  # at the client
        await a.pull(b.peer_id, b"", 10, 5.0)
    await push(a, b)
    assert opened.count == 3
    sink = Sink(30_000_000)
    async with unreadable(at_b, sink):
        cancelled = asyncio.create_task(a.push(b.peer_id, b"", [bytes(30_000_000)], 5.0))
        await sink.started.wait()
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
    await sink.done.wait()
    assert sink.aborted and len(a._kept) == 0
    await push(a, b)
    assert opened.count == 4


async def test_a_kept_stream_that_died_costs_a_new_one_and_no_transfer(swarm: Swarm) -> None:
    a, b, at_b, opened = await pair(swarm)
    at_b.payload = [b"all of it"]
    await push(a, b)
    for task in list(b._serving):  # known: the end has come here before the next transfer
        task.cancel()
    await until(
        lambda: not any(streams.is_whole_stream(stream[0]) for _, stream, _ in a._kept._idle.values())
    )
    await push(a, b)
    assert opened.count == 2 and not a._kept_in
    sinks = len(at_b.sinks)
    for number, transfer in enumerate((lambda: push(a, b), lambda: a.pull(b.peer_id, b"", 9, 5.0))):
        served = b._serve_one

        async def deaf(channel, sender, kind) -> None:  # type: ignore[no-untyped-def]
            """Unknown: it ends on the way of the request."""
            b._serve_one = served  # noqa: B023 - used in this turn
            raise TransportError("cut")

        b._serve_one = deaf
        await transfer()
        assert opened.count == 3 + number
    assert len(at_b.sinks) == sinks + 1, "it was carried out once"
    assert b.refusals == a.refusals == {}


async def test_a_server_that_dies_after_the_last_byte_takes_nothing_back(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, at_b, _opened = await pair(swarm)
    at_b.payload, write = [bytes(700_000)], framing.Channel.write

    async def dies(channel: framing.Channel, *parts: Buffer) -> None:
        if parts == (bytes([framing.ACK]),):
            end_stream(channel._writer, False)
            raise TransportError("stream cut")
        await write(channel, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(framing.Channel, "write", dies)
        assert len((await a.pull(b.peer_id, b"state", 700_000, 5.0))[1]) == 700_000
    await push(a, b)


async def test_idle_streams_end_and_their_number_is_bounded(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, at_b, opened = await pair(swarm)
    greedy = [await swarm.raw_stream(a, b) for _ in range(MOST_KEPT_IN_PER_PEER + 2)]
    try:
        for reader, writer in greedy:  # keeps all of them open, and says nothing more
            writer.write(b"\x51\0\0\0\x06refuse" + bytes(8))
            await asyncio.wait_for(reader.read(100), within_s(5.0))
        await until(lambda: len(b._kept_in) == MOST_KEPT_IN_PER_PEER and not b._places)
        assert await asyncio.wait_for(greedy[0][0].read(1), within_s(5.0)) == b"", (
            "the one idle for longest has ended"
        )
        monkeypatch.setattr(streams, "MAX_STREAMS_IN", 1)
        await push(a, b)  # idle streams take nobody's place
    finally:
        for _, writer in greedy:
            writer.close()
    await until(lambda: len(b._kept_in) == 1 == len(a._kept))
    monkeypatch.setattr(streams, "KEEP_S", 0.05)
    monkeypatch.setattr(streams, "MAX_STREAMS_IN", 64)
    a._kept.clear()
    await push(a, b)
    await until(lambda: len(b._kept_in) == 0 == len(a._kept))
    monkeypatch.setattr(endpoint, "SERVER_KEEPS_S", 0.05)
    monkeypatch.setattr(streams, "KEEP_S", 15.0)
    await push(a, b)
    await until(lambda: len(b._kept_in) == 0)
    await push(a, b)
    assert at_b.sinks[-1].finished and opened.count > 3


class Closed:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


async def test_the_stream_idle_for_longest_gives_way() -> None:
    kept = streams.KeptStreams()
    writers = [Closed() for _ in range(MOST_KEPT + 1)]
    for number, writer in enumerate(writers):
        kept.put(f"peer {number}", (object(), writer))  # type: ignore[arg-type]
    assert len(kept) == MOST_KEPT and [w.closed for w in writers] == [True] + MOST_KEPT * [False]
    kept.clear()
    assert all(w.closed for w in writers)
