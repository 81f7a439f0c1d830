"""`p2pdiloco run link`: a run as one word, with which others join it, and its QR code."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.membership.qr import check_qr_file, save_qr, show_qr
from p2pdiloco.cli.options import FILE, WORDS, SpacedLists


@click.command("link", cls=SpacedLists, epilog=example("run link"))
@click.argument("run", required=False, default="")
@click.option(
    "--data-dir",
    type=FILE,
    help="Folder of a node or bootstrap of the run.  [default: their own default folders]",
)
@click.option(
    "--join",
    multiple=True,
    type=WORDS,
    metavar="MULTIADDR",
    help="Peer to join through, or /dnsaddr/NAME, instead of those that this folder knows; may be repeated.",
)
@click.option("--qr/--no-qr", default=None, help="A QR code of it on stderr.  [default: on a terminal]")
@click.option("--qr-file", type=FILE, metavar="FILE", help="Write the QR code into this file, .svg or .png.")
def link(
    run: str, data_dir: Path | None, join: tuple[str, ...], qr: bool | None, qr_file: Path | None
) -> None:
    """Print the link to a RUN (its name or id) that a node or bootstrap of this machine is in or serves.

    It says run, owner, and peers to join through, and holds no secret. For a run by invite, its owner
    prints one that lets others in: p2pdiloco invite RUN --link.
    """
    from p2pdiloco.daemon.run_files.known_runs import KnownRun

    if qr_file is not None:
        check_qr_file(qr_file)
    known = KnownRun.find(run, data_dir)
    addresses = known.addresses(join)
    word = known.link(join)
    click.echo(word)
    click.echo(f"joins run {known.title}; others run: p2pdiloco node LINK", err=True)
    warn_of_addresses(addresses)
    if known.is_by_invite:
        click.echo(
            "note: it lets nobody in, as this run takes members by invite; its owner makes links that do: "
            f"p2pdiloco invite {known.name} --link",
            err=True,
        )
    if qr_file is not None:
        save_qr(word, qr_file)
    if qr if qr is not None else sys.stderr.isatty():
        show_qr(word)


def warn_of_addresses(addresses: list[str]) -> None:
    """Say that others cannot dial what a word names, if so."""
    from p2pdiloco.config.values import DNSADDR, is_loopback

    if all(not address.startswith(DNSADDR) and is_loopback(address) for address in addresses):
        click.echo("warning: it names this machine's loopback only: others need --join ADDRESS", err=True)
