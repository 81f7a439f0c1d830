"""`p2pdiloco simulate`: play seeds of the protocol simulator; a failing seed is a bug report."""

from __future__ import annotations

import json
import time

import click

MIX_NAMES = ("calm", "churn", "datacentre", "partition", "storm", "wan")


@click.command("simulate")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="First seed (default 0).")
@click.option("--seeds", type=click.IntRange(min=1), default=None, help="How many seeds from there on.")
@click.option("--nodes", type=click.IntRange(1, 64), default=None, help="Nodes at start (default: drawn).")
@click.option("--mix", type=click.Choice(MIX_NAMES), default=None, help="Kind of faults (default: drawn).")
@click.option("--trace", is_flag=True, help="Print every event, effect and decision with its reason.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end instead of lines.")
def simulate(
    seed: int | None, seeds: int | None, nodes: int | None, mix: str | None, trace: bool, as_json: bool
) -> int:
    """Run the protocol under a virtual clock, a faulty network, crashes and restarts.

    The same core as in a real node; fragments are histories, so that "nothing lost, nothing twice" is
    checked exactly. Exit status 1 if a rule was broken or the swarm did not recover.
    """
    # Imported here so that --help does not pay for it.
    from p2pdiloco.simulation.report import SeedResult, replay_command
    from p2pdiloco.simulation.runner import Summary, run_seed

    first = seed or 0
    count = seeds if seeds is not None else (1 if seed is not None else 100)
    summary = Summary()
    started_s = time.perf_counter()
    write = (lambda line: click.echo(line)) if trace else None
    last: SeedResult | None = None
    for number in range(first, first + count):
        last = run_seed(number, mix, nodes, write)
        summary.add(last)
        if not last.ok and not as_json:
            click.echo(f"seed {number} ({last.mix}, {last.nodes} nodes): {last.detail or last.stuck}")
            click.echo(f"  {replay_command(last, nodes, mix)}")
    elapsed_s = time.perf_counter() - started_s
    rate = 60.0 * count / max(elapsed_s, 1e-9)
    if as_json:
        click.echo(json.dumps(summary.as_dict(rate, nodes, mix)))
    else:
        if count == 1 and last is not None:
            click.echo(f"seed {first}: digest {last.digest}, {last.virtual_s} virtual seconds")
        click.echo(summary.sentence(rate))
    return 1 if summary.failed else 0
