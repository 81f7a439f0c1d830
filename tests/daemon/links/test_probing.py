"""Measuring a link: right figures, bounded bytes, and a node that does not let itself be worn out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pdiloco.adapters.framing import refused_by_peer
from p2pdiloco.cli.live_result import listed_manifest
from p2pdiloco.core.api.reasons import ProbeRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import LINK_OVERHEAD
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.reach import PROBE_AGAIN_S, TURN_S, Forgetful, ProbeGate, measure
from p2pdiloco.errors import RemoteError, TransportError, UserError
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco_lab.memory_net import MemoryNetwork


class Shaped:
    """A transport whose clock is what its link would have taken, and whose peer is a gate."""

    def __init__(self, up_bits: float, down_bits: float, one_way_s: float) -> None:
        self.now_s = 1000.0
        self._rates = {"up": up_bits / LINK_OVERHEAD / 8, "down": down_bits / LINK_OVERHEAD / 8}
        self._one_way_s = one_way_s
        self.gate = ProbeGate(self.now)
        self.moved = {"up": 0, "down": 0}

    def now(self) -> float:
        return self.now_s

    def _pass(self, way: str, size: int, ways: int) -> None:
        self.now_s += ways * self._one_way_s + size / self._rates[way]
        self.moved[way] += size

    async def send(self, _peer: str, _data: bytes, _timeout_s: float) -> bytes:
        self._pass("up", 0, 2)
        return b""

    async def pull(self, _peer: str, request: bytes, most: int, _timeout_s: float) -> tuple[bytes, bytearray]:
        source = self.gate.give("me", wire.decode(request, wire.PullProbe))
        payload = bytearray().join(source.payload)
        assert len(payload) <= most
        self._pass("down", len(payload), 4)
        return source.header, payload

    async def push(self, _peer: str, header: bytes, payload: Any, _timeout_s: float) -> tuple[bool, bytes]:
        sink = self.gate.take("me", wire.decode(header, wire.PushProbe))
        assert sum(map(len, payload)) == sink.payload_bytes
        self._pass("up", sink.payload_bytes, 6)
        return True, await sink.finish()


@pytest.mark.parametrize("up", [2e5, 2e6, 2e7, 1e9])
@pytest.mark.parametrize("down", [1e6, 1e8])
@pytest.mark.parametrize("one_way_s", [0.0005, 0.1])
async def test_figures_are_the_links_and_bytes_are_bounded(up: float, down: float, one_way_s: float) -> None:
    link = Shaped(up, down, one_way_s)
    found = await measure(link, "peer", link.now)  # type: ignore[arg-type]
    if up > 1e8 and one_way_s > 0.01:  # 8 MiB are too few: the round trips take longer than they
        assert 5e7 < found.upload_bits_per_s < up
    else:
        assert found.upload_bits_per_s == pytest.approx(up, rel=0.05)
    assert found.download_bits_per_s == pytest.approx(down, rel=0.05)
    assert found.link.latency_s == pytest.approx(one_way_s)
    assert max(link.moved.values()) <= wire.MAX_PROBE_BYTES
    assert found.moved_bytes >= sum(link.moved.values())
    assert found.took_s == link.now_s - 1000.0 < TURN_S


def test_one_at_a_time_one_a_minute_and_only_so_much() -> None:
    now = 0.0
    gate = ProbeGate(lambda: now)

    def refused(answer: Any) -> tuple[ProbeRefusal, int]:
        found = wire.decode(answer.answer, wire.ProbeRefused)
        return found.reason, found.again_s

    def give(peer: str, size: int = 1 << 20) -> Any:
        return gate.give(peer, wire.PullProbe(size))

    assert sum(map(len, give("a", 7 << 20).payload)) == 7 << 20
    taken = gate.take("a", wire.PushProbe(7 << 20))
    assert isinstance(taken, Forgetful) and taken.payload_bytes == 7 << 20  # the other way counts apart
    assert refused(give("a", 2 << 20)) == (ProbeRefusal.TOO_MUCH, PROBE_AGAIN_S)
    assert refused(gate.take("a", wire.PushProbe(2 << 20))) == (ProbeRefusal.TOO_MUCH, PROBE_AGAIN_S)
    assert refused(give("b")) == (ProbeRefusal.BUSY, TURN_S)
    for _ in range(64):
        assert isinstance(give("a", 0), PullSource)
    assert refused(give("a", 0))[0] is ProbeRefusal.TOO_MUCH  # also of nothing
    now = TURN_S + 1
    assert refused(give("a")) == (ProbeRefusal.TOO_OFTEN, PROBE_AGAIN_S - TURN_S - 1)
    assert isinstance(give("b"), PullSource)
    assert refused(give("a"))[0] is ProbeRefusal.TOO_OFTEN
    now = PROBE_AGAIN_S + 1
    assert isinstance(give("a"), PullSource)
    for number in range(100):
        now += TURN_S
        assert isinstance(give(f"peer {number}", 0), PullSource)
    assert len(gate._turns) <= PROBE_AGAIN_S / TURN_S


async def test_on_a_network_it_is_measured_once_then_refused() -> None:
    hub, door = MemoryNetwork(), FrontDoor()
    node, asker, other = hub.transport("node"), hub.transport("asker"), hub.transport("other")
    for transport, handlers in ((node, door), (asker, FrontDoor()), (other, FrontDoor())):
        await transport.start(handlers)
    found = await measure(asker, "node")
    assert found.upload_bits_per_s > 1e6 and found.download_bits_per_s > 1e6
    assert 2 * 32 * 1024 <= found.moved_bytes <= 2 * wire.MAX_PROBE_BYTES
    with pytest.raises(UserError, match=r"measures a link for somebody else just now \(again in") as refused:
        await measure(other, "node")
    assert "--upload" in refused.value.hint
    assert not node.refusals, "to ask is no offence"
    with pytest.raises(UserError, match="gives no run"):
        await listed_manifest(asker, "node", "")
    await node.close()
    with pytest.raises(UserError, match="node cannot be reached"):
        await measure(asker, "node")


@pytest.mark.parametrize("why", ProbeRefusal)
@pytest.mark.parametrize("way", ["give", "take"])
async def test_what_a_person_hears_who_is_refused(why: ProbeRefusal, way: str) -> None:
    door, hub = FrontDoor(), MemoryNetwork()
    refusal = Refusal(wire.encode(wire.ProbeRefused(why, 7)))
    setattr(door.probes, way, lambda peer, request: refusal)
    node, asker = hub.transport("node"), hub.transport("asker")
    await node.start(door)
    await asker.start(FrontDoor())
    with pytest.raises(UserError, match=rf"^node {why} \(again in 7 s\)$"):
        await measure(asker, "node")


async def test_a_peer_with_too_many_requests_is_asked_later() -> None:
    class Full(Shaped):
        async def pull(self, *_: Any) -> Any:
            raise refused_by_peer(b"busy\ntoo many requests at once")

    full = Full(1e6, 1e6, 0.0)
    with pytest.raises(UserError, match=r"^peer has too many requests just now$") as refused:
        await measure(full, "peer", full.now)  # type: ignore[arg-type]
    assert "later" in refused.value.hint


async def test_what_is_pushed_is_forgotten() -> None:
    sink = Forgetful(3)
    await sink.write(0, memoryview(b"abc"))
    assert await sink.finish() == b""
    assert vars(sink) == {"payload_bytes": 3}


async def test_a_peer_that_does_not_know_it_and_one_that_is_mute() -> None:
    class Old(FrontDoor):
        async def on_pull(self, sender: str, request: bytes) -> Any:
            raise RemoteError("garbage", "Invalid value 'PullProbe'")

    hub = MemoryNetwork()
    old, asker = hub.transport("old"), hub.transport("asker")
    await old.start(Old())
    await asker.start(FrontDoor())
    with pytest.raises(UserError, match="old does not know how to measure a link") as refused:
        await measure(asker, "old")
    assert "another version" in refused.value.hint

    class Mute(Shaped):
        async def pull(self, *_: Any) -> Any:
            await asyncio.Event().wait()

    mute = Mute(1e6, 1e6, 0.0)
    with pytest.raises(UserError, match="too slow to measure: 32 KiB did not arrive"):
        await measure(mute, "peer", mute.now, give_up_s=0.01)  # type: ignore[arg-type]


async def test_a_queue_that_swallows_the_first_bytes_does_not_deceive() -> None:
    """32 KiB pass at once, what follows does not end: the rate is at most what that would have needed."""

    class Queue(Shaped):
        async def pull(self, peer: str, request: bytes, most: int, timeout_s: float) -> Any:
            if most > 32 * 1024:
                self.now_s += 5.0
                await asyncio.Event().wait()
            return await super().pull(peer, request, most, timeout_s)

    link = Queue(1e8, 1e8, 0.0)
    found = await measure(link, "peer", link.now, give_up_s=0.05)  # type: ignore[arg-type]
    assert found.download_bits_per_s == pytest.approx(8 * LINK_OVERHEAD * 128 * 1024 / 5.0)
    assert found.upload_bits_per_s == pytest.approx(1e8, rel=0.05)


async def test_one_reset_stream_is_forgiven_and_two_are_not() -> None:
    class Resets(Shaped):
        resets = 1

        async def push(self, *arguments: Any) -> Any:
            self.resets -= 1
            if self.resets >= 0:
                raise TransportError("stream reset")
            return await super().push(*arguments)

    link = Resets(1e7, 1e7, 0.0)
    assert (await measure(link, "peer", link.now)).upload_bits_per_s > 1e6  # type: ignore[arg-type]
    link = Resets(1e7, 1e7, 0.0)
    link.resets = 2
    with pytest.raises(UserError, match="cut while it was measured: stream reset"):
        await measure(link, "peer", link.now)  # type: ignore[arg-type]


def test_sizes_are_bounded_on_the_wire() -> None:
    for request in (wire.PullProbe(wire.MAX_PROBE_BYTES + 1), wire.PushProbe(-1)):
        with pytest.raises(RemoteError, match="garbage"):
            wire.decode(wire.encode(request), type(request))
