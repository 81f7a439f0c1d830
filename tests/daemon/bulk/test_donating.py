"""The side of a donor: pins, and states that wait for what is urgent."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from chain_kit import uplink
from daemon_kit import PATIENCE_S, version
from deadlines import within_s

from p2pdiloco.adapters.flow import CHUNK_BYTES
from p2pdiloco.adapters.framing import MIN_BYTES_PER_S
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk import states
from p2pdiloco.daemon.bulk.states import TRICKLE_S, Courtesy
from p2pdiloco.ports import PullSource, Refusal


class Pins:
    """A vault's worker that counts what is pinned."""

    def __init__(self) -> None:
        self.pinned: Counter[int] = Counter()
        self.number = 1

    async def run(self, job: Any, *arguments: Any) -> Any:
        return job(*arguments)

    def pin(self, fragment: int) -> Any:
        made = version(self.number, bytes(32))
        digest = bytes([fragment, self.number]) * 16
        header = msgspec.structs.replace(made.header, fragment=fragment, state_digest=digest)
        self.pinned[fragment] += 1

        def release() -> None:
            self.pinned[fragment] -= 1

        pin = SimpleNamespace(buffers=[memoryview(bytes(8))] * 2, release=release)
        return wire.StateHeader(msgspec.structs.replace(made, header=header), ()), pin


class Donor:
    def __init__(self) -> None:
        self.now = 0.0
        self.pins = Pins()
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.donating = states.Donating(self.pins, Courtesy(uplink(), clock), clock)  # type: ignore[arg-type]

    async def ask(self, peer: str, fragment: int, **more: Any) -> Any:
        answer = await self.donating.serve(peer, wire.PullState("run", fragment, 1, **more))
        if isinstance(answer, Refusal):
            return wire.decode(answer.answer, wire.Refused).reason
        return answer


async def test_a_peer_has_its_share_of_the_pins_and_no_more() -> None:
    donor = Donor()
    given = [await donor.ask("greedy", i) for i in range(states.SHARE)]
    assert await donor.ask("greedy", 77) is PullRefusal.BUSY
    assert isinstance(await donor.ask("modest", 77), PullSource), "there is room for others"
    given[0].release()
    assert isinstance(await donor.ask("greedy", 78), PullSource), "what is not read any more makes room"
    assert donor.pins.pinned[0] == 0 and donor.donating.pins == states.SHARE + 1


async def test_all_peers_together_have_a_bound_and_idle_pins_make_room() -> None:
    donor = Donor()
    given = [await donor.ask(f"peer {i}", i) for i in range(states.MAX_PINS)]
    assert await donor.ask("one more", 77) is PullRefusal.BUSY
    given[3].release()
    assert isinstance(await donor.ask("one more", 77), PullSource)
    assert donor.pins.pinned[3] == 0 and donor.donating.pins == states.MAX_PINS


async def test_a_version_stays_for_its_reader_for_a_while() -> None:
    donor = Donor()
    first = await donor.ask("joiner", 0, most_bytes=4)
    have = bytes([0, 1]) * 16
    first.release()
    donor.pins.number = 2
    donor.now = states.LEASE_S - 1
    again = await donor.ask("joiner", 0, have_bytes=4, have=have, most_bytes=8, exact=True)
    assert [part.nbytes for part in again.payload] == [4, 4], "of both halves of the state"
    assert wire.decode(again.header, wire.StateHeader).offset == 4
    again.release()
    donor.now += states.LEASE_S + 1
    donor.donating.expire()
    assert donor.pins.pinned[0] == 0
    gone = await donor.ask("joiner", 0, have_bytes=4, have=have, exact=True)
    assert gone is PullRefusal.GONE and donor.pins.pinned[0] == 0, "and nothing stays pinned for nothing"
    newer = await donor.ask("joiner", 0, have_bytes=4, have=have)
    assert wire.decode(newer.header, wire.StateHeader).offset == 0


class Waits:
    """Waits of a stream, instead of the time: it goes on when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.inside, self._go = asyncio.Event(), asyncio.Event()
        self.uplink = uplink()
        self.courtesy = Courtesy(self.uplink, lambda: self.now)
        monkeypatch.setattr(self.courtesy._none_urgent, "wait", self._wait)
        monkeypatch.setattr("p2pdiloco.daemon.bulk.states.COURTESY_LOOK_S", math.inf)

    async def _wait(self) -> None:
        self.inside.set()
        await self._go.wait()

    async def until_inside(self) -> None:
        await asyncio.wait_for(self.inside.wait(), within_s(PATIENCE_S))

    def turn(self) -> None:
        self.inside.clear()
        self._go.set()
        self._go = asyncio.Event()


async def test_states_wait_while_something_urgent_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    with waits.courtesy.urgent():
        chunk = asyncio.create_task(waits.courtesy.pace(CHUNK_BYTES))
        await waits.until_inside()
        waits.now = TRICKLE_S - 0.1
        waits.turn()
        await waits.until_inside()
        assert not chunk.done()
    waits.turn()
    await chunk  # nothing is urgent any more


async def test_a_state_is_never_so_slow_that_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    with waits.courtesy.urgent():
        for size in (2048, 4096, CHUNK_BYTES):
            began_s = waits.now
            chunk = asyncio.create_task(waits.courtesy.pace(size))
            await waits.until_inside()
            waits.now += min(TRICKLE_S, size / MIN_BYTES_PER_S)
            waits.turn()
            await asyncio.wait_for(chunk, within_s(PATIENCE_S))
            assert size / (waits.now - began_s) >= MIN_BYTES_PER_S, "also where chunks are small"


async def test_states_do_not_wait_for_a_peer_that_takes_the_urgent_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch)
    monkeypatch.setattr("p2pdiloco.daemon.bulk.states.COURTESY_LOOK_S", 1.0)
    waits.uplink.uplink_bytes_per_s = 1000.0
    with waits.courtesy.urgent():
        waits.now, waits.uplink.sent_bytes = 1.0, 499
        await asyncio.wait_for(waits.courtesy.pace(0), within_s(PATIENCE_S))  # the uplink is not what is full
        assert not waits.inside.is_set()
        waits.now, waits.uplink.sent_bytes = 2.0, 999
        chunk = asyncio.create_task(waits.courtesy.pace(CHUNK_BYTES))
        await waits.until_inside()
        chunk.cancel()


async def test_states_have_a_share_of_the_uplink_and_control_of_nothing_else() -> None:
    loop = asyncio.get_running_loop()
    courtesy = Courtesy(uplink(200_000.0), loop.time)
    began = loop.time()
    await asyncio.gather(*(courtesy.pace(10_000) for _ in range(4)))
    assert loop.time() - began >= 0.29, "three chunks paid for at half of the uplink before the fourth"


async def test_a_slow_reader_of_an_update_holds_states_up_for_a_minute_at_most() -> None:
    now = 0.0
    courtesy = Courtesy(uplink(), lambda: now)
    courtesy.begin()
    now = 61.0
    await asyncio.wait_for(courtesy.pace(1), within_s(1))
