"""Memory of each process of a learner, with a copy of the model and with a share of it.

    .venv/bin/python scripts/bench/bench_shards.py [--nproc 2 3] [--layers 8] [--width 512] [--json FILE]

For one process, and for each number of processes with `--shard never` and `always`, fresh processes build the
model as a node's learner does and make two inner steps with AdamW on the CPU. What is told is how far the
resident memory of the largest of them rises above what it was before the model: its peak over the steps
(parameters, gradients, two moments, and what a step needs beside), and its peak while it builds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchkit import AT_ONCE, MIB, arguments, finish, forget_peak, peak_bytes
from p2pdiloco.config.manifest import CausalLMSection, Manifest, table
from p2pdiloco.config.presets import for_run

STEPS = 2
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "p2pdiloco.learner.training_process",
    "p2pdiloco.tasks.transformer",
]
PATIENCE_S = 600.0


def model_of(layers: int, width: int) -> Manifest:
    """Small passes, so that the model's state is what counts."""
    base, heads = for_run("micro", "shards"), width // 64
    section = CausalLMSection(layers=layers, heads=heads, width=width, context_tokens=64)
    return msgspec.structs.replace(base, model=table(section))


def one(rank: int, count: int, shard: str, manifest: Manifest, meeting: Path, out: Any) -> None:
    """A process of a learner."""
    from p2pdiloco.learner import training_process
    from p2pdiloco.learner.channel import LearnerOptions, Start

    options = LearnerOptions(peer="peer", device="cpu", threads=1, nproc=count, shard=shard, niceness=0)
    training_process._build(
        Start(model_of(1, 64), options, ())
    ).training.step()  # what is loaded is not counted
    before = forget_peak()
    parts = training_process._build(Start(manifest, options, ()), rank, count, meeting if count > 1 else None)
    building = peak_bytes() - before
    gc.collect()
    forget_peak()
    for _ in range(STEPS):
        parts.training.step()
    parameters = sum(layout.numel for layout in parts.layouts)
    out.put({"parameters": parameters, "building": building, "steps": peak_bytes() - before})


def measured(count: int, shard: str, manifest: Manifest) -> dict[str, int]:
    """The largest process of a learner of so many."""
    starting = multiprocessing.get_context("forkserver")
    starting.set_forkserver_preload(PRELOADED)
    out = starting.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            starting.Process(target=one, args=(rank, count, shard, manifest, Path(folder), out), daemon=True)
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        found = [out.get(timeout=PATIENCE_S) for _ in ranks]
        for rank in ranks:
            rank.join(PATIENCE_S)
    return {key: max(each[key] for each in found) for key in found[0]}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    os.environ.update(AT_ONCE)
    manifest = model_of(args.layers, args.width)
    rows: list[dict[str, Any]] = []
    for count, shard in [(1, "never"), *((n, shard) for n in args.nproc for shard in ("never", "always"))]:
        rows.append({"nproc": count, "shard": shard} | measured(count, shard, manifest))
    whole = rows[0]
    print(f"{whole['parameters'] / 1e6:.1f} M parameters: the largest process, MiB (and of one process's)")
    print(f"{'nproc':>6}{'shard':>8}{'steps':>10}{'':>8}{'building':>10}{'':>8}")
    for row in rows:
        cells = "".join(
            f"{row[key] / MIB:>10.0f}{row[key] / whole[key]:>8.2f}" for key in ("steps", "building")
        )
        print(f"{row['nproc']:>6}{row['shard']:>8}{cells}")
    finish("shards", {"steps": STEPS, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
