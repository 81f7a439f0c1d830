"""`p2pdiloco chaos`: only flags; the body imports what it needs when it is called."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from p2pdiloco.cli.options import FILE, Number, build, example, setting
from p2pdiloco_lab.chaos.chaos_settings import ChaosSettings

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
