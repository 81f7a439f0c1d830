#!/usr/bin/env python3
"""Does a swarm learn as well as one big machine?

Suites of comparisons (study.suites) between swarms in virtual time (study.virtual:
learners, encodings, merges and outer steps of production, in one process), one data-parallel process with the
same batch and tokens, and an oracle: synchronous DiLoCo without delay, faults or compression. Figure: loss of
the global parameters at the end, held-out, in nats per byte (per image). What is in --out is not run again.

    python scripts/bench/study/bench_learning.py parity codecs [--model mini] [--steps 700] [--jobs 2]
    python scripts/bench/study/bench_learning.py parity --table      # prints what is there, runs nothing
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import msgspec

from study.play import play_line
from study.setting import HELDOUT_TOKENS, MODELS, Outcome, Setting
from study.suites import SUITES, every, of_optimizer, settings_of, usual_rate

Runs = dict[int, Outcome]
"""Results of one row, by seed."""
Rows = dict[str, Runs]
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
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"), help="everybody's")
    parser.add_argument("--beta1", type=float, default=0.9, help="of the inner AdamW, everybody's")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="of a learner; 0: the model's")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="of passes on CPUs")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("learning.jsonl"), help="results, a line per run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, a processor each")
    parser.add_argument("--device", default="cpu", help="of the models, as of a node")
    parser.add_argument("--curve", action="store_true", help="print losses on the way, too")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    return parser.parse_args(arguments)


def base_of(options: argparse.Namespace) -> Setting:
    """Make the setting that the suites vary."""
    if options.quick:
        return QUICK
    base = Setting(
        model=options.model,
        learners=options.learners,
        steps=options.steps,
        inner_rate=options.inner_rate or usual_rate(options.model, options.optimizer),
        beta1=options.beta1,
        precision=options.precision,
        tokens_per_step=options.tokens_per_step,
        codec=options.codec,
    )
    return every(of_optimizer(base, options.optimizer), options.inner_steps)


def results(path: Path) -> dict[str, Outcome]:
    """Read the results of earlier runs, by setting."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    found = [msgspec.json.decode(line, type=Outcome) for line in lines if line.endswith("\n")]
    return {outcome.setting.key: outcome for outcome in found}


def run(options: argparse.Namespace, base: Setting) -> None:
    """Everything that is not there yet, a line each."""
    done = results(options.out)
    wanted = [s for s in settings_of(options.suites, base, options.seeds) if s.key not in done]
    heldout_tokens = QUICK_HELDOUT_TOKENS if options.quick else HELDOUT_TOKENS
    for line in made_of(wanted, heldout_tokens, options.device, options.jobs):
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line.decode() + "\n")
        made = msgspec.json.decode(line, type=Outcome)
        print(f"{made.setting.key}: {made.loss:.4f}, {made.cpu_s:.0f} CPU-s", file=sys.stderr, flush=True)


def made_of(wanted: list[Setting], heldout_tokens: int, device: str, jobs: int) -> Iterator[bytes]:
    """Outcomes as lines, in the order in which they come."""
    lines = [msgspec.json.encode(setting) for setting in wanted]
    if jobs == 1:
        yield from (play_line(line, heldout_tokens, device) for line in lines)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        runs = [pool.submit(play_line, line, heldout_tokens, device) for line in lines]
        failures = []
        for made in as_completed(runs):
            failure = made.exception()
            if failure is None:
                yield made.result()
            else:
                failures.append(failure)
    if failures:  # only now: what the others took long for is kept
        raise failures[0]


def mean_loss(runs: Runs) -> float:
    """Mean loss of all seeds that were run."""
    return statistics.mean(made.loss for made in runs.values())


def reference(rows: Rows, kind: str, name: str) -> Runs | None:
    """Choose the row that another is held against.

    Of a kind's rows with its inner optimizer and learners (of oracles: and its H) that have most seeds, it is
    the one with the least loss. A rate that was tried with one seed may be lucky. Muon's momentum is a
    setting of it, as the rate is: data parallel's best is not a swarm's.
    """

    def terms(runs: Runs) -> tuple[str | float, ...]:
        its = next(iter(runs.values())).setting
        period = 0 if kind == "parallel" else its.inner_steps
        return its.kind, its.optimizer, its.beta1, its.learners, period

    its_kind, *alike = terms(rows[name])
    if its_kind == "parallel" and kind == "oracle":
        return None
    found = [runs for runs in rows.values() if terms(runs) == (kind, *alike)]
    most = max((len(runs) for runs in found), default=0)
    return min((runs for runs in found if len(runs) == most), key=mean_loss, default=None)


def difference(runs: Runs, against: Runs | None) -> str:
    """Per cent, mean and spread over the seeds that both have."""
    both = sorted(runs.keys() & against.keys()) if against else []
    if against is None or not both:
        return ""
    found = [100 * (runs[seed].loss / against[seed].loss - 1) for seed in both]
    words = f"{min(found):+.2f} to {max(found):+.2f}" if len(found) > 1 else "one seed"
    return f"{statistics.mean(found):+.2f} % ({words})"


def table(suite: str, base: Setting, seeds: list[int], done: dict[str, Outcome], curve: bool = False) -> str:
    """Losses of a suite, held against the best data-parallel process of the same inner optimizer and learners
    (where a suite has none at all, its first row) and the best such oracle. `curve`: the losses on the way,
    too."""
    rows: Rows = {}
    for seed in seeds:
        for case in SUITES[suite](msgspec.structs.replace(base, seed=seed)):
            if (found := done.get(case.setting.key)) is not None:
                rows.setdefault(case.name, {})[seed] = found
    oracles = _has(rows, "oracle")
    parallels = _has(rows, "parallel")
    head = ["", "held-out loss", "against data parallel" if parallels else "against the first"]
    head += ["against the oracle"] * oracles + ["merges", "contributors"] + ["on the way"] * curve
    body = [head, ["---"] * len(head)]
    for name, runs in rows.items():
        last = next(iter(runs.values()))
        first = reference(rows, "parallel", name) if parallels else next(iter(rows.values()))
        cells = [name, f"{mean_loss(runs):.4f}", difference(runs, first)]
        cells += [difference(runs, reference(rows, "oracle", name))] * oracles
        cells += [f"{last.merges:.0f}", f"{last.contributors:.2f}"] if last.merges else ["", ""]
        if curve:
            points = zip(*(made.curve for made in runs.values()), strict=True)
            means = [statistics.mean(loss for _, loss in at) for at in points]
            cells.append(", ".join(f"{mean:.3f}" for mean in means))
        body.append(cells)
    lines = ["| " + " | ".join(cells) + " |" for cells in body]
    return f"{suite} ({base.model}, {base.learners} learners, {base.steps} steps)\n" + "\n".join(lines)


def _has(rows: Rows, kind: str) -> bool:
    return any(made.setting.kind == kind for runs in rows.values() for made in runs.values())


def main(arguments: list[str] | None = None) -> int:
    """Run, then print."""
    options = options_of(arguments)
    base = base_of(options)
    if not options.table:
        run(options, base)
    done = results(options.out)
    print("\n\n".join(table(suite, base, options.seeds, done, options.curve) for suite in options.suites))
    return 0


if __name__ == "__main__":
    sys.exit(main())
