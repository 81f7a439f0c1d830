"""How the outer step's numbers follow from a run's length, and what of a manifest nobody has shown to work.

What is known, and how well, is in docs/experiments.md (`scripts/bench_learning.py`).
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from p2pdiloco.config.manifest import Manifest

LEARNERS = 4
"""Where the manifest does not say how many members are expected."""
LONGEST_WARMUP = 20
FEW_MERGES = 10
MANY_MERGES = 100
LONGEST_INTERVAL = 100
RATES = (0.2, 1.0)
SHORT_WARMUP_STEPS, MOST_WARMUP_STEPS = 70, 1000


class Length(Struct, frozen=True):
    """A run of so many inner steps of every learner, with such an H at most."""

    steps: int
    inner_steps: int


LENGTHS = {"demo": Length(700, 24), "day": Length(10_000, 50), "long": Length(100_000, 100)}


def momentum_warmup(merges: int) -> int:
    """Merges of a fragment over which outer momentum grows, in a run of so many: two thirds, at most 20."""
    return min(LONGEST_WARMUP, round(2 * merges / 3))


def expected_merges(manifest: Manifest, learners: int = 0) -> int:
    """Outer steps of every fragment until the schedule's end. `learners`: 0, as many as are expected."""
    learners = learners or manifest.group.expected_members or LEARNERS
    per_interval = learners * manifest.inner.tokens_per_step * manifest.sync.inner_steps
    return manifest.inner.schedule_tokens // per_interval


def warmup_steps(steps: int) -> int:
    """Inner steps over which the inner learning rate grows, in a run of so many: a tenth of a short one, a
    twentieth of a longer one, at most 1000. Swarms suffer from a short warm-up more than data parallel."""
    return min(max(steps // 20, min(steps // 10, SHORT_WARMUP_STEPS)), MOST_WARMUP_STEPS)


def with_steps(manifest: Manifest, steps: int, learners: int = 0) -> Manifest:
    """With a schedule of so many inner steps of every learner. `learners`: 0, as many as are expected."""
    learners = learners or manifest.group.expected_members or LEARNERS
    step_tokens = learners * manifest.inner.tokens_per_step
    inner = msgspec.structs.replace(
        manifest.inner, warmup_tokens=warmup_steps(steps) * step_tokens, schedule_tokens=steps * step_tokens
    )
    return msgspec.structs.replace(manifest, inner=inner)


def for_length(manifest: Manifest, length: str) -> Manifest:
    """With the schedule and H of a run of that length (`LENGTHS`), for the members that are expected."""
    chosen, sync = LENGTHS[length], manifest.sync
    inner_steps = chosen.inner_steps if length != "demo" else min(sync.inner_steps, chosen.inner_steps)
    sync = msgspec.structs.replace(
        sync, inner_steps=inner_steps, delay_steps=min(sync.delay_steps, max(1, inner_steps // 3))
    )
    return msgspec.structs.replace(with_steps(manifest, chosen.steps), sync=sync)


def with_outer(manifest: Manifest, learners: int = 0) -> Manifest:
    """With the warm-up of outer momentum that belongs to the run's expected number of merges."""
    replace, warmup = msgspec.structs.replace, momentum_warmup(expected_merges(manifest, learners))
    return replace(manifest, outer=replace(manifest.outer, momentum_warmup_merges=warmup))


def doubts(manifest: Manifest) -> list[str]:
    """Whatever is outside what has been shown to work, a sentence each."""
    outer, sync, codec = manifest.outer, manifest.sync, manifest.codec
    merges, warmup = expected_merges(manifest), outer.momentum_warmup_merges
    length = f"about {merges} outer steps of each fragment"
    rules = (
        (
            merges < FEW_MERGES,
            f"the schedule is {length} long; that fewer than {FEW_MERGES} keep up with data parallel was not "
            "shown: make it longer, or sync.inner_steps smaller",
        ),
        (
            outer.momentum >= 0.5 and warmup < momentum_warmup(merges) // 2 and merges < MANY_MERGES,
            f"outer.momentum {outer.momentum:g} with a warm-up of {warmup} merges overshoots in a run of "
            f"{length}: outer.momentum_warmup_merges = {momentum_warmup(merges)} was better",
        ),
        (
            warmup > max(momentum_warmup(merges), 3 * merges // 4),
            f"outer momentum warms up over {warmup} merges, but the schedule is {length} long: "
            f"outer.momentum_warmup_merges = {momentum_warmup(merges)} was better",
        ),
        (
            not RATES[0] <= outer.learning_rate <= RATES[1],
            f"outer.learning_rate {outer.learning_rate:g} is outside {RATES[0]:g} to {RATES[1]:g}, "
            "which is what was tried",
        ),
        (
            outer.momentum > 0.9,
            f"outer.momentum {outer.momentum:g} is more than was tried (0.9)",
        ),
        (
            sync.inner_steps > LONGEST_INTERVAL,
            f"sync.inner_steps {sync.inner_steps} is more than was tried ({LONGEST_INTERVAL})",
        ),
        (
            2 * sync.delay_steps > sync.inner_steps,
            f"sync.delay_steps {sync.delay_steps} is more than half of sync.inner_steps "
            f"({sync.inner_steps}), which was not tried; delays cost loss",
        ),
        (
            "topk" in (codec.contribution, codec.update),
            "what the codec topk costs in loss was not measured",
        ),
    )
    return [sentence for holds, sentence in rules if holds]
