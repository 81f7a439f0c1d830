"""What a peer is given that is no member: bounded, whatever it asks for, and members have no bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import Neighbourhood, Rogue, until

from p2pdiloco.adapters import streams
from p2pdiloco.adapters.streams import PutOff
from p2pdiloco.daemon import budgets, wire
from p2pdiloco.daemon.budgets import LISTING_BYTES, MAX_PEERS, Budget, BulkBudgets, Enough
from p2pdiloco.daemon.owner.pauses import OthersWork
from p2pdiloco.daemon.owner.wishes import KeptWishes, save_wishes
from p2pdiloco.daemon.run_files.shared_files import Giving
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PullSource


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def has_enough(budget: Budget, peer: str) -> bool:
    try:
        budget.check(peer)
    except PutOff as error:
        assert error.reason == "busy" and Enough(error.counted)
        return True
    return False


def test_a_budget_fills_again_with_time_and_is_each_peers_own() -> None:
    clock = Clock()
    budget = Budget(Enough.LISTINGS, 10.0, 100.0, clock)
    budget.take("greedy", 11.0)
    assert has_enough(budget, "greedy") and not has_enough(budget, "other")
    clock.now += 9.0
    assert has_enough(budget, "greedy")
    clock.now += 2.0
    assert not has_enough(budget, "greedy")
    for i in range(2 * MAX_PEERS):
        budget.take(f"peer {i}", 1.0)
    assert len(budget._used) == MAX_PEERS


def test_a_peer_has_a_few_copies_of_all_states_and_of_each_update() -> None:
    clock = Clock()
    bulk, whole = BulkBudgets(clock), 100_000_000
    for _ in range(round(budgets.COPIES)):
        for _ in range(10):
            bulk.check_state("newcomer")
            bulk.state("newcomer", whole // 10, whole)
    with pytest.raises(PutOff):
        bulk.check_state("newcomer")
    clock.now += budgets.COPIES_S / 10
    bulk.check_state("newcomer")
    for _ in range(budgets.UPDATE_COPIES):
        bulk.check_update("newcomer", 0, 7, 1000)
        bulk.update("newcomer", 0, 7, 1000)
    with pytest.raises(PutOff):
        bulk.check_update("newcomer", 0, 7, 1000)
    bulk.check_update("newcomer", 0, 8, 1000)
    bulk.check_update("other", 0, 7, 1000)


def test_files_go_to_a_stranger_a_few_times_and_to_members_always() -> None:
    clock, big = Clock(), bytes(2 * budgets.SMALL_BYTES)
    giving = Giving(clock)

    def give(limited: bool) -> None:
        source = giving.serve("peer", lambda: (b"", big), limited)
        assert isinstance(source, PullSource)
        source.release()

    for _ in range(round(budgets.COPIES)):
        give(limited=True)
    with pytest.raises(PutOff):
        give(limited=True)
    give(limited=False)
    clock.now += budgets.COPIES_S
    give(limited=True)


async def refused_after(rogue: Rogue, peer: str, pull: Any, most: int) -> int:
    """Pull again and again; how many times something was given."""
    for given in range(most):
        try:
            answer = await rogue.transport.pull(peer, wire.encode(pull), 1 << 24, 5.0)
        except RemoteError as error:
            assert error.reason == "busy"
            return given
        assert isinstance(answer, tuple)
    raise AssertionError("nothing was refused")


async def test_a_stranger_is_given_so_much_and_members_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "SMALL_BYTES", 1)
    monkeypatch.setattr(streams, "PEER_AT_ONCE", 1 << 20)  # it is bytes that are counted here
    monkeypatch.setattr(streams, "OTHERS_AT_ONCE", 1 << 20)
    async with Neighbourhood(tmp_path, seats=("one", "two")) as around:
        one = await around.member("one", genesis=True)
        await around.round(one)
        rogue = await around.rogue()
        me, run, transfers = one.core.shared.me, around.run.id, one.transfers
        manifest = len(one.peer.door._runs[run][1])
        given = await refused_after(rogue, me, wire.PullManifest(run), 2 * LISTING_BYTES // manifest)
        assert given * manifest <= 1.5 * LISTING_BYTES, "and what came again meanwhile"
        whole = sum(8 * layout.numel for layout in around.run.layouts)
        states = await refused_after(rogue, me, wire.PullState(run, 0, 1), 1000)
        assert states * 8 * around.run.layouts[0].numel <= budgets.COPIES * whole + whole
        updates = await refused_after(rogue, me, wire.PullUpdate(run, 0, 1, insist=True), 1000)
        assert updates == budgets.UPDATE_COPIES
        counted = {Enough.LISTINGS.value: 1, Enough.STATES.value: 1, Enough.UPDATES.value: 1}
        await until(lambda: one.report.snapshot(0.0).refusals == counted, "all refusals to be counted")
        assert transfers.donating.pins <= 4
        two = await around.member("two")  # a newcomer, of whom as much is asked as ever
        await around.round(one, two)
        assert transfers.is_member(two.core.shared.me) and not transfers.is_member(rogue.id)
        assert one.peer.door.is_stranger(rogue.id), "in an open run everybody is, until it has worked"


# Guard of event loops: it finds what it is for.


def work_of(name: str, folder: Path) -> Callable[[], object]:
    return partial(save_wishes, folder, KeptWishes()) if name == "fsync" else OthersWork().seconds


@pytest.mark.parametrize("name", ["fsync", "cpu_times"])
async def test_a_wait_is_found_in_the_thread_of_a_loop_alone(
    name: str, tmp_path: Path, waits_of_loops: list[str]
) -> None:
    await asyncio.to_thread(work_of(name, tmp_path))
    assert not waits_of_loops
    work_of(name, tmp_path)()  # a test's own: no coroutine of the package is between
    assert not waits_of_loops
    asyncio.get_running_loop().call_soon(work_of(name, tmp_path))
    await asyncio.sleep(0)
    assert waits_of_loops[0].startswith(f"{name} in the thread of the event loop:")
    waits_of_loops.clear()
