"""One fragment's state in the learner, as the daemon sees it."""

from __future__ import annotations

from p2pdiloco.learner.channel_messages import InstallMode

SEVERITY: dict[InstallMode, int] = {"rebase": 0, "merged": 1, "overwrite": 2}


class Slot:
    """Which buffer is whose, what the learner is to take over, and whether a copy of it is on its way."""

    def __init__(self) -> None:
        self.buffer = 0
        """The base buffer that the learner's parameters are measured against."""
        self.installing: InstallMode | None = None
        self.next: InstallMode | None = None
        self.ticket: int | None = None
        """Of the contribution whose copy occupies the slot."""
        self.encoding = False
        """A copy is being encoded: its contribution is the answer to a closing call."""
        self.sent = False
        """The learner has been told of the install under way."""
        self.wanted = False
        """A closing call waits for an install: before it the learner has no room for another copy."""

    def committed(self, merged_ticket: int | None, overwrite: bool) -> bool:
        """A new version is being committed: the next install takes it over. Whether our copy is in it."""
        merged = merged_ticket is not None and merged_ticket == self.ticket
        mode: InstallMode = "overwrite" if overwrite else "merged" if merged else "rebase"
        if mode != "rebase":
            self.ticket = None
        if self.next is None or SEVERITY[mode] > SEVERITY[self.next]:
            self.next = mode
        return merged

    @property
    def void(self) -> bool:
        """An overwrite that the learner has not yet taken over makes its copy void."""
        return "overwrite" in (self.installing, self.next)
