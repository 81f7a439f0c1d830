"""Commands of owners: of a run (invite, run link, ban, vouch, run amend ...) and of a machine (pause ...).

A run's owner makes words with which others join (`invite`, `link`, with QR codes) and changes the run's
notice (`owner_notice`). `can_join` tells whether a run would let this node in. The owner of this machine
tells the node that runs on it to pause, resume or finish, and limits it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdiloco.adapters.data_dir import storage_errors, try_file
from p2pdiloco.cli.options import (
    FILE,
    RunPlace,
    command,
    data_dir_option,
    join_option,
    joined_through,
    node_folder,
    patience_option,
    say,
)
from p2pdiloco.config.settings import DEFAULTS, OwnLimits, flag_of, flags, value_text
from p2pdiloco.config.values import Addresses, parse_life
from p2pdiloco.errors import StorageError, UserError

if TYPE_CHECKING:
    from p2pdiloco.daemon.owner.control import ControlState, Reply, Verb
    from p2pdiloco.daemon.run_files.ownership import Ownership

# QR codes.

FORMS = (".svg", ".png")
SCALE, BORDER = 6, 4
"""Pixels of a module, and modules of the quiet zone that readers need."""


def with_qr(command: Callable[..., str]) -> Callable[..., None]:
    """Have a command's word as a QR code, too, as its flags say; an empty word has none."""

    @click.option("--qr/--no-qr", default=None, help="A QR code of it on stderr.  [default: on a terminal]")
    @click.option(
        "--qr-file", type=FILE, metavar="FILE", help="Write the QR code into this file, .svg or .png."
    )
    @wraps(command)
    def drawn(qr: bool | None, qr_file: Path | None, **arguments: Any) -> None:
        if qr_file is not None:
            check_qr_file(qr_file)
        word = command(**arguments)
        if word and qr_file is not None:
            save_qr(word, qr_file)
        if word and (sys.stderr.isatty() if qr is None else qr):
            show_qr(word)

    return drawn


def show_qr(word: str) -> None:
    """Draw the code on stderr."""
    import segno

    # Capital letters need fewer modules, and mean the same.
    segno.make(word.upper(), error="l", micro=False).terminal(out=sys.stderr, compact=True)


def check_qr_file(path: Path) -> None:
    """Check that a code can be written there. Raises: UserError, StorageError."""
    if path.suffix.lower() not in FORMS:
        raise UserError(f"--qr-file {path} must end in {' or '.join(FORMS)}")
    try_file(path, "--qr-file")


def save_qr(word: str, path: Path) -> None:
    """Write the code as an image of the form that the name ends in. Raises: StorageError."""
    import segno

    code = segno.make(word.upper(), error="m", micro=False)
    with storage_errors("write", path):
        code.save(str(path), kind=path.suffix.lower()[1:], scale=SCALE, border=BORDER)


# Invites and links: a run as one word.

OWNED_DIR = data_dir_option(
    "Folder with owner.key: of the node or bootstrap that signed the run. "
    "[default: their own default folders]"
)


