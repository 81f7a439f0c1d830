"""Share of a learner's displacement that one contribution carries, after an absence.

`learner.fragments` and the simulator ask for it. A learner that was cut off, or that found no peer to merge
its work, comes back with a displacement of many sync intervals. Merged at full length it is one stride of a
single learner, in proportion to its tokens, which outer momentum then amplifies: it costs everybody loss for
hundreds of steps. In shares of twice the usual length, one in each round, it costs hardly any
(docs/results.md, `scripts/bench/study/bench_absence.py`).

Rules: docs/protocol/weights.md, section 7.
"""

from __future__ import annotations

PERIODS = 2
"""Longest share, as a multiple of the usual number of inner steps between two merged contributions."""
LEAST_SHARE = 8
"""Divisor of the smallest share: at least an eighth of a displacement goes out. However irregularly
contributions are merged, what waits does not grow beyond eight times what is trained between two of them."""


MOST_GIVEN_UP = 2
"""Number of copies of the same displacement that are given up, until an inner step changes it."""


class Stride:
    """Measure of one fragment: what is usual, which is H inner steps, or more where rounds take longer, and
    what has become of copies since the last inner step. Steps are counted from any beginning."""

    def __init__(self, inner_steps: int, at_step: int = 0) -> None:
        """Begin with H as usual. `inner_steps`: H."""
        self._least = inner_steps
        self._last = self._before = inner_steps
        self._merged_at = self._stands_at = at_step
        """Step at which something was merged last; step after which what follows was counted."""
        self._carried = self._given_up = 0
        """Inner steps of what was merged last; number of copies that were given up since."""

    def rarer(self, inner_steps: int) -> None:
        """Make so many inner steps between two contributions the usual."""
        self._least = inner_steps

    def merged(self, steps: int, at_step: int) -> None:
        """Count a contribution of so many inner steps that was merged."""
        self._before, self._last = self._last, at_step - self._merged_at
        self._merged_at = self._stands_at = at_step
        self._carried, self._given_up = steps, 0

    def given_up(self, at_step: int) -> None:
        """Count a copy that will not be merged as it stands."""
        if at_step != self._stands_at:
            self._stands_at, self._carried, self._given_up = at_step, 0, 0
        self._given_up += 1

    def carried(self, unmerged_steps: int, at_step: int) -> int:
        """Compute how many of a displacement's inner steps go into the next contribution: all of them, as a
        rule. 0: there is nothing to send before the next inner step.

        One long interval is an absence; only two in a row are the pace of the rounds. Shares of as many steps
        of one displacement have the same bytes, and syncers refuse a copy of what was merged last. So without
        an inner step in between it is another number than that one's.
        """
        stands = at_step == self._stands_at
        if stands and self._given_up >= MOST_GIVEN_UP:
            return 0
        usual = max(self._least, min(self._before, self._last))
        steps = min(unmerged_steps, max(PERIODS * usual, -(-unmerged_steps // LEAST_SHARE)))
        return steps - 1 if stands and 0 < steps == self._carried else steps
