"""Deliberate bugs about links that carry little; of the list in `mutation_list.py`.

They break no rule of the simulator: versions have fewer contributors, which `scripts/bench/bench_rules.py`
measures.
"""

from __future__ import annotations

from mutation_kit import Patch
from p2pdiloco.core.context import Electorate, Fitness


def a_thin_uplink_is_as_fit_as_any(patch: Patch) -> None:
    fitness = Electorate.fitness

    def blind(self: Electorate, peer: str) -> Fitness:
        return Fitness.FIT if fitness(self, peer) is Fitness.THIN else fitness(self, peer)

    patch.set(Electorate, "fitness", blind)
