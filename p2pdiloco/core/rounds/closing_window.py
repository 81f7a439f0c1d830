"""Window of a round that closes: until when it is open for what the others were called for.

Rules: docs/protocol/rounds.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.api.messages import Closing
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.rounds.attendance import Attendance
from p2pdiloco.core.rounds.closing_calls import ClosingCalls
from p2pdiloco.core.rounds.inbox import Inbox
from p2pdiloco.core.timing import grace_cap_s

CALLED_SHARE = 0.6
"""Share of the window above within which a group that is called closes: the rest is for its merge to
arrive."""


class ClosingWindow:
    """Window of one group's rounds, of which one at most closes at a time."""

    def __init__(
        self,
        context: FragmentContext,
        level: int,
        inbox: Inbox,
        attendance: Attendance,
        calls: ClosingCalls,
    ) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._chain = context.chain
        self._level = level
        self._inbox = inbox
        self._attendance = attendance
        self._calls = calls
        self.until_s = 0.0
        """Time at which it ends."""
        self._waits = False
        """True: it is over, but payloads are on their way."""
        self._needs = 1
        """Quorum when the round began."""
        self._called_by: tuple[str, Closing] | None = None

    @property
    def _own(self) -> bool:
        """True: a round of learners that began by itself, not called from above."""
        return not self._level and self._called_by is None

    def words(self, now: float) -> str:
        """Say for people what keeps it open."""
        left_s = max(0.0, self.until_s - now)
        return "others are on their way" if self._waits else f"grace ends in {left_s:.1f} s"

    def begin(self, needs: int) -> None:
        """Note with which quorum a round begins."""
        self._needs = needs

    def open(self, grace_s: float, now: float) -> None:
        """Open it for that long."""
        self.until_s = now + grace_s
        self._waits = False

    def called(self, sender: str, call: Closing) -> float:
        """Take in that the syncer above closes its own round. Compute how long ours may be open then."""
        self._called_by = (sender, call)
        cap_s = grace_cap_s(self._shared.config.grace_cap_s, self._level + 1)
        closes_in_s = call.closes_in_s if 0.0 <= call.closes_in_s <= cap_s else cap_s
        return CALLED_SHARE * closes_in_s

    def shorten(self, until_s: float) -> None:
        """End it at that time, unless it ends before."""
        self.until_s = min(self.until_s, until_s)

    def gather(self) -> None:
        """Keep it open while we listen for who else is there."""
        if self._own:
            self.until_s = max(self.until_s, self._shared.gather_until_s)

    def take_caller(self) -> tuple[str, Closing] | None:
        """Forget by whom the round was called. Returns (peer, its call), or None."""
        caller, self._called_by = self._called_by, None
        return caller

    def over(self, missing: list[str], now: float) -> bool:
        """Tell whether the round is to close without these."""
        return now >= self.until_s and not self._waits_on(missing, now)

    def _waits_on(self, missing: list[str], now: float) -> bool:
        """Tell whether a round whose window is over waits for payloads that are on their way.

        On thin links the syncer would else merge alone time and again, and all that the others send would
        come too late. It waits only while no majority is in, so that a few slow links hold no other up. Nor
        does it wait longer than those that are in are patient with us. Inner steps wait for nothing; streams
        that stand still are cut.
        """
        shared, ready = self._shared, self._inbox.ready()
        arriving = [child for child in missing if self._inbox.has(child)]
        enough = len(ready) > len(missing) and not self.short(len(ready), now)
        if not self._own or shared.leaving or not arriving or enough:
            return False
        until_s = self._calls.arrivals_until_s(self.until_s, ready, now)
        if now < until_s and not self._waits:
            self._waits = True
            reason = f"{len(ready)} in, waits for {len(arriving)} on their way"
            number = self._chain.head.number + 1
            shared.out.record("closing", self._fragment, reason, number=number, grace_s=until_s - now)
        return now < until_s

    def short(self, ready: int, now: float) -> bool:
        """Tell whether what the round was begun for did not come: fewer are in than the quorum."""
        bound = self._own and not self._shared.leaving
        return bound and ready < min(self._needs, self._attendance.quorum(now))
