#!/usr/bin/env python3
"""Time and memory of an inner step by the size of the passes that it is computed in.

    .venv/bin/python scripts/bench/bench_passes.py [--presets tiny small] [--passes 8192 2048] [--rounds 5]

One process per size, on the CPU, alternating: processor time of a step (so that other processes matter
little), by that of the first size. Memory is the process's peak.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import msgspec
import torch

from benchkit import arguments, finish, peak_bytes, processor_s, spread, table
from p2pdiloco.config.presets import for_run
from p2pdiloco.learner.channel import PassOptions
from p2pdiloco.learner.loop import Training
from p2pdiloco.tasks.registry import task_of


def _training(preset: str, tokens: int, pass_tokens: int) -> Training:
    manifest = for_run(preset, "bench-passes")
    inner = msgspec.structs.replace(manifest.inner, tokens_per_step=tokens)
    task = task_of(msgspec.structs.replace(manifest, inner=inner))
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    return Training(task, model, task.load_data(None).train, "bench", options=PassOptions(pass_tokens))


def _serve(pipe: Connection, preset: str, tokens: int, pass_tokens: int, threads: int) -> None:
    """Make a step whenever asked; answers: its processor time in s, peak memory in GB."""
    torch.set_num_threads(threads)
    training = _training(preset, tokens, pass_tokens)
    while pipe.recv():
        took_s = processor_s(training.step)
        pipe.send((took_s, peak_bytes() / 1e9))


def measure(
    preset: str, tokens: int, sizes: list[int], rounds: int, threads: int
) -> list[tuple[str, dict[str, float]]]:
    """Rows: seconds, their ratio to the first size's, memory."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for size in sizes:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, preset, tokens, size, threads), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    found: list[list[float]] = [[] for _ in sizes]
    peaks_gb = [0.0 for _ in sizes]
    for turn in range(rounds + 1):
        for index, pipe in enumerate(pipes):
            pipe.send(True)
            took_s, peaks_gb[index] = pipe.recv()
            if turn:  # the first step warms up
                found[index].append(took_s)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    rows = []
    for size, times, peak_gb in zip(sizes, found, peaks_gb, strict=True):
        name = f"{preset}, {tokens} in passes of {size}"
        ratios = [new / old for new, old in zip(times, found[0], strict=True)]
        rows += [(f"{name}: s", spread(times)), (f"{name}: by {sizes[0]}", spread(ratios))]
        rows.append((f"{name}: peak GB", spread([peak_gb])))
    return rows


def main() -> None:
    """Measure, then print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, nargs="+", default=[8192, 4096, 2048, 1024, 512])
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"])
    args = parser.parse_args()
    rows = []
    for preset in args.presets:
        rows += measure(preset, args.tokens, args.passes, args.rounds, args.threads)
        print(table(rows[-3 * len(args.passes) :], ""), flush=True)
    finish("passes", dict(rows), args.json)


if __name__ == "__main__":
    main()
