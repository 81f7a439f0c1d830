"""Lies in runs of several groups: of a group's syncer, and of the root. Each is found by those whom it harms,
and nobody else is blamed."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from sim_kit import Commits, calm_plan

from p2pdiloco.core import audits
from p2pdiloco.core.api.events import Audit, Effect, Record
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import FALSE_FROM_S, LieKind, Perjurer
from p2pdiloco_lab.simulation.sim_world import World

UNTIL_S = 60.0
GROUP_SYNCER, ROOT = "n3", "n2"
"""Members that hold these offices in this world while false merges are made."""


class Seen:
    """What happened in a world of three groups in which some lie."""

    def __init__(self, group_syncers: tuple[str, ...] = (), roots: tuple[str, ...] = ()) -> None:
        plan = calm_plan(7, until_s=UNTIL_S, seed=8, fragments=1)
        config = msgspec.structs.replace(plan.config, audited=True, group_size=3)
        world = World(dataclasses.replace(plan, config=config))
        liars = {*group_syncers, *roots}
        world.perjurers = {liar: Perjurer(world, liar, LieKind.MERGES) for liar in liars}
        for liar in liars.difference(roots):
            world.clock.at(FALSE_FROM_S, world.false_syncers.discard, liar)
        for liar in liars.difference(group_syncers):
            world.clock.at(FALSE_FROM_S, world.false_groups.discard, liar)
        self.made: list[tuple[float, str, str]] = []
        self.audited: list[str] = []
        """Groups whose merges were made again."""
        self.found: set[tuple[str, str]] = set()
        """Who was found to have made a false merge, and by whom."""
        commits = Commits(world)
        commits.act = self._act
        result = world.run()
        assert not result.violation and not result.stuck, result.stuck or result.detail
        self.excluded = {host.core.shared.excluded.peers for host in world.core_hosts()}

    def _act(self, host: Host, effect: Effect) -> None:
        if isinstance(effect, Audit):
            self.audited.append("all" if effect.part is None else effect.part.entry.group)
        if isinstance(effect, Record):
            fields = dict(effect.fields)
            if effect.kind in ("publish", "partial"):
                self.made.append((host.now, effect.kind, host.peer))
            if effect.kind == "audit" and fields.get("outcome") == "different":
                self.found.add((str(fields["peer"]), host.peer))

    def merges(self, kind: str, peer: str) -> list[float]:
        """When a peer made merges of that kind."""
        return [at_s for at_s, what, who in self.made if (what, who) == (kind, peer)]


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


def test_a_false_partial_is_found_by_its_group_and_the_root_is_not_blamed() -> None:
    seen = Seen(group_syncers=(GROUP_SYNCER,))
    lied = seen.merges("partial", GROUP_SYNCER)
    assert {liar for liar, _ in seen.found} == {GROUP_SYNCER}
    finders = {finder for _, finder in seen.found}
    assert finders >= {"n0", "n1", "n2", "n4", "n5", "n6"}, "its group accused it"
    assert seen.excluded == {(GROUP_SYNCER,)}
    assert max(lied) < min(lied) + 15.0, "it holds no office any more"
    assert max(at_s for at_s, kind, _ in seen.made if kind == "partial") > max(lied) + 15.0, "others go on"


def test_a_false_sum_is_found_by_all_and_no_group_is_blamed() -> None:
    seen = Seen(roots=(ROOT,))
    lied = seen.merges("publish", ROOT)
    assert {liar for liar, _ in seen.found} == {ROOT}
    assert seen.excluded == {(ROOT,)}
    assert max(lied) < min(lied) + 15.0
    assert any("/" in group for group in seen.audited), "the own groups' merges come first"


def test_honest_groups_are_never_found_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 1.0)
    seen = Seen()
    assert not seen.found
    assert "all" in seen.audited and any("/" in group for group in seen.audited), "both were audited"


def test_who_draws_finds_what_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SUSPICIOUS", -1.0)
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    found = Seen(group_syncers=(GROUP_SYNCER,)).found | Seen(roots=(ROOT,)).found
    assert {liar for liar, _ in found} == {GROUP_SYNCER, ROOT}
