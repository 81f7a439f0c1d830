"""The command line: the group, and the one place where errors become exit statuses.

    0  done          1  a bug of ours, with its traceback (or the demo's verdict)
    3  `status`: peers answer, but no node of the run       4  `status`: nobody answers
       pause, resume, finish, limits: the node is silent       the same: no node runs here
    2  the person's to mend: one sentence and a hint        130  interrupted (143, 129: SIGTERM, SIGHUP, where
                                                                 a visit of a live run had to be ended)

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import click

from p2pdiloco.cli.commands import (
    board,
    bootstrap,
    credits_command,
    demo,
    doctor,
    join,
    log_to,
    node,
    status,
    top,
)
from p2pdiloco.cli.from_lab import CHAOS, SIMULATE, installed
from p2pdiloco.cli.interrupt import EXIT_INTERRUPTED
from p2pdiloco.cli.options import COMPLETION, WholeSentences, known_variables, say
from p2pdiloco.cli.owner_commands import COMMANDS, can_join, finish, invite, limits, members, pause, resume
from p2pdiloco.cli.result_commands import checkpoint, evaluate, export, generate
from p2pdiloco.cli.run_commands import plan, run_group
from p2pdiloco.config.settings import ENVIRONMENT_PREFIX, check_environment
from p2pdiloco.config.values import read_toml
from p2pdiloco.errors import UserError, clean, without_torch
from p2pdiloco.release import VERSION

PARTS: dict[str, tuple[click.Command, ...]] = {
    "Take part": (join, node, can_join, plan, doctor),
    "Your node": (pause, resume, finish, limits),
    "Look": (status, top, board, credits_command, log_to, members),
    "Take the result": (export, generate, evaluate, checkpoint),
    "Host a run": (run_group, bootstrap, invite, *COMMANDS),
    "Try it out": (demo, CHAOS, SIMULATE),
}
"""Commands by whom they are for."""


@click.group(
    cls=WholeSentences,
    parts=PARTS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=COMPLETION,
)
@click.version_option(VERSION, prog_name="p2pdiloco")
def cli() -> None:
    """Train one model together, peer to peer, with Decoupled DiLoCo."""
    known = known_variables(cli)
    if any(name.startswith(ENVIRONMENT_PREFIX) and name not in known for name in os.environ):
        known |= known_variables(installed())  # the lab is loaded only where a variable may be its own
    check_environment(os.environ, known)


for command in chain.from_iterable(PARTS.values()):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Run a command, return the exit status. Anything unexpected is raised, to end in a traceback."""
    try:
        if sys.flags.optimize:
            raise UserError("p2pdiloco does not run under python -O: its checks must stay on")
        result = cli.main(args=list(arguments), prog_name="p2pdiloco", standalone_mode=False)
    except ModuleNotFoundError as error:
        missing = without_torch(error)
        if missing is None:
            raise
        return _complain(missing, arguments)
    except UserError as error:
        return _complain(error, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "p2pdiloco --help")
        return 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "p2pdiloco"
        return _complain(UserError(error.format_message(), f"{command} --help"), arguments)
    except click.Abort:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _complain(error: UserError, arguments: Sequence[str]) -> int:
    """Tell an error, as the log is written. Returns the exit status."""
    if _logs_json(arguments):
        from p2pdiloco.daemon.display.logs import complaint_line

        say(complaint_line(error))
        return error.exit_status
    hint = [f"hint: {error.hint}"] if error.hint else []
    for line in (f"error: {error}", *(f"  {detail}" for detail in error.details), *hint):
        say(clean(line))
    return error.exit_status


def _logs_json(arguments: Sequence[str]) -> bool:
    """Tell whether a command whose flags are wrong was to write a log for machines: then its last word is a
    line of that, as of one that began (`SpacedLists`)."""
    words = " ".join(arguments).replace("--log=", "--log ")
    if "--log " in words:
        return "--log json" in words
    if not arguments or arguments[0] not in ("node", "bootstrap"):
        return False
    asked = os.environ.get("P2PDILOCO_LOG") or _log_of_settings_file(arguments)
    return asked == "json"


def _log_of_settings_file(arguments: Sequence[str]) -> object:
    """Read what the settings file says of the log, whatever else is wrong with it, and with the flags."""
    named = [following for word, following in pairwise(arguments) if word == "--config"]
    named += [word.removeprefix("--config=") for word in arguments if word.startswith("--config=")]
    path = named[-1] if named else os.environ.get("P2PDILOCO_CONFIG", "")
    try:
        return read_toml(Path(path)).get(arguments[0], {}).get("log") if path else None
    except (UserError, AttributeError):  # which is said, as far as it is what is wrong
        return None
