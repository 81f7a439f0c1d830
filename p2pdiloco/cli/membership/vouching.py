"""Vouching: an owner's word that what a node of its own holds is the run, and that its members know it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.cli.joining import joined_through
from p2pdiloco.cli.membership.publishing import publish
from p2pdiloco.cli.visitor import visit, visitor
from p2pdiloco.config.values import check_peer_address, peer_in
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import counted
from p2pdiloco.daemon.network.discovery import ask, presences
from p2pdiloco.daemon.run_files.known_runs import Ownership, load_own_addresses, peers_of, usual_folders
from p2pdiloco.errors import ConfigError, UserError, clean

DIGITS = 8
"""Hexadecimal digits of a digest that are shown."""
MOST_NAMED = 3
"""Members that are named where none was."""


def vouch_for(run: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Vouch for the newest versions of this folder's node, or of the first of these peers that answers.

    Raises: UserError.
    """
    join, _ = joined_through(join)
    owned = Ownership.find(run, data_dir)
    # Peers that the node has met are strangers: what one of those holds is not the owner's word.
    addresses = join or _own_addresses(owned)
    versions, others = visit(_stands(owned.run, addresses)) if addresses else ((), [])
    if not versions:
        raise UserError(
            f"no node of yours that has trained is found here{' or behind --join' if join else ''}: there is "
            "nothing to vouch for",
            "name the node whose state you trust: --join ADDRESS",
            others,
        )
    for version in versions:
        click.echo(f"fragment {version.fragment}: version {version.number} ({version.digest.hex()[:DIGITS]})")
    members = sum(len(version.members) for version in versions)
    click.echo(f"worked on by {counted(members, 'member')}")
    publish(run, join, data_dir, lambda notice, _: msgspec.structs.replace(notice, vouch=versions))


def without_vouch(run: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Take the last vouch back. Raises: UserError."""
    publish(run, join, data_dir, lambda notice, _: msgspec.structs.replace(notice, vouch=()))


def _own_addresses(owned: Ownership) -> tuple[str, ...]:
    """List the addresses of the owner's nodes: of the folder with the key, and of the usual ones, if they
    are in the run."""
    usual = [folder for folder in usual_folders(None) if run_folder(folder, owned.run).exists()]
    found = [address for folder in (owned.data_dir, *usual) for address in load_own_addresses(folder)]
    return tuple(dict.fromkeys(found))


async def _stands(run: str, addresses: tuple[str, ...]) -> tuple[tuple[Vouch, ...], list[str]]:
    """Ask these for what they hold; where none tells, list others that are members, in words."""
    async with visitor(addresses) as transport:
        for peer in peers_of(addresses):
            answer = await ask(transport, peer, wire.StandsQuery(run), wire.Stands)
            if answer is not None and answer.versions:
                return answer.versions, []
        records = await presences(transport, run)
    return (), [words for peer in sorted(records) if (words := _words_of(peer, records[peer]))][:MOST_NAMED]


def _words_of(peer: str, record: wire.Presence) -> str:
    """Word where a member is; empty: nobody can tell."""
    for address in record.addresses:
        whole = address if "/p2p/" in address else f"{address}/p2p/{peer}"
        try:
            check_peer_address(whole)
        except ConfigError:
            continue
        if peer_in(whole) == peer:
            return f"{clean(record.name) or 'a member'} is at {clean(whole)}"
    return ""
