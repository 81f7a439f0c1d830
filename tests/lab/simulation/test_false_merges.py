"""Syncers whose updates are no merge of what they name: found, and not elected again by whoever found it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from sim_kit import Commits, calm_plan

from p2pdiloco.core.api.effects import Audit, Effect, Record
from p2pdiloco.core.audits import auditor
from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.world.plan import WorldPlan
from p2pdiloco.lab.simulation.world.world import World

UNTIL_S = 60.0
LIES_FROM_S = 20.0
LIAR = "n1"


def audited_plan(nodes: int = 5) -> WorldPlan:
    """A calm swarm in which merges can be made again."""
    plan = calm_plan(nodes, until_s=UNTIL_S, seed=8)
    return dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, audited=True, group_size=64))


class Seen:
    """What happened in a world with a syncer that lies from a moment on, or without."""

    def __init__(self, plan: WorldPlan, lies: bool) -> None:
        world = World(plan)
        if lies:
            world.clock.at(LIES_FROM_S, world.false_syncers.add, LIAR)
        self.made: list[tuple[float, str]] = []
        self.audits = self.false = 0
        commits = Commits(world)
        commits.act = self._act
        result = world.run()
        assert not result.violation and not result.stuck, result.stuck or result.detail
        self.versions = len({(f, n) for _, _, f, n in commits.seen})

    def _act(self, host: Host, effect: Effect) -> None:
        self.audits += isinstance(effect, Audit)
        if isinstance(effect, Record) and effect.kind == "publish":
            self.made.append((host.now, host.peer))
        if isinstance(effect, Record) and effect.kind == "audit":
            self.false += dict(effect.fields).get("outcome") == "different"


def test_a_syncer_of_false_merges_is_found_by_those_whom_they_harm_and_holds_no_office_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auditor, "DRAWN", 0.0)
    seen = Seen(audited_plan(), lies=True)
    lied = [at_s for at_s, peer in seen.made if peer == LIAR and at_s > LIES_FROM_S]
    assert lied and seen.false >= 2, "a majority of five, with the liar's own vote, counts on it no more"
    assert max(lied) < min(lied) + 15.0
    assert [peer for at_s, peer in seen.made if at_s > max(lied) + 15.0], "others go on"


def test_honest_syncers_are_never_found_false_and_audits_are_rare() -> None:
    seen = Seen(audited_plan(), lies=False)
    assert seen.false == 0 and seen.audits < 0.2 * seen.versions


def test_who_draws_finds_what_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "SUSPICIOUS", -1.0)
    monkeypatch.setattr(auditor, "DRAWN", 100.0)
    assert Seen(audited_plan(), lies=True).false >= 2