@command("invite")
@click.argument("run")
@click.option("--expires", default="7d", show_default=True, metavar="TIME", help="12h, 7d, 4w, or never.")
@click.option(
    "--uses", type=click.IntRange(1, 1024), default=5, show_default=True, help="Nodes that it lets in."
)
@click.option(
    "--name", default="", metavar="WHO", help="Whom it is for, to revoke it by that; nobody sees it."
)
@join_option("Peer to join through, instead of those that this folder knows; may be repeated.")
@OWNED_DIR
@click.option("--link", is_flag=True, hidden=True, expose_value=False, help="Each invite is in a link.")
@with_qr
@click.option(
    "--close",
    default="",
    metavar="INVITE",
    help="End this one (itself, its key or --name; that of the bootstrap's link is called link) instead: "
    "nobody new comes by it, and its members and their seats stay.",
)
def invite(
    run: str,
    close: str,
    expires: str,
    uses: int,
    name: str,
    join: Addresses,
    data_dir: Path | None,
) -> str:
    """Print an invite to a RUN of yours (its name or id): a link. Anybody who has it can join, so keep it
    private."""
    place = RunPlace(run, join, data_dir)
    if close:
        from p2pdiloco.cli.owner_notice import end_invite

        end_invite(place, close, yes=False, leaves=True)
        return ""
    from p2pdiloco.daemon.display.snapshot import counted

    life_s = parse_life(expires, "--expires")
    owned = place.owned()
    made = owned.invite(int(time.time()) + life_s if life_s else 0, uses, name[:63], join)
    text = owned.link(made)
    click.echo(text)
    until = f"for {expires}" if life_s else "for ever"
    say(f"lets {counted(uses, 'node')} in, {until}; they run: p2pdiloco node LINK")
    warn_of_addresses(owned.addresses(join))
    if _admission(owned) != "invite":
        say("note: this run does not ask for invites: an invite keeps nobody out")
    return text


@command("run link")
@click.argument("run", required=False, default="")
@data_dir_option("Folder of a node or bootstrap of the run.  [default: their own default folders]")
@join_option(
    "Peer to join through, or /dnsaddr/NAME, instead of those that this folder knows; may be repeated."
)
@with_qr
def link(run: str, data_dir: Path | None, join: Addresses) -> str:
    """Print the link to a RUN (its name or id) that a node or bootstrap of this machine is in or serves.

    It says run, owner, and peers to join through, and holds no secret. For a run by invite, its owner
    prints one that lets others in: p2pdiloco invite RUN.
    """
    from p2pdiloco.daemon.run_files.known_runs import addresses_of, known_run, link_of

    folder, known = known_run(run, data_dir)
    addresses = addresses_of(folder, join)
    word = link_of(known, addresses)
    click.echo(word)
    say(f"joins run {known.title}; others run: p2pdiloco node LINK")
    warn_of_addresses(addresses)
    if known.manifest.admission.mode == "invite":
        say(
            "note: it lets nobody in, as this run takes members by invite; its owner makes links that do: "
            f"p2pdiloco invite {known.name}",
        )
    return word


def warn_of_addresses(addresses: list[str]) -> None:
    """Say that others cannot dial what a word names, if so."""
    from p2pdiloco.config.values import DNSADDR, is_loopback

    if all(not address.startswith(DNSADDR) and is_loopback(address) for address in addresses):
        say("warning: it names this machine's loopback only: others need --join ADDRESS")


# `p2pdiloco can-join`.

EXIT_KEPT_OUT = 1


@command("can-join")
@click.argument("run", metavar="RUN|LINK|INVITE")
@join_option("Peer to ask; may be repeated.")
@data_dir_option("Folder of the node that is to join.  [default: a node's default]")
@patience_option(20.0, 3600, "Give up if nobody answers for so long.")
def can_join(run: str, join: Addresses, data_dir: Path | None, timeout_s: float) -> int:
    """Say whether a run would let this node in. Exit status 0: yes, 1: no."""
    from p2pdiloco.cli.owner_notice import why_cannot_join

    folder = node_folder(data_dir)
    why = why_cannot_join(run, join, folder, timeout_s)
    click.echo(f"no: {why}" if why else "yes: this node can join")
    return EXIT_KEPT_OUT if why else 0


# An owner's notice changed.


def _admission(owned: Ownership) -> str:
    """Find how a run takes its members."""
    from p2pdiloco.daemon.run_files.known_runs import known_run

    return known_run(owned.run, owned.data_dir)[1].manifest.admission.mode


def _at_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a run of the person's, as one argument `place`."""

    @click.argument("run")
    @join_option("Peer of the run to give it to, beside those that this folder knows; may be repeated.")
    @OWNED_DIR
    @wraps(command)
    def placed(run: str, join: Addresses, data_dir: Path | None, **arguments: Any) -> None:
        command(place=RunPlace(run, join, data_dir), **arguments)

    return placed


