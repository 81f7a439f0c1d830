"""All nodes of a run leave, as at its end: what they trained is in the last versions."""

from __future__ import annotations

import random

import pytest
from test_survival import plan_of

from p2pdiloco.core.api.events import LeaveRequested
from p2pdiloco_lab.simulation.lineage import FragmentLineage, missing_spans
from p2pdiloco_lab.simulation.sim_world import World

NODES = 4
FRAGMENTS = 2


class Ending:
    """A calm run whose nodes are asked to leave within so many seconds of each other."""

    def __init__(self, seed: int, within_s: float) -> None:
        self.world = World(plan_of(NODES, until_s=60.0, quorum=1, seed=seed))
        self.begins_s = 40.0 + seed / 7 % 3
        self.asked_s: dict[str, float] = {}
        self.trained: dict[str, int] = {}
        """Inner steps of each when it was asked."""
        self.ended_s: dict[str, float] = {}
        self.newest: dict[int, FragmentLineage] = {}
        dice = random.Random(seed)
        for spec in self.world.plan.nodes:
            self.world.clock.at(self.begins_s + dice.uniform(0.0, within_s), self._leave, spec.peer)
        self.world.clock.at(self.begins_s, self._look)

    def _leave(self, peer: str) -> None:
        host, now = self.world.hosts[peer], self.world.clock.now
        host.leaving = True
        self.asked_s[peer], self.trained[peer] = now, host.learner.model.step_at(now)
        host.feed(LeaveRequested())

    def _look(self) -> None:
        now = self.world.clock.now
        for peer, host in self.world.hosts.items():
            if not host.up:
                self.ended_s.setdefault(peer, now)
                continue
            for fragment, store in enumerate(host.stores):
                newest = self.newest.get(fragment)
                if newest is None or store.state.number > newest.number:
                    self.newest[fragment] = store.state
        self.world.clock.at(now + 0.004, self._look)

    def play(self) -> None:
        """Until all have left. Not to the plan's end, which heals: nobody is there then."""
        self.world.clock.run_until(self.begins_s + 5.0)
        assert len(self.ended_s) == NODES

    def missing(self) -> list[int]:
        """Inner steps that are in no version, of every learner and fragment."""
        lacks = []
        for fragment, state in self.newest.items():
            for peer, host in self.world.hosts.items():
                begun = host.learner.model.fragments[fragment].life_from
                spans = missing_spans(state.covered[peer], begun, self.trained[peer])
                lacks.append(sum(end - first for first, end in spans))
        return lacks


@pytest.mark.parametrize("within_s", [0.02, 0.3])
def test_who_leave_together_leave_no_more_than_the_step_under_way(within_s: float) -> None:
    """One in five left up to a whole interval (H = 10) on its disk: whose contribution came a moment late,
    or was under way when it was asked to leave, or found no syncer any more."""
    lacks, lasted_s = [], []
    for seed in range(30):
        ending = Ending(seed, within_s)
        ending.play()
        lacks += ending.missing()
        lasted_s += [ending.ended_s[peer] - asked_s for peer, asked_s in ending.asked_s.items()]
    assert len(lacks) == 30 * NODES * FRAGMENTS and max(lacks) <= 1, lacks
    assert sum(lacks) < 0.02 * len(lacks), "and that seldom"
    assert max(lasted_s) < 3.1 and sum(lasted_s) / len(lasted_s) < 1.5
