#!/usr/bin/env python3
"""A learner's process died and is back: where shall its inner optimizer's moments come from?

Swarms in lockstep (study.lockstep), one learner restarting every so many inner steps, in turn. Its
moments are its own from the disk (saved a while ago), a peer's of now, or none, and then its learning rate
warms up over so many inner steps. All kinds share data and restarts; how much worse Θ is than without any
restart is what is printed. A part of it is the same for all: what a dead learner had not contributed is lost.

    python scripts/bench/study/bench_returning.py [--steps 600] [--every 12] [--seeds 3] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import msgspec
import torch

from benchkit import arguments, finish
from p2pdiloco.config.presets import PRESETS, for_run, with_schedule
from study.lockstep import Lockstep, Moments, Restart, mean_loss

FIRST = 48
"""No restarts before this inner step."""
KINDS: dict[str, tuple[Moments | None, int]] = {
    "no restarts": (None, 0),
    "own, from the disk": ("disk", 0),
    "a peer's": ("peer", 0),
    "none, no warm-up": ("none", 0),
    "none, warm-up of 10": ("none", 10),
    "none, warm-up of 20": ("none", 20),
    "none, warm-up of 40": ("none", 40),
}


def loss(preset: str, learners: int, steps: int, every: int, saved: int, seed: int, kind: str) -> float:
    """Mean held-out loss of Θ over the last quarter."""
    moments, warmup = KINDS[kind]
    manifest = with_schedule(for_run(preset, "returning", seed), steps, learners)
    inner = msgspec.structs.replace(manifest.inner, fresh_warmup_steps=warmup)
    restarts = [
        Restart(index % learners, step, moments, saved if moments == "disk" else 0)
        for index, step in enumerate(range(FIRST, steps, every))
        if moments is not None
    ]
    swarm = Lockstep(msgspec.structs.replace(manifest, inner=inner), learners, 2, f"seed{seed}")
    try:
        return mean_loss(swarm.run(steps, 20, restarts=restarts), 0.25)
    finally:
        swarm.close()


def main() -> int:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="micro")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600, help="inner steps of every learner")
    parser.add_argument("--every", type=int, default=12, help="inner steps between two restarts of the swarm")
    parser.add_argument("--saved-steps", type=int, default=40, help="age of moments on the disk, inner steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--most-warmup-steps", type=int, default=40, help="leave longer warm-ups out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (options.preset, options.learners, options.steps, options.every, options.saved_steps)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    print(f"{'moments':24}{'against no restarts':>22}   held-out loss, last quarter")
    found: dict[str, list[float]] = {}
    for kind in [kind for kind, (_, warmup) in KINDS.items() if warmup <= options.most_warmup_steps]:
        found[kind] = [loss(*shape, seed, kind) for seed in seeds]
        against = [value / calm - 1 for value, calm in zip(found[kind], found["no restarts"], strict=True)]
        mean = f"{100 * statistics.mean(against):+.2f} %"
        values = ", ".join(f"{value:.4f}" for value in found[kind])
        print(f"{kind:24}{mean:>22}   {values}", flush=True)
    finish("returning", {"shape": shape, "losses": found}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
