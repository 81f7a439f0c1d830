"""Members whose lies can be proved, or found by everybody, are found out, whichever they tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from p2pdiloco.core.api.evidence import Accusation, Evidence, FalseVersion, Refutation, short_of
from p2pdiloco_lab.simulation.lineage import Clock
from p2pdiloco_lab.simulation.seed_plan import draw_plan, genesis_version
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import PROVABLE, LieKind
from p2pdiloco_lab.simulation.sim_rules import WITHIN_S, Exclusion
from p2pdiloco_lab.simulation.sim_world import World

LIAR = "n9"
VOTERS = ("n0", "n1", "n2", "n3")
SUBJECT = FalseVersion(short_of(genesis_version(0)))
SEEDS = (3, 57, 128)
"""In them each kind is noticed."""


def test_every_kind_of_lie_is_seen_through() -> None:
    seen: set[LieKind] = set()
    for seed in SEEDS:
        world = World(draw_plan(seed, "liars"))
        result = world.run()
        assert result.ok, result.detail or result.stuck
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
    excluded = Excluding({} if evidence is None else {LIAR: evidence})
    others = [other for other in VOTERS if other != peer]
    view = SimpleNamespace(confirmed=lambda now: others)
    shared = SimpleNamespace(excluded=excluded, view=view, has_seat=lambda peer: True)
    marks = SimpleNamespace(seats=frozenset((*VOTERS, LIAR)))
    core = SimpleNamespace(
        confirmed=True, shared=shared, fragments=(SimpleNamespace(chain=SimpleNamespace(marks=marks)),)
    )
    return SimpleNamespace(peer=peer, core=core, frozen=False, confirmed_at_s=0.0, local_now=0.0)


def world_of(hosts: list[SimpleNamespace], kind: LieKind, clock: Clock) -> World:
    liars, here = {LIAR: SimpleNamespace(kind=kind)}, lambda: hosts
    return cast(World, SimpleNamespace(clock=clock, perjurers=liars, core_hosts=here, up_hosts=here))


@pytest.mark.parametrize("stating", [1, 2, 3])
def test_who_cannot_find_out_has_to_believe_most_of_those_who_vote(stating: int) -> None:
    clock = Clock()
    refuted = [
        Refutation(Accusation(SUBJECT, LIAR, b""), peer, b"") if place < stating else None
        for place, peer in enumerate(VOTERS)
    ]
    hosts = [host_that_knows(peer, known) for peer, known in zip(VOTERS, refuted, strict=True)]
    watch = Exclusion(world_of(hosts, LieKind.ACCUSATIONS, clock))
    watch.excluded(cast(Host, hosts[0]), LIAR)
    if stating < 3:
        clock.run_until(2 * WITHIN_S)
        assert not watch.missing(LIAR), "half of them are not most"
    else:
        with pytest.raises(Violation, match="n3 still count n9"):
            clock.run_until(2 * WITHIN_S)


def test_who_was_confirmed_a_moment_ago_has_as_long_as_the_others() -> None:
    clock = Clock()
    newcomer = host_that_knows("n0", None)
    newcomer.confirmed_at_s = WITHIN_S - 1
    Exclusion(world_of([newcomer], LieKind.VOTES, clock)).excluded(cast(Host, newcomer), LIAR)
    clock.run_until(2 * WITHIN_S - 2)
    with pytest.raises(Violation, match="n0 still count n9"):
        clock.run_until(2 * WITHIN_S)


def test_where_merges_are_audited_liars_are_in_one_group_from_the_first_version_on() -> None:
    audited = [plan.config for seed in range(60) if (plan := draw_plan(seed, "liars")).config.audited]
    assert len(audited) > 15
    assert all(version.header.groups == 1 for config in audited for version in config.genesis_versions)
    assert all(config.group_size > 8 for config in audited)
