"""`bench_rules`: every rule is there to be taken away, and the same seed goes otherwise without it."""

from __future__ import annotations

import bench_rules
from bench_rules import CELLS, WITHOUT
from mutation_kit import Patch
from p2pdiloco.core.context import Electorate


def test_a_seed_is_played_with_and_without_thin_uplinks_leaving_offices_to_others() -> None:
    found, fitness = {}, Electorate.fitness
    for name in ("as it is", "thin uplinks hold offices"):
        with Patch() as patch:
            WITHOUT[name](patch)
            found[name] = bench_rules.played(CELLS["slow first"], 100.0, 3)
    assert Electorate.fitness is fitness
    for figures in found.values():
        assert 0.0 < figures["merges"] <= 100.0 and 25.0 <= figures["participation"] <= 100.0
    assert found["as it is"] != found["thin uplinks hold offices"]


def test_every_rule_can_be_taken_away() -> None:
    for apply in WITHOUT.values():
        with Patch() as patch:
            apply(patch)