_YES = click.option("--yes", is_flag=True, help="Do not ask whether what is meant is the right one.")


def _change_by_peer(place: RunPlace, **change: Any) -> None:
    """Change the notice as `PeerChange` has it."""
    from p2pdiloco.cli.owner_notice import PeerChange, publish

    asked = PeerChange(**change)
    publish(place, asked.make, asked.agree, asked.word)


def _on_list(verb: str, help: str, entries: str, adds: bool, seated: bool | None) -> click.Command:
    """Make a command that puts a peer on a list of the notice, or takes it off (`PeerChange`)."""

    @command(verb, help=help)
    @_at_run
    @click.argument("peer")
    @_YES
    def change(place: RunPlace, peer: str, yes: bool) -> None:
        asked = {"verb": verb, "entries": entries, "word": peer, "adds": adds, "seated": seated}
        _change_by_peer(place, yes=yes, **asked)

    return change


ban = _on_list(
    "ban",
    "Refuse a PEER (its id, the end of it, or its name) at every member's door of a RUN of yours. Its seat "
    "ends.",
    "banned",
    adds=True,
    seated=False,
)
unban = _on_list(
    "unban",
    "Take a ban of a PEER back. A seat that ended by it is given again by `p2pdiloco seat`.",
    "banned",
    adds=False,
    seated=None,
)
dismiss = _on_list(
    "dismiss", "Take a PEER off the list again. Its seat ends.", "members", adds=False, seated=False
)


@command("revoke")
@_at_run
@click.argument("invite")
@_YES
def revoke(place: RunPlace, invite: str, yes: bool) -> None:
    """Revoke an INVITE (itself, its key or --name): it lets nobody in, and whoever came with it is out, with
    the seats that it gave. `p2pdiloco invite RUN --close INVITE` lets them stay."""
    from p2pdiloco.cli.owner_notice import end_invite

    end_invite(place, invite, yes=yes)


@command("admit")
@_at_run
@click.argument("peer")
@_YES
def admit(place: RunPlace, peer: str, yes: bool) -> None:
    """Put a PEER (its id) on the list of a RUN whose members are listed, and give it a seat."""
    seated = True if _admission(place.owned()) == "list" else None
    asked = {"verb": "admit", "entries": "members", "word": peer, "adds": True, "seated": seated}
    _change_by_peer(place, yes=yes, **asked)


@command("seat")
@_at_run
@click.argument("peer")
@click.option(
    "--replace",
    default="",
    metavar="OLD",
    help="Id of a peer whose seat it gets: a lost node's. It is offered where that had the same name.",
)
@click.option("--end", is_flag=True, help="End the seat of the PEER.")
@_YES
def seat(place: RunPlace, peer: str, replace: str, end: bool, yes: bool) -> None:
    """Give a PEER (its id, the end of it, or its name) a seat in a RUN of yours: it votes and merges.

    Work without a seat is merged all the same, with a bounded share. A node that comes by an invite among the
    first six has a seat without this. Without the owner's key this folder's node says it as a seat: it counts
    once more than half of the seats say the same. So it gives its own up, too."""
    from p2pdiloco.cli.owner_notice import lost_seats
    from p2pdiloco.identity import public_of

    if replace and end:
        raise UserError("--replace and --end exclude each other", "give one of them")
    if replace and public_of(replace) is None:
        hint = "p2pdiloco status --json shows whole ids"
        raise UserError(f'--replace "{replace}" is not the id of a peer', hint)
    try:
        place.owned()
    except StorageError:
        raise
    except UserError:  # the key of the run's owner is not here
        if public_of(peer) is not None and _is_said_by_node(place, peer, not end, replace):
            return
        raise
    lost = {} if end or replace else lost_seats(place)
    asked: dict[str, Any] = {"verb": "end the seat of" if end else "seat", "entries": "", "word": peer}
    asked |= {"adds": True, "yes": yes, "seated": not end, "replaces": replace, "lost": lost}
    _change_by_peer(place, **asked)


