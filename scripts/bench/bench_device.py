#!/usr/bin/env python3
"""Training speed of a device: tokens per second of one learner process, by model, precision and compiler.

    python scripts/bench/bench_device.py --device cuda [--presets gpt2 350m] [--seconds 10] [--json FILE]
    python scripts/bench/bench_device.py --device cuda --yardstick --presets gpt2 --micro-batch-tokens 16384
    .venv/bin/python scripts/bench/bench_device.py --device cpu --presets tiny --variants fp32 uncompiled

Without a daemon, in whole inner steps (passes, clipping, the optimizer), after the first ten. "of the
ceiling", for dense text models: the operations that the model needs (6 for each parameter and token, and
attention's), by what one large matrix product on the device reaches in bf16, as measured at the beginning.
Memory is what a CUDA device has less of than before, looked at every 0.2 s. `bench_inner --device` compares a
learner in a swarm with one alone. `--yardstick` compares a learner's inner step with a plain GPT-2's
(`peers/yardstick.py`); memory is the most that torch had allocated there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import get_args

import msgspec
import torch

from bench_inner import Ended, alone, rate
from benchkit import arguments, finish
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import Compile
from p2pdiloco.learner.channel import LearnerOptions
from p2pdiloco.learner.ranks import choose_device, free_bytes
from p2pdiloco.tasks.registry import task_of
from peers.yardstick import WINDOWS, apart, ours, plain

VARIANTS = {
    "fp32": LearnerOptions(peer="", precision="fp32"),
    "uncompiled": LearnerOptions(peer=""),
    "auto": LearnerOptions(peer="", compile="auto"),
    "compiled": LearnerOptions(peer="", compile="always"),
}
PRODUCT = 8192
"""Rows and columns of matrices on accelerators."""
STATUS_INTERVAL_S = 0.5
WATCH_S = 0.2


def ceiling(device: torch.device) -> float:
    """Operations per second of a large matrix product in bf16."""
    size = 1024 if device.type == "cpu" else PRODUCT
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = []
    for _ in range(13):
        began = time.perf_counter()
        float((left @ right)[0, 0])
        took.append(time.perf_counter() - began)
    return 2 * size**3 / min(took[3:])


def operations_per_token(manifest: Manifest) -> float | None:
    """Forward and backward of a dense text model (else None): 6 for each parameter (but embeddings, which are
    looked up, unless the head is tied to them), 6 of causal attention for each layer, width and token of the
    context."""
    task = task_of(manifest)
    numel = {spec.name: spec.numel for spec in task.specs()}
    model = manifest.model
    if "context_tokens" not in model or model.get("experts"):
        return None
    looked_up = 0 if model.get("tied_head", True) else sum(n for k, n in numel.items() if "embed" in k)
    attention = 6 * model["layers"] * model["width"] * model["context_tokens"]
    return float(6 * (sum(numel.values()) - looked_up) + attention)


class Measured(msgspec.Struct, frozen=True):
    """Measurement of one learner."""

    tokens_per_s: float
    longest_gap_in_steps: float
    """Longest gap, in the learner's own average steps."""
    start_s: float
    """Until its first inner step had ended."""
    memory_bytes: int | None
    """None: this device does not say."""
    notes: list[str]
    """Sentences that the learner said."""


async def measured(manifest: Manifest, options: LearnerOptions, seconds: float) -> Measured:
    """One learner. Raises: Ended, TimeoutError."""
    device = choose_device(options.device)
    free = [free_bytes(device, 1) or 0]

    async def watch() -> None:
        while True:
            free.append(free_bytes(device, 1) or 0)
            await asyncio.sleep(WATCH_S)

    watching = asyncio.ensure_future(watch())
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as folder:
            (learner,) = await alone(manifest, 1, seconds, Path(folder), options)
    finally:
        watching.cancel()
    found = rate(learner.points)
    return Measured(
        found.steps_per_s * manifest.inner.tokens_per_step,
        found.longest_gap_s / found.step_s,
        learner.points[0].at_s - began,
        free[0] - min(free) if device.type == "cuda" else None,
        learner.notes,
    )


