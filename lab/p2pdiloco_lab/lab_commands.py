"""`p2pdiloco simulate` and `p2pdiloco chaos`: the lab's commands.

Only flags live here. Bodies import what they need when they are called. A failing seed of `simulate` is a bug
report.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from p2pdiloco.cli.options import FILE, Number, build, example, setting
from p2pdiloco.errors import UserError
from p2pdiloco_lab.chaos.chaos_settings import ChaosSettings

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.seed_report import SeedResult

MOST_DRAWN = 64
"""Nodes of a world with faults. Larger ones are calm, and measured."""
MIX_NAMES = (
    "calm",
    "churn",
    "colluders",
    "crowd",
    "datacentre",
    "liars",
    "old",
    "partition",
    "quiet",
    "storm",
    "strangers",
    "usurpers",
    "wan",
)


@click.command("simulate", epilog=example("simulate"))
@click.option("--seed", type=click.IntRange(min=0), default=None, help="First seed (default 0).")
@click.option("--seeds", type=click.IntRange(min=1), default=None, help="How many seeds from there on.")
@click.option(
    "--nodes",
    type=click.IntRange(1, 16384),
    default=None,
    help=f"Nodes at start (default: drawn). Above {MOST_DRAWN}: one calm world, and what it costs a node.",
)
@click.option("--mix", type=click.Choice(MIX_NAMES), default=None, help="Kind of faults (default: drawn).")
@click.option("--vectors", is_flag=True, help="Learners really train a small model; reports its loss.")
@click.option("--bulk", is_flag=True, help="The daemon's transfers in a virtual network, without a core.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, help="Processes that share the seeds.")
@click.option("--trace", is_flag=True, help="Print every decision with its reason, and every fault.")
@click.option("--verbose", is_flag=True, help="With --trace: messages, events and effects too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end instead of lines.")
def simulate(
    seed: int | None,
    seeds: int | None,
    nodes: int | None,
    mix: str | None,
    vectors: bool,
    bulk: bool,
    jobs: int,
    trace: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Run the protocol under a virtual clock, a faulty network, crashes and restarts.

    The same core as in a real node; fragments are histories, so that "nothing lost, nothing twice" is
    checked exactly. With --vectors they are small real vectors too, made by the code that merges and steps
    in a real node, and "equal state" means equal bytes. With --bulk the daemon's own code moves updates,
    states and contributions, while links, peers and holders fail. Exit status 1 if a rule was broken or the
    swarm did not recover.
    """
    first = seed or 0
    count = seeds if seeds is not None else (1 if seed is not None else 100)
    if bulk:
        if vectors or verbose or (nodes is not None and not 2 <= nodes <= MOST_DRAWN):
            raise UserError(
                f"bulk worlds have 2 to {MOST_DRAWN} members, and no core to be verbose about",
                "leave out --vectors and --verbose",
            )
        return _bulk(range(first, first + count), mix, nodes, jobs, trace, as_json)
    if nodes is not None and nodes > MOST_DRAWN:
        if mix or vectors or trace or verbose or jobs > 1 or (seeds or 1) > 1:
            raise UserError(
                f"above {MOST_DRAWN} nodes there is one calm world, and nothing but its figures",
                "leave out --seeds, --mix, --vectors, --jobs, --trace and --verbose",
            )
        return _measure(nodes, seed or 0, as_json)
    # Imported here so that --help does not pay for it.
    from p2pdiloco_lab.seed_pool import arithmetic, play
    from p2pdiloco_lab.simulation.seed_report import SeedsSummary, rate
    from p2pdiloco_lab.simulation.sim_world import run_seed

    summary = SeedsSummary()
    started_s = time.perf_counter()
    last: SeedResult | None = None
    if trace or verbose:
        make = arithmetic(vectors)
        seeds_traced = range(first, first + count)
        played = ((run_seed(s, mix, nodes, click.echo, verbose, make), 0.0) for s in seeds_traced)
    else:
        played = play(range(first, first + count), mix, nodes, jobs, vectors)  # type: ignore[assignment]
    for last, seconds in played:
        summary.add(last, seconds)
        if not last.ok and not as_json:
            _tell_failure(last, nodes, mix, with_tail=not trace)
    elapsed_s = time.perf_counter() - started_s
    if as_json:
        click.echo(json.dumps(summary.as_dict(elapsed_s, nodes, mix)))
    else:
        if count == 1 and last is not None:
            click.echo(f"seed {first}: digest {last.digest}, {last.virtual_s} virtual seconds")
        click.echo(summary.sentence(rate(summary.seeds, elapsed_s)))
    return 1 if summary.failed else 0


