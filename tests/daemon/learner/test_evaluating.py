"""One member at a time measures the global parameters, and all hear of it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemon_kit import Neighbourhood, until

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.course import MOST, Measurements, Turns, evaluate_regularly
from p2pdiloco_lab.bulk_world.bulk_plan import in_virtual_time

PEERS = ["a", "b", "c", "d"]


def swarm() -> dict[str, Turns]:
    return {peer: Turns("run", peer, interval_s=10.0, first_s=5.0, term_versions=8) for peer in PEERS}


def due(turns: dict[str, Turns], now: float, number: int = 0, learners: list[str] = PEERS) -> list[str]:
    return [peer for peer in learners if now >= turns[peer].due_s(now, number, learners)]


def test_one_at_a_time_and_another_when_that_one_is_gone_or_mute() -> None:
    turns = swarm()
    assert due(turns, 0.0) == [] and due(turns, 4.9) == []
    (first,) = due(turns, 5.1)
    turns[first].ended(5.1, None)
    assert due(turns, 9.9) == []
    # Nothing came of it: the next in the order is more patient by half an interval, and does.
    (second,) = due(turns, 10.1)
    heldout = wire.HeldoutLoss(12, 3.0, 64)
    turns[second].measured(heldout, 10.1)
    for peer in PEERS:
        if peer != second:
            turns[peer].heard(second, heldout, 11.0)
    assert all(t.newest == heldout and t.by == second for t in turns.values())
    assert due(turns, 20.0) == []
    assert due(turns, 21.1) == [first]
    # Gone: the others close up.
    assert due(turns, 21.1, learners=[p for p in PEERS if p != first]) == [second]
    # Nobody believes that an older state is news.
    turns[first].heard("x", wire.HeldoutLoss(11, 0.1, 64), 22.0)
    assert turns[first].newest == heldout


def test_measuring_takes_a_small_share_of_a_learner_s_time_however_long_it_takes() -> None:
    """With an interval as long as a measurement, or far shorter, training goes on."""
    spans: list[tuple[float, float]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def evaluate() -> float:
            began_s, took_s = loop.time(), 5.0 if len(spans) < 3 else 0.1
            await asyncio.sleep(took_s)
            spans.append((began_s, loop.time()))
            return took_s

        core: Any = SimpleNamespace(
            shared=SimpleNamespace(expected_learners=lambda _now: []),
            fragments=[SimpleNamespace(chain=SimpleNamespace(head=SimpleNamespace(number=0)))],
        )
        learner: Any = SimpleNamespace(ready=asyncio.Event(), evaluate=evaluate)
        learner.ready.set()
        vault: Any = SimpleNamespace(layouts=())
        measurements = Measurements(Turns("run", "a", 0.05, 0.0, 8), vault, 8, alone=True)
        work = asyncio.create_task(
            evaluate_regularly(measurements, learner.ready, learner.evaluate, core, asyncio.Event())
        )
        await asyncio.sleep(320.0)
        work.cancel()

    in_virtual_time(run())
    assert len(spans) >= 6
    for (began_s, ended_s), (next_s, _) in pairwise(spans):
        assert ended_s - began_s <= MOST * (next_s - began_s) + 1e-9


def test_turns_go_round() -> None:
    def first(number: int) -> str:
        turns = swarm()
        assert due(turns, 0.0, number) == []
        return due(turns, 5.1, number)[0]

    assert {first(0)} == {first(number) for number in range(8)}, "for a term of versions"
    assert {first(8 * term) for term in range(30)} == set(PEERS)


def test_who_waits_for_its_turn_looks_when_it_may_have_come_and_at_every_version() -> None:
    looks: list[float] = []
    asked: list[float] = []
    strangers = [f"stranger {i}" for i in range(200)]

    async def run() -> None:
        loop, committed = asyncio.get_running_loop(), asyncio.Event()
        head = SimpleNamespace(number=0)

        def learners(now: float) -> list[str]:
            looks.append(round(now, 6))
            return [*PEERS, *strangers]  # most of whom would be asked before us

        core: Any = SimpleNamespace(
            shared=SimpleNamespace(expected_learners=learners),
            fragments=[SimpleNamespace(chain=SimpleNamespace(head=head))],
        )

        async def evaluate() -> None:
            asked.append(round(loop.time(), 6))

        learner: Any = SimpleNamespace(ready=asyncio.Event(), evaluate=evaluate)
        learner.ready.set()
        vault: Any = SimpleNamespace(layouts=())
        last = next(peer for peer in PEERS if Turns("run", peer, 10.0, 0.0, 1).due_s(0.0, 0, PEERS) == 15.0)
        turns = Turns("run", last, 10.0, 0.0, 1)
        measurements = Measurements(turns, vault, 8, False, PEERS.__contains__)
        work = asyncio.create_task(
            evaluate_regularly(measurements, learner.ready, learner.evaluate, core, committed)
        )
        await asyncio.sleep(2.0)
        # With that version it is the first.
        head.number = next(n for n in range(99) if turns.due_s(loop.time(), n, PEERS) == 0.0)
        committed.set()
        await asyncio.sleep(7.0)
        work.cancel()

    in_virtual_time(run())
    assert asked == [2.0]
    assert looks == [0.0, 2.0, 2.0]


async def test_members_share_the_work_and_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.member.FIRST_EVALUATION_S", 60.0)
    monkeypatch.setattr("p2pdiloco.daemon.network.discovery.LOOK_S", 0.05)
    async with Neighbourhood(tmp_path) as swarm:
        members = [await swarm.member(n, genesis=n == "a", eval_every_s=60.0) for n in ("a", "b", "c")]
        now = asyncio.get_running_loop().time
        await until(
            lambda: all(len(m.core.shared.expected_learners(now())) == 3 for m in members), "all here"
        )
        await until(lambda: all(m.measurements.turns._began_s is not None for m in members), "all to wait")
        for member in members:  # now it is time, for all of them
            member.measurements.turns._known_s -= 60.0
            member.committing.done.set()
        await until(lambda: all(m.report.snapshot(0.0).heldout_loss == 1.5 for m in members), "all know it")
        assert sum(len(m.records("evaluation")) for m in members) == 1
        (who,) = [m for m in members if m.records("evaluation")]
        assert {m.report.snapshot(0.0).heldout_by for m in members} == {who.core.shared.me}
        assert who.report.snapshot(who.measurements.at_s + 3.0).heldout_age_s == 3.0
        # A record cannot take the place of all results to come.
        member, before = members[0], members[0].measurements.newest
        member.measurements.heard("liar", wire.HeldoutLoss(1 << 40, 0.0, 64))
        assert member.measurements.newest == before
        member.measurements.heard("peer", wire.HeldoutLoss(member.measurements.newest.merges + 1, 1.4, 64))
        assert member.measurements.newest.loss == 1.4
        monkeypatch.setattr("p2pdiloco.daemon.member.FIRST_EVALUATION_S", 0.0)
        alone = await swarm.member("d", evaluate="each", eval_every_s=60.0)
        await until(lambda: alone.records("evaluation"), "one that measures for itself")
