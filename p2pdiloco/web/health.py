"""Health of the program in one word, for `/healthz`."""

from __future__ import annotations

from p2pdiloco.web.view import RunView
from p2pdiloco.web.words import NodeWord

UNWELL = (NodeWord.JOINING, NodeWord.WAITING, NodeWord.LEAVING)
"""States in which a node does nothing for its run: 503. In all others: 200."""


def of(view: RunView | None) -> tuple[str, bool]:
    """Find the word of the state, and whether the program does what it is for."""
    if view is None or view.own is None:
        return NodeWord.JOINING.value, False
    return view.own.state.value, view.own.state not in UNWELL
