"""`p2pdiloco top` and `p2pdiloco board`: the commands."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from msgspec.structs import replace

from p2pdiloco.cli.commands import JOIN, JOIN_ALIASES, LOCAL, RUN
from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.options import FILE, Number, SpacedLists, build, setting
from p2pdiloco.config.settings import BoardSettings, TopSettings

TOP = partial(setting, TopSettings)
BOARD = partial(setting, BoardSettings)


@click.command(cls=SpacedLists)
@TOP("--join", *JOIN_ALIASES, **JOIN)
@TOP("--data-dir", **LOCAL)
@TOP("--run", **RUN)
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
    join, run_id = joined_through(settings.join, settings.run)
    settings = replace(settings, join=join, run=run_id)
    from p2pdiloco.cli.watching.top import run

    return run(settings)


@click.command(cls=SpacedLists)
@BOARD("--join", *JOIN_ALIASES, **JOIN)
@BOARD("--data-dir", **LOCAL)
@BOARD("--run", **RUN)
@BOARD("--out", type=FILE, metavar="DIR", help="Folder of the files: index.html, view.json, static/.")
@BOARD("--every", metavar="TIME", help="Write again and again, such as 30s, until told to stop.")
@BOARD("--timeout-s", type=Number(min=0.1, max=3600), help="Give up if nobody answers for so long.")
def board(**values: Any) -> int | None:
    """Write the public page of a run as files that any web server carries.

    Once, or again and again with --every. Each file is replaced whole. If nobody answers later, the files
    stay and say their age. Exit statuses are those of status.

    \b
    Example: p2pdiloco board --join ADDRESS --out /var/www/run --every 30s
    """
    settings = build(BoardSettings, values)
    join, run_id = joined_through(settings.join, settings.run)
    settings = replace(settings, join=join, run=run_id)
    from p2pdiloco.cli.watching.board import run

    return run(settings)
