"""`p2pdiloco can-join`: whether a run would let this node in, and why not, in one sentence."""

from __future__ import annotations

from pathlib import Path

import click

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.options import FILE, WORDS, Number, SpacedLists
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import expanded

NO = 1


@click.command("can-join", cls=SpacedLists, epilog=example("can-join"))
@click.argument("run", metavar="RUN|LINK|INVITE")
@click.option("--join", multiple=True, type=WORDS, metavar="MULTIADDR", help="Peer to ask; may be repeated.")
@click.option(
    "--data-dir", type=FILE, help="Folder of the node that is to join.  [default: a node's default]"
)
@click.option(
    "--timeout-s",
    type=Number(min=0.1, max=3600),
    default=20.0,
    show_default=True,
    help="Give up if nobody answers for so long.",
)
def can_join(run: str, join: tuple[str, ...], data_dir: Path | None, timeout_s: float) -> int:
    """Say whether a run would let this node in. Exit status 0: yes, 1: no."""
    from p2pdiloco.cli.membership.asking import why_not

    folder = expanded(data_dir or NodeSettings().data_dir)
    why = why_not(run, join, folder, timeout_s)
    click.echo(f"no: {why}" if why else "yes: this node can join")
    return NO if why else 0
