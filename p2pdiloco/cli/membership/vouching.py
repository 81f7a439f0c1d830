"""Vouching: an owner's word that what a node of its own holds is the run, and that its members know it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.membership.publishing import publish
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.admission.owner import Ownership
from p2pdiloco.daemon.display.wording import counted
from p2pdiloco.daemon.finding.asking import ask
from p2pdiloco.daemon.finding.peers_file import load_own_addresses
from p2pdiloco.daemon.run_files.listing import peers_of
from p2pdiloco.errors import UserError

DIGITS = 8
"""Hexadecimal digits of a digest that are shown."""


def vouch_for(run: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Vouch for the newest versions of this folder's node, or of the first of these peers that answers.

    Raises: UserError.
    """
    join, _ = joined_through(join)
    owned = Ownership.find(run, data_dir)
    # Peers that the node has met are strangers: what one of those holds is not the owner's word.
    addresses = join or tuple(load_own_addresses(owned.data_dir))
    versions = visit(_stands(owned.run, addresses)) if addresses else ()
    if not versions:
        raise UserError(
            "no node that has trained tells what it holds: there is nothing to vouch for",
            "start this folder's node, or name one that you trust: --join ADDRESS",
        )
    for version in versions:
        click.echo(f"fragment {version.fragment}: version {version.number} ({version.digest.hex()[:DIGITS]})")
    members = sum(len(version.members) for version in versions)
    click.echo(f"worked on by {counted(members, 'member')}")
    publish(run, join, data_dir, lambda notice, _: msgspec.structs.replace(notice, vouch=versions))


def without_vouch(run: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Take the last vouch back. Raises: UserError."""
    publish(run, join, data_dir, lambda notice, _: msgspec.structs.replace(notice, vouch=()))


async def _stands(run: str, addresses: tuple[str, ...]) -> tuple[Vouch, ...]:
    async with visitor(addresses) as transport:
        for peer in peers_of(addresses):
            answer = await ask(transport, peer, wire.StandsQuery(run), wire.Stands)
            if answer is not None and answer.versions:
                return answer.versions
    return ()
