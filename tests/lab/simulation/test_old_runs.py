"""Worlds of runs that are older than their founding: who votes there, and whose states are copied."""

from __future__ import annotations

import dataclasses

import pytest
from sim_kit import calm_plan

from p2pdiloco.core.api.effects import CommitVersion, Effect
from p2pdiloco.core.chain.watermarks import FOUNDING_VERSIONS
from p2pdiloco.core.following.support import Support
from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.node.lineage import genesis_state
from p2pdiloco.lab.simulation.world.past import Past, old_liars
from p2pdiloco.lab.simulation.world.plan import draw_plan
from p2pdiloco.lab.simulation.world.world import World


def test_liars_are_fewer_than_a_third_of_those_who_vote_in_every_fragment() -> None:
    lying_worlds = 0
    for seed in range(200):
        plan = draw_plan(seed, "old")
        past = Past(plan, tuple(genesis_state(f) for f in range(plan.config.fragments)))
        peers, liars = {spec.peer for spec in plan.nodes}, {*old_liars(plan)}
        lying_worlds += bool(liars)
        for checkpoint in past.saved:
            voters = {mark.learner for mark in checkpoint.watermarks if mark.voter}
            assert liars <= voters <= {*past.members} <= peers
            assert 3 * len(liars) < len(voters)
    assert 100 < lying_worlds < 200


def old_world(liars: int) -> World:
    """A calm swarm of seven, whose run is old."""
    plan = calm_plan(7, until_s=40.0, quorum=2)
    mix = dataclasses.replace(plan.mix, old=True, perjurers=liars)
    return World(dataclasses.replace(plan, mix=mix))


def test_an_old_run_goes_on_from_what_was_saved_and_asks_for_support_from_its_first_version_on() -> None:
    world = old_world(liars=0)
    assert world.past is not None
    saved = [checkpoint.version.header.number for checkpoint in world.past.saved]
    first: dict[int, int] = {}

    def look(host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion):
            header = effect.version.header
            first.setdefault(header.fragment, header.number)
            assert host.core.fragments[header.fragment].follower.heads.support.needed

    world.on_effect = look
    result = world.run()
    assert result.ok, result.detail or result.stuck
    assert [first[f] for f in range(len(saved))] == [number + 1 for number in saved]
    assert all(number > FOUNDING_VERSIONS for number in saved)


@pytest.mark.parametrize("supported", [True, False])
def test_only_without_support_a_state_that_a_liar_alone_stands_on_is_copied(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supported:
        monkeypatch.setattr(Support, "has", lambda self, head, now: True)
    world = old_world(liars=2)
    result = world.run()
    assert result.violation == ("" if supported else "backed"), result.detail
    assert world.backing.excused == 0
