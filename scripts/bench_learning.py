#!/usr/bin/env python3
"""Does a swarm learn as well as one big machine?

Suites of comparisons (p2pdiloco.study.suites) between swarms in virtual time (p2pdiloco.study.virtual:
learners, encodings, merges and outer steps of production, in one process), one data-parallel process with the
same batch and tokens, and an oracle: synchronous DiLoCo without delay, faults or compression. Figure: loss of
the global parameters at the end, held-out, in nats per byte (per image). What is in --out is not run again.

    .venv/bin/python scripts/bench_learning.py parity codecs [--model mini] [--steps 700] [--seeds 0 1 2]
    .venv/bin/python scripts/bench_learning.py parity --table      # prints what is there, runs nothing
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec
import torch

from p2pdiloco.study.play import play
from p2pdiloco.study.setting import HELDOUT_TOKENS, MODELS, Outcome, Setting
from p2pdiloco.study.suites import MODEL_RATE, SUITES, every, settings_of

QUICK = Setting(model="pico", steps=24, inner_steps=4, learners=2, momentum_warmup=2, warmup=5, delay=0.5)
QUICK_HELDOUT_TOKENS = 512


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--model", default="mini", help=f"{', '.join(MODELS)}, or a preset")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=700, help="inner steps of a usual learner")
    parser.add_argument("--inner-steps", type=int, default=24, help="H, where a suite does not say")
    parser.add_argument("--inner-rate", type=float, default=0.0, help="0: the model's best of `rates`")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("learning.jsonl"), help="results, a line per run")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    return parser.parse_args(arguments)


def base_of(options: argparse.Namespace) -> Setting:
    """What the suites vary."""
    if options.quick:
        return QUICK
    base = Setting(
        model=options.model,
        learners=options.learners,
        steps=options.steps,
        inner_rate=options.inner_rate or MODEL_RATE.get(options.model, 0.0),
        codec=options.codec,
    )
    return every(base, options.inner_steps)


def results(path: Path) -> dict[str, Outcome]:
    """Of earlier runs, by setting."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    found = [msgspec.json.decode(line, type=Outcome) for line in lines if line.endswith("\n")]
    return {outcome.setting.key: outcome for outcome in found}


def run(options: argparse.Namespace, base: Setting) -> None:
    """Everything that is not there yet, a line each."""
    done = results(options.out)
    for setting in settings_of(options.suites, base, options.seeds):
        if setting.key in done:
            continue
        outcome = play(setting, QUICK_HELDOUT_TOKENS if options.quick else HELDOUT_TOKENS)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(msgspec.json.encode(outcome).decode() + "\n")
        print(f"{setting.key}: {outcome.loss:.4f}, {outcome.cpu_s:.0f} CPU-s", file=sys.stderr, flush=True)


def table(suite: str, base: Setting, seeds: list[int], done: dict[str, Outcome]) -> str:
    """Losses of a suite, and differences to its first row: mean and spread over the seeds that have both."""
    head = (
        "| | against the first | spread | held-out loss | merges | contributors |\n|---|---|---|---|---|---|"
    )
    rows: dict[str, list[tuple[float, Outcome]]] = {}
    for seed in seeds:
        cases = SUITES[suite](msgspec.structs.replace(base, seed=seed))
        first = done.get(cases[0].setting.key)
        for case in cases:
            found = done.get(case.setting.key)
            if found is not None and first is not None:
                rows.setdefault(case.name, []).append((100 * (found.loss / first.loss - 1), found))
    body = [head]
    for name, runs in rows.items():
        differences, outcomes = [one[0] for one in runs], [one[1] for one in runs]
        mean = statistics.mean(one.loss for one in outcomes)
        words = f"{min(differences):+.2f} to {max(differences):+.2f} %" if len(runs) > 1 else "one seed"
        merges = f"{outcomes[0].merges:.0f} | {outcomes[0].contributors:.2f}" if outcomes[0].merges else " | "
        body.append(f"| {name} | {statistics.mean(differences):+.2f} % | {words} | {mean:.4f} | {merges} |")
    return f"{suite} ({base.model}, {base.steps} steps)\n" + "\n".join(body)


def main(arguments: list[str] | None = None) -> int:
    """Run, then print."""
    options = options_of(arguments)
    torch.set_num_threads(1)
    base = base_of(options)
    if not options.table:
        run(options, base)
    done = results(options.out)
    print("\n\n".join(table(suite, base, options.seeds, done) for suite in options.suites))
    return 0


if __name__ == "__main__":
    sys.exit(main())
