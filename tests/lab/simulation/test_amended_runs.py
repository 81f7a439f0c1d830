"""A run is amended while nodes are away: all go by it in the end, and versions are the same for everybody."""

from __future__ import annotations

import random

import pytest
from sim_kit import calm_plan

from p2pdiloco.core.api.config import Amendment, Going, amended
from p2pdiloco_lab.simulation.lineage import missing_spans
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

NODES = 5
PAUSE_S, RESUME_S = 22.0, 75.0
"""Virtual times at which the owner speaks."""
WORD_EVERY_S = 1.0


class Amended:
    """A world whose owner pauses the run, and lets it go on. His word goes from node to node, and is kept."""

    def __init__(self, seed: int) -> None:
        self.world = World(calm_plan(NODES, until_s=110.0, seed=seed))
        self.dice = random.Random(seed)
        self.kept: dict[str, tuple[Amendment, ...]] = {}
        clock = self.world.clock
        clock.at(PAUSE_S, self._pause)
        clock.at(PAUSE_S, self._spread)
        clock.at(RESUME_S, self._resume)
        away = self.dice.sample(range(1, NODES), 2)
        # One is dead when the owner speaks, one cut off until long after the others have stopped.
        clock.at(PAUSE_S - self.dice.uniform(1.0, 6.0), self._die, f"n{away[0]}")
        self.absent = f"n{away[1]}"
        clock.at(PAUSE_S - self.dice.uniform(0.1, 3.0), self._part, self.absent)
        clock.at(52.0, self.world.network.heal)
        self.pause: Amendment | None = None

    def _die(self, peer: str) -> None:
        self.world.crash(self.world.hosts[peer], self.dice.uniform(12.0, 18.0))

    def _part(self, peer: str) -> None:
        others = {spec.peer for spec in self.world.plan.nodes} - {peer}
        for other in others:
            self.world.network.block(peer, other)
            self.world.network.block(other, peer)

    def _tokens(self, host: Host) -> int:
        return sum(store.version.header.tokens for store in host.stores) // len(host.stores)

    def _pause(self) -> None:
        here = self.world.hosts["n0"]
        self.pause = Amendment(1, self._tokens(here) + self.dice.randrange(3000), going=Going.PAUSE)
        self.kept["n0"] = (self.pause,)

    def _resume(self) -> None:
        assert self.pause is not None
        self.kept["n0"] = amended(self.kept["n0"], Amendment(2, self.pause.from_tokens))

    def _spread(self) -> None:
        """Every node tells one other what it knows; of two words the later one counts."""
        up = [host for host in self.world.up_hosts() if not host.frozen]
        for host in up:
            other = self.dice.choice(up)
            if self.world.network.both_ways(host.peer, other.peer):
                known = [self.kept.get(peer, ()) for peer in (host.peer, other.peer)]
                newest = max(known, key=lambda a: a[-1].number if a else 0)
                self.kept[host.peer] = self.kept[other.peer] = newest
        for host in up:
            host.learner.hear(self.kept.get(host.peer, ()))
        self.world.clock.after(WORD_EVERY_S, self._spread)

    def rested(self) -> list[tuple[int, int, bytes]]:
        """Who is up rests, holds one state, and has merged all that it ever made. Returns what they hold."""
        up = self.world.up_hosts()
        assert len(up) == NODES and all(host.learner.model.rests for host in up)
        held = []
        for fragment in range(self.world.plan.config.fragments):
            versions = {host.stores[fragment].version.header.head() for host in up}
            assert len(versions) == 1, f"fragment {fragment}: {versions}"
            held += [(fragment, head.number, head.digest) for head in versions]
            state = up[0].stores[fragment].state
            for host in up:
                first = host.learner.model.fragments[fragment].life_from
                made = host.learner.model.step_at(self.world.clock.now)
                assert not missing_spans(state.covered.get(host.peer, ()), first, made), host.peer
        return held


@pytest.mark.parametrize("seed", range(7, 13))
def test_whoever_hears_when_all_rest_with_one_state_and_go_on_from_it(seed: int) -> None:
    run = Amended(seed)
    clock = run.world.clock
    clock.run_until(50.0)
    absent = run.world.hosts[run.absent]
    assert not absent.learner.model.rests, "it has heard nothing, and trains on"
    assert all(h.learner.model.rests for h in run.world.up_hosts() if h.peer != run.absent)
    clock.run_until(RESUME_S - 1.0)
    held = run.rested()
    result = (
        run.world.run()
    )  # its rules are looked at all the while: equal states, nothing lost, nothing twice
    assert result.ok, (result.detail, result.stuck)
    assert not any(host.learner.model.rests for host in run.world.up_hosts())
    for fragment, number, digest in held:
        final = run.world.hosts["n0"].stores[fragment].version
        assert final.header.number > number and digest in run.world.watch.ancestors(final)


def test_the_same_words_at_the_same_times_give_the_same_bits() -> None:
    digests = {Amended(7).world.run().digest for _ in range(2)}
    assert len(digests) == 1