def beside_yardstick(
    manifest: Manifest, args: argparse.Namespace, pass_tokens: int, top: float
) -> dict[str, object]:
    """Measure and print a plain GPT-2, and a learner in each of the forms asked for."""
    of = (manifest, args.device, pass_tokens, args.seconds / WINDOWS)
    found = {"yardstick": apart(plain, *of)}
    for choice in args.compile:
        found[f"ours, --compile {choice}"] = apart(ours, *of, choice)
    base = statistics.median(found["yardstick"].tokens_per_s)
    operations = operations_per_token(manifest) or 0.0
    least = max(1, found["yardstick"].memory_bytes)
    for name, each in found.items():
        speed = statistics.median(each.tokens_per_s)
        words = [
            f"{speed:.0f} tokens/s ({min(each.tokens_per_s):.0f} to {max(each.tokens_per_s):.0f})",
            f"{speed / base:.3f} of the yardstick",
            f"{each.memory_bytes / 2**30:.2f} GiB, {each.memory_bytes / least:.2f}",
        ]
        if name != "yardstick":
            words.append(f"{speed * operations / top:.3f} of the ceiling")
        if each.outside is not None:
            words.append(f"{each.outside:.1%} outside passes")
        words.append(f"start {each.start_s:.0f} s")
        size = f"passes of {pass_tokens or 'its choice'}"
        what = [manifest.run.name, manifest.inner.optimizer, size, name]
        print("\n    ".join([", ".join(what), ", ".join(words), *each.notes]), flush=True)
    return {name: msgspec.to_builtins(each) for name, each in found.items()}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--presets", nargs="+", default=["small", "gpt2", "350m"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[0], help="0: as a node chooses")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="0: the preset's")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--yardstick", action="store_true", help="beside a plain GPT-2, instead of variants")
    parser.add_argument("--compile", nargs="+", default=["always"], choices=get_args(Compile))
    parser.add_argument("--optimizer", choices=["adamw", "muon"], help="instead of the preset's")
    args = parser.parse_args()
    device = choose_device(args.device)
    top = ceiling(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{name}, torch {torch.__version__}: matrix products in bf16 reach {top / 1e12:.1f} TFLOP/s")
    figures: dict[str, object] = {"device": name, "torch": torch.__version__, "ceiling_flops": top}
    figures["seconds"] = args.seconds
    for preset in args.presets:
        manifest = for_run(preset, preset)
        tokens = args.tokens_per_step or manifest.inner.tokens_per_step
        optimizer = args.optimizer or manifest.inner.optimizer
        inner = msgspec.structs.replace(manifest.inner, tokens_per_step=tokens, optimizer=optimizer)
        manifest = msgspec.structs.replace(manifest, inner=inner)
        if args.yardstick:
            for pass_tokens in args.micro_batch_tokens:
                figures[f"{preset}, {pass_tokens}"] = beside_yardstick(manifest, args, pass_tokens, top)
            continue
        operations = operations_per_token(manifest)
        for variant, pass_tokens in itertools.product(args.variants, args.micro_batch_tokens):
            options = msgspec.structs.replace(
                VARIANTS[variant],
                device=args.device,
                micro_batch_tokens=pass_tokens,
                status_interval_s=STATUS_INTERVAL_S,
            )
            what = f"{preset}, {variant}" + (f", passes of {pass_tokens}" if pass_tokens else "")
            try:
                found = asyncio.run(measured(manifest, options, args.seconds))
            except (Ended, TimeoutError) as error:
                print(f"{what:40} {type(error).__name__}: {error}", flush=True)
                continue
            figures[what] = msgspec.to_builtins(found) | {"tokens_per_step": tokens}
            words = [f"{found.tokens_per_s:.0f} tokens/s", f"first step after {found.start_s:.0f} s"]
            if operations is not None:
                words.insert(1, f"{found.tokens_per_s * operations / top:.2f} of the ceiling")
            if found.memory_bytes is not None:
                words.insert(-1, f"{found.memory_bytes / 1e9:.1f} GB")
            print("\n    ".join([f"{what:40} {', '.join(words)}", *found.notes]), flush=True)
    finish("device", figures, args.json)


if __name__ == "__main__":
    main()
