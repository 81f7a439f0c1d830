"""`p2pdiloco doctor`: the command."""

from __future__ import annotations

import shutil
import textwrap
from functools import partial
from typing import Any

import click
from msgspec import structs

from p2pdiloco.cli.commands import JOIN, JOIN_ALIASES, RUN
from p2pdiloco.cli.doctor.findings import Diagnosis, Level, exit_status
from p2pdiloco.cli.options import FILE, Number, SpacedLists, build, setting
from p2pdiloco.config.settings import DoctorSettings
from p2pdiloco.errors import clean, json_line

DOCTOR = partial(setting, DoctorSettings)
COLOURS = {Level.GOOD: "green", Level.SKIPPED: "bright_black", Level.WARNING: "yellow", Level.BAD: "red"}
NAME_CELLS, LEVEL_CELLS, WIDTH = 10, 8, 110


@click.command(cls=SpacedLists)
@DOCTOR("--join", *JOIN_ALIASES, **JOIN)
@DOCTOR("--run", **RUN)
@DOCTOR(
    "--data-dir", type=FILE, help="Folder of the node that runs, or is to run, here.  [default: the usual]"
)
@DOCTOR("--json", is_flag=True, help="Print one JSON object a line.")
@DOCTOR("--timeout-s", type=Number(min=5, max=3600), help="Take no longer than this.")
@DOCTOR(
    "--probe-python",
    metavar="PATH",
    help="Python of an environment with py-libp2p, with which to dial the peer, too (docs/topics/doctor.md).",
)
def doctor(**values: Any) -> int:
    """Look for what keeps a node from its work: this machine, its network, the way to a run.

    Each line is good, a warning, bad, or skipped with the reason, and says what to do. Exit status 0: nothing
    is wrong; 1: there are warnings; 2: something is bad. Without --join the node that runs here is asked, and
    those that it last joined through, or met.

    \b
    Example: p2pdiloco doctor --join /dns/example.org/tcp/31337/p2p/12D3Koo... --run NAME
    """
    settings = build(DoctorSettings, values)
    from p2pdiloco.cli.doctor.examining import examine
    from p2pdiloco.cli.doctor.looking import all_of
    from p2pdiloco.cli.visitor import visit
    from p2pdiloco.daemon.display.snapshot import counted
    from p2pdiloco.daemon.run_files.known_runs import way_of

    way = way_of(settings.join, settings.run)  # names are looked up later, as something to look at
    settings = structs.replace(settings, join=tuple(way.join), run=way.run)
    found = visit(all_of(examine(settings), settings.timeout_s, partial(_print, as_json=settings.json)))
    status = exit_status(found)
    if not settings.json:
        counts = {level: sum(finding.level is level for finding in found) for level in Level}
        warnings = counted(counts[Level.WARNING], "warning")
        click.echo(f"{counts[Level.GOOD]} good, {warnings}, {counts[Level.BAD]} bad")
    return status


def _print(finding: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_line(finding))
        return
    level = click.style(f"{finding.level.value:<{LEVEL_CELLS}}", fg=COLOURS[finding.level])
    indent = " " * (LEVEL_CELLS + NAME_CELLS + 2)
    width = max(WIDTH // 2, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    for number, text in enumerate(filter(None, (finding.words, finding.todo and f"-> {finding.todo}"))):
        lines = textwrap.wrap(
            clean(text), width - len(indent), break_long_words=False, break_on_hyphens=False
        )
        first = f"{level} {finding.check:<{NAME_CELLS}} " if number == 0 else indent
        click.echo(f"\n{indent}".join([first + (lines or [""])[0], *lines[1:]]))
