"""The transport contract, on both transports."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Swarm
from deadlines import within_s
from net_helpers import Sink, until

from p2pdiloco.adapters import endpoint, framing, streams
from p2pdiloco.adapters.endpoint import Endpoint
from p2pdiloco.adapters.framing import OTHERS_HEADER_BYTES, checksum
from p2pdiloco.adapters.streams import (
    MAX_STREAMS_IN,
    MOST_KEPT,
    MOST_KEPT_IN_PER_PEER,
    MOST_KEPT_PER_PEER,
    POOL_SHARES,
    STREAMS_OF_OTHERS,
    StreamRefusal,
    end_stream,
)
from p2pdiloco.errors import InvariantViolation, PeerUnreachable, RemoteError, TransportError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Buffer, Refusal

MEGABYTE = 1_000_000


async def pair(swarm: Swarm):
    a, b = await swarm.add(), await swarm.add()
    return a, b, swarm.handlers_of(b)


async def test_a_message_is_answered_or_its_refusal_reaches_the_caller_and_is_counted_at_the_refuser(
    swarm: Swarm,
) -> None:
    a, b, at_b = await pair(swarm)
    assert await a.send(b.peer_id, b"hello", 5.0) == b"re:hello"
    assert await b.send(a.peer_id, b"back", 5.0) == b"re:back"  # without ever having dialled
    assert at_b.messages == [(a.peer_id, b"hello")]  # the sender is the authenticated one
    assert a.peers_connected() == 1
    with pytest.raises(RemoteError, match="not today") as refused:
        await a.send(b.peer_id, b"error", 5.0)
    assert refused.value.reason == "no-thanks"
    assert b.refusals == {"no-thanks": 1} and a.refusals == {}


async def test_who_is_not_admitted_introduces_itself_once_and_what_was_refused_is_sent_again(
    swarm: Swarm,
) -> None:
    a, b, at_b = await pair(swarm)
    at_b.payload = [b"payload"]
    at_b.strangers = {a.peer_id}
    kinds = (
        lambda: a.send(b.peer_id, b"hello", 5.0),
        lambda: a.push(b.peer_id, b"3", [b"abc"], 5.0),
        lambda: a.pull(b.peer_id, b"x", 10, 5.0),
    )
    for ask in kinds:
        with pytest.raises(RemoteError, match="not-admitted"):
            await ask()
    introduced: list[str] = []

    async def introduce(peer: str, works: bool) -> bool:
        introduced.append(peer)
        at_b.strangers = set() if works else {a.peer_id}
        return works

    a.introduce_by(lambda peer: introduce(peer, False))
    for ask in kinds:
        with pytest.raises(RemoteError, match="not-admitted"):
            await ask()
    a.introduce_by(lambda peer: introduce(peer, True))
    for ask in kinds:
        at_b.strangers = {a.peer_id}
        assert await ask()
    assert introduced == [b.peer_id] * 6
    assert b.refusals == {"not-admitted": 9}


async def test_a_bug_of_ours_is_reported_here_and_named_to_the_peer(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))

    async def broken(sender: str, data: bytes) -> bytes:
        raise KeyError("ours")

    at_b.on_message = at_b.on_pull = broken  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="internal-error"):
        await a.send(b.peer_id, b"x", 5.0)
    with pytest.raises(TransportError):
        await a.pull(b.peer_id, b"x", 10, 5.0)
    assert [repr(report["exception"]) for report in reports if report.get("bug")] == ["KeyError('ours')"] * 2
    assert b.refusals == {}


async def test_unreachable_peer(swarm: Swarm) -> None:
    a, b, _ = await pair(swarm)
    await swarm.vanish(b)
    for peer in (b.peer_id, Identity.generate().peer_id, a.peer_id, "nonsense"):
        async with asyncio.timeout(within_s(4.0)):
            with pytest.raises(PeerUnreachable):
                await a.send(peer, b"hello", 2.0)
            with pytest.raises(PeerUnreachable):
                await a.pull(peer, b"x", 10, 2.0)
    with pytest.raises(PeerUnreachable):
        await a.connect(Identity.generate().peer_id, ["/ip4/127.0.0.1/tcp/9", "nonsense"])


async def test_a_silent_handler_costs_only_the_time_out(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    at_b.before_reply = asyncio.get_running_loop().create_future
    async with asyncio.timeout(within_s(3.0)):
        with pytest.raises(PeerUnreachable):
            await a.send(b.peer_id, b"hello", 0.3)
    at_b.before_reply = None
    assert await a.send(b.peer_id, b"again", 5.0) == b"re:again"


async def test_oversized_message(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    with pytest.raises(InvariantViolation):  # our own bug
        await a.send(b.peer_id, bytes(256 * 1024 + 1), 5.0)
    reply = await a._call(b.peer_id, bytes(256 * 1024 + 1), 5.0)  # a peer's misdeed
    assert reply.startswith(b"\1oversized") and b.refusals == {"oversized": 1} and not at_b.messages
    assert len(await a.send(b.peer_id, bytes(200 * 1024), 5.0)) == 200 * 1024 + 3


async def test_push(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    parts = [bytes(range(256)) * 3000, bytearray(b"x" * 5), b"", memoryview(b"y" * MEGABYTE)]
    whole = b"".join(bytes(part) for part in parts)
    assert await a.push(b.peer_id, b"%d" % len(whole), parts, 5.0) == (True, b"got %d" % len(whole))
    sink = at_b.sinks[0]
    assert bytes(sink.data) == whole and sink.finished and at_b.senders == {a.peer_id}
    assert (a.payload_bytes(), b.payload_bytes()) == ((len(whole), 0), (0, len(whole)))
    went, came = a.carried_bytes()[0], b.carried_bytes()[1]  # with what carries it
    assert len(whole) < went < 1.1 * len(whole) + 10_000 and len(whole) < came < 1.1 * len(whole) + 10_000
    assert await a.push(b.peer_id, b"0", [], 5.0) == (True, b"got 0")


async def test_a_push_goes_on_where_an_earlier_one_was_cut(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    parts = [bytes(range(200)), b"b" * 300_000, b"c" * 300_000]
    whole = b"".join(parts)
    for have in (0, 100, 200, 400_000, len(whole)):
        at_b.already = whole[:have]
        before, finished = len(at_b.sinks), []
        said = lambda: finished.append(at_b.sinks[-1].finished)  # noqa: E731, B023
        assert (await a.push(b.peer_id, b"%d" % len(whole), parts, 5.0, said))[0]
        assert at_b.sinks[before].data == whole
        assert finished == [False], "said once, before the receiver has all of it"


async def test_push_refused_on_sight_of_its_header_or_its_size(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    ends: list[None] = []
    answer = await a.push(b.peer_id, b"refuse", [bytes(MEGABYTE)], 5.0, lambda: ends.append(None))
    assert answer == (False, b"stale base") and not ends
    with pytest.raises(RemoteError, match="bad-header"):
        await a.push(b.peer_id, b"error", [bytes(MEGABYTE)], 5.0)
    assert not at_b.sinks
    for size in (999, 1001):
        with pytest.raises(RemoteError, match="wrong-size"):
            await a.push(b.peer_id, b"1000", [bytes(size)], 5.0)
    assert [sink.aborted for sink in at_b.sinks] == [True] * 2
    await until(lambda: b.refusals == {"bad-header": 1, "wrong-size": 2})
    assert a.refusals == {}


def push_preface(header: bytes, size: int) -> bytes:
    return b"\x51" + struct.pack(">I", len(header)) + header + struct.pack(">Q", size)


CHUNK = struct.pack(">I", 100) + checksum(bytes(100)) + bytes(100)
END = bytes(12)
MISDEEDS = {
    "payload-too-long": CHUNK * 11,
    "payload-too-short": CHUNK * 9 + END,
    "damaged-chunk": CHUNK * 9 + CHUNK[:-1] + b"1" + END,
    "chunk-oversized": struct.pack(">I", 256 * 1024 + 1) + bytes(8),
    "chunks-too-small": (struct.pack(">I", 1 << 31) + bytes(8)) * 100,
}


@pytest.mark.parametrize("reason", MISDEEDS)
async def test_push_that_breaks_a_rule(swarm: Swarm, reason: str) -> None:
    a, b, at_b = await pair(swarm)
    reader, writer = await swarm.raw_stream(a, b)
    try:
        writer.write(push_preface(b"1000", 1000) + MISDEEDS[reason])
        await writer.drain()
        heard = b""
        while reason.encode() not in heard:
            heard += await asyncio.wait_for(reader.read(1000), within_s(5.0))
    finally:
        writer.close()
    sink = at_b.sinks[0]
    await asyncio.wait_for(sink.done.wait(), within_s(5.0))
    assert sink.aborted and not sink.finished
    await until(lambda: b.refusals == {reason: 1})


async def test_push_cut_in_the_middle(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    _, writer = await swarm.raw_stream(a, b)
    writer.write(push_preface(b"1000", 1000) + CHUNK * 3)
    await writer.drain()
    await until(lambda: at_b.sinks and at_b.sinks[0].started.is_set())
    writer.close()
    await asyncio.wait_for(at_b.sinks[0].done.wait(), within_s(5.0))
    assert at_b.sinks[0].aborted and not at_b.sinks[0].finished
    assert b.refusals == {}  # a cut is the world's fault


async def test_receiver_that_dies_in_the_middle(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)

    async def die_when_begun() -> None:
        await until(lambda: at_b.sinks and at_b.sinks[0].started.is_set())
        await swarm.vanish(b)

    died = asyncio.create_task(die_when_begun())
    ends: list[None] = []
    size = 50 * MEGABYTE
    with pytest.raises(TransportError):
        await a.push(b.peer_id, b"%d" % size, [bytes(size)], 5.0, lambda: ends.append(None))
    await died
    assert at_b.sinks[0].aborted and not ends


async def test_who_ends_what_comes_in_cuts_it_and_takes_no_more(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    _, writer = await swarm.raw_stream(a, b)
    writer.write(push_preface(b"100000", 100_000))
    await until(lambda: at_b.sinks)
    await b.end_incoming()
    assert at_b.sinks[0].aborted, "before anything else of ours ends"
    with pytest.raises((RemoteError, TransportError)):
        await a.push(b.peer_id, b"10", [bytes(10)], 5.0)
    with pytest.raises(RemoteError, match="not-ready"):
        await a.send(b.peer_id, b"hello", 5.0)
    assert len(at_b.sinks) == 1 and not at_b.messages
    writer.close()


async def test_a_sink_that_raises_tells_the_sender(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)

    async def poison(self: Sink, offset: int, chunk: memoryview) -> None:
        raise RemoteError("poison", "not a number")

    sink = Sink(20 * MEGABYTE)
    sink.write = poison.__get__(sink)  # type: ignore[method-assign]

    async def on_push(sender: str, header: bytes) -> Sink:
        return sink

    at_b.on_push = on_push  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="poison"):  # while the sender still has 20 MB to send
        await a.push(b.peer_id, b"", [bytes(20 * MEGABYTE)], 5.0)
    assert sink.aborted
    await until(lambda: b.refusals == {"poison": 1})


async def test_pull(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    at_b.payload = [bytes(range(256)) * 80_000, b"end"]  # 20 MB
    header, payload = await a.pull(b.peer_id, b"state", 21 * MEGABYTE, 5.0)
    assert header == b"header" and payload == b"".join(at_b.payload)
    await until(lambda: at_b.released == 1)
    assert await a.pull(b.peer_id, b"refuse", 10, 5.0) == Refusal(b"have it not")
    with pytest.raises(RemoteError, match="bad-request"):
        await a.pull(b.peer_id, b"error", 10, 5.0)
    with pytest.raises(RemoteError, match="oversized"):
        await a.pull(b.peer_id, b"state", MEGABYTE, 5.0)
    assert a.refusals == {"oversized": 1}
    await until(lambda: at_b.released == 2)


async def test_32_streams_at_once(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    at_b.payload = [bytes(300_000)]
    pushes = [a.push(b.peer_id, b"300000", at_b.payload, 20.0) for _ in range(16)]
    pulls = [a.pull(b.peer_id, b"", MEGABYTE, 20.0) for _ in range(32)]
    results = await asyncio.gather(*pushes, *pulls)
    assert results[:16] == [(True, b"got 300000")] * 16
    assert all(len(payload) == 300_000 for _, payload in results[16:])
    await until(lambda: at_b.released == 32)


async def test_more_streams_than_a_peer_may_open_are_refused(swarm: Swarm) -> None:
    a, b, _ = await pair(swarm)
    most = MAX_STREAMS_IN - MAX_STREAMS_IN // POOL_SHARES
    opened = [await swarm.raw_stream(a, b) for _ in range(most + 1)]
    try:
        for _, writer in opened:
            writer.write(b"\x51")
        await until(lambda: b.refusals == {StreamRefusal.ONE_PEERS_SHARE.value: 1})
    finally:
        for _, writer in opened:
            writer.close()


async def test_strangers_slow_streams_keep_no_member_out(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "HEADER_S", 600.0)  # a busy machine opens them slowly
    a, b, at_b = await pair(swarm)
    strangers = [await swarm.add(), await swarm.add()]
    at_b.members = {a.peer_id}
    announced = b"\x51" + struct.pack(">I", OTHERS_HEADER_BYTES)
    opened = [await swarm.raw_stream(strangers[i % 2], b) for i in range(2 * STREAMS_OF_OTHERS)]
    try:
        for _, writer in opened:
            writer.write(announced + b"h")
        await until(lambda: b.refusals == {StreamRefusal.OTHERS_FULL.value: STREAMS_OF_OTHERS})
        assert (await a.push(b.peer_id, b"10", [bytes(10)], 5.0))[0]
    finally:
        for _, writer in opened:
            writer.close()


async def test_a_long_header_is_for_members(swarm: Swarm) -> None:
    a, b, at_b = await pair(swarm)
    header = b"refuse" + bytes(OTHERS_HEADER_BYTES)
    at_b.members = set()
    with pytest.raises(RemoteError, match=StreamRefusal.LONG_HEADER.value):
        await a.push(b.peer_id, header, [b""], 5.0)
    await until(lambda: b.refusals == {StreamRefusal.LONG_HEADER.value: 1})
    assert await a.push(b.peer_id, header[:OTHERS_HEADER_BYTES], [b""], 5.0) == (False, b"stale base")
    at_b.members = {a.peer_id}
    assert await a.push(b.peer_id, header, [b""], 5.0) == (False, b"stale base")


async def test_a_header_that_does_not_come_is_given_up_and_counted(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = await pair(swarm)
    monkeypatch.setattr(framing, "HEADER_S", 0.05)
    reader, writer = await swarm.raw_stream(a, b)
    writer.write(b"\x51" + struct.pack(">I", 100) + b"h")
    await until(lambda: b.refusals == {StreamRefusal.TOO_SLOW.value: 1})
    assert await asyncio.wait_for(reader.read(1), within_s(5.0)) == b""
    writer.close()


async def test_a_lone_peers_record_is_told_to_nobody_yet_kept_and_two_peers_have_one_each_under_a_key(
    swarm: Swarm,
) -> None:
    a = await swarm.add()
    assert not await a.put_record("runs", b"first", 30.0)
    assert await a.get_records("runs") == {a.peer_id: b"first"}
    b, c = await swarm.add(), await swarm.add()
    assert await b.get_records("runs") == {a.peer_id: b"first"}
    assert await a.put_record("members", b"a1", 30.0)
    assert await b.put_record("members", b"b1", 30.0)
    assert await a.put_record("members", b"a2", 30.0)  # replaces our own
    lifetime_s = 0.5
    while not await b.put_record("gone", b"soon", lifetime_s):  # too old when it arrives: a busy machine
        lifetime_s *= 2
    for reader in (a, b, c):
        assert await reader.get_records("members") == {a.peer_id: b"a2", b.peer_id: b"b1"}
        assert await reader.get_records("nothing") == {}
    async with asyncio.timeout(within_s(10.0)):  # expiry is by the clock
        while await a.get_records("gone"):
            pass


async def test_two_peers_that_know_only_a_third_reach_each_other(swarm: Swarm) -> None:
    _, b = await swarm.add(), await swarm.add()
    c = await swarm.add()
    await b.connect(c.peer_id, c.addresses())
    assert await b.send(c.peer_id, b"x", 5.0) == b"re:x"
    assert b.peers_connected() == 2


async def test_no_initial_peer_reachable(swarm: Swarm, tmp_path: Path) -> None:
    a, b, _ = await pair(swarm)
    await swarm.vanish(a)
    with pytest.raises(UserError, match=a.peer_id) as refused:
        await swarm.add()
    assert refused.value.hint
    await b.close()
    await b.close()  # twice is harmless


# One stream carries one transfer after the other; what went wrong is not used again.


class Opened:
    """Counts the streams that a transport opens."""

    def __init__(self, transport: Endpoint) -> None:
        self.count, self._before = 0, transport._open
        transport._open = self._open  # type: ignore[method-assign]

    async def _open(self, peer: str, timeout_s: float):  # type: ignore[no-untyped-def]
        self.count += 1
        return await self._before(peer, timeout_s)


async def kept_pair(swarm: Swarm):  # type: ignore[no-untyped-def]
    a, b, at_b = await pair(swarm)
    return a, b, at_b, Opened(a)


async def push(a: Endpoint, b: Endpoint, size: int = 5) -> None:
    assert await a.push(b.peer_id, b"%d" % size, [bytes(size)], 5.0) == (True, b"got %d" % size)


async def test_transfers_of_all_kinds_share_a_stream(swarm: Swarm) -> None:
    a, b, at_b, opened = await kept_pair(swarm)
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


async def test_a_stream_on_which_something_went_wrong_is_not_used_again(swarm: Swarm) -> None:
    a, b, at_b, opened = await kept_pair(swarm)
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
    cancelled = asyncio.create_task(a.push(b.peer_id, b"30000000", [bytes(30_000_000)], 5.0))
    await until(lambda: at_b.sinks[-1].payload_bytes == 30_000_000)
    sink = at_b.sinks[-1]
    await sink.started.wait()
    cancelled.cancel()
    with suppress(asyncio.CancelledError):
        await cancelled
    await sink.done.wait()
    assert sink.aborted and len(a._kept) == 0
    await push(a, b)
    assert opened.count == 4


async def test_a_kept_stream_that_died_costs_a_new_one_and_no_transfer(swarm: Swarm) -> None:
    a, b, at_b, opened = await kept_pair(swarm)
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
    a, b, at_b, _opened = await kept_pair(swarm)
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
    a, b, at_b, opened = await kept_pair(swarm)
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
