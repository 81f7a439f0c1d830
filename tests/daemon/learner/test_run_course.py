"""The course of a run as a node follows it: progress, the end, what an owner changed."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from daemon_kit import Neighbourhood, until

from p2pdiloco.config.manifest import EndSection
from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment, Going
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.course import MOST, SETTLE_S, Measurements, RunCourse, Turns, evaluate_regularly
from p2pdiloco.daemon.display.snapshot import owner_text, progress_text
from p2pdiloco.learner import channel as ch
from p2pdiloco_lab.bulk_world.bulk_plan import in_virtual_time

END = MICRO.inner.schedule_tokens


class World:
    """A node's chain with two fragments, and what it is told of its owner."""

    def __init__(self, learners="stop"):
        self.heads = [SimpleNamespace(tokens=0, number=0) for _ in range(2)]
        roster = SimpleNamespace(roster=SimpleNamespace(seats=("one",)))
        chains = [SimpleNamespace(head=head, absent=()) for head in self.heads]
        fragments = [SimpleNamespace(chain=chain, context=roster) for chain in chains]
        self.amendments = ()
        self.told, self.said = [], []
        manifest = msgspec.structs.replace(MICRO, end=EndSection(learners=learners))
        self.course = RunCourse(
            manifest,
            SimpleNamespace(fragments=fragments),
            lambda: self.amendments,
            self.told.append,
            lambda words, tokens: self.said.append(words),
        )

    def at(self, tokens, now=0.0):
        """Merge that much, and look."""
        for head in self.heads:
            head.tokens = tokens
            head.number += 1
        self.course.look(now)
        return self.course.rests


def test_a_run_ends_with_its_schedule():
    world = World()
    assert (world.at(END - 1), world.at(END)) == ("no", "ended")
    assert world.told == [ch.FollowCourse((), "ended")]
    assert "the run has ended" in world.said[0]
    assert progress_text(world.course.row(0.0)) == "ended at 100.0 % of 154k tokens"
    assert world.at(END - 1) == "no"  # another chain won, which is not as far
    assert world.told[-1] == ch.FollowCourse((), "no")
    assert world.said[1] == "the run goes on"


def test_a_run_is_as_far_as_its_fragments_are_on_the_mean():
    world = World()
    world.at(END)
    world.heads[1].tokens = END - 2
    world.course.look(0.0)
    assert world.course.rests == "no"


def test_a_run_goes_on_where_its_manifest_says_so():
    world = World("go-on")
    assert world.at(2 * END) == "no"
    assert len(world.said) == 1
    assert "at the floor" in world.said[0]
    assert world.at(3 * END) == "no"
    assert len(world.said) == 1
    assert progress_text(world.course.row(0.0)) == "300.0 % of 154k tokens, past the schedule"


