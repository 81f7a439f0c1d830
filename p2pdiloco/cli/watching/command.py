"""`p2pdiloco top`: the command."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from msgspec.structs import replace

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.cli.commands import JOIN, JOIN_ALIASES
from p2pdiloco.cli.options import FILE, Number, SpacedLists, build, setting
from p2pdiloco.config.watching_settings import TopSettings

TOP = partial(setting, TopSettings)


@click.command(cls=SpacedLists)
@TOP("--join", *JOIN_ALIASES, **JOIN)
@TOP(
    "--data-dir",
    type=FILE,
    help="Without --join: ask the node or bootstrap that runs here with this folder.  [default: the usual]",
)
@TOP("--run", metavar="ID|NAME", help="Id of the run, 8 digits of it or more, or its name.")
@TOP("--timeout-s", type=Number(min=0.1, max=3600), help="Give up if nobody answers at first for so long.")
@TOP("--every-s", type=Number(min=1, max=3600), help="Between two lines, where there is no terminal.")
def top(**values: Any) -> int | None:
    """Show the whole swarm, live: who is here and behind, speed, loss, progress, elections and faults.

    Several members are asked, and others when those are gone. q leaves, ? explains, arrows and page keys move
    in the list of members, s sorts it. Not on a terminal it writes lines. Exit statuses are those of status.

    \b
    Example: p2pdiloco top                       of the node that runs here
             p2pdiloco top --join ADDRESS        of any bootstrap or node
    """
    settings = build(TopSettings, values)
    settings = replace(settings, join=peers_behind(settings.join))
    from p2pdiloco.cli.watching.top import run

    return run(settings)