def _is_said_by_node(place: RunPlace, peer: str, seated: bool, replaces: str) -> bool:
    """Let the node of this folder say it as a seat. False: none runs. Raises: UserError (it does not)."""
    from p2pdiloco.daemon.owner.control import NodeSilent

    word = {"run": place.run, "peer": peer, "seated": "yes" if seated else "", "replaces": replaces}
    with suppress(NodeSilent, NoNode):
        return _print(_ask(_folder(place.data_dir), "say", word)) == 0
    return False


@command("vouch")
@_at_run
@click.option("--clear", is_flag=True, help="Take the last vouch back.")
def vouch(place: RunPlace, clear: bool) -> None:
    """Vouch for what your node of a RUN holds now: newcomers start from what its members stand on.

    Without a node in the folder, name one that you trust: --join MULTIADDR."""
    from p2pdiloco.cli.owner_notice import vouch_for

    vouch_for(place, clear)


@command("run amend")
@_at_run
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
    place: RunPlace,
    pause: bool,
    resume: bool,
    end: bool,
    learning_rate_factor: float | None,
    **wanted: Any,
) -> None:
    """Change a RUN of yours that goes on: its length, its learning rate; pause it, end it, tell all members.

    All else is part of the run's id: another model, other data or another H are another run."""
    from p2pdiloco.cli.owner_notice import AmendmentWish
    from p2pdiloco.cli.owner_notice import amend as amend_run
    from p2pdiloco.core.api.config import Going

    ways = [
        way for way, is_meant in ((Going.PAUSE, pause), (Going.TRAIN, resume), (Going.END, end)) if is_meant
    ]
    if len(ways) > 1:
        raise UserError("--pause, --resume and --end exclude each other", "give one of them")
    wish = AmendmentWish(rate_factor=learning_rate_factor, going=ways[0] if ways else None, **wanted)
    amend_run(place, wish)


@command("members")
@click.argument("run", required=False, default="")
@join_option("Ask a peer; may be repeated.")
@data_dir_option("Folder of the node to ask, if no peer is named.  [default: the usual ones]")
def members(run: str, join: Addresses, data_dir: Path | None) -> None:
    """List who has a seat in a RUN, since which version and by which paper, and the members without one."""
    from p2pdiloco.cli.status_command import list_members

    join, run = joined_through(join, run)
    list_members(run, join, data_dir)


COMMANDS = (ban, unban, revoke, admit, dismiss, seat, vouch)


# The owner of this machine, to the node that runs on it.

EXIT_NO_NODE = 4
STATUS_HELP = "\n\nExit status 0: done; 2: it cannot be; 3: the node does not answer; 4: no node runs here."
DATA_DIR = click.option(
    "--data-dir",
    type=FILE,
    envvar="P2PDILOCO_DATA_DIR",
    show_envvar=True,
    help="Folder of the node that runs here.  [default: a node's usual one]",
)


class NoNode(UserError):
    """Error: no node runs here with that data folder."""

    exit_status = EXIT_NO_NODE


def _command(verb: Verb, words: str, example: str) -> click.Command:
    """Make a command that says one word to the node, and prints its answer."""

    @click.command(verb, help=f"{words}\n\n\b\nExample:\n  {example}{STATUS_HELP}")
    @DATA_DIR
    def command(data_dir: Path | None) -> int:
        return _print(_ask(_folder(data_dir), verb, {}))

    return command


pause = _command(
    "pause",
    "Let the node on this machine rest: what it made is handed over, then it makes no inner steps until "
    "`resume`, also after a restart. It stays a member meanwhile.",
    "p2pdiloco pause",
)
resume = _command(
    "resume", "End a pause of the node on this machine, or take `finish` back.", "p2pdiloco resume"
)
finish = _command(
    "finish",
    "Let the node on this machine end in good order: what it made is handed over and merged (two minutes at "
    "most), then it leaves as with Ctrl-C.",
    "p2pdiloco finish --data-dir ~/.p2pdiloco/node",
)