def test_it_is_said_when_the_end_is_reached():
    world = World()
    for second in range(0, 101, 10):
        world.at(second * END // 1000, float(second))
    row = world.course.row(100.0)
    assert row.left_s == pytest.approx(900, rel=0.01)
    assert progress_text(row) == "10.0 % of 154k tokens, 15 min left"
    assert World().course.row(0.0).left_s is None  # nothing is known yet
    assert progress_text(world.course.row(0.0)) == "10.0 % of 154k tokens"


@pytest.mark.parametrize("rests", [True, False])
def test_the_pace_is_that_of_the_present_chain_while_inner_steps_are_made(rests):
    world = World()
    for second in range(0, 101, 10):
        world.at((100 + second) * END // 1000, float(second))
    if rests:
        world.amendments = (Amendment(1, 0, going=Going.PAUSE),)
        world.at(200 * END // 1000, 110.0)
        world.amendments = (Amendment(2, 0),)
    merged = 200 if rests else 0  # or another chain won
    for second in range(0, 101, 10):
        world.at((merged + second) * END // 1000, 300.0 + second)
    assert world.course.row(400.0).left_s == pytest.approx(900 - merged, rel=0.01)


def test_an_amendment_holds_from_its_tokens_on():
    world = World()
    pause = Amendment(1, 500, going=Going.PAUSE, message="a word\x1b[2J")
    world.at(0)
    world.amendments = (pause,)
    assert (world.at(499), world.at(500)) == ("no", "paused")
    assert "message of the run's owner: a word" in world.said[0]
    assert "\x1b" not in world.said[0]
    arrived, held = (words for words in world.said if "amendment 1 of the run's owner" in words)
    assert arrived == held and "holds from 500 tokens on" in held  # once when it comes, once when it holds
    assert [course.rests for course in world.told] == ["no", "paused"]
    assert world.told[0].amendments == (pause,)  # learners know it before it holds
    world.amendments = (Amendment(2, 500, schedule_tokens=3 * END, rate_factor=0.5),)
    assert world.at(500) == "no"
    assert world.at(2 * END) == "no"
    assert world.at(3 * END) == "ended"
    assert (
        owner_text(world.course.row(0.0))
        == "amendment 2 holds: a schedule of 461k tokens, learning rate times 0.5"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"going": Going.END, "rate_factor": 0.5}, "the run ends; learning rate times 0.5"),
        (
            {"going": Going.PAUSE},
            "the run pauses, learning rate times 1; learning rate times 0.5 until then",
        ),
        (
            {"rate_factor": 0.25, "schedule_tokens": 5 * END},
            "a schedule of 768k tokens, learning rate times 0.25; learning rate times 0.5 until then",
        ),
    ],
)
def test_what_an_amendment_does_is_said_before_it_holds(change, words):
    world = World()
    world.amendments = (Amendment(1, 0, rate_factor=0.5), Amendment(2, 700, **change))
    world.at(500)
    assert owner_text(world.course.row(0.0)) == f"amendment 2 will hold from 700 tokens on: {words}"


def test_an_owner_ends_a_run_that_would_go_on_and_it_can_be_taken_back():
    world = World("go-on")
    world.amendments = (Amendment(1, 100, going=Going.END),)
    assert (world.at(99), world.at(100)) == ("no", "ended")
    world.amendments = (Amendment(2, 100),)
    world.course.look(1.0)
    assert world.course.rests == "no"


def test_a_run_that_rests_settles_once_when_no_version_comes_any_more():
    world = World()
    world.at(END - 1, 0.0)
    assert not world.course.settles(100.0)
    world.at(END, 100.0)
    world.at(END, 103.0)
    assert not world.course.settles(103.0 + SETTLE_S - 0.1)
    world.course.look(103.0 + SETTLE_S)
    assert world.course.settles(103.0 + SETTLE_S)
    assert not world.course.settles(1000.0)
    world.at(END + 1, 2000.0)  # somebody came back with work
    assert not world.course.settles(2000.0)
    assert world.course.settles(2000.0 + SETTLE_S)


def test_what_learners_hand_out_when_a_run_begins_to_rest_is_waited_for():
    world = World()
    world.at(100, 0.0)
    world.course.look(100.0)  # no version came for long
    world.amendments = (Amendment(1, 0, going=Going.PAUSE),)
    world.course.look(100.5)
    assert world.course.rests == "paused" and not world.course.settles(100.5)
    assert world.course.settles(100.0 + SETTLE_S)


# One member at a time measures the global parameters, and all hear of it.

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
    async with Neighbourhood(tmp_path, seats=("a", "b", "c")) as swarm:
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
        other, merges = members[1].core.shared.me, member.measurements.newest.merges
        member.measurements.heard(other, wire.HeldoutLoss(merges + 1, 1.4, 64))
        assert member.measurements.newest.loss == 1.4
        monkeypatch.setattr("p2pdiloco.daemon.member.FIRST_EVALUATION_S", 0.0)
        alone = await swarm.member("d", evaluate="each", eval_every_s=60.0)
        await until(lambda: alone.records("evaluation"), "one that measures for itself")
