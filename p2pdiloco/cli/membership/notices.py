"""`p2pdiloco ban`, `unban`, `revoke`, `admit`, `dismiss`, `vouch`, `run amend`: an owner's notice changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from p2pdiloco.cli.examples import example
from p2pdiloco.cli.membership.invite import OWNED_DIR
from p2pdiloco.cli.options import WORDS, SpacedLists
from p2pdiloco.errors import UserError


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    join = click.option(
        "--join",
        multiple=True,
        type=WORDS,
        metavar="MULTIADDR",
        help="Peer of the run to give it to, beside those that this folder knows; may be repeated.",
    )
    return click.argument("run")(join(OWNED_DIR()(command)))


_YES = click.option("--yes", is_flag=True, help="Do not ask whether what is meant is the right one.")


def _change_by_peer(run: str, join: tuple[str, ...], data_dir: Path | None, **change: Any) -> None:
    """Change the notice as `naming.PeerChange` has it."""
    from p2pdiloco.cli.membership.naming import PeerChange
    from p2pdiloco.cli.membership.publishing import publish

    asked = PeerChange(**change)
    publish(run, join, data_dir, asked.make, asked.agree, asked.word)


@click.command(cls=SpacedLists, epilog=example("ban"))
@_options
@click.argument("peer")
@_YES
def ban(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None, yes: bool) -> None:
    """Refuse a PEER (its id, the end of it, or its name) at every member's door of a RUN of yours."""
    _change_by_peer(run, join, data_dir, verb="ban", entries="banned", word=peer, adds=True, yes=yes)


@click.command(cls=SpacedLists, epilog=example("unban"))
@_options
@click.argument("peer")
@_YES
def unban(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None, yes: bool) -> None:
    """Take a ban of a PEER back."""
    _change_by_peer(run, join, data_dir, verb="unban", entries="banned", word=peer, adds=False, yes=yes)


@click.command(cls=SpacedLists, epilog=example("revoke"))
@_options
@click.argument("invite")
@_YES
def revoke(run: str, invite: str, join: tuple[str, ...], data_dir: Path | None, yes: bool) -> None:
    """Revoke an INVITE (itself, its key or --name): it lets nobody in, and whoever came with it is out."""
    from p2pdiloco.cli.membership.naming import InviteEnd
    from p2pdiloco.cli.membership.publishing import publish
    from p2pdiloco.daemon.run_files.known_runs import Ownership

    owned = Ownership.find(run, data_dir)
    ended = InviteEnd.of(owned, invite, yes)
    publish(run, join, data_dir, ended.make, ended.agree)


@click.command(cls=SpacedLists, epilog=example("admit"))
@_options
@click.argument("peer")
@_YES
def admit(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None, yes: bool) -> None:
    """Put a PEER (its id) on the list of a RUN whose members are listed."""
    _change_by_peer(run, join, data_dir, verb="admit", entries="members", word=peer, adds=True, yes=yes)


@click.command(cls=SpacedLists, epilog=example("dismiss"))
@_options
@click.argument("peer")
@_YES
def dismiss(run: str, peer: str, join: tuple[str, ...], data_dir: Path | None, yes: bool) -> None:
    """Take a PEER off the list again."""
    _change_by_peer(run, join, data_dir, verb="dismiss", entries="members", word=peer, adds=False, yes=yes)


@click.command(cls=SpacedLists, epilog=example("vouch"))
@_options
@click.option("--clear", is_flag=True, help="Take the last vouch back.")
def vouch(run: str, join: tuple[str, ...], data_dir: Path | None, clear: bool) -> None:
    """Vouch for what your node of a RUN holds now: newcomers start from what its members stand on.

    Without a node in the folder, name one that you trust: --join MULTIADDR."""
    from p2pdiloco.cli.membership.vouching import vouch_for, without_vouch

    if clear:
        without_vouch(run, join, data_dir)
    else:
        vouch_for(run, join, data_dir)


@click.command(cls=SpacedLists, epilog=example("run amend"))
@_options
@click.option(
    "--schedule-tokens",
    type=click.IntRange(1, 1 << 53),
    metavar="N",
    help="Length of the schedule, and with it the end of the run, in tokens of all learners.",
)
@click.option(
    "--learning-rate-factor",
    type=float,
    metavar="X",
    help="Factor of the manifest's inner learning rate; 1 is as it was.",
)
@click.option("--message", metavar="TEXT", help="Message to all who take part; empty: none any more.")
@click.option("--pause", is_flag=True, help="Let learners make no inner steps.")
@click.option("--resume", is_flag=True, help="Let them go on, at once.")
@click.option("--end", is_flag=True, help="End the run before its schedule does.")
@click.option(
    "--at-tokens",
    type=click.IntRange(0, 1 << 53),
    metavar="N",
    help="Tokens of the run from which on it holds. Default: about a minute ahead.",
)
def amend(
    run: str,
    join: tuple[str, ...],
    data_dir: Path | None,
    pause: bool,
    resume: bool,
    end: bool,
    learning_rate_factor: float | None,
    **wanted: Any,
) -> None:
    """Change a RUN of yours that goes on: its length, its learning rate; pause it, end it, tell all members.

    All else is part of the run's id: another model, other data or another H are another run."""
    from p2pdiloco.cli.membership.amending import Wish
    from p2pdiloco.cli.membership.amending import amend as amend_run
    from p2pdiloco.core.api.config import Going

    ways = [
        way for way, is_meant in ((Going.PAUSE, pause), (Going.TRAIN, resume), (Going.END, end)) if is_meant
    ]
    if len(ways) > 1:
        raise UserError("--pause, --resume and --end exclude each other", "give one of them")
    wish = Wish(rate_factor=learning_rate_factor, going=ways[0] if ways else None, **wanted)
    amend_run(run, join, data_dir, wish)


COMMANDS = (ban, unban, revoke, admit, dismiss, vouch)
