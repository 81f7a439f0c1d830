"""`p2pdiloco invite`: one word with which others join a run, made by its owner."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import click

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.membership.link import warn_of_addresses
from p2pdiloco.cli.membership.qr import check_qr_file, save_qr, show_qr
from p2pdiloco.cli.options import FILE, WORDS, SpacedLists
from p2pdiloco.config.values import parse_life

OWNED_DIR = partial(
    click.option,
    "--data-dir",
    type=FILE,
    help="Folder with owner.key: of the node or bootstrap that signed the run. "
    "[default: their own default folders]",
)


@click.command(cls=SpacedLists, epilog=example("invite"))
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
@click.option(
    "--link", is_flag=True, help="Print it as a run link, which also says the run's name and owner."
)
@click.option("--qr/--no-qr", default=None, help="A QR code of it on stderr.  [default: on a terminal]")
@click.option("--qr-file", type=FILE, metavar="FILE", help="Write the QR code into this file, .svg or .png.")
def invite(
    run: str,
    expires: str,
    uses: int,
    name: str,
    join: tuple[str, ...],
    data_dir: Path | None,
    link: bool,
    qr: bool | None,
    qr_file: Path | None,
) -> None:
    """Print an invite to a RUN of yours (its name or id). Whoever has it can join, so keep it private."""
    from p2pdiloco.daemon.display.snapshot import counted
    from p2pdiloco.daemon.papers import encode_invite
    from p2pdiloco.daemon.run_files.known_runs import KnownRun, Ownership

    if qr_file is not None:
        check_qr_file(qr_file)
    if not link:  # an invite holds no names of the DNS
        join, _ = joined_through(join)
    life_s = parse_life(expires, "--expires")
    owned = Ownership.find(run, data_dir)
    made = owned.invite(int(time.time()) + life_s if life_s else 0, uses, name[:63], join)
    text = owned.link(made) if link else encode_invite(made)
    click.echo(text)
    until = f"for {expires}" if life_s else "for ever"
    click.echo(
        f"lets {counted(uses, 'node')} in, {until}; they run: p2pdiloco node {'LINK' if link else 'INVITE'}",
        err=True,
    )
    warn_of_addresses(owned.addresses(join))
    if not KnownRun.find(owned.run, owned.data_dir).is_by_invite:
        click.echo("note: this run does not ask for invites: an invite keeps nobody out", err=True)
    if qr_file is not None:
        save_qr(text, qr_file)
    if qr if qr is not None else sys.stderr.isatty():
        show_qr(text)
