"""Slot of one fragment in the learner, as the daemon sees it."""

from __future__ import annotations

from p2pdiloco.learner.channel import InstallMode

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

        self._not_finite = False

    def call(self, ready: bool) -> bool:
        """Take in a closing call. True: it is to be answered now; False: a version is about to be taken over,
        and it waits for that."""
        self.wanted = ready and not self.sent and bool(self.installing or self.next)
        return not self.wanted

    def copies(self) -> None:
        """Note that the learner is asked for a copy: no closing call waits."""
        self.wanted = False

    def had_nothing(self, in_use: bool) -> bool:
        """Take in that the learner had no copy to give, `in_use`: for lack of room. True: that is the answer
        to the closing call."""
        # It crossed the version that makes room: ask again when the learner has that.
        free = in_use and self.ticket is None and not self.encoding
        self.wanted = free and bool(self.installing)
        return not self.encoding and not self.wanted

    def copied(self) -> None:
        """Note that a copy is here, to be encoded."""
        self.encoding = True

    def encoded(self) -> bool:
        """Note that the copy is encoded. False: it is void."""
        self.encoding = False
        return not self.void

    def first_not_finite(self) -> bool:
        """Note that a copy was not finite. True: none was before, since one was sent."""
        before, self._not_finite = self._not_finite, True
        return not before

    def holds(self, ticket: int) -> None:
        """Note under which ticket the copy goes out."""
        self.ticket, self._not_finite = ticket, False

    def freed(self, ticket: int) -> bool:
        """Free the slot, if the copy in it has that ticket. False: it has not."""
        if self.ticket != ticket:
            return False
        self.ticket = None
        return True

    def lags(self) -> None:
        """Note that the learner began with an older version than the newest."""
        self.next = self.next or "rebase"

    def begin_install(self) -> bool:
        """Begin to take over what is next. False: nothing is, or an install is under way."""
        if self.installing is not None or self.next is None:
            return False
        self.installing, self.next = self.next, None
        return True

    def told(self) -> None:
        """Note that the learner has been told of the install under way."""
        self.sent = True

    def applied(self) -> None:
        """Note that the learner has taken the new version over, into its other buffer."""
        self.buffer, self.installing, self.sent = 1 - self.buffer, None, False

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
