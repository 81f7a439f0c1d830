"""Do liars among the learners of a run cost the others anything?

    python scripts/bench/bench_attacks.py --who liars [--only LIE,…] [--of 10] [--liars 2]
        [--seeds 1,2,3] [--speeds equal|spread] [--data equal|different] [--out FILE] [--rounds FOLDER]
        [--json FILE] [--seatless [--open-share 0.25]]

Swarms in virtual time (`attacks.lying_swarm`: learners, encodings, merges and outer steps of production, in
one process), of which some learners lie from the first round on. Figure: held-out loss at the end over that
of the honest learners alone, which have made the same inner steps on the same samples. `none`: nobody lies.
What is in --out is not run again; `attacks.lying_table` makes one table of several such files.

With --seatless the liars are a crowd without seats beside the others, which have them. They claim four times
their work, and the schedule follows the tokens that the chains count: so the loss has both harms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec

from attacks.lying_rows import means_of, results, rows_of, shown
from attacks.lying_runs import ALONE, CALM, Result, Trial, play
from benchkit import arguments, finish
from worlds.kinds import Lie

QUICK = Trial(
    attack=ALONE, model="pico", steps=24, inner_steps=4, tokens_per_step=0, heldout_tokens=512, learners=5
)


def options(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options; `attacks` are the runs besides that of the honest alone."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    usual = Trial(attack=ALONE)
    parser.add_argument("--who", choices=("liars",), default="liars")
    parser.add_argument("--only", metavar="LIE", help="some of the lies, by name, separated by commas")
    parser.add_argument(
        "--of", "--learners", dest="learners", type=int, default=usual.learners, help="of which --liars lie"
    )
    parser.add_argument("--liars", type=int, default=usual.liars)
    parser.add_argument("--model", default=usual.model, help="a model of `study.setting`, or a preset")
    parser.add_argument("--steps", type=int, default=usual.steps, help="inner steps of the fastest learner")
    parser.add_argument("--seeds", nargs="+", default=["0"], help="of which the means are")
    parser.add_argument("--speeds", choices=("equal", "spread"), default="equal", help="spread: 1 to 0.2")
    parser.add_argument("--data", choices=("equal", "different"), default="equal", help="of the learners")
    parser.add_argument("--seatless", action="store_true", help="the liars have no seats")
    parser.add_argument(
        "--open-share", type=float, default=usual.open_share, help="of a merge, theirs at most"
    )
    parser.add_argument("--out", type=Path, default=Path("liars.jsonl"), help="results, a line per run")
    parser.add_argument("--rounds", type=Path, metavar="FOLDER", help="write what was sent in each round")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, a processor each")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works")
    parser.add_argument("--list", action="store_true", help="name the lies, and do nothing")
    chosen = parser.parse_args(words)
    known = [CALM, *(lie.value for lie in Lie)]
    chosen.attacks = chosen.only.split(",") if chosen.only else known
    wrong = [name for name in chosen.attacks if name not in known]
    if wrong:
        parser.error(f"no lie: {', '.join(wrong)} (there are: {', '.join(known)})")
    try:
        chosen.seeds = seeds_of(chosen.seeds)
    except ValueError:
        parser.error("--seeds: whole numbers, as in 1,2,3")
    if not 0 < chosen.liars < chosen.learners:
        parser.error("--liars: one at least, and not all learners")
    if not 0 <= chosen.open_share < 1:
        parser.error("--open-share: from 0 to less than 1")
    return chosen


def trials_of(chosen: argparse.Namespace) -> list[Trial]:
    """List all runs, the honest alone of each seed first."""
    base = QUICK
    if not chosen.quick:
        base = Trial(attack=ALONE, model=chosen.model, steps=chosen.steps, learners=chosen.learners)
    changes = {"liars": chosen.liars, "speeds": chosen.speeds, "data": chosen.data}
    if chosen.seatless:
        changes |= {"seatless": True, "open_share": chosen.open_share}
    return [
        msgspec.structs.replace(base, attack=attack, seed=seed, **changes)
        for seed in chosen.seeds
        for attack in (ALONE, *chosen.attacks)
    ]


def made_of(wanted: Sequence[Trial], rounds: Path | None, jobs: int) -> Iterator[Result]:
    """Results of these runs, in the order in which they come."""
    if jobs == 1:
        yield from (play(trial, rounds) for trial in wanted)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        runs = [pool.submit(play, trial, rounds) for trial in wanted]
        yield from (made.result() for made in as_completed(runs))


def seeds_of(words: Sequence[str]) -> list[int]:
    """Read seeds: `1 2 3` and `1,2,3` are the same."""
    return [int(word) for each in words for word in each.split(",") if word]


def main(words: Sequence[str]) -> int:
    """Run what is not there yet, print, write."""
    chosen = options(words)
    if chosen.list:
        print("\n".join([f"{CALM:20}nobody lies", *(f"{lie.value:20}{lie.text}" for lie in Lie)]))
        return 0
    trials, done = trials_of(chosen), results(chosen.out)
    if chosen.rounds is not None:
        chosen.rounds.mkdir(parents=True, exist_ok=True)
    wanted = [] if chosen.table else [trial for trial in trials if trial.key not in done]
    for made in made_of(wanted, chosen.rounds, chosen.jobs):
        with chosen.out.open("a", encoding="utf-8") as file:
            file.write(msgspec.json.encode(made).decode() + "\n")
        words_of = f"{made.trial.attack}, seed {made.trial.seed}: {made.loss:.4f}, {made.cpu_s:.0f} CPU-s"
        print(words_of, file=sys.stderr, flush=True)
    runs = rows_of(trials, results(chosen.out))
    rows = means_of(runs)
    print(shown(rows))
    finish("attacks", {"rows": msgspec.to_builtins(rows), "runs": msgspec.to_builtins(runs)}, chosen.json)
    return 0
