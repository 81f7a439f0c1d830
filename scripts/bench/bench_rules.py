"""Rules about thin links, taken away one by one: `bench_links` in virtual time, with four nodes.

    .venv/bin/python scripts/bench/bench_rules.py [--cell slow ...] [--seeds 16] [--seconds 400]

The run is that of `bench_links`: H = 11 inner steps of 0.97 s, tau 6, three fragments of 1.9 MB each way,
terms of four versions, 50 ms round trip. A cell is the four nodes' Mbit/s; the first node begins the run.
Seeds draw clocks, disks and delays; the same seeds are played with every rule.

* merges: versions of a fragment over those that H allows.
* participation: contributors of a merge over nodes. contributions: the product of both.
* in step: seeds in which afterwards all nodes come to one version, with work of everybody in it.
* silent: times that a member took another for silent. All nodes live.
* gain: what the rule adds to contributions, to seeds in step and to silent, with its standard error: means of
  the differences seed by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutation_kit import Patch
from mutation_links import a_thin_uplink_is_as_fit_as_any
from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco.core.round import ClosingCalls, ClosingWindow
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, draw_plan, genesis_version
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

MBIT_BYTES = 125_000.0
STEP_S = 0.97
INNER_STEPS = 11
FRAGMENTS = 3
PAYLOAD_BYTES = 1_900_000
SETTLE_S = 400.0
CELLS = {
    "slow": (50, 50, 50, 2),
    "slow first": (2, 50, 50, 50),
    "3": (3, 3, 3, 3),
    "1": (1, 1, 1, 1),
}


WITHOUT: dict[str, Callable[[Patch], None]] = {
    "as it is": lambda patch: None,
    "thin uplinks hold offices": a_thin_uplink_is_as_fit_as_any,
    "payloads are not waited for": lambda patch: patch.set(ClosingWindow, "_waits_on", lambda *_: False),
    "syncers outrun others": lambda patch: patch.set(ClosingCalls, "outruns", lambda *_: False),
}


def homes(rates: tuple[int, ...], seconds: float, seed: int) -> WorldPlan:
    """The run on these links (Mbit/s)."""
    plan = draw_plan(seed, "calm", len(rates))
    config = msgspec.structs.replace(
        plan.config,
        inner_steps=INNER_STEPS,
        delay_steps=6,
        quorum=1,
        grace_fraction=0.5,
        grace_cap_s=30.0,
        term_versions=4,
        log_versions=8,
        max_base_age_versions=6,
        tokens_per_step=64,
        genesis_versions=tuple(genesis_version(f) for f in range(FRAGMENTS)),
        max_payload_bytes=(PAYLOAD_BYTES,) * FRAGMENTS,
    )
    nodes = tuple(
        dataclasses.replace(spec, step_time_s=STEP_S, write_s=0.02, bandwidth_bytes_s=rate * MBIT_BYTES)
        for spec, rate in zip(plan.nodes, rates, strict=True)
    )
    return dataclasses.replace(
        plan,
        config=config,
        nodes=nodes,
        mix=dataclasses.replace(plan.mix, latency_s=(0.02, 0.03)),
        joins_s=tuple(0.3 * index for index in range(len(rates))),
        faults=False,
        faults_until_s=seconds,
        settle_s=SETTLE_S,
        hidden=(),
    )


def played(rates: tuple[int, ...], seconds: float, seed: int) -> dict[str, float]:
    """One seed's figures."""
    world = World(homes(rates, seconds, seed))
    made: dict[bytes, int] = {}
    heads = [0] * FRAGMENTS

    def saw(_host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion) and world.clock.now < seconds:
            header = effect.version.header
            made[header.digest()] = len(header.contributors)
            heads[header.fragment] = max(heads[header.fragment], header.number)

    world.on_effect = saw
    result = world.run()
    merges = sum(heads) / (FRAGMENTS * seconds / (INNER_STEPS * STEP_S))
    participation = sum(made.values()) / max(1, len(made)) / len(rates)
    return {
        "merges": 100 * merges,
        "participation": 100 * participation,
        "contributions": 100 * merges * participation,
        "in step": 100.0 * result.ok,
        "silent": result.records.get("silent", 0),
    }


def gain(with_rule: list[dict[str, float]], without: list[dict[str, float]], key: str) -> str:
    """Work out what the rule adds to a figure: mean and standard error of the differences seed by seed."""
    differences = [a[key] - b[key] for a, b in zip(with_rule, without, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return f"{statistics.fmean(differences):+7.2f} ± {error:.2f}"


def main(arguments: list[str]) -> None:
    """A line for every cell and rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", action="append", choices=list(CELLS))
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=400.0)
    asked: Any = parser.parse_args(arguments)
    print(
        f"{'cell':12}{'without':30}{'merges':>10}{'particip.':>11}{'contrib.':>10}{'in step':>9}{'silent':>8}"
        f"{'gain: contrib.':>17}{'in step':>17}{'silent':>17}"
    )
    for cell in asked.cell or CELLS:
        as_it_is: list[dict[str, float]] = []
        for name, apply in WITHOUT.items():
            with Patch() as patch:
                apply(patch)
                found = [played(CELLS[cell], asked.seconds, seed) for seed in range(asked.seeds)]
            as_it_is = as_it_is or found
            mean = {key: sum(figures[key] for figures in found) / len(found) for key in found[0]}
            print(
                f"{cell:12}{name:30}{mean['merges']:8.0f} %{mean['participation']:9.0f} %"
                f"{mean['contributions']:8.1f} %{mean['in step']:7.0f} %{mean['silent']:8.1f}"
                + "".join(
                    f"{gain(as_it_is, found, key):>17}" for key in ("contributions", "in step", "silent")
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