def _bulk(seeds: range, mix: str | None, members: int | None, jobs: int, trace: bool, as_json: bool) -> int:
    """Play seeds of bulk worlds. Exit status 1 if one of them failed."""
    from p2pdiloco_lab.bulk_world.bulk_plan import BulkSummary, replay_command
    from p2pdiloco_lab.bulk_world.bulk_world import run_bulk_seed
    from p2pdiloco_lab.seed_pool import play_bulk

    summary, started_s = BulkSummary(), time.perf_counter()
    traced = (run_bulk_seed(seed, mix, members, click.echo) for seed in seeds)
    for result in traced if trace else play_bulk(seeds, mix, members, jobs):
        summary.add(result)
        if not result.ok and not as_json:
            if not trace:
                click.echo("\n".join(result.tail))
            click.echo(f"seed {result.seed} ({result.mix}, {result.members} members): ", nl=False)
            click.echo(f"{result.detail or result.stuck}\n  {replay_command(result, members, mix)}")
        if len(seeds) == 1 and not as_json:
            click.echo(f"seed {result.seed}: digest {result.digest}, {result.virtual_s} virtual seconds")
    elapsed_s = time.perf_counter() - started_s
    if as_json:
        click.echo(json.dumps(summary.as_dict(elapsed_s, members, mix)))
    else:
        click.echo(summary.sentence(elapsed_s))
    return 1 if summary.failed else 0


def _measure(nodes: int, seed: int, as_json: bool) -> int:
    """A large calm world. Exit status 1 if a rule was broken, or no update of it reached the nodes."""
    from msgspec import to_builtins

    from p2pdiloco_lab.seed_pool import rare_collections
    from p2pdiloco_lab.simulation.scale import run_scale
    from p2pdiloco_lab.simulation.seed_report import Violation, rate

    rare_collections()
    started_s = time.perf_counter()
    values: dict[str, Any] = {"seeds": 1, "violations": 0, "stuck": 0}
    try:
        report = run_scale(nodes, seed, each=None if as_json else lambda text: click.echo(text, err=True))
        values.update(to_builtins(report), stuck=int(not report.updates))
    except Violation as broken:
        values.update(nodes=nodes, violations=1, detail=str(broken))
    elapsed_s = time.perf_counter() - started_s
    values.update(seconds=round(elapsed_s, 1), seeds_per_minute=rate(1, elapsed_s))
    if as_json:
        click.echo(json.dumps(values))
    else:
        click.echo("\n".join(f"{name:<20} {value}" for name, value in values.items()))
    return 1 if values["violations"] or values["stuck"] else 0


def _tell_failure(result: SeedResult, nodes: int | None, mix: str | None, with_tail: bool) -> None:
    from p2pdiloco_lab.simulation.seed_report import replay_command

    if with_tail:
        click.echo("\n".join(result.tail))
    click.echo(f"seed {result.seed} ({result.mix}, {result.nodes} nodes): {result.detail or result.stuck}")
    click.echo(f"  {replay_command(result, nodes, mix)}")


# `p2pdiloco chaos`.

CHAOS = partial(setting, ChaosSettings)


@click.command(epilog=example("chaos"))
@CHAOS("--nodes", type=click.IntRange(2, 64), help="Nodes, beside the bootstrap.")
@CHAOS("--preset", help="Run to train.")
@CHAOS("--minutes", type=Number(min=0.1, max=1e5), help="Minutes of training under faults.")
@CHAOS("--seconds", type=Number(min=0, max=1e6), help="Instead of --minutes, if positive.")
@CHAOS("--faults-per-hour", type=Number(min=1, max=1e5), help="At least so many.")
@CHAOS("--seed", type=click.IntRange(min=0), help="Of the schedule of faults.")
@click.option(
    "--compare/--no-compare",
    default=True,
    envvar="P2PDILOCO_COMPARE",
    show_envvar=True,
    help="First run the same swarm without faults.",
)
@CHAOS("--compare-minutes", type=Number(0, 1e5), help="For so long; 0: as long as with faults.")
@CHAOS(
    "--load",
    type=Number(0.01, 1),
    help="Share of the processors that the learners use together; 1: all that they get.",
)
@CHAOS("--netns", is_flag=True, help="Cut and slow down links too: network namespaces (Linux, root).")
@CHAOS(
    "--scenario",
    type=click.Choice(["none", "survivor", "split"]),
    help="Instead of faults drawn from the seed: all but one node killed, or 5 of 8 cut from the others.",
)
@CHAOS("--split-seconds", type=Number(min=5, max=1e5), help="How long a split lasts.")
@CHAOS("--out", type=FILE, metavar="DIR", help="Folder of report.json, faults.jsonl and chaos.png.")
@CHAOS("--keep", is_flag=True, help="Keep everything that the processes wrote, in DIR/nodes.")
@CHAOS("--json", is_flag=True, help="Print the report as JSON.")
def chaos(**values: Any) -> int | None:
    """Kill, stop, fill and cut a swarm of real nodes, and report how it fares."""
    settings = build(ChaosSettings, values)
    from p2pdiloco_lab.chaos.chaos import run

    return run(settings)
