#!/usr/bin/env python3
"""Do real nodes learn what the swarm in virtual time learns, and what one big machine does?

For every seed: a data-parallel process, a swarm in virtual time (both as in bench_learning.py, whose --out
may be given), and real nodes: a bootstrap and so many daemons with their learners, on loopback, over the DHT,
ended when they have trained as many tokens together. Figure: held-out loss of the global parameters that they
saved, whose bytes are compared between all of them. What is in --out is not run again.

    python scripts/bench/study/bench_nodes.py [--model mini] [--steps 700] [--learners 4] [--step-s 0.1]
    .venv/bin/python scripts/bench/study/bench_nodes.py --speeds 1 1 1 0.2      # one is five times slower
    python scripts/bench/study/bench_nodes.py --faults-per-hour 125   # kill -9 of any node, started again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import msgspec
import torch

from benchkit import running_swarm
from p2pdiloco.demo.judge import SavedNode, read_saved
from p2pdiloco.demo.swarm import Chronicle, DemoFailed, Swarm, Tail, conflicts
from p2pdiloco.learner.loop import evaluate, heldout_batch
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import scatter
from study.bench_learning import difference, made_of, mean_loss, results
from study.data import data_of
from study.play import faults_of
from study.setting import HELDOUT_TOKENS, MODELS, Outcome, Setting
from study.suites import PARALLEL_RATES, every, of_optimizer, parallel, usual_rate

replace = msgspec.structs.replace
POLL_S = 0.1
SAID_EVERY_S = 1.0
PATIENCE = 10
"""Times the time that a run should take, until it is given up."""
LEAST_PATIENCE_S = 300.0


class Tokens:
    """Tokens that the nodes of a swarm have trained, in all their lives."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._earlier: Counter[str] = Counter()
        self._pace: dict[str, tuple[float, float]] = {}

    def heard(self, name: str, total: int, per_s: float = 0.0, at_s: float = 0.0) -> None:
        """A node's learner says how much it has trained, how fast, and when. A node that was killed goes on
        from what it had saved, and counts on from there: what it had trained beyond was trained all the
        same."""
        last = self._last.get(name, 0)
        self._earlier[name] += max(0, last - total)
        self._last[name] = total
        self._pace[name] = per_s, at_s

    @property
    def sum(self) -> int:
        """Tokens of all nodes, as far as they have said."""
        return sum(self._last.values()) + self._earlier.total()

    def by_now(self, now_s: float) -> float:
        """Tokens with those that they should have trained since they last said something, a second ago at
        most."""
        since = [per_s * min(SAID_EVERY_S, now_s - at_s) for per_s, at_s in self._pace.values()]
        return self.sum + sum(since)


class Nodes:
    """One swarm of real nodes, from its first token to its last."""

    def __init__(self, setting: Setting, swarm: Swarm) -> None:
        names = {node.peer: node.name for node in swarm.nodes}
        self.chronicle = Chronicle(setting.manifest().sync.fragments, names)
        self.tokens = Tokens()
        self.deaths = 0
        self._setting, self._swarm = setting, swarm
        self._tails = [Tail(node.events, node.name) for node in swarm.nodes]
        self._faults = list(faults_of(setting))
        self._back_at_s: dict[str, float] = {}

    def train(self) -> None:
        """Until as many tokens were trained as the schedule has. Raises: DemoFailed, TimeoutError."""
        wanted = self._setting.manifest().inner.schedule_tokens
        began_s, usual_s = time.monotonic(), self._setting.steps * self._setting.step_s
        until_s = began_s + max(LEAST_PATIENCE_S, PATIENCE * usual_s)
        while self.tokens.by_now(time.monotonic()) < wanted:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.tokens.sum} tokens of {wanted} were trained in time")
            self._strike(time.monotonic() - began_s)
            for node in self._swarm.nodes:
                if not node.alive and node.name not in self._back_at_s:
                    raise DemoFailed(f"{node.name} ended by itself: {node.last_words()}")
            time.sleep(POLL_S)
            self.read()

    def read(self) -> None:
        """Read what the diaries have gained."""
        for tail in self._tails:
            for line in tail.lines():
                self.chronicle.feed(line)
                if line.kind == "progress":
                    per_s = line.tokens_per_s or 0.0
                    self.tokens.heard(line.node, line.tokens_total, per_s, line.mono)

    def _strike(self, since_s: float) -> None:
        """Kill whose time has come, start who was away for long enough."""
        step_s = self._setting.step_s
        for name in [name for name, at_s in self._back_at_s.items() if at_s <= since_s]:
            self._swarm.node(name).start()
            del self._back_at_s[name]
        while self._faults and self._faults[0].at * step_s <= since_s:
            fault = self._faults.pop(0)
            node = self._swarm.nodes[fault.learner]
            if node.alive:
                node.kill()
                self.deaths += 1
                self._back_at_s[node.name] = since_s + fault.away * step_s


