"""Turn of this member to stand for an open office.

Rules: docs/protocol/election.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.candidates import Candidates
from p2pdiloco.core.election.terms import Terms
from p2pdiloco.core.timing import backoff_s


class Turn:
    """Turn in one group: rank x stagger after the office was seen open, and not in a pause."""

    def __init__(self, context: FragmentContext, candidates: Candidates, terms: Terms) -> None:
        self._shared = context.shared
        self._candidates = candidates
        self._terms = terms
        self._open_since_s: float | None = None
        self._vacant_since_s: float | None = None
        """Time at which the office was seen open, whatever candidacies there were since."""
        self._not_before_s = 0.0
        self._voted_until_s = 0.0
        """Time until which it pauses for another that has its vote, beside any other pause."""
        self._failures = 0
        """Rounds of ours in a row that came to nothing."""
        self.due_s: float | None = None
        """Time at which it comes, as the last look had it; None: not worked out."""

    def opened(self, now: float) -> None:
        """Note that the office is open, if that was not known."""
        if self._open_since_s is None:
            self._open_since_s = now
        if self._vacant_since_s is None:
            self._vacant_since_s = now

    def open_s(self, now: float) -> float:
        """Compute for how long the office has been open, as far as we know."""
        return now - self._vacant_since_s if self._vacant_since_s is not None else 0.0

    def again(self, now: float) -> None:
        """Count from now on, however long the office was open."""
        self._open_since_s = now

    def filled(self) -> None:
        """Note that the office is filled, which ends a voter's pause. Else who voted would miss its turn in
        terms that are shorter than that, and the first syncer would stay. Other pauses last."""
        self._voted_until_s = 0.0
        self._open_since_s = self._vacant_since_s = None

    def not_before(self, from_s: float) -> None:
        """Let it come at that time at the earliest."""
        self._not_before_s = max(self._not_before_s, from_s)

    def voted(self, until_s: float) -> None:
        """Pause for another that has our vote: until the office is filled, or that time."""
        self._voted_until_s = until_s

    def pause_longer(self, by_s: float) -> None:
        """Lengthen the pause."""
        self._not_before_s += by_s

    def lost(self, now: float) -> None:
        """Wait for another turn, after a pause of random length: a candidacy was lost."""
        shared = self._shared
        self._not_before_s = now + shared.timing.stagger_s * (1 + 2 * shared.rng.random())
        self._open_since_s = now
        self.due_s = self._not_before_s

    def failed(self, now: float) -> None:
        """Pause after a round of ours that came to nothing, longer every time, up to a bound.

        Where nobody else stands and all merges fail, they would else follow each other as fast as our disk
        takes votes.
        """
        self._failures += 1
        self.not_before(now + backoff_s(self._shared.timing.retry_s, self._failures))

    def served(self) -> None:
        """Note that a round of ours was merged."""
        self._failures = 0

    def unknown(self) -> None:
        """Forget when it comes, until the next look."""
        self.due_s = None

    def look(self, waits: bool, now: float) -> bool:
        """Work out when it comes, and tell whether it has come. `waits`: others are to be heard of first."""
        shared = self._shared
        if waits:
            self._open_since_s = now
            self.due_s = now + shared.timing.retry_s
            return False
        opened_s = self._open_since_s if self._open_since_s is not None else now
        ranked_s = opened_s + self._candidates.wait_s(self._terms.next(), now)
        paused_s = max(self._not_before_s, self._voted_until_s)
        self.due_s = max(paused_s, ranked_s, shared.health.listens_until_s)
        return now >= self.due_s
