"""Deliberate bugs about links that carry little; of the list in `mutation_list.py`.

That rounds wait for payloads on their way is none of them: without it versions have fewer contributors. That
breaks no rule of the simulator (`scripts/bench/bench_rules.py` measures it).
"""

from __future__ import annotations

from mutation_kit import Patch, mutation
from p2pdiloco.core.context import Electorate, Fitness
from p2pdiloco.core.round import ClosingCalls


@mutation("wan", 3, 8, "stuck", first_seed=4)
def a_thin_uplink_is_as_fit_as_any(patch: Patch) -> None:
    fitness = Electorate.fitness

    def blind(self: Electorate, peer: str) -> Fitness:
        return Fitness.FIT if fitness(self, peer) is Fitness.THIN else fitness(self, peer)

    patch.set(Electorate, "fitness", blind)


@mutation("wan", 6, 3, "stuck", first_seed=39)
def a_syncer_outruns_the_others(patch: Patch) -> None:
    """Versions come faster than they travel: no newcomer ever catches up."""
    patch.set(ClosingCalls, "outruns", lambda *_: False)