@click.command("limits")
@DATA_DIR
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
def limits(data_dir: Path | None, as_json: bool, **values: Any) -> int:
    """Show what limits the node on this machine, or change it while it runs.

    A changed limit holds at once, and at later starts; a flag that is given at a start wins over it. "none"
    takes a limit away. Where no node runs, changes are kept for its next start, and what is kept is shown.

    \b
    Example:
      p2pdiloco limits --max-upload 5Mbit --hours 22-7 --max-transfer 200GB/month
      p2pdiloco limits --hours none

    Exit status 0: done; 2: it cannot be; 3: the node does not answer; 4: no node runs here.
    """
    changes = {flag_of(name)[2:]: value for name, value in values.items() if value is not None}
    folder = node_folder(data_dir)
    if not _runs(folder) and folder.is_dir():
        if not changes:
            return _say_kept(folder)
        from p2pdiloco.daemon.owner.wishes import change_kept

        change_kept(folder, changes)
        click.echo(f"no node runs here: kept for the next start with {folder}")
        return 0
    reply = _ask(_folder(data_dir), "limits" if changes else "state", changes)
    if reply.state is None or not reply.ok or (changes and not as_json):
        return _print(reply)
    from p2pdiloco.errors import json_line

    click.echo(json_line(reply.state) if as_json else "\n".join(_lines(reply.state)))
    return 0


for _name, _flag in flags(OwnLimits).items():
    _values = _flag.metavar or ("yes|no" if DEFAULTS[_name] is False else "NUMBER")
    limits.params.append(click.Option([flag_of(_name), _name], metavar=_values, help=_flag.help))


def _folder(data_dir: Path | None) -> Path:
    """Find the folder of the node that runs here. Raises: NoNode, StorageError."""
    folder = node_folder(data_dir)
    if not _runs(folder):
        hint = "name its folder with --data-dir; `p2pdiloco node` starts one"
        raise NoNode(f"no node runs here with the data folder {folder}", hint)
    return folder


def _runs(folder: Path) -> bool:
    from p2pdiloco.adapters.data_dir import is_in_use

    return folder.is_dir() and is_in_use(folder)


def _ask(folder: Path, verb: Verb, changes: dict[str, str]) -> Reply:
    from p2pdiloco.daemon.owner.control import Request, ask

    return ask(folder, Request(verb, changes))


def _print(reply: Reply) -> int:
    if not reply.ok:
        raise UserError(reply.said, reply.hint)
    click.echo(reply.said)
    return 0


def _say_kept(folder: Path) -> int:
    """Print what is kept for the next start. Returns the exit status."""
    from p2pdiloco.daemon.owner.wishes import load_wishes

    wishes = load_wishes(folder)
    kept = [
        f"{flag_of(name)[2:]} {value_text(getattr(wishes.limits, name)) or 'none'}" for name in wishes.changed
    ]
    kept += ["paused"] if wishes.paused_since else []
    click.echo(f"no node runs here; kept for the next start with {folder}: {', '.join(kept) or 'nothing'}")
    return EXIT_NO_NODE


def _lines(state: ControlState) -> list[str]:
    from p2pdiloco.daemon.display.snapshot import transfer_text
    from p2pdiloco.errors import clean

    words = [clean(state.rest.words) if state.rest is not None else f"state: {state.state}"]
    if state.transfer is not None:
        words.append(transfer_text(state.transfer))
    width = max(len(row.name) for row in state.limits)
    for row in state.limits:
        where = "" if row.comes_from == "default" else f"  ({row.comes_from})"
        words.append(f"{row.name:<{width}}  {clean(row.value) or 'none'}{where}")
    return words
