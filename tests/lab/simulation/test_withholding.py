"""Syncers that withhold: it costs a bounded time, and no work of anybody."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
from sim_kit import Commits, calm_plan

from p2pdiloco.core.api.effects import Effect, Record
from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.world.withholder import Kept, Withholder
from p2pdiloco.lab.simulation.world.world import World

UNTIL_S = 70.0
FROM_S = 15.0
LIAR, VICTIM = "n1", "n0"


class Seen:
    """What happened in a calm world of five, one of which withholds when it is a syncer."""

    def __init__(self, kind: Kept | None, term_versions: int, seed: int = 8) -> None:
        plan = calm_plan(5, until_s=UNTIL_S, seed=seed)
        config = msgspec.structs.replace(plan.config, group_size=64, term_versions=term_versions)
        world = World(dataclasses.replace(plan, config=config))
        self.liar = Withholder(kind, VICTIM, FROM_S) if kind is not None else None
        if self.liar is not None:
            world.perjurers[LIAR] = self.liar
        self.made: list[tuple[float, str]] = []
        self.suspicions: list[tuple[str, str]] = []
        commits = Commits(world)
        commits.act = self._act
        result = world.run()
        assert result.ok, result.detail or result.stuck  # nothing lost, nothing twice, all merged in the end
        first: dict[tuple[int, int], float] = {}
        for at_s, peer, fragment, number in commits.seen:
            if peer != LIAR and at_s < UNTIL_S:
                first.setdefault((fragment, number), at_s)
        times = [sorted(at_s for (f, _), at_s in first.items() if f == fragment) for fragment in range(2)]
        self.longest_s = max(after - before for each in times for before, after in itertools.pairwise(each))

    def _act(self, host: Host, effect: Effect) -> None:
        if isinstance(effect, Record) and effect.kind == "publish":
            self.made.append((host.now, host.peer))
        if isinstance(effect, Record) and effect.kind == "suspicion":
            self.suspicions.append((host.peer, effect.reason))

    def made_by_the_liar(self) -> int:
        """Versions that it made since it withholds."""
        return sum(peer == LIAR and at_s > FROM_S for at_s, peer in self.made)


def test_a_syncer_that_gives_its_versions_to_nobody_costs_one_patience() -> None:
    calm, seen = Seen(None, 6), Seen(Kept.VERSIONS, 6)
    assert seen.made_by_the_liar() and calm.longest_s < 4.0
    assert seen.longest_s < calm.longest_s + 7.0, "5 s of patience, and an election"
    assert len(seen.made) > 0.85 * len(calm.made)


def test_a_learner_whose_work_is_left_out_finds_that_and_loses_nothing() -> None:
    seen = Seen(Kept.WORK, 16)
    assert seen.liar is not None and seen.liar.swallowed > 2 and seen.made_by_the_liar() > 4
    assert (VICTIM, str(Suspicion.LEFT_OUT)) in seen.suspicions
    assert {peer for peer, why in seen.suspicions if why == str(Suspicion.LEFT_OUT)} == {VICTIM}
    assert seen.longest_s < 5.0, "the others do not wait"
