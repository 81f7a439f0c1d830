"""Sources of views: a node's own, or a bootstrap's, and before either is there the first word."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from p2pdiloco.daemon.owner.control import ControlState, OwnerControls
from p2pdiloco.release import VERSION
from p2pdiloco.web.view import OwnView, RunView
from p2pdiloco.web.words import Control, NodeWord

FRESH_S = 1.0
"""Age up to which a view is given to the next one who asks."""


class Source(Protocol):
    """Source of views."""

    def view(self, run: str) -> RunView | None:
        """Make the whole view of a run, given by its id, or of the first if that is empty; None: it is not
        known here."""


def offered(state: ControlState | None) -> tuple[Control, ...]:
    """List what the page may offer to the owner; None: there are no controls."""
    if state is None:
        return ()
    return (Control.RESUME if state.paused else Control.PAUSE, Control.FINISH, Control.LIMITS)


def limits_by_name(state: ControlState | None) -> dict[str, str]:
    """List the limits by name."""
    return {row.name: row.value for row in state.limits} if state is not None else {}


class Starting:
    """Source of a program that has no run yet."""

    def __init__(self, role: str, name: str, peer: str, controls: OwnerControls | None = None) -> None:
        self._role, self._name, self._peer, self._controls = role, name, peer, controls

    def view(self, run: str) -> RunView | None:
        """Say that it is joining, or away for its owner's sake."""
        known = self._controls.state() if self._controls is not None else None
        own = OwnView(
            state=NodeWord(known.state) if known is not None else NodeWord.JOINING,
            rest=known.rest.words if known is not None and known.rest is not None else "",
            name=self._name,
            peer=self._peer,
            controls=offered(known),
            limits=limits_by_name(known),
        )
        return None if run else RunView(role=self._role, version=VERSION, own=own)


class Views:
    """Views for all who ask: nothing is made twice within a second, and nothing if nobody asks."""

    def __init__(self, source: Source, now: Callable[[], float] = time.monotonic) -> None:
        self._source, self._now = source, now
        self._kept: dict[str, tuple[float, RunView, RunView]] = {}
        self.controls: OwnerControls | None = None
        """Controls of the node; None: it has none (yet)."""

    def enter(self, source: Source, controls: OwnerControls | None = None) -> None:
        """Show another source from now on."""
        self._source, self.controls = source, controls
        self._kept.clear()

    def view(self, run: str, is_owner: bool) -> RunView | None:
        """Give the view of a run, without what is the owner's to see if need be."""
        kept = self._kept.get(run)
        if kept is None or self._now() >= kept[0] + FRESH_S:
            view = self._source.view(run)
            if view is None:  # what anybody may ask for is not remembered
                return None
            public = RunView(role=view.role, version=view.version, public=view.public, runs=view.runs)
            kept = self._kept[run] = self._now(), view, public
        return kept[1] if is_owner else kept[2]
