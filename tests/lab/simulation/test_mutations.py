"""Is the simulator any good? Each rule of the protocol is taken away in turn, and must be missed soon."""

from __future__ import annotations

import pytest

from mutation_kit import Mutation
from mutation_list import MUTATIONS
from mutations import hunt


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_missing_rule_is_noticed(mutation: Mutation) -> None:
    rule, seeds, others = hunt(mutation)
    assert rule, f"not found in {seeds} seeds, only {others}"


def test_there_are_enough_of_them_and_each_is_another() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 15
