"""Deliberate bugs about links that carry little; of the list in `mutation_list.py`.

That rounds wait for payloads on their way, and that no syncer outruns the others, is none of them: without
it versions have fewer contributors. That breaks no rule of the simulator (`scripts/bench/bench_rules.py`
measures it).
"""

from __future__ import annotations

from mutation_kit import Patch, mutation
from p2pdiloco.core.context import Electorate, Fitness


@mutation("wan", 3, 1, "stuck", first_seed=79)
def a_thin_uplink_is_as_fit_as_any(patch: Patch) -> None:
    fitness = Electorate.fitness

    def blind(self: Electorate, peer: str) -> Fitness:
        return Fitness.FIT if fitness(self, peer) is Fitness.THIN else fitness(self, peer)

    patch.set(Electorate, "fitness", blind)
