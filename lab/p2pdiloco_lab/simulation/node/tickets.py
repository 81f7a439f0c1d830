"""A node's buffers: contributions and updates by ticket. Wrong use of one is a bug of the core."""

from __future__ import annotations

from p2pdiloco.core.pending import KEPT_MAX
from p2pdiloco_lab.simulation.node.lineage import Displacement, OuterUpdate, PartialSum
from p2pdiloco_lab.simulation.rules.violation import Violation

Content = Displacement | OuterUpdate | PartialSum

MAX_PER_FRAGMENT = 48
"""Buffers alive at one node per fragment, besides the log: own queue, one inbox entry per member, updates."""

MAX_SPILLED_PER_FRAGMENT = 2 * KEPT_MAX

PER_GROUP_SIZE = 2
"""More of them for every member that a group should have: groups by hash may be twice as large, and a syncer
has an inbox on every level."""


class TicketBuffers:
    """Opens, lends and closes buffers."""

    def __init__(self, peer: str, fragments: int, group_size: int) -> None:
        self._peer = peer
        self._limit = (MAX_PER_FRAGMENT + PER_GROUP_SIZE * min(group_size, MAX_PER_FRAGMENT)) * fragments
        self._made = 0
        self._contents: dict[int, Content] = {}
        self._spilled: set[int] = set()
        """Buffers that are on the disk."""
        self._spill_limit = MAX_SPILLED_PER_FRAGMENT * fragments

    def __len__(self) -> int:
        """Buffers in memory."""
        return len(self._contents) - len(self._spilled)

    def new(self, content: Content) -> int:
        """A buffer with this content. Raises: Violation when there are too many."""
        self._made += 1
        self._contents[self._made] = content
        if len(self) > self._limit:
            raise Violation("bounded", f"{self._peer} holds {len(self)} buffers")
        return self._made

    def spill(self, ticket: int) -> None:
        """The buffer goes to the disk. Raises: Violation for what is no contribution, and for too many."""
        self.contribution(ticket)
        self._spilled.add(ticket)
        if len(self._spilled) > self._spill_limit:
            raise Violation("bounded", f"{self._peer} has {len(self._spilled)} buffers on its disk")

    def free(self, ticket: int) -> None:
        """The buffer is not needed any more. Raises: Violation when it was freed before."""
        self._spilled.discard(ticket)
        if self._contents.pop(ticket, None) is None:
            raise Violation("tickets", f"{self._peer} frees buffer {ticket}, which it does not hold")

    def contribution(self, ticket: int) -> Displacement:
        """The contribution in a buffer. Raises: Violation when there is none."""
        content = self._contents.get(ticket)
        if not isinstance(content, Displacement):
            raise Violation("tickets", f"{self._peer}: no contribution in buffer {ticket}")
        return content

    def partial(self, ticket: int) -> PartialSum:
        """The partial merge in a buffer. Raises: Violation when there is none."""
        content = self._contents.get(ticket)
        if not isinstance(content, PartialSum):
            raise Violation("tickets", f"{self._peer}: no partial merge in buffer {ticket}")
        return content

    def update(self, ticket: int) -> OuterUpdate:
        """The outer update in a buffer. Raises: Violation when there is none."""
        content = self._contents.get(ticket)
        if not isinstance(content, OuterUpdate):
            raise Violation("tickets", f"{self._peer}: no outer update in buffer {ticket}")
        return content
