"""Syncers whose updates are no merge of what they name, or make another state than they say, and false
accusers: found by all, and excluded. In old runs also states of which nobody gives the update."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from sim_kit import Commits, calm_plan

from p2pdiloco.core import audits
from p2pdiloco.core.api.events import Audit, CommitVersion, Effect, Record
from p2pdiloco.core.chain import marks_of
from p2pdiloco.core.fork_choice import ForkChoice
from p2pdiloco_lab.simulation.lineage import genesis_state
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, draw_plan
from p2pdiloco_lab.simulation.sim_disk import Past, old_liars
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import FALSE_FROM_S, LieKind, Perjurer
from p2pdiloco_lab.simulation.sim_world import World

UNTIL_S = 60.0
LIES_FROM_S = FALSE_FROM_S
LIAR = "n1"
LATE, LATE_S = "n4", 40.0
"""Who joins when all is over: it cannot make the merge again."""


def audited_plan(nodes: int = 5) -> WorldPlan:
    """A calm swarm in which merges can be made again."""
    plan = calm_plan(nodes, until_s=UNTIL_S, seed=8)
    return dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, audited=True, group_size=64))


class Seen:
    """What happened in a world with a member that lies, or without."""

    def __init__(self, plan: WorldPlan, kind: LieKind | None) -> None:
        world = World(plan)
        if kind is not None:
            world.perjurers = {LIAR: Perjurer(world, LIAR, kind)}
        self.made: list[tuple[float, str]] = []
        self.taken: list[str] = []
        """Who took a version with a false state."""
        self.audits = self.false = 0
        self.names: dict[bytes, str] = {}
        """Syncers of all versions."""
        self.repairs: dict[bytes, set[bytes]] = {}
        """Versions that repair each one."""
        commits = Commits(world)
        commits.act = self._act
        result = world.run()
        assert not result.violation and not result.stuck, result.stuck or result.detail
        self.excluded = {
            host.peer: host.core.shared.excluded.peers for host in world.core_hosts() if host.peer != LIAR
        }
        self.versions = len({(f, n) for _, _, f, n in commits.seen})

    def _act(self, host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            header = effect.version.header
            self.names[header.digest()] = header.syncer
            if header.syncer == LIAR and LIAR in host.world.false_states and host.peer != LIAR:
                self.taken.append(host.peer)
            if header.repairs is not None and host.peer != LIAR:  # it goes on alone, and finds itself false
                self.repairs.setdefault(header.repairs, set()).add(header.digest())
        self.audits += isinstance(effect, Audit)
        if isinstance(effect, Record) and effect.kind == "publish":
            self.made.append((host.now, host.peer))
        if isinstance(effect, Record) and effect.kind == "audit":
            self.false += dict(effect.fields).get("outcome") == "different"


def test_a_syncer_of_false_merges_is_found_by_those_whom_they_harm_and_excluded_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)
    seen = Seen(audited_plan(), LieKind.MERGES)
    lied = [at_s for at_s, peer in seen.made if peer == LIAR and at_s > LIES_FROM_S]
    assert lied and seen.false >= 2, "more than one makes the merge again"
    assert max(lied) < min(lied) + 5.0
    assert [peer for at_s, peer in seen.made if at_s > max(lied) + 15.0], "others go on"
    assert set(seen.excluded.values()) == {(LIAR,)}
    assert seen.repairs, "what it made is taken back"
    for repaired, by in seen.repairs.items():
        assert seen.names[repaired] == LIAR and len(by) == 1 and seen.names[by.pop()] != LIAR


@pytest.mark.parametrize("kind", [LieKind.MERGES, LieKind.STATES, LieKind.ACCUSATIONS])
def test_who_comes_when_all_is_over_hears_of_it(kind: LieKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)
    plan = audited_plan()
    joins = tuple(
        LATE_S if spec.peer == LATE else at_s for spec, at_s in zip(plan.nodes, plan.joins_s, strict=True)
    )
    seen = Seen(dataclasses.replace(plan, joins_s=joins), kind)
    assert len(seen.excluded) == 4 and set(seen.excluded.values()) == {(LIAR,)}


def test_nobody_takes_a_false_state_and_its_syncer_is_excluded_by_all() -> None:
    seen = Seen(audited_plan(), LieKind.STATES)
    lied = [at_s for at_s, peer in seen.made if peer == LIAR and at_s > LIES_FROM_S]
    assert lied and not seen.taken
    assert [peer for at_s, peer in seen.made if peer != LIAR and at_s > min(lied) + 15.0], "others go on"
    assert set(seen.excluded.values()) == {(LIAR,)} and not seen.repairs


def test_a_false_accuser_is_excluded_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)
    seen = Seen(audited_plan(), LieKind.ACCUSATIONS)
    assert set(seen.excluded.values()) == {(LIAR,)} and not seen.false and seen.audits >= 4


def test_honest_syncers_are_never_found_false_and_audits_are_rare() -> None:
    seen = Seen(audited_plan(), None)
    assert seen.false == 0 and seen.audits < 0.2 * seen.versions and not seen.repairs


def test_who_draws_finds_what_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SUSPICIOUS", -1.0)
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    assert Seen(audited_plan(), LieKind.MERGES).false >= 2


# --- states of which nobody gives the update ----------------------------------------------------------


def test_liars_are_fewer_than_a_third_of_the_seats_that_have_worked_in_every_fragment() -> None:
    lying_worlds = 0
    for seed in range(200):
        plan = draw_plan(seed, "old")
        past = Past(plan, tuple(genesis_state(f) for f in range(plan.config.fragments)))
        peers, liars = {spec.peer for spec in plan.nodes}, {*old_liars(plan)}
        lying_worlds += bool(liars)
        for checkpoint in past.saved:
            worked = {mark.learner for mark in checkpoint.watermarks if mark.merges}
            assert liars <= worked == {*past.members} <= peers <= marks_of(checkpoint.watermarks).seats
            assert 3 * len(liars) < len(worked)
    assert 100 < lying_worlds < 200


def old_world(liars: int) -> World:
    """A calm swarm of seven, whose run is old."""
    plan = calm_plan(7, until_s=40.0, quorum=2)
    mix = dataclasses.replace(plan.mix, old=True, perjurers=liars)
    return World(dataclasses.replace(plan, mix=mix))


def test_an_old_run_goes_on_from_what_was_saved() -> None:
    world = old_world(liars=0)
    assert world.past is not None
    saved = [checkpoint.version.header.number for checkpoint in world.past.saved]
    first: dict[int, int] = {}

    def look(host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            header = effect.version.header
            first.setdefault(header.fragment, header.number)

    world.on_effect = look
    result = world.run()
    assert result.ok, result.detail or result.stuck
    assert [first[f] for f in range(len(saved))] == [number + 1 for number in saved]
    assert all(number >= 80 for number in saved)


@pytest.mark.parametrize("supported", [True, False])
def test_only_without_support_a_state_that_a_liar_alone_stands_on_is_copied(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supported:
        monkeypatch.setattr(ForkChoice, "may_copy", lambda self, version, giver, now: True)
    world = old_world(liars=2)
    result = world.run()
    assert result.violation == ("" if supported else "backed"), result.detail
    assert world.backing.excused == 0
