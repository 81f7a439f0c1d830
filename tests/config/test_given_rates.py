"""Rates and outer steps for models that exist."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from p2pdiloco.config.presets import (
    ADAPTER,
    AVERAGE,
    CONTINUE,
    FINETUNE,
    GENTLE,
    KINDS,
    PRESETS,
    ROWS,
    USUAL,
    OuterRule,
    for_given,
    harmful_settings,
    row_for,
    rule_of,
    too_large,
    with_outer,
    with_tokens,
)
from p2pdiloco.errors import UserError

replace = msgspec.structs.replace


def test_larger_models_have_lower_rates_and_every_row_its_sources() -> None:
    for smaller, larger in pairwise(ROWS):
        assert smaller.most_numel < larger.most_numel
        assert all(smaller.rate(kind) >= larger.rate(kind) for kind in KINDS)
    for row in ROWS:
        assert row.sources and row.finetune < row.continued < row.adapter
    assert ROWS[-1].most_numel == float("inf")


@pytest.mark.parametrize(
    ("numel", "kind", "rate"),
    [
        (35_000, FINETUNE, 3e-4),
        (124_000_000, FINETUNE, 1e-4),
        (124_000_000, CONTINUE, 2e-4),
        (1_100_000_000, FINETUNE, 3e-5),
        (8_000_000_000, FINETUNE, 1e-5),
        (8_000_000_000, CONTINUE, 1e-4),
        (8_000_000_000, ADAPTER, 2e-4),
        (70_000_000_000, FINETUNE, 2e-6),
    ],
)
def test_a_rate_far_above_the_table_is_warned_of(numel: int, kind: str, rate: float) -> None:
    assert row_for(numel).rate(kind) == rate
    assert too_large(3 * rate, numel, kind) == ""
    assert f"({rate:g}): it may lose what it has learned" in too_large(3.1 * rate, numel, kind)


@pytest.mark.parametrize(
    ("steps", "inner_steps", "rule", "warmup"),
    [
        (36, 4, AVERAGE, 0),  # 9 merges
        (40, 4, GENTLE, 0),
        (240, 8, GENTLE, 0),  # 30 merges, but few steps
        (725, 25, GENTLE, 0),  # 29 merges
        (690, 23, GENTLE, 0),
        (720, 24, USUAL, 20),
        (10_000, 50, USUAL, 20),
    ],
)
def test_the_outer_step_of_a_model_that_exists_is_gentle_where_the_run_is_short(
    steps: int, inner_steps: int, rule: OuterRule, warmup: int
) -> None:
    tiny = PRESETS["tiny"]
    short = replace(tiny, sync=replace(tiny.sync, inner_steps=inner_steps, delay_steps=1))
    made = for_given(with_tokens(short, steps * 4 * tiny.inner.tokens_per_step))
    assert rule_of(made.outer) == rule and made.outer.momentum_warmup_merges == warmup
    assert with_outer(made) == made
    assert all(sentence.startswith("the schedule is about") for sentence in harmful_settings(made))
    # A run that begins with nothing has what it had.
    assert rule_of(with_outer(with_tokens(short, steps * 4 * tiny.inner.tokens_per_step)).outer) == USUAL


def test_a_length_in_tokens_has_its_warm_up_and_is_at_least_one_step() -> None:
    tiny = PRESETS["tiny"]
    inner = with_tokens(tiny, 4_096_001).inner
    assert (inner.schedule_tokens, inner.warmup_tokens) == (4_096_001, 70 * 4096)
    assert with_tokens(tiny, 4096).inner.warmup_tokens == 0
    with pytest.raises(UserError, match="4095 tokens are less than one inner step of each learner"):
        with_tokens(tiny, 4095)
