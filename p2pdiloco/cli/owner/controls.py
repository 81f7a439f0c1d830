"""`p2pdiloco pause`, `resume`, `finish`, `limits`: the owner of this machine to the node that runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdiloco.cli.options import FILE
from p2pdiloco.config.settings import FIELDS, NodeSettings, flag_of, value_text
from p2pdiloco.config.values import expanded
from p2pdiloco.errors import UserError

if TYPE_CHECKING:
    from p2pdiloco.daemon.owner.control import ControlState, Reply, Verb

NO_NODE = 4
STATUS = "\n\nExit status 0: done; 2: it cannot be; 3: the node does not answer; 4: no node runs here."
HELP = {
    "max_upload": "Bits per second to send, such as 20Mbit.",
    "max_download": "The same to receive.",
    "max_transfer": "Bytes both ways in a calendar month, such as 200GB/month.",
    "min_step_s": "Least seconds of an inner step.",
    "hours": 'Hours in which it trains, such as 22-7 or "mon-fri 18-8, sat-sun 0-24".',
    "when_idle": "Time for which nobody has used the machine before it trains, such as 10min.",
    "not_on_battery": "yes: train on mains power only.",
    "max_temperature": "Degrees Celsius of GPU and CPU above which it rests.",
    "max_power": "Watts of the GPUs above which it rests.",
}
DATA_DIR = click.option(
    "--data-dir",
    type=FILE,
    envvar="P2PDILOCO_DATA_DIR",
    show_envvar=True,
    help="Folder of the node that runs here.  [default: a node's usual one]",
)


class NoNode(UserError):
    """Error: no node runs here with that data folder."""

    exit_status = NO_NODE


def _command(verb: Verb, words: str, example: str) -> click.Command:
    """Make a command that says one word to the node, and prints its answer."""

    @click.command(
        verb, help=f"{words}\n\n\b\nExample:\n  {example}{STATUS}", short_help=words.partition(".")[0]
    )
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
    folder = expanded(data_dir or NodeSettings().data_dir)
    if not _runs(folder) and folder.is_dir():
        return _change_file(folder, changes) if changes else _say_kept(folder)
    reply = _ask(_folder(data_dir), "limits" if changes else "state", changes)
    if reply.state is None or not reply.ok:
        return _print(reply)
    if as_json:
        from p2pdiloco.errors import json_line

        click.echo(json_line(reply.state))
    elif changes:
        return _print(reply)
    else:
        click.echo("\n".join(_lines(reply.state)))
    return 0


for _name in FIELDS:
    limits.params.append(click.Option([flag_of(_name), _name], metavar="VALUE", help=HELP[_name]))


def _folder(data_dir: Path | None) -> Path:
    """Find the folder of the node that runs here. Raises: NoNode, StorageError."""
    folder = expanded(data_dir or NodeSettings().data_dir)
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


def _change_file(folder: Path, changes: dict[str, str]) -> int:
    """Change what is kept for the next start. Raises: UserError."""
    from p2pdiloco.daemon.owner.wishes import change_kept

    change_kept(folder, changes)
    click.echo(f"no node runs here: kept for the next start with {folder}")
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
    return NO_NODE


def _lines(state: ControlState) -> list[str]:
    """Word the state for people."""
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


COMMANDS = (pause, resume, finish, limits)
