"""Recovery of a swarm from its syncer's death: at least 10 times `kill -9`, then the victim returns.

    .venv/bin/python scripts/bench/bench_recovery.py [--kills 10] [--nodes 4] [--preset micro] [--json FILE]

T_resume: from the kill to the survivors' next version of each fragment whose syncer was killed. T_back: from
the victim's relaunch to the first version that contains its work again. Others: time between versions of the
fragments whose syncer lived on, within 5 s after a kill, against the quiet time before. Longest gap:
survivors' longest pause between inner steps, in inner steps.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from benchkit import arguments, finish, running_swarm, spread, table, wait_until
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import Line, Swarm, SwarmNode, of_kind, read_log

QUIET_S = 6.0
AFTER_S = 5.0
PATIENCE_S = 30.0


class Watch:
    """Diaries of all nodes, kept up to date."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.lines: dict[str, list[Line]] = {}

    def read(self) -> None:
        """Take in what was written since."""
        for node in self._swarm.nodes:
            self.lines[node.name] = read_log(node.events)

    def offices(self) -> dict[int, str]:
        """Fragment -> name of the node that made its newest version."""
        newest: dict[int, tuple[int, str]] = {}
        for name, lines in self.lines.items():
            for line in of_kind(lines, "publish"):
                number = line.number
                if number > newest.get(line.fragment, (-1, ""))[0]:
                    newest[line.fragment] = (number, name)
        return {fragment: name for fragment, (_, name) in newest.items()}

    def published(self, but: str) -> dict[int, list[tuple[float, int]]]:
        """Fragment -> (time, number) of all versions that nodes other than `but` made, in order of time."""
        found: dict[int, list[tuple[float, int]]] = {}
        for name, lines in self.lines.items():
            if name != but:
                for line in of_kind(lines, "publish"):
                    found.setdefault(line.fragment, []).append((line.mono, line.number))
        return {fragment: sorted(times) for fragment, times in found.items()}


def one_kill(swarm: Swarm, watch: Watch, figures: dict[str, list[float]]) -> None:
    """Kill the node with most offices, wait for all its fragments, bring it back."""
    time.sleep(QUIET_S)
    watch.read()
    offices = watch.offices()
    count = {node.name: sum(1 for name in offices.values() if name == node.name) for node in swarm.nodes}
    victim = max(swarm.nodes, key=lambda node: count[node.name])
    theirs = {fragment for fragment, name in offices.items() if name == victim.name}
    killed_s = victim.kill()

    def resumed() -> bool:
        watch.read()
        after = watch.published(victim.name)
        return all(any(at > killed_s for at, _ in after.get(f, [])) for f in theirs)

    wait_until(resumed, PATIENCE_S)
    time.sleep(max(0.0, killed_s + AFTER_S - time.monotonic()))
    watch.read()
    published = watch.published(victim.name)
    for fragment, times in published.items():
        if fragment in theirs:
            figures["t_resume_s"].append(min(at for at, _ in times if at > killed_s) - killed_s)
            continue
        quiet = [at for at, _ in times if killed_s - QUIET_S < at <= killed_s]
        after = [at for at, _ in times if killed_s - 1 < at <= killed_s + AFTER_S]
        figures["others_quiet_s"] += [b - a for a, b in itertools.pairwise(quiet)]
        figures["others_after_kill_s"] += [b - a for a, b in itertools.pairwise(after)]
    for node in swarm.nodes:
        if not node.alive:
            continue
        for line in of_kind(watch.lines[node.name], "progress"):
            if killed_s - 1 < line.mono < killed_s + AFTER_S:
                figures["gap_in_steps"].append(line.longest_gap_s / line.step_time_s)
    bring_back(swarm, watch, victim, figures)


def bring_back(swarm: Swarm, watch: Watch, victim: SwarmNode, figures: dict[str, list[float]]) -> None:
    """Relaunch; wait until somebody's version counts its work again."""
    relaunched_s = time.monotonic()
    victim.start()

    def merged() -> list[float]:
        watch.read()
        lines = of_kind(watch.lines[victim.name], "contribution")
        return [x.mono for x in lines if x.mono > relaunched_s and x.reason == "merged"]

    wait_until(lambda: bool(merged()), PATIENCE_S * 2)
    figures["t_back_s"].append(min(merged()) - relaunched_s)


def main() -> None:
    """Kill and bring back, then print the figures."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--preset", default="micro")
    args = parser.parse_args()
    names = ("t_resume_s", "t_back_s", "others_quiet_s", "others_after_kill_s", "gap_in_steps")
    figures: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text:
        manifest = for_run(args.preset, "bench-recovery")
        with running_swarm(Path(text), manifest, args.nodes, "--eval-every-s", "100000") as swarm:
            watch = Watch(swarm)
            for index in range(args.kills):
                one_kill(swarm, watch, figures)
                print(f"kill {index + 1}: back after {figures['t_back_s'][-1]:.1f} s", flush=True)
    results: dict[str, Any] = {name: spread(values) for name, values in figures.items()}
    print(
        table(
            [
                ("T_resume, per fragment of the victim", results["t_resume_s"]),
                ("T_back, relaunch to merged work", results["t_back_s"]),
                ("other fragments, between versions, quiet", results["others_quiet_s"]),
                ("other fragments, between versions, killed", results["others_after_kill_s"]),
                ("survivors' longest gap / inner step", results["gap_in_steps"]),
            ],
            "s (last row: steps)",
        )
    )
    finish(
        "recovery", {"preset": args.preset, "kills": args.kills, "nodes": args.nodes, **results}, args.json
    )


if __name__ == "__main__":
    main()
