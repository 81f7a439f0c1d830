#!/usr/bin/env python3
"""Cost of Muon: processor time of an inner step with AdamW and with Muon, by preset.

    .venv/bin/python scripts/bench/study/bench_muon.py [--presets tiny small] [--rounds 5] [--json FILE]
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python scripts/bench/study/bench_muon.py  # an older CPU
    ONEDNN_MAX_CPU_ISA=AVX512_CORE python scripts/bench/study/bench_muon.py --passes fp32  # without bf16

On one core: forward and backward passes over the preset's tokens, then the optimizer's step; Muon once with
matrices in bf16, once in fp32, of which production takes one (`learner.ranks.multiplies_bf16`). Passes are
as a learner makes them on this CPU, or in fp32 (`ONEDNN_MAX_CPU_ISA` hides what it can from oneDNN only).
Rounds alternate over the three, after one that is not counted; ratios are of whole inner steps, to AdamW's.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import msgspec
import numpy as np
import torch

from benchkit import arguments, both_passes, finish, processor_s, spread
from p2pdiloco.config.presets import for_run
from p2pdiloco.learner import optimizer as muon
from p2pdiloco.learner.optimizer import Optimizer, make_optimizer
from p2pdiloco.learner.ranks import multiplies_bf16, passes_in_bf16
from p2pdiloco.tasks.registry import task_of

ROWS = {"AdamW": ("adamw", True), "Muon, bf16": ("muon", True), "Muon, fp32": ("muon", False)}


def measure(preset: str, rounds: int, bf16: bool) -> dict[str, dict[str, list[float]]]:
    """Seconds of "passes" and "optimizer" of every row's inner steps."""
    manifest = for_run(preset, "bench")
    task = task_of(manifest)
    model = task.model()
    optimizers: dict[str, Optimizer] = {
        name: make_optimizer(model, msgspec.structs.replace(manifest.inner, optimizer=kind))
        for name, (kind, _) in ROWS.items()
    }
    data = task.load_data(None).train
    batch = data.batch(np.arange(manifest.inner.tokens_per_step // task.tokens_per_sample))
    found: dict[str, dict[str, list[float]]] = {name: {"passes": [], "optimizer": []} for name in ROWS}
    for counted in [False, *[True] * rounds]:
        for name, (_, half) in ROWS.items():
            optimizer = optimizers[name]
            optimizer.zero_grad()
            passes = processor_s(lambda: both_passes(task, model, batch, bf16))
            muon.multiplies_bf16 = lambda kind, half=half: half  # type: ignore[assignment,misc]
            step = processor_s(optimizer.step)
            if counted:
                found[name]["passes"].append(passes)
                found[name]["optimizer"].append(step)
    return found


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", choices=["auto", "fp32"], default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    bf16 = passes_in_bf16(torch.device("cpu"), args.passes)
    print(f"here Muon multiplies in {'bf16' if multiplies_bf16('cpu') else 'fp32'}, passes are {bf16=}")
    print(f"{'':24}{'passes, s':>12}{'optimizer, s':>16}{'of AdamW, whole step':>32}")
    for preset in args.presets:
        rows = measure(preset, args.rounds, bf16)
        base = [sum(both) for both in zip(*rows["AdamW"].values(), strict=True)]
        for name, row in rows.items():
            whole = [sum(both) for both in zip(*row.values(), strict=True)]
            ratio = spread([mine / theirs for mine, theirs in zip(whole, base, strict=True)])
            passes, step = (statistics.median(row[kind]) for kind in ("passes", "optimizer"))
            words = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            print(f"{preset + ', ' + name:24}{passes:12.4f}{step:16.4f}{words:>32}")
            figures[f"{preset}, {name}"] = {"passes_s": passes, "optimizer_s": step, "ratio": ratio}
    finish("muon", figures, args.json)


if __name__ == "__main__":
    main()