def play_nodes(setting: Setting) -> Outcome:
    """Real processes. Raises: DemoFailed (a node ended by itself, or they disagree), TimeoutError."""
    manifest, speeds = setting.manifest(), setting.speeds or (1.0,) * setting.learners
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-nodes-") as name:
        folder = Path(name)
        # As what they are compared with, on processors that are fast at bf16, too.
        precision = ("--precision", "auto" if setting.precision == "bf16" else "fp32")
        flags = [["--min-step-s", f"{setting.step_s / speed:.4f}"] for speed in speeds]
        with running_swarm(
            folder, manifest, setting.learners, "--eval-every-s", "100000", *precision, each=flags
        ) as swarm:
            nodes = Nodes(setting, swarm)
            nodes.train()
        nodes.read()
        saved = [read_saved(manifest, node.name, node.data_dir) for node in swarm.nodes]
    disagreements, compared = conflicts([one.holdings for one in saved])
    if disagreements or nodes.chronicle.wrong_digests() or any(one.unsound for one in saved):
        raise DemoFailed(f"the nodes do not agree: {disagreements or 'bytes differ from their digests'}")
    newest = max(saved, key=lambda one: sum(max(chain) for chain in one.holdings.versions.values()))
    seen = nodes.chronicle
    print(
        f"  {compared} saved versions compared, {nodes.deaths} deaths, inner steps "
        f"{', '.join(str(trace.inner_step) for trace in seen.nodes.values())}",
        file=sys.stderr,
    )
    loss = loss_of(setting, newest)
    return Outcome(
        setting=setting,
        loss=loss,
        curve=[(setting.steps, loss)],
        merges=seen.updates() / manifest.sync.fragments,
        contributors=sum(line.contributors for line in seen.merges) / max(1, len(seen.merges)),
        tokens=nodes.tokens.sum,
    )


def loss_of(setting: Setting, saved: SavedNode) -> float:
    """Held-out, of the same samples as in virtual time."""
    task = task_of(setting.manifest())
    model = task.model()
    parameters = named_parameters(model)
    for layout in saved.vault.layouts:
        scatter(saved.vault.result(layout.index), layout, parameters)
    return evaluate(task, model, heldout_batch(task, data_of(task).heldout, HELDOUT_TOKENS)).loss


def rows_of(options: argparse.Namespace, seed: int) -> dict[str, Setting]:
    """List what is compared, the reference first."""
    rate = options.inner_rate or usual_rate(options.model, options.optimizer)
    base = Setting(
        model=options.model,
        learners=options.learners,
        steps=options.steps,
        seed=seed,
        inner_rate=rate,
        beta1=options.beta1,
        tokens_per_step=options.tokens_per_step,
        speeds=tuple(options.speeds),
        faults_per_hour=options.faults_per_hour,
    )
    swarm = every(of_optimizer(base, options.optimizer), options.inner_steps)
    nodes = replace(swarm, kind="nodes", step_s=options.step_s)
    if swarm.faults_per_hour:
        swarm = replace(swarm, step_s=options.step_s, ends="tokens")  # as those of real nodes
    its = options.parallel_rate or PARALLEL_RATES[0] * swarm.manifest().inner.learning_rate
    pace = sum(options.speeds or [1.0] * options.learners) / options.learners
    return {
        "data parallel": replace(parallel(swarm), inner_rate=its, steps=round(options.steps * pace)),
        "swarm in virtual time": swarm,
        "real nodes": nodes,
    }


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini", help=f"{', '.join(MODELS)}, or a preset")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=700, help="inner steps of a usual learner")
    parser.add_argument("--inner-steps", type=int, default=24, help="H")
    parser.add_argument("--inner-rate", type=float, default=0.0, help="of swarms; 0: the model's")
    parser.add_argument("--parallel-rate", type=float, default=0.0, help="of data parallel; 0: twice that")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"), help="everybody's")
    parser.add_argument("--beta1", type=float, default=0.9, help="of the inner AdamW, everybody's")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="of a learner; 0: the model's")
    parser.add_argument("--step-s", type=float, default=0.1, help="least seconds of an inner step")
    parser.add_argument("--speeds", type=float, nargs="+", default=[], help="of each node; default: all 1")
    parser.add_argument("--faults-per-hour", type=float, default=0.0, help="kill -9, of all nodes together")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("learning.jsonl"), help="results, a line per run")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    options = parser.parse_args(arguments)
    if options.speeds and len(options.speeds) != options.learners:
        parser.error(f"--speeds needs {options.learners} numbers, one for each learner")
    return options


def run(options: argparse.Namespace) -> None:
    """Everything that is not there yet, a line each."""
    for setting in [setting for seed in options.seeds for setting in rows_of(options, seed).values()]:
        if setting.key in results(options.out):
            continue
        if setting.kind == "nodes":
            line = msgspec.json.encode(play_nodes(setting))
        else:
            (line,) = made_of([setting], HELDOUT_TOKENS, "cpu", 1)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line.decode() + "\n")
        print(f"{setting.key}: {msgspec.json.decode(line, type=Outcome).loss:.4f}", file=sys.stderr)


def table(options: argparse.Namespace) -> str:
    """Every row against the first two."""
    done, rows = results(options.out), dict[str, dict[int, Outcome]]()
    for seed in options.seeds:
        for name, setting in rows_of(options, seed).items():
            if setting.key in done:
                rows.setdefault(name, {})[seed] = done[setting.key]
    lines = [
        "| | held-out loss | against data parallel | against virtual time | merges | contributors | tokens |"
    ]
    lines.append("|---" * 7 + "|")
    for name, runs in rows.items():
        against = [difference(runs, rows.get(other)) for other in ("data parallel", "swarm in virtual time")]
        last = next(iter(runs.values()))
        counts = f"{last.merges:.0f} | {last.contributors:.2f} | {last.tokens}"
        lines.append(f"| {name} | {mean_loss(runs):.4f} | {against[0]} | {against[1]} | {counts} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, then print."""
    options = options_of(arguments)
    torch.set_num_threads(1)
    if not options.table:
        run(options)
    print(table(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
