"""Bounds of what a learner can have trained, and what a merge can weigh.

Rules: docs/protocol/weights.md, section 1.
"""

from __future__ import annotations

FULL_TRUST, LEAST_TRUST = 64, 1
"""Most and least trust weight (`core.api.trust_weight`): parts of a contribution's weight that count."""

MAX_INNER_STEPS = 1 << 32
"""Limit of inner steps between two merges: no learner makes more. Bounds what one lie can add to token
counts."""
MAX_WEIGHT = 1 << 62
"""Limit of a contribution's weight, tokens^2 / inner steps: two thousand million tokens in one inner step.
With `tensors.merging.merge.MIN_LENGTH` it keeps every sum of a merge inside fp32's range."""
MOST_PERIODS = 1 << 20
"""Limit of a contribution's inner steps as a multiple of H: years of absence."""


def can_be_weighed(tokens: int, inner_steps: int) -> bool:
    """Tell whether a merge can weigh so many tokens in so many inner steps."""
    return tokens > 0 and 0 < inner_steps <= MAX_INNER_STEPS and tokens * tokens <= MAX_WEIGHT * inner_steps


def weight_of(tokens: int, inner_steps: int, most_tokens: int, trust: int) -> float:
    """Compute the weight of a contribution, tokens^2 / inner steps. Of the tokens at most `most_tokens`
    weigh, and of that the share that its learner is trusted with."""
    return min(tokens, most_tokens) * tokens / inner_steps * (trust / FULL_TRUST)


def plausible_work(tokens: int, inner_steps: int, tokens_per_step: int, period: int) -> bool:
    """Tell whether a learner can have trained so many tokens in so many inner steps, and a merge can weigh
    them: what it raises at would cost a whole round. `period`: H."""
    possible = tokens <= inner_steps * tokens_per_step and inner_steps <= MOST_PERIODS * period
    return possible and can_be_weighed(tokens, inner_steps)
