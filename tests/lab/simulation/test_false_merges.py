"""Members whose lies can be proved, or found by everybody: seen through, whichever they tell, and excluded by
all; nobody else is blamed, in a group or above it. In old runs also states of which nobody gives the
update."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from sim_kit import Commits, calm_plan, played_well

from p2pdiloco.core import audits
from p2pdiloco.core.api.events import Audit, CommitVersion, Effect, Record
from p2pdiloco.core.api.evidence import Accusation, Evidence, FalseVersion, Refutation, short_of
from p2pdiloco.core.chain import marks_of
from p2pdiloco.core.fork_choice import ForkChoice
from p2pdiloco_lab.simulation.lineage import Clock, genesis_state
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, draw_plan, genesis_version
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_disk import Past, old_liars
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import FALSE_FROM_S, PROVABLE, LieKind, Perjurer
from p2pdiloco_lab.simulation.sim_rules import WITHIN_S, Exclusion
from p2pdiloco_lab.simulation.sim_world import World

UNTIL_S = 60.0
LIAR = "n1"
LATE, LATE_S = "n4", 40.0
"""Who joins when all is over: it cannot make the merge again."""
GROUP_SYNCER, ROOT = "n3", "n2"
"""Members that hold these offices in the world of groups while false merges are made."""


def audited_plan(nodes: int = 5, group_size: int = 64, fragments: int = 2) -> WorldPlan:
    """A calm swarm in which merges can be made again."""
    plan = calm_plan(nodes, until_s=UNTIL_S, seed=8, fragments=fragments)
    config = msgspec.structs.replace(plan.config, audited=True, group_size=group_size)
    return dataclasses.replace(plan, config=config)


class Seen:
    """What happened in a world in which some lie, or nobody does."""

    def __init__(
        self, plan: WorldPlan, liars: dict[str, LieKind], of_groups: bool = True, of_roots: bool = True
    ) -> None:
        """`of_groups`, `of_roots`: which of their merges are false ones."""
        world = World(plan)
        self.liars = world.perjurers = {peer: Perjurer(world, peer, kind) for peer, kind in liars.items()}
        for liar in liars:
            if not of_groups:
                world.clock.at(FALSE_FROM_S, world.false_groups.discard, liar)
            if not of_roots:
                world.clock.at(FALSE_FROM_S, world.false_syncers.discard, liar)
        self.made: list[tuple[float, str, str]] = []
        self.taken: list[str] = []
        """Who took a version with a false state."""
        self.audited: list[str] = []
        """Groups whose merges were made again."""
        self.found: list[tuple[str, str]] = []
        """Peers that were found to have made a false merge, and by whom."""
        self.names: dict[bytes, str] = {}
        """Syncers of all versions."""
        self.repairs: dict[bytes, set[bytes]] = {}
        """Versions that repair each one."""
        commits = Commits(world, self._act)
        result = world.run()
        assert not result.violation and not result.stuck, result.stuck or result.detail
        self.excluded = {host.peer: host.core.shared.excluded.peers for host in world.core_hosts()}
        self.versions = len({(f, n) for _, _, f, n in commits.seen})

    def _act(self, host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            header = effect.version.header
            self.names[header.digest()] = header.syncer
            if header.syncer in host.world.false_states and host.peer not in self.liars:
                self.taken.append(host.peer)
            # A liar goes on alone, and finds itself false.
            if header.repairs is not None and host.peer not in self.liars:
                self.repairs.setdefault(header.repairs, set()).add(header.digest())
        if isinstance(effect, Audit):
            self.audited.append("all" if effect.part is None else effect.part.entry.group)
        if isinstance(effect, Record):
            fields = dict(effect.fields)
            if effect.kind in ("publish", "partial"):
                self.made.append((host.now, effect.kind, host.peer))
            if effect.kind == "audit" and fields.get("outcome") == "different":
                self.found.append((str(fields["peer"]), host.peer))

    def merges(self, kind: str, peer: str) -> list[float]:
        """When a peer made merges of that kind, since it may lie."""
        return [t for t, what, who in self.made if (what, who) == (kind, peer) and t > FALSE_FROM_S]

    def go_on(self, kind: str, from_s: float) -> bool:
        """Whether honest members make merges of that kind from then on."""
        return any(t > from_s and what == kind and who not in self.liars for t, what, who in self.made)


@pytest.fixture
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


@pytest.mark.parametrize("kind", [LieKind.MERGES, LieKind.STATES, LieKind.ACCUSATIONS])
def test_who_lies_about_a_version_is_excluded_by_all_and_by_who_comes_when_all_is_over(
    kind: LieKind, nobody_draws: None
) -> None:
    plan = audited_plan()
    joins = (LATE_S if spec.peer == LATE else t for spec, t in zip(plan.nodes, plan.joins_s, strict=True))
    seen = Seen(dataclasses.replace(plan, joins_s=tuple(joins)), {LIAR: kind})
    honest = {peer: liars for peer, liars in seen.excluded.items() if peer != LIAR}
    assert len(honest) == 4 and set(honest.values()) == {(LIAR,)}
    if kind is LieKind.ACCUSATIONS:
        assert not seen.found and len(seen.audited) >= 3, "all that are here make the merge again"
        return
    lied = seen.merges("publish", LIAR)
    assert lied and not seen.taken
    if kind is LieKind.STATES:
        assert seen.go_on("publish", min(lied) + 15.0) and not seen.repairs
        return
    assert len(seen.found) >= 2, "more than one makes the merge again"
    assert max(lied) < min(lied) + 5.0 and seen.go_on("publish", max(lied) + 15.0)
    assert seen.repairs, "what it made is taken back"
    for repaired, by in seen.repairs.items():
        assert seen.names[repaired] == LIAR and len(by) == 1 and seen.names[by.pop()] != LIAR


def test_honest_syncers_are_never_found_false_and_audits_are_rare() -> None:
    seen = Seen(audited_plan(), {})
    assert not seen.found and len(seen.audited) < 0.2 * seen.versions and not seen.repairs


def test_a_false_partial_is_found_by_its_group_and_the_root_is_not_blamed(nobody_draws: None) -> None:
    seen = Seen(audited_plan(7, 3, 1), {GROUP_SYNCER: LieKind.MERGES}, of_roots=False)
    lied = seen.merges("partial", GROUP_SYNCER)
    assert {liar for liar, _ in seen.found} == {GROUP_SYNCER}
    finders = {finder for _, finder in seen.found}
    assert finders >= {"n0", "n1", "n2", "n4", "n5", "n6"}, "its group accused it"
    assert set(seen.excluded.values()) == {(GROUP_SYNCER,)}
    assert max(lied) < min(lied) + 15.0, "it holds no office any more"
    assert seen.go_on("partial", max(lied) + 15.0)


def test_a_false_sum_is_found_by_all_and_no_group_is_blamed(nobody_draws: None) -> None:
    seen = Seen(audited_plan(7, 3, 1), {ROOT: LieKind.MERGES}, of_groups=False)
    lied = seen.merges("publish", ROOT)
    assert {liar for liar, _ in seen.found} == {ROOT}
    assert set(seen.excluded.values()) == {(ROOT,)}
    assert max(lied) < min(lied) + 15.0
    assert any("/" in group for group in seen.audited), "the own groups' merges come first"


def test_honest_groups_are_never_found_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 1.0)
    seen = Seen(audited_plan(7, 3, 1), {})
    assert not seen.found
    assert "all" in seen.audited and any("/" in group for group in seen.audited), "both were audited"


def test_who_draws_finds_what_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SUSPICIOUS", -1.0)
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    assert len(Seen(audited_plan(), {LIAR: LieKind.MERGES}).found) >= 2
    groups = audited_plan(7, 3, 1)
    found = Seen(groups, {GROUP_SYNCER: LieKind.MERGES}, of_roots=False).found
    found += Seen(groups, {ROOT: LieKind.MERGES}, of_groups=False).found
    assert {liar for liar, _ in found} == {GROUP_SYNCER, ROOT}


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
    played_well(world)
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


# --- all kinds of lies ------------------------------------------------------------------------------------


NINTH = "n9"
VOTERS = ("n0", "n1", "n2", "n3")
SUBJECT = FalseVersion(short_of(genesis_version(0)))
SEEDS = (3, 57, 128)
"""In them each kind is noticed."""


def test_every_kind_of_lie_is_seen_through() -> None:
    seen: set[LieKind] = set()
    for seed in SEEDS:
        world = World(draw_plan(seed, "liars"))
        played_well(world)
        found = set(world.exclusion.seen)
        seen |= {world.perjurers[peer].kind for peer in found}
        for host in world.core_hosts():
            assert set(host.core.shared.excluded.peers) == found
            # A proof is everybody's; of what cannot be proved each keeps what it found itself.
            proved = {peer for peer in found if world.perjurers[peer].kind in PROVABLE}
            assert proved <= {proof.culprit() for proof in host.disk.proofs} <= found
    assert seen == {*LieKind} - {LieKind.HISTORIES, LieKind.OFFICES}, "which nobody can prove"


class Excluding(dict[str, Evidence]):
    """What one member knows of liars."""

    proof_of = dict.get

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(self)


def host_that_knows(peer: str, evidence: Evidence | None) -> SimpleNamespace:
    """A member that is here, and excludes the liar if it has that evidence."""
    excluded = Excluding({} if evidence is None else {NINTH: evidence})
    others = [other for other in VOTERS if other != peer]
    view = SimpleNamespace(confirmed=lambda now: others)
    shared = SimpleNamespace(excluded=excluded, view=view, has_seat=lambda peer: True)
    marks = SimpleNamespace(seats=frozenset((*VOTERS, NINTH)))
    core = SimpleNamespace(
        confirmed=True, shared=shared, fragments=(SimpleNamespace(chain=SimpleNamespace(marks=marks)),)
    )
    return SimpleNamespace(peer=peer, core=core, frozen=False, confirmed_at_s=0.0, local_now=0.0)


def world_of(hosts: list[SimpleNamespace], kind: LieKind, clock: Clock) -> World:
    liars, here = {NINTH: SimpleNamespace(kind=kind)}, lambda: hosts
    return cast(World, SimpleNamespace(clock=clock, perjurers=liars, core_hosts=here, up_hosts=here))


@pytest.mark.parametrize("stating", [1, 2, 3])
def test_who_cannot_find_out_has_to_believe_most_of_those_who_vote(stating: int) -> None:
    clock = Clock()
    refuted = [
        Refutation(Accusation(SUBJECT, NINTH, b""), peer, b"") if place < stating else None
        for place, peer in enumerate(VOTERS)
    ]
    hosts = [host_that_knows(peer, known) for peer, known in zip(VOTERS, refuted, strict=True)]
    watch = Exclusion(world_of(hosts, LieKind.ACCUSATIONS, clock))
    watch.excluded(cast(Host, hosts[0]), NINTH)
    if stating < 3:
        clock.run_until(2 * WITHIN_S)
        assert not watch.missing(NINTH), "half of them are not most"
    else:
        with pytest.raises(Violation, match="n3 still count n9"):
            clock.run_until(2 * WITHIN_S)


def test_who_was_confirmed_a_moment_ago_has_as_long_as_the_others() -> None:
    clock = Clock()
    newcomer = host_that_knows("n0", None)
    newcomer.confirmed_at_s = WITHIN_S - 1
    Exclusion(world_of([newcomer], LieKind.VOTES, clock)).excluded(cast(Host, newcomer), NINTH)
    clock.run_until(2 * WITHIN_S - 2)
    with pytest.raises(Violation, match="n0 still count n9"):
        clock.run_until(2 * WITHIN_S)


def test_where_merges_are_audited_liars_are_in_one_group_from_the_first_version_on() -> None:
    audited = [plan.config for seed in range(60) if (plan := draw_plan(seed, "liars")).config.audited]
    assert len(audited) > 15
    assert all(version.header.groups == 1 for config in audited for version in config.genesis_versions)
    assert all(config.group_size > 8 for config in audited)
