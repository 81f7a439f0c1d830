"""Is the simulator any good? Each rule of the protocol is taken away in turn, and must be missed soon."""

from __future__ import annotations

from typing import Any

import pytest

from mutation_kit import Mutation
from mutation_list import MUTATIONS
from mutations import hunt

pytestmark = pytest.mark.long

LONG = {
    "completions of old rounds are accepted",
    "partials are offered to nobody",
    "votes are forgotten at restart",
    "who cannot be dialled stands like any other",
    "nobody ever leaves",
    "a newcomer counts at once",
    "two votes are not compared",
    "no rebase",
    "contributions are not sent again",
    "what was merged is forgotten at once",
    "a merged contribution is admitted again",
    "watermarks are not saved",
}
"""They take ten seeds or more, seconds each: hunted in the tier `slow`."""


def tiered(mutation: Mutation) -> Any:
    marks = [pytest.mark.slow] if mutation.name in LONG else []
    return pytest.param(mutation, id=mutation.name.replace(" ", "-"), marks=marks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", map(tiered, MUTATIONS))
def test_missing_rule_is_noticed(mutation: Mutation) -> None:
    rule, seeds, others = hunt(mutation)
    assert rule, f"not found in {seeds} seeds, only {others}"


def test_there_are_enough_of_them_and_each_is_another() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 15
    assert {mutation.name for mutation in MUTATIONS} >= LONG
