"""Controls of a node: what the owner of its machine may ask of it while it runs.

Who calls it has shown that they are the owner: the control socket by the file's rights, the web page by its
token. All answers are one line for people; a wish that cannot be is a `UserError` with a sentence and a hint.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from p2pdiloco.daemon.display.own_rows import RestRow, TransferRow
from p2pdiloco.daemon.rest.kept_wishes import LimitRow

AWAY = "away"
"""State of a node that has left its run for now, and comes back by itself."""


class ControlState(Struct, frozen=True, kw_only=True):
    """State of a node, for its owner."""

    peer: str = ""
    name: str = ""
    run_name: str = ""
    state: str = "joining"
    """Word of the node's state (`NodeState`), or "away": it has left for now, and comes back by itself."""
    paused: bool = False
    finishing: bool = False
    rest: RestRow | None = None
    """Reason why the learner rests by the owner's wish; None: it does not."""
    transfer: TransferRow | None = None
    limits: tuple[LimitRow, ...] = ()
    recent: tuple[str, ...] = ()
    """Latest lines of its log, newest last."""


class OwnerControls(Protocol):
    """Controls, for who serves them to the owner (control socket, web page). On the event loop only."""

    async def pause(self) -> str:
        """Let the learner rest until `resume`, also over restarts."""

    async def resume(self) -> str:
        """End a pause, or take `finish` back while it can be. Schedules and bounds go on holding."""

    def finish(self) -> str:
        """Hand over what was made, then leave and end."""

    async def limits(self, changes: dict[str, str]) -> str:
        """Change limits by name, all or none; an empty value takes one away. They are kept for later starts.

        Raises: UserError (an unknown name, a value that cannot be, nothing to read it by)."""

    def state(self) -> ControlState:
        """Describe the node."""
