#!/usr/bin/env python3
"""Whether the trial of others' states lets honest ones through, and forged ones not (docs/protocol/belief.md,
section 4).

Swarms in lockstep (study.lockstep). A node falls asleep with the state of then, and tries on waking what it
is given: what all or a few made meanwhile, and what was forged. Printed is how much worse that is on its
held-out samples, as it is and a step on, as a share of what was learned by then, and whether it passes: with
0.05, as where all read the same data, and with 0.5, as where each brings its own. Then what the worst states
that pass cost: each is the node's own with so much noise that it is worse by just that share, and all train
on from it for a day, beside the same day without it.

    python scripts/bench/study/bench_trials.py [--asleep 400] [--night 400] [--day 400] [--seeds 3]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import torch
from torch import Tensor

from benchkit import arguments, finish
from p2pdiloco.config.presets import PRESETS, for_run, with_schedule
from p2pdiloco.learner.loop import heldout_batch
from p2pdiloco.learner.trial import OWN_DATA_SHARE, PARTS, SAME_DATA_SHARE, LossComparison
from study.lockstep import HELDOUT_TOKENS, Absence, Lockstep, mean_loss

LEARNERS = 6
BISECTIONS = 10
State = Mapping[tuple[int, str], Tensor]
"""Theta and momentum of each fragment."""


def state_of(swarm: Lockstep) -> State:
    """Copy the global state."""
    vault = swarm.global_state
    return {
        (layout.index, name): values.clone()
        for layout in swarm.layouts
        for name, values in (
            ("theta", vault.theta(layout.index)),
            ("momentum", vault.momentum(layout.index)),
        )
    }


def trained(preset: str, seed: int, asleep: int, later: int) -> Lockstep:
    """Train until the node falls asleep; so many steps come later."""
    manifest = with_schedule(for_run(preset, "trials", seed), 4 * (asleep + later), LEARNERS)
    swarm = Lockstep(manifest, LEARNERS, 0, f"seed{seed}")
    swarm.run(asleep, asleep)
    return swarm


def after_a_night(
    preset: str, seed: int, asleep: int, night: int, awake: int
) -> tuple[Lockstep, State, State]:
    """Train, then let only the first so many go on; returns the states before and after."""
    swarm = trained(preset, seed, asleep, night)
    before = state_of(swarm)
    away = [Absence(learner, 0, night + 1) for learner in range(awake, LEARNERS)]
    swarm.run(night, night, away)
    return swarm, before, state_of(swarm)


def forged(before: State, after: State, fragments: int) -> dict[str, tuple[State, tuple[int, ...]]]:
    """Forge states of what was learned overnight: by their names, with the fragments that are given."""
    every = tuple(range(fragments))
    generator = torch.Generator().manual_seed(1)

    def of_length(values: Tensor) -> Tensor:
        made = torch.randn(values.shape, generator=generator)
        found: Tensor = made * (values.norm() / made.norm())
        return found

    def changed(name: str, rule: Callable[[tuple[int, str], Tensor], Tensor]) -> State:
        return {key: rule(key, values) if key[1] == name else values for key, values in after.items()}

    ways = {key: values - before[key] for key, values in after.items()}
    noise = changed("theta", lambda key, values: before[key] + of_length(ways[key]))
    halves = changed("theta", lambda key, values: before[key] + (ways[key] + of_length(ways[key])) / 2)
    back = changed("theta", lambda key, values: before[key] - ways[key])
    momentum = changed("momentum", lambda _, values: -values)
    strong = changed("momentum", lambda _, values: -10 * values)
    zeros = changed("theta", lambda _, values: torch.zeros_like(values))
    return {
        "noise as long as the night's way": (noise, every),
        "half of it noise": (halves, every),
        "the way back": (back, every),
        "zeros": (zeros, every),
        "momentum reversed": (momentum, every),
        "momentum reversed, ten times": (strong, every),
        "one fragment noise, the others true": ({**after, (0, "theta"): noise[0, "theta"]}, every),
        "one fragment the way back, alone": (back, (0,)),
    }


def tried(
    swarm: Lockstep, before: State, theirs: State, fragments: tuple[int, ...]
) -> tuple[float, float, bool]:
    """Compare as `learner.trial` does: (share that it is worse by, the same a step on, whether it passes)."""

    def read(name: str) -> Tensor:
        whose, fragment, what = name.split(".")
        return (before if whose == "ours" else theirs)[int(fragment), what]

    batch = heldout_batch(swarm.task, swarm.data.heldout, HELDOUT_TOKENS)
    size = len(batch[0]) // PARTS
    parts = [tuple(column[place * size : (place + 1) * size] for column in batch) for place in range(PARTS)]
    found = LossComparison(swarm.task, swarm.task.model(), swarm.layouts, parts, read)
    learned = found.allowed / SAME_DATA_SHARE
    shares = [
        (fmean(found._losses(fragments, ahead)) - fmean(found._losses((), ahead))) / learned
        for ahead in (False, True)
    ]
    return shares[0], shares[1], found.passes(fragments, None)[0]


def worst(swarm: Lockstep, share: float) -> State:
    """Make the state with so much noise that it is worse by that share, by bisection."""
    before, every = state_of(swarm), tuple(range(len(swarm.layouts)))
    generator = torch.Generator().manual_seed(2)
    noise = {key: torch.randn(values.shape, generator=generator) for key, values in before.items()}
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        made = {
            key: values + noise[key] * (middle * values.norm() / noise[key].norm())
            if key[1] == "theta"
            else values
            for key, values in before.items()
        }
        low, high = (middle, high) if max(tried(swarm, before, made, every)[:2]) < share else (low, middle)
    return made


def day_after(preset: str, seed: int, asleep: int, day: int, share: float) -> float:
    """Train for a day from the worst state that passes: held-out loss of its last quarter."""
    swarm = trained(preset, seed, asleep, day)
    if share:
        vault, state = swarm.global_state, worst(swarm, share)
        for layout in swarm.layouts:
            number = (vault.version(layout.index) or 0) + 1
            theta, momentum = (state[layout.index, name].numpy() for name in ("theta", "momentum"))
            vault.load_spare(layout.index, number, theta.tobytes(), momentum.tobytes())
            vault.commit(layout.index, number)
    loss = mean_loss(swarm.run(day, max(1, day // 20)), 0.25)
    swarm.close()
    return loss


def main() -> int:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="micro")
    parser.add_argument("--asleep", type=int, default=400, help="inner steps until the node falls asleep")
    parser.add_argument("--night", type=int, default=400, help="inner steps that others make meanwhile")
    parser.add_argument("--day", type=int, default=400, help="inner steps that all make afterwards")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[tuple[float, float, bool]]] = {}
    for seed in range(options.seeds):
        for awake, name in ((LEARNERS, "all made it"), (2, "two of six made it"), (1, "one of six made it")):
            swarm, before, after = after_a_night(options.preset, seed, options.asleep, options.night, awake)
            fragments = len(swarm.layouts)
            cases = {name: (after, tuple(range(fragments)))}
            if awake == LEARNERS:
                cases |= forged(before, after, fragments)
            for case, given in cases.items():
                rows.setdefault(case, []).append(tried(swarm, before, *given))
            swarm.close()
    print(f"{'state':40}{'worse by':>26}{'a step on':>26}  passes ({SAME_DATA_SHARE}, {OWN_DATA_SHARE})")
    for case, found in rows.items():
        now, ahead = (f"{min(each):+.3f} to {max(each):+.3f}" for each in list(zip(*found, strict=True))[:2])
        own = sum(max(each[:2]) <= OWN_DATA_SHARE for each in found)
        print(f"{case:40}{now:>26}{ahead:>26}  {sum(each[2] for each in found)}, {own} of {len(found)}")
    days: dict[float, list[float]] = {}
    for share in (0.0, SAME_DATA_SHARE, OWN_DATA_SHARE):
        seeds = range(options.seeds)
        days[share] = [day_after(options.preset, n, options.asleep, options.day, share) for n in seeds]
        ratios = [loss / without for loss, without in zip(days[share], days[0.0], strict=True)]
        print(
            f"a day after a state worse by {share}: loss {min(ratios):.4f} to {max(ratios):.4f}", flush=True
        )
    finish(
        "trials",
        {"shape": vars(options) | {"json": str(options.json)}, "rows": rows, "days": days},
        options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
