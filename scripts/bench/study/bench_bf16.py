#!/usr/bin/env python3
"""Does bf16 pay on this machine's CPU? Processor time of inner steps with passes in fp32 and in bf16, and of
attention alone.

    .venv/bin/python scripts/bench/study/bench_bf16.py [--presets micro tiny ...] [--rounds 5] [--json FILE]
    ONEDNN_MAX_CPU_ISA=AVX512_CORE .venv/bin/python scripts/bench/study/bench_bf16.py  # AVX-512 without bf16
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python scripts/bench/study/bench_bf16.py  # an older CPU

On one core, with the preset's optimizer and tokens (8192 at most). Rounds alternate over the two, after two
that are not counted; ratios are fp32's time by bf16's, so above 1 bf16 is faster. Attention is forward and
backward over 2048 tokens of 8 heads of 32 and 64, inputs and output bf16 in both cases, as between layers.
`ONEDNN_MAX_CPU_ISA` hides from oneDNN only what the CPU can: Muon's step, in both inner steps, is not as it
would be. Look at passes there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import numpy as np
import torch
from torch.nn import functional

from benchkit import arguments, both_passes, finish, processor_s, spread
from p2pdiloco.config.presets import for_run
from p2pdiloco.learner.optimizer import make_optimizer
from p2pdiloco.learner.ranks import computes_in_bf16
from p2pdiloco.tasks.registry import task_of

PRESETS = ("micro", "tiny", "tiny-moe", "digits", "digits-cnn", "small")
MOST_TOKENS = 8192
UNCOUNTED = 2
HEADS, ATTENTION_TOKENS = 8, 2048
CONTEXTS = (64, 128, 256, 512, 1024)


def inner_steps(preset: str, rounds: int) -> tuple[list[float], list[float]]:
    """fp32's time by bf16's: of passes, of whole inner steps."""
    manifest = for_run(preset, "bench")
    task = task_of(manifest)
    model = task.model()
    optimizer = make_optimizer(model, manifest.inner)
    samples = max(1, min(MOST_TOKENS, manifest.inner.tokens_per_step) // task.tokens_per_sample)
    data = task.load_data(None).train
    of_passes, of_steps = [], []
    for round_ in range(rounds + UNCOUNTED):
        # Another one each time: numbers of tokens for experts differ, and so do shapes of matrices.
        batch = data.batch((np.arange(samples) + round_ * samples) % len(data))
        took = []
        for bf16 in (False, True):
            optimizer.zero_grad()
            computing = processor_s(lambda b=batch, h=bf16: both_passes(task, model, b, h))
            took.append((computing, processor_s(optimizer.step)))
        if round_ >= UNCOUNTED:
            (fp32, fp32_rest), (bf16_s, bf16_rest) = took
            of_passes.append(fp32 / bf16_s)
            of_steps.append((fp32 + fp32_rest) / (bf16_s + bf16_rest))
    return of_passes, of_steps


def attention(context: int, head_width: int, rounds: int) -> list[float]:
    """fp32's time by bf16's."""
    shape = (ATTENTION_TOKENS // context, HEADS, context, head_width)
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def work(dtype: torch.dtype) -> None:
        query, key, value = (tensor.to(dtype) for tensor in inputs)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.backward(mixed.to(torch.bfloat16).sum())

    ratios = []
    for round_ in range(rounds + UNCOUNTED):
        fp32, bf16 = (processor_s(lambda d=d: work(d)) for d in (torch.float32, torch.bfloat16))
        if round_ >= UNCOUNTED:
            ratios.append(fp32 / bf16)
    return ratios


def words(ratios: list[float]) -> str:
    """ "1.82 (1.79 to 1.90)"."""
    found = spread(ratios)
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--presets", nargs="*", default=PRESETS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    print(f"here passes are in {'bf16' if computes_in_bf16('cpu') else 'fp32'}; fp32's time by bf16's:")
    for preset in args.presets:
        passes, steps = inner_steps(preset, args.rounds)
        print(f"{preset:16} passes {words(passes)}, whole inner step {words(steps)}")
        figures[preset] = {"passes": spread(passes), "steps": spread(steps)}
    for head_width in (32, 64):
        for context in CONTEXTS:
            ratios = attention(context, head_width, args.rounds)
            print(f"attention, heads of {head_width}, {context:4} tokens: {words(ratios)}")
            figures[f"attention, {head_width}, {context}"] = spread(ratios)
    finish("bf16", figures, args.json)


if __name__ == "__main__":
    main()
