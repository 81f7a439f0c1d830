"""Commands of the lab (`lab/` in the repository), a distribution of its own: named here, loaded when called.

An entry point of the group `p2pdiloco.commands` has the command (`click.Command`). Help lists them without
looking for it, so that it stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from p2pdiloco.errors import UserError, install_hint
from p2pdiloco.release import VERSION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "p2pdiloco.commands"


class LabCommand(click.Command):
    """Place of a command that the lab has, with the first sentence of its help."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Hand over to the command itself.

        Raises:
            UserError: the lab is not installed, or it is not of this release.
        """
        if extra.get("resilient_parsing") and self.entry() is None:
            return super().make_context(info_name, args, parent, **extra)
        return self.loaded().make_context(info_name, args, parent, **extra)

    def entry(self) -> EntryPoint | None:
        """Look the command up among what is installed."""
        # Imported here: it would take longer than all else that help needs.
        from importlib.metadata import entry_points

        return next(iter(entry_points(group=GROUP, name=self.name or "")), None)

    def loaded(self) -> click.Command:
        """Import the command. Raises: UserError."""
        entry, hint = self.entry(), install_hint(path="./lab")
        if entry is None:
            raise UserError(f"`p2pdiloco {self.name}` is in the lab, which is not installed here", hint)
        if entry.dist is not None and entry.dist.version != VERSION:
            raise UserError(f"the lab is that of version {entry.dist.version}, and this is {VERSION}", hint)
        command: click.Command = entry.load()
        return command


CHAOS = LabCommand(
    "chaos",
    short_help="Kill, stop, fill and cut a swarm of real nodes, and report how it fares.",
)
SIMULATE = LabCommand(
    "simulate",
    short_help="Run the protocol under a virtual clock, a faulty network, crashes and restarts.",
)


def loaded(command: click.Command) -> click.Command:
    """Return the command itself where it is the lab's. Raises: UserError."""
    return command.loaded() if isinstance(command, LabCommand) else command


def installed() -> click.Group:
    """Group the lab's commands that are installed, all loaded."""
    found = (command for command in (CHAOS, SIMULATE) if command.entry() is not None)
    return click.Group(commands=[command.loaded() for command in found])
