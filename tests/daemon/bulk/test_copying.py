"""A newcomer copies states from several holders: in parallel, by their rates, on after cuts."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from chain_kit import uplink
from copying_kit import LAYOUTS, NUMEL, SIZE, Peer
from daemon_kit import PATIENCE_S, Neighbourhood, until, version
from deadlines import within_s

from p2pdiloco.adapters.flow import CHUNK_BYTES, Allowance, Limits
from p2pdiloco.adapters.framing import MIN_BYTES_PER_S
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk import states
from p2pdiloco.daemon.bulk.states import TRICKLE_S, Courtesy
from p2pdiloco.errors import RemoteError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.vault import Vault
from p2pdiloco_lab.memory_net import MemoryNetwork

PIECE = 1 << 16


@pytest.fixture
async def town(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(states, "LEAST_PIECE_BYTES", PIECE)
    hub, made = MemoryNetwork(), []

    async def add(name: str, seed: int | None = 1, bits_per_s: float = 0.0) -> Peer:
        upload = Allowance(bits_per_s / 8, asyncio.get_running_loop().time) if bits_per_s else None
        peer = Peer(hub.transport(name, limits=Limits(upload=upload)), seed)
        made.append(peer)
        await peer.transport.start(peer)  # type: ignore[arg-type]
        return peer

    yield SimpleNamespace(add=add, hub=hub)
    for peer in made:
        await peer.transport.close()
        peer.compute.close()


async def three(town: Any, *bits_per_s: float) -> tuple[Peer, list[Peer]]:
    """A newcomer and three donors."""
    donors = [await town.add(f"d{i}", 1, rate) for i, rate in enumerate(bits_per_s or (0, 0, 0))]
    joiner = await town.add("joiner", None)
    joiner.chain.peers = [donor.name for donor in donors]
    return joiner, donors


async def test_the_bytes_come_from_all_holders_of_the_version_once(town: Any) -> None:
    joiner, donors = await three(town, 80e6, 80e6, 80e6)
    assert isinstance(await joiner.copy("d0"), ev.StateFetched)
    assert joiner.has_state_of(donors[0]) and joiner.transfers.bytes_in == SIZE, "nothing travelled twice"
    assert all(donor.gave for donor in donors), [donor.gave for donor in donors]
    assert joiner.transfers.held_bytes == 0, "it is written straight into the vault"


async def test_a_slow_holder_gives_little_of_it(town: Any) -> None:
    joiner, donors = await three(town, 0.4e6, 80e6, 80e6)
    await asyncio.wait_for(joiner.copy("d0"), within_s(20))
    assert joiner.has_state_of(donors[0])
    assert joiner.transfers.copying.from_others_bytes > SIZE - 3 * PIECE
    assert joiner.transfers.bytes_in < SIZE + PIECE


async def test_a_holder_that_says_nothing_holds_nobody_up(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joiner, donors = await three(town)
    monkeypatch.setattr(states, "SILENT_S", 0.1)
    asked = asyncio.Event()

    async def silent(_sender: str, _request: bytes) -> Refusal:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(donors[1], "on_pull", silent)
    monkeypatch.setattr(states, "LEAST_PIECE_BYTES", SIZE // 4)
    joiner.chain.peers = ["d1"]
    await asyncio.wait_for(joiner.copy("d0"), within_s(10))
    assert asked.is_set() and joiner.has_state_of(donors[0])


async def test_a_holder_that_does_not_begin_is_given_up(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joiner, donors = await three(town)
    monkeypatch.setattr(states, "BEGIN_S", 0.3)

    async def silent(_sender: str, _request: bytes) -> Refusal:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(donors[0], "on_pull", silent)
    failed = await asyncio.wait_for(joiner.copy("d0"), within_s(10))
    assert isinstance(failed, ev.FetchFailed) and failed.failure.innocent
    assert isinstance(await joiner.copy("d1"), ev.StateFetched)


async def test_the_first_donor_dies_half_way_and_the_others_finish_it(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6, 20e6)
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 4, "a quarter")
    town.hub.kill("d0")
    assert isinstance(await fetching, ev.StateFetched) and joiner.has_state_of(donors[1])
    assert joiner.transfers.bytes_in == SIZE, "what had come was not asked for again"


async def test_a_holder_that_fails_is_replaced(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.bulk.states.MAX_HOLDERS", 2)
    joiner, _ = await three(town, 2e6, 20e6, 20e6)
    copying = joiner.transfers.copying
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: copying.from_others_bytes > 0, "another one helps")
    assert copying._rates.of("d2", -1.0) < 0
    town.hub.kill("d1")
    assert isinstance(await fetching, ev.StateFetched) and copying._rates.of("d2", -1.0) > 0


async def test_the_only_donor_dies_and_the_next_one_goes_on(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6)
    joiner.chain.peers = []
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 2, "a half")
    town.hub.kill("d0")
    assert isinstance(await fetching, ev.FetchFailed)
    assert isinstance(await joiner.copy("d1"), ev.StateFetched) and joiner.has_state_of(donors[1])
    assert joiner.transfers.bytes_in == SIZE


async def test_what_came_is_worth_nothing_once_the_spare_was_used_or_the_version_is_gone(town: Any) -> None:
    for what in ("used", "gone"):
        joiner, donors = await town.add(f"joiner {what}", None), [await town.add(f"d {what}", 1, 20e6)]
        fetching = asyncio.create_task(joiner.copy(donors[0].name))
        await until(lambda j=joiner: j.transfers.copying.bytes_in > SIZE // 2, "a half")
        town.hub.cut(joiner.name, donors[0].name)
        await fetching
        before, next_donor = (
            joiner.transfers.bytes_in,
            await town.add(f"e {what}", 1 if what == "used" else 2),
        )
        if what == "used":
            joiner.vault.lend_spare(0)
        await joiner.copy(next_donor.name)
        assert joiner.has_state_of(next_donor) and joiner.transfers.bytes_in == before + SIZE


async def test_a_liar_among_the_holders_costs_one_more_copy_and_nobody_is_blamed(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6)
    donors[1].vault._states[0].theta[7] += 1.0
    donors[1].vault._states[0].theta[-1] += 1.0
    donors[1].vault._states[0].momentum += 1.0
    assert isinstance(await joiner.copy("d0"), ev.StateFetched) and joiner.has_state_of(donors[0])
    assert donors[1].gave and joiner.transfers.bytes_in == 2 * SIZE, "all of it again, from the one named"
    gave = donors[1].gave
    await joiner.copy("d0", 1)
    assert joiner.has_state_of(donors[0], 1) and donors[1].gave == gave, "who may have lied helps nobody"


async def test_where_the_named_holder_lied_those_who_helped_are_not_left_out(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6)
    donors[0].vault._states[0].theta += 1.0
    donors[0].vault._states[0].momentum += 1.0
    failed = await joiner.copy("d0")
    assert isinstance(failed, ev.FetchFailed) and failed.detail == "digest-differs"
    before = donors[1].gave
    assert before
    await joiner.copy("d0", 1)
    assert donors[1].gave > before


async def test_all_copies_together_have_a_bound(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_STREAMS", 2)
    joiner, _ = await three(town, 20e6, 20e6, 20e6)
    found = joiner.transfers.copying
    taken: list[int] = []
    take = found._take_place
    monkeypatch.setattr(found, "_take_place", lambda peer: (take(peer), taken.append(found._streams.total())))
    assert isinstance(await joiner.copy("d0"), ev.StateFetched) and max(taken) == 2


@pytest.mark.parametrize("lie", ["content", "fragment", "more", "nothing", "offset"])
async def test_a_donor_that_lies_is_told_to_the_core(lie: str, town: Any) -> None:
    joiner, (donor,) = await town.add("joiner", None), [await town.add("d0")]
    if lie == "content":
        donor.vault._states[0].theta[7] += 1.0
    else:
        found = donor.compute._committed[0][0]
        shown = wire.StateHeader(
            donor.compute._committed[1][0] if lie == "fragment" else found, (), 8 if lie == "offset" else 0
        )
        size = {"more": SIZE + 1, "nothing": 0}.get(lie, 8)
        donor.answers = lambda pull: PullSource(wire.encode(shown), (bytes(size),), lambda: None)
    failed = await joiner.copy("d0")
    wanted = {
        "content": "digest-differs",
        "fragment": "wrong-fragment",
        "more": "oversized",
        "nothing": "garbage",
        "offset": "garbage",
    }
    assert isinstance(failed, ev.FetchFailed) and failed.detail == wanted[lie]


async def test_the_version_that_is_copied_stays_while_its_donor_moves_on(town: Any) -> None:
    joiner, (donor,) = await town.add("joiner", None), [await town.add("d0", 1, 20e6)]
    before = donor.vault._states[0].theta.clone()
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 4, "a quarter")
    donor.hold(2)
    donor.hold(3)
    answer = await fetching
    assert isinstance(answer, ev.StateFetched) and answer.version.header.number == 1
    assert torch.equal(joiner.vault._spares[0].theta, before)


async def test_a_joiner_of_many_fragments_asks_a_donor_for_a_few_at_a_time(
    town: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SHARE", 1)
    joiner, donor = await town.add("joiner", None), await town.add("d0", 1, 40e6)
    answers = await asyncio.gather(joiner.copy("d0", 0), joiner.copy("d0", 1))
    assert [type(answer) for answer in answers] == [ev.StateFetched, ev.StateFetched]
    assert all(joiner.has_state_of(donor, fragment) for fragment in (0, 1))


def test_a_loan_is_for_one_use() -> None:
    vault = Vault(LAYOUTS, OuterSection(), 24, "int8", "int8")
    loan = vault.lend_spare(0)
    loan.write(0, memoryview(bytes(range(256))))
    assert vault.lend_spare(0, loan) is loan, "it goes on"
    loan.write(4 * NUMEL - 2, memoryview(b"abcd"))
    assert bytes(loan.buffers[0][-2:]) + bytes(loan.buffers[1][:2]) == b"abcd"
    vault._free_spare(0)
    assert vault.lend_spare(0, loan) is not loan
    last = vault.lend_spare(0)
    last.buffers[1][-4:] = b"\0\0\xc0\x7f"
    with pytest.raises(RemoteError, match="non-finite"):
        vault.take_loan(0, 1, last)


async def test_members_copy_from_each_other_and_status_says_so(tmp_path: Path) -> None:
    async with Neighbourhood(
        tmp_path, log_versions=1, term_versions=1, max_base_age_versions=1, seats=("a", "b")
    ) as place:
        members = [await place.member("a", genesis=True), await place.member("b")]
        for _ in range(3):
            await place.round(*members)
        newcomer = await place.member("c")
        await until(lambda: newcomer.number() == members[0].number(), "the newcomer has it")
        bulk = newcomer.report.status(0.0).bulk
        given = sum(member.report.status(0.0).bulk["states_given_bytes"] for member in members)
        assert bulk["states_copied_bytes"] == given > 0


# Copying over libp2p: a newcomer, and three that hold what it wants, of which the first dies.

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.net
async def test_a_state_comes_from_all_and_is_finished_without_the_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PIECE_BYTES", SIZE // 16)
    peers: list[Peer] = []
    try:
        for number in range(4):
            path = tmp_path / f"{number}" / "identity.key"
            initial = peers[0].transport.addresses()[:1] if peers else []  # type: ignore[attr-defined]
            limits = Limits(upload=Allowance(500_000, asyncio.get_running_loop().time))
            transport = HivemindTransport(
                Identity.load_or_create(path),
                path,
                path.parent,
                LOOPBACK,
                initial_peers=initial,
                limits=limits,
            )
            peers.append(Peer(transport, 1 if peers else None))
            await transport.start(peers[-1])  # type: ignore[arg-type]
        joiner, first, *others = peers
        for peer in (first, *others):
            joiner.transport.learn(peer.name, peer.transport.addresses())  # type: ignore[attr-defined]
        joiner.chain.peers = [peer.name for peer in (first, *others)]
        copying = asyncio.create_task(joiner.copy(first.name))
        await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 4, "a quarter")
        await first.transport.close()  # type: ignore[attr-defined]
        answer = await asyncio.wait_for(copying, within_s(60))
        assert isinstance(answer, ev.StateFetched) and joiner.has_state_of(others[0])
        assert all(peer.gave for peer in (first, *others))
    finally:
        for peer in peers:
            await peer.transport.close()  # type: ignore[attr-defined]
            peer.compute.close()


# The side of a donor: pins, and states that wait for what is urgent.


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
