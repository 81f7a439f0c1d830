"""`p2pdiloco invite`: one word with which others join a run, made by its owner."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import click

from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.cli.options import FILE, WORDS, SpacedLists
from p2pdiloco.config.addresses import is_loopback
from p2pdiloco.config.units import parse_life

OWNED_DIR = partial(
    click.option,
    "--data-dir",
    type=FILE,
    help="Folder with owner.key: of the node or bootstrap that signed the run. "
    "[default: their own default folders]",
)


@click.command(cls=SpacedLists)
@click.argument("run")
@click.option("--expires", default="7d", show_default=True, metavar="TIME", help="12h, 7d, 4w, or never.")
@click.option(
    "--uses", type=click.IntRange(1, 1024), default=5, show_default=True, help="Nodes that it lets in."
)
@click.option(
    "--name", default="", metavar="WHO", help="Whom it is for, to revoke it by that; nobody sees it."
)
@click.option(
    "--join",
    multiple=True,
    type=WORDS,
    metavar="MULTIADDR",
    help="Peer to join through, instead of those that this folder knows; may be repeated.",
)
@OWNED_DIR()
@click.option("--qr/--no-qr", default=None, help="A QR code of it on stderr.  [default: on a terminal]")
def invite(
    run: str,
    expires: str,
    uses: int,
    name: str,
    join: tuple[str, ...],
    data_dir: Path | None,
    qr: bool | None,
) -> None:
    """Print an invite to a RUN of yours (its name or id). Whoever has it can join, so keep it private."""
    from p2pdiloco.daemon.admission.owner import Ownership

    join = peers_behind(join)
    life_s = parse_life(expires, "--expires")
    owned = Ownership.find(run, data_dir)
    text = owned.invite(int(time.time()) + life_s if life_s else 0, uses, name[:63], join)
    click.echo(text)
    until = f"for {expires}" if life_s else "for ever"
    addresses = owned.addresses(join)
    click.echo(f"lets {uses} nodes in, {until}; they run: p2pdiloco node INVITE", err=True)
    if all(map(is_loopback, addresses)):
        click.echo("warning: it names this machine's loopback only: others need --join ADDRESS", err=True)
    if qr if qr is not None else sys.stderr.isatty():
        _show_qr(text)


def _show_qr(text: str) -> None:
    import segno

    # Capital letters need fewer modules, and mean the same.
    segno.make(text.upper(), error="l", micro=False).terminal(out=sys.stderr, compact=True)
