#!/usr/bin/env python3
"""Cost of the codecs in loss.

Swarms in lockstep (study.lockstep): the same learners, data and rounds, once for every codec, used in both
directions. Figure: held-out loss over the last quarter of the run, against fp32 of the same seed.

    python scripts/bench/study/bench_codec_loss.py [--preset micro] [--learners 4] [--steps 1500] [--seeds 3]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import msgspec
import torch

from benchkit import arguments, finish
from p2pdiloco.config.manifest import CodecSection
from p2pdiloco.config.presets import PRESETS, for_run, with_schedule
from study.lockstep import Lockstep, mean_loss

CODECS = ("fp32", "bf16", "int8", "int4", "e3m0", "topk")


def loss_with(codec: str, preset: str, learners: int, steps: int, seed: int) -> float:
    """Mean held-out loss of the last quarter, nats per byte."""
    manifest = for_run(preset, "codecs")
    manifest = with_schedule(manifest, steps, learners)
    section = CodecSection(contribution=codec, update=codec)  # type: ignore[arg-type]
    manifest = msgspec.structs.replace(manifest, codec=section)
    swarm = Lockstep(manifest, learners, names=f"seed{seed}")
    try:
        return mean_loss(swarm.run(steps, max(1, steps // 40)), 0.25)
    finally:
        swarm.close()


def main() -> int:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="micro")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500, help="inner steps of every learner")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {codec: [] for codec in ("fp32", *options.codecs)}
    for seed in range(options.seeds):
        for codec in found:
            began = time.perf_counter()
            found[codec].append(loss_with(codec, options.preset, options.learners, options.steps, seed))
            print(
                f"  seed {seed} {codec}: {found[codec][-1]:.4f}, {time.perf_counter() - began:.0f} s",
                file=sys.stderr,
            )
    print(f"{'codec':8}{'against fp32':>24}   held-out loss")
    for codec, losses in found.items():
        against = [100 * (loss / exact - 1) for loss, exact in zip(losses, found["fp32"], strict=True)]
        words = f"{min(against):+.2f} to {max(against):+.2f} %"
        print(f"{codec:8}{words:>24}   {', '.join(f'{loss:.4f}' for loss in losses)}")
    finish("codec_loss", {"losses": found}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
