"""Hand-made stories with one fault each: who is killed, when, and how soon the others go on."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
from sim_kit import Commits, calm_plan, played_well

from p2pdiloco.core.api.events import (
    AcceptTransfer,
    CommitVersion,
    Effect,
    FetchUpdate,
    LearnerLost,
    LeaveRequested,
    Merge,
    Offer,
    Persist,
    UpdateRecord,
)
from p2pdiloco_lab.simulation.seed_plan import genesis_version
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World


def held_up(effect: Effect, moment: str) -> bool:
    """Whether this effect is the given moment in a syncer's round."""
    if moment == "collecting":
        return isinstance(effect, AcceptTransfer)
    if moment == "merging":
        return isinstance(effect, Merge)
    return isinstance(effect, Persist) and isinstance(effect.record, UpdateRecord)


@pytest.mark.parametrize("moment", ["collecting", "merging", "persisting"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_syncer_killed(moment: str, comes_back: bool) -> None:
    world = World(calm_plan(4, quorum=2))
    killed: list[tuple[float, str, int, int]] = []

    def kill(host: Host, effect: Effect) -> None:
        if not killed and host.now > 12.0 and held_up(effect, moment):
            record = getattr(effect, "record", None)
            fragment = record.version.header.fragment if record is not None else effect.fragment
            number = host.stores[fragment].version.header.number
            killed.append((host.now, host.peer, fragment, number))
            world.clock.after(0.0, world.crash, host, 6.0 if comes_back else None)

    commits = Commits(world, kill)
    result = played_well(world)
    assert result.lost_to_forks == 0
    at_s, victim, fragment, number = killed[0]
    later = [t for t, p, f, n in commits.seen if f == fragment and n > number and p != victim]
    resumed_s = min(t for t in later if t > at_s)
    # Three heartbeats of suspicion or two failed sends, one election, one re-send, one merge.
    assert resumed_s - at_s < 8.0
    assert victim in {host.peer for host in world.up_hosts()} or not comes_back


def test_late_joiner_catches_up_before_it_votes_or_contributes() -> None:
    plan = calm_plan(4)
    world = World(dataclasses.replace(plan, joins_s=(0.0, 0.3, 0.6, 20.0)))
    late: list[tuple[float, str]] = []

    def note(host: Host, effect: Effect) -> None:
        if host.peer == "n3":
            late.append((host.now, type(effect).__name__))
            if type(effect).__name__ in ("Offer", "Persist"):
                assert host.may_serve
                assert host.stores[0].version.header.number > 0

    world.on_effect = note
    result = played_well(world)
    offers = [t for t, name in late if name == "Offer"]
    assert offers and min(offers) < 30.0
    assert result.lost_to_forks == 0


def test_nothing_stops_without_faults() -> None:
    world = World(calm_plan(3))
    counts: dict[str, int] = {}

    def count(host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            counts[host.peer] = counts.get(host.peer, 0) + 1

    world.on_effect = count
    result = world.run()
    assert result.ok and result.switches == 0 and result.split_terms == 0
    # 2 fragments, a round every 2 s of at least 30 s: at least every other round comes about.
    assert all(counts[peer] >= 14 for peer in ("n0", "n1", "n2"))
    for host in world.up_hosts():
        alive_s = world.clock.now - world.plan.joins_s[int(host.peer[1:])]
        assert host.learner.model.step_at(world.clock.now) >= (alive_s - 5.0) / 0.2


def test_a_pull_that_stands_still_is_given_up() -> None:
    world = World(calm_plan(3))
    stood: list[tuple[float, str, int]] = []
    hours = 1e6  # times the latency of the link

    def stand(host: Host, effect: Effect) -> None:
        if isinstance(effect, FetchUpdate) and host.now > 12.0 and not stood:
            stood.append((host.now, host.peer, effect.fragment))
            for link in ((host.peer, effect.peer), (effect.peer, host.peer)):
                world.network.slow_down(*link, hours)
                world.clock.after(0.01, world.network.slow_down, *link, 1.0)

    commits = Commits(world, stand)
    played_well(world)
    at_s, peer, fragment = stood[0]
    after = [t for t, p, f, _ in commits.seen if (p, f) == (peer, fragment) and t > at_s]
    assert after and after[0] < at_s + 25.0


def test_who_leaves_over_a_link_that_carries_nothing_takes_it_up_again() -> None:
    world = World(calm_plan(4, seed=11))  # in which it is no syncer when it leaves
    links = [link for other in ("n0", "n1", "n2") for link in (("n3", other), (other, "n3"))]
    offered: list[int] = []

    def note(host: Host, effect: Effect) -> None:
        if isinstance(effect, Offer) and host.leaving:
            offered.append(effect.signed.header.fragment)

    def leave() -> None:
        leaver = world.hosts["n3"]
        leaver.leaving, leaver.returns_in_s = True, 10.0
        leaver.feed(LeaveRequested())

    world.on_effect = note
    for link in links:
        world.clock.at(20.0, world.network.slow_down, *link, 1e6)
        world.clock.at(30.0, world.network.slow_down, *link, 1.0)
    world.clock.at(20.1, leave)
    played_well(world)
    assert sorted(offered) == [0, 1], "and nobody answered"
    for store in world.hosts["n0"].stores:
        assert len(store.state.covered["n3"]) == 1, "a hole in what was merged of it"


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_full_disks_do_not_stand_in_the_way_of_the_one_that_has_room(nodes: int) -> None:
    """All but one cannot save a vote: they train on, are merged, and have no part in majorities."""
    world = World(calm_plan(nodes, until_s=60.0))
    merged: list[tuple[float, int, set[str]]] = []
    at_s = 12.0

    def note(host: Host, effect: Effect) -> None:
        if isinstance(effect, Persist) and isinstance(effect.record, UpdateRecord):
            header = effect.record.version.header
            merged.append((host.now, header.fragment, {part.learner for part in header.contributors}))

    def fill() -> None:
        for spec in world.plan.nodes[1:]:
            world.disk_of(spec.peer).full = True

    world.on_effect = note
    world.clock.after(at_s, fill)
    result = played_well(world)
    assert result.lost_to_forks == 0
    everybody = {spec.peer for spec in world.plan.nodes}
    for fragment in range(2):
        while_full = [who for t, f, who in merged if f == fragment and at_s + 10.0 < t < 60.0]
        assert len(while_full) >= 15  # a round takes about two seconds
        assert all(one | next_one == everybody for one, next_one in itertools.pairwise(while_full))


@pytest.mark.parametrize(("nodes", "seed"), [(2, 79), (2, 137), (3, 4), (3, 6), (3, 65), (5, 18), (5, 126)])
def test_all_disks_are_full_and_have_room_at_one_time(nodes: int, seed: int) -> None:
    """Who has a vote again first is a majority of one for a moment, and must not be one beside another."""
    world = World(calm_plan(nodes, until_s=45.0, seed=seed))

    def fill(full: bool) -> None:
        for spec in world.plan.nodes:
            world.disk_of(spec.peer).full = full

    world.clock.after(12.0, fill, True)
    world.clock.after(30.0, fill, False)
    played_well(world)


@pytest.mark.parametrize("at_s", [12.0, 13.4, 14.8, 17.6])
def test_who_has_room_takes_over_without_work_of_its_own(at_s: float) -> None:
    """Nothing of its own is refused: that the holder has laid the office down its heartbeats say."""
    world = World(calm_plan(2, until_s=60.0))
    commits = Commits(world)

    def stop_learner() -> None:
        host = world.hosts["n1"]
        host.learner.model.stop(host.now)
        host.feed(LearnerLost())

    world.clock.after(10.0, stop_learner)
    world.clock.after(at_s, setattr, world.disk_of("n0"), "full", True)
    world.clock.run_until(60.0)
    for fragment in range(2):
        assert len({n for t, _, f, n in commits.seen if f == fragment and t > 30.0}) > 8


@pytest.mark.parametrize("seed", range(6))
def test_in_groups_a_full_disk_costs_no_more_than_an_election(seed: int) -> None:
    """Whatever it held, on whichever level: without it the groups above have no syncer."""
    plan = calm_plan(4, until_s=80.0, seed=seed)
    versions = tuple(genesis_version(fragment, groups=2) for fragment in range(2))
    config = msgspec.structs.replace(plan.config, group_size=2, genesis_versions=versions)
    world = World(dataclasses.replace(plan, config=config))
    commits = Commits(world)
    world.clock.after(20.0, setattr, world.disk_of(f"n{seed % 4}"), "full", True)
    world.clock.run_until(80.0)
    for fragment in range(2):
        times = sorted(t for t in commits.made(fragment).values() if t > 15.0)
        assert max(b - a for a, b in itertools.pairwise([*times, 80.0])) < 10.0


def test_a_member_whose_updates_come_late_at_a_change_of_groups_does_not_fork() -> None:
    """It left its mates out, which were ahead in new groups, and elected itself in the old one."""
    plan = calm_plan(6, until_s=1200.0, seed=100, fragments=1)
    config = msgspec.structs.replace(
        plan.config, group_size=3, term_versions=4, log_versions=16, grace_cap_s=10.0, max_base_age_versions=8
    )
    late_bytes_s = 100_000 / 24.0  # an update takes 24 s
    specs = tuple(
        dataclasses.replace(
            spec,
            step_time_s=3.0 * (1 + 0.13 * index),
            bandwidth_bytes_s=late_bytes_s if spec.peer == "n5" else 5e6,
        )
        for index, spec in enumerate(plan.nodes)
    )
    world = World(dataclasses.replace(plan, config=config, nodes=specs, faults=False, settle_s=600.0))
    made: dict[int, set[bytes]] = {}

    def note(_host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            header = effect.version.header
            made.setdefault(header.number, set()).add(header.digest())

    world.on_effect = note
    played_well(world)
    assert all(len(versions) == 1 for versions in made.values())
