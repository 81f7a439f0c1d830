"""Slot of one fragment in the learner, as the daemon sees it."""

from __future__ import annotations

from p2pdiloco.learner.channel_messages import InstallMode

SEVERITY: dict[InstallMode, int] = {"rebase": 0, "merged": 1, "overwrite": 2}


class Slot:
    """Slot of a fragment: whose which buffer is, what the learner is to take over, and its copy on its
    way."""

    def __init__(self) -> None:
        self.buffer = 0
        """Number of the base buffer that the learner's parameters are measured against."""
        self.installing: InstallMode | None = None
        self.next: InstallMode | None = None
        self.ticket: int | None = None
        """Ticket of the contribution whose copy occupies the slot."""
        self.encoding = False
        """True: a copy is being encoded, whose contribution is the answer to a closing call."""
        self.sent = False
        """True: the learner has been told of the install under way."""
        self.wanted = False
        """True: a closing call waits for an install, before which the learner has no room for another
        copy."""

    def committed(self, merged_ticket: int | None, overwrite: bool) -> bool:
        """Note that a new version is being committed, which the next install takes over.

        Returns whether our copy is in it.
        """
        merged = merged_ticket is not None and merged_ticket == self.ticket
        mode: InstallMode = "overwrite" if overwrite else "merged" if merged else "rebase"
        if mode != "rebase":
            self.ticket = None
        if self.next is None or SEVERITY[mode] > SEVERITY[self.next]:
            self.next = mode
        return merged

    @property
    def void(self) -> bool:
        """True: an overwrite that the learner has not yet taken over makes its copy void."""
        return "overwrite" in (self.installing, self.next)
