#!/usr/bin/env python3
"""Losses of a model that exists after more training: as `run new --from` chooses it, and as a preset does.

    python scripts/bench/study/bench_given.py [--steps 700] [--rates 1e-4 1e-3] [--epochs 1] [--data docs]

A model of the preset `tiny` is trained with the embedded text (Python's library), 4096 tokens a step. From
it runs are described by `run new --from`: as chosen, with `--preset tiny` of the same length, as before there
was a choice, and with other rates. Each is trained in one process by plain torch, on `--data`, with the inner
settings of its manifest and the tokens of all its learners in each step. Printed are held-out losses of both
texts, in nats per byte.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import msgspec
import numpy as np
import torch
from torch import nn

from benchkit import arguments, finish
from p2pdiloco.adapters.result_file import load_tensors, save_tensors
from p2pdiloco.cli.main import run
from p2pdiloco.config.manifest import InnerSection, Manifest
from p2pdiloco.config.presets import expected_members, for_other_model, for_run
from p2pdiloco.tasks.causal_lm import CausalLM
from p2pdiloco.tasks.hub_models import llama_config
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import load_manifest, task_of
from p2pdiloco.tasks.task import Samples, Shards

HELD_OUT = 128
FLOOR = 0.1
OLD_TOKENS = 4096


def rate_factors(inner: InnerSection, step_tokens: int) -> Iterator[float]:
    """Factor of the rate at each step: linear warm-up, then a cosine down to the floor."""
    steps, warmup = inner.schedule_tokens // step_tokens, inner.warmup_tokens // step_tokens
    for step in range(steps):
        share = max(0, step - warmup) / max(1, steps - warmup)
        yield min(1, (step + 1) / max(1, warmup)) * (
            FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * share)) / 2
        )


def train(
    task: CausalLM, model: nn.Module, samples: Samples | Shards, inner: InnerSection, step_tokens: int
) -> None:
    """Train by the inner settings, with so many tokens a step."""
    assert not isinstance(samples, Shards)
    optimizer = torch.optim.AdamW(
        model.parameters(), inner.learning_rate, (inner.beta1, inner.beta2), weight_decay=inner.weight_decay
    )
    order, count, at = (
        np.random.default_rng(0).permutation(len(samples)),
        step_tokens // task.tokens_per_sample,
        0,
    )
    for factor in rate_factors(inner, step_tokens):
        for group in optimizer.param_groups:
            group["lr"] = factor * inner.learning_rate
        chosen = order[np.arange(at, at + count) % len(order)]
        at += count
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, samples.batch(chosen)))
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
        optimizer.step()


def held_out(task: CausalLM, model: nn.Module, samples: Samples) -> float:
    """Loss of samples spread over those held out."""
    chosen = np.linspace(0, len(samples) - 1, HELD_OUT).astype(np.int64)
    with torch.no_grad():
        return float(task.loss(model, samples.batch(chosen)))


def save_folder(task: CausalLM, model: nn.Module, folder: Path) -> None:
    """The model as a folder that `run new --from` reads."""
    arrays = {name: value.detach().numpy() for name, value in named_parameters(model).items()}
    save_tensors(folder / "model.safetensors", arrays, {})
    (folder / "config.json").write_text(json.dumps(llama_config(task.section)))


def load_into(model: nn.Module, folder: Path) -> None:
    """Take the folder's parameters."""
    arrays, _ = load_tensors(folder / "model.safetensors")
    with torch.no_grad():
        for name, value in named_parameters(model).items():
            value.copy_(torch.from_numpy(arrays[name]))


def manifest_of(folder: Path, data: str, *more: str) -> Manifest:
    """The run that `run new --from` describes with these flags more."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "run.toml"
        base = ["run", "new", "given", "--from", str(folder), "--data", data, "--tokenizer", "bytes"]
        assert run([*base, *more, "--out", str(out)]) == 0
        return load_manifest(out)


def main() -> None:
    """Entry point."""
    parser = arguments(str(__doc__))
    parser.add_argument("--steps", type=int, default=700, help="with which the model comes to exist")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-4, 1e-3], help="other ones")
    parser.add_argument("--epochs", type=int, default=1, help="of the new text")
    parser.add_argument("--data", default="docs", help="new text: a file or a folder")
    parser.add_argument("--keep", type=Path, help="folder of the model: used if it is there, else made")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiny = for_other_model(for_run("tiny", "old"))
    schedule = options.steps * OLD_TOKENS
    inner = msgspec.structs.replace(tiny.inner, warmup_tokens=schedule // 20, schedule_tokens=schedule)
    task = task_of(msgspec.structs.replace(tiny, inner=inner))
    assert isinstance(task, CausalLM)
    model, old = task.model(), task.load_data(None)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            with torch.no_grad():
                for name, value in task.initial_parameters().items():
                    named_parameters(model)[name].copy_(value)
            train(task, model, old.train, inner, OLD_TOKENS)
            save_folder(task, model, folder)
        of_files = msgspec.structs.replace(tiny, data=msgspec.structs.replace(tiny.data, source="files"))
        new = task_of(of_files).load_data(options.data)
        length = ["--epochs", str(options.epochs)]
        runs = {"before": None, "chosen": length, "preset tiny, as long": ["--preset", "tiny", *length]}
        runs |= {f"chosen, rate {rate:g}": [*length, "--learning-rate", str(rate)] for rate in options.rates}
        runs["preset tiny"] = ["--preset", "tiny"]
        for label, flags in runs.items():
            load_into(model, folder)
            if flags is not None:
                manifest = manifest_of(folder, options.data, *flags)
                step_tokens = expected_members(manifest) * manifest.inner.tokens_per_step
                train(task, model, new.train, manifest.inner, step_tokens)
            losses = held_out(task, model, old.heldout), held_out(task, model, new.heldout)
            figures[label] = list(losses)
            print(f"{label:28} old text {losses[0]:.4f}  new text {losses[1]:.4f}", flush=True)
    finish("given", figures, options.json)


if __name__ == "__main__":
    main()
