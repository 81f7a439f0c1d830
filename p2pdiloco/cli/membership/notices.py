"""`p2pdiloco ban`, `unban`, `revoke`, `admit`, `dismiss`: changes of a run's notice by its owner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from p2pdiloco.cli.membership.invite import OWNED_DIR
from p2pdiloco.cli.options import WORDS, SpacedLists


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    join = click.option(
        "--join",
        multiple=True,
        type=WORDS,
        metavar="MULTIADDR",
        help="Peer of the run to give it to, beside those that this folder knows; may be repeated.",
    )
    return click.argument("run")(join(OWNED_DIR()(command)))


@click.command(cls=SpacedLists)
@_options
@click.argument("peer")
def ban(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Refuse a PEER (its id, the end of it, or its name) at every member's door of a RUN of yours."""
    from p2pdiloco.cli.membership.publishing import publish, with_peer

    publish(run, join, data_dir, with_peer("banned", peer))


@click.command(cls=SpacedLists)
@_options
@click.argument("peer")
def unban(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Take a ban of a PEER back."""
    from p2pdiloco.cli.membership.publishing import publish, without

    publish(run, join, data_dir, without("banned", peer))


@click.command(cls=SpacedLists)
@_options
@click.argument("invite")
def revoke(run: str, invite: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Revoke an INVITE (itself, its key or --name): it lets nobody in, and whoever came with it is out."""
    from p2pdiloco.cli.membership.publishing import publish, revoke_invite

    publish(run, join, data_dir, revoke_invite(run, data_dir, invite))


@click.command(cls=SpacedLists)
@_options
@click.argument("peer")
def admit(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Put a PEER (its id) on the list of a RUN whose members are listed."""
    from p2pdiloco.cli.membership.publishing import publish, with_peer

    publish(run, join, data_dir, with_peer("members", peer))


@click.command(cls=SpacedLists)
@_options
@click.argument("peer")
def dismiss(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None) -> None:
    """Take a PEER off the list again."""
    from p2pdiloco.cli.membership.publishing import publish, without

    publish(run, join, data_dir, without("members", peer))


COMMANDS = (ban, unban, revoke, admit, dismiss)
