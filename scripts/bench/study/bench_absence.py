#!/usr/bin/env python3
"""Cost of a learner that was cut off, in the others' loss, when it returns.

Swarms in lockstep (study.lockstep) of micro learners: without absences, with absences whose work is merged in
shares (as in production), and with the same merged at full length. Pairs share data and absences.

    python scripts/bench/study/bench_absence.py [--steps 2000] [--seeds 2] [--delay-steps 0] [--json FILE]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import torch

from benchkit import arguments, finish
from p2pdiloco.config.presets import for_run, with_schedule
from p2pdiloco.core.api import versions
from study.lockstep import Absence, Lockstep, mean_loss

LEARNERS = 8
AWAY_STEPS = 200
EVERY_STEPS = 400
WHOLE = 1 << 30


def losses(steps: int, seed: int, delay_steps: int, absences: list[Absence], shares: bool) -> float:
    """Mean held-out loss of the last quarter."""
    manifest = for_run("micro", "absence")
    manifest = with_schedule(manifest, 10 * steps, LEARNERS)
    kept, versions.PERIODS = versions.PERIODS, versions.PERIODS if shares else WHOLE
    swarm = Lockstep(manifest, LEARNERS, delay_steps, f"seed{seed}")
    try:
        return mean_loss(swarm.run(steps, 25, absences), 0.25)
    finally:
        swarm.close()
        versions.PERIODS = kept


def main() -> int:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=2000, help="inner steps of every learner")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--delay-steps", type=int, default=0, help="from copy-out to install")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"no absence": [], "in shares": [], "at full length": []}
    for seed in range(options.seeds):
        rng = random.Random(seed)
        starts = range(EVERY_STEPS // 4, options.steps - EVERY_STEPS // 2, EVERY_STEPS)
        absences = [Absence(rng.randrange(LEARNERS), start, AWAY_STEPS) for start in starts]
        for kind, away, shares in (("no absence", [], True), ("in shares", absences, True)):
            found[kind].append(losses(options.steps, seed, options.delay_steps, away, shares))
        found["at full length"].append(losses(options.steps, seed, options.delay_steps, absences, False))
    print(f"{'absences of 200 inner steps':30}{'against none':20}held-out loss, last quarter")
    for kind, values in found.items():
        against = [value / without - 1 for value, without in zip(values, found["no absence"], strict=True)]
        words = f"{100 * min(against):+.1f} to {100 * max(against):+.1f} %"
        print(f"{kind:30}{words:20}{', '.join(f'{value:.3f}' for value in values)}")
    finish("absence", {"losses": found}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
