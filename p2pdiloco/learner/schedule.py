"""Learning rate by the tokens that the run has consumed: the same for all learners.

Without torch: the daemon asks, too.
"""

from __future__ import annotations

import math

from p2pdiloco.config.manifest import InnerSection
from p2pdiloco.core.api.config import Amendment

RATE_FLOOR = 0.1
"""The cosine ends at this share of the learning rate and stays there."""


def schedule_of(section: InnerSection, amendment: Amendment | None) -> int:
    """Return the length of the schedule in tokens, with the amendment that is in force."""
    return (amendment.schedule_tokens if amendment is not None else 0) or section.schedule_tokens


def learning_rate(
    section: InnerSection, run_tokens: int, optimizer_steps: int, amendment: Amendment | None = None
) -> float:
    """Rate of an inner step before which the run has consumed `run_tokens`, with moments of so many steps.

    Linear warm-up, cosine decay to a floor; fresh moments warm up too, at any point of the schedule.
    `amendment`: the one that is in force.

    All learners have the same rate. Nobody counts the run's tokens exactly at any moment. What is merged is
    known from the versions; to it a learner adds its own unmerged tokens, and what the others have made
    meanwhile (`Fragments.run_tokens`). Alone, or as long as it hears nothing, it goes on by its own count
    (`Training.run_tokens`). It goes back only where it is far ahead of the chain that its node holds: after a
    fork, or a lie.

    Rules: docs/protocol/learner.md, section 4.
    """
    ramp = 1.0
    if run_tokens < section.warmup_tokens:
        ramp = min(1.0, (run_tokens + section.tokens_per_step) / section.warmup_tokens)
    if optimizer_steps < section.fresh_warmup_steps:
        ramp = min(ramp, (optimizer_steps + 1) / section.fresh_warmup_steps)
    span = schedule_of(section, amendment) - section.warmup_tokens
    progress = min(1.0, max(0, run_tokens - section.warmup_tokens) / max(1, span))
    cosine = RATE_FLOOR + (1 - RATE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
    factor = amendment.rate_factor if amendment is not None else 1.0
    return section.learning_rate * factor * ramp * cosine
