"""Share of a learner's displacement that one contribution carries, after an absence.

`learner.fragments` and the simulator ask for it. A learner that was cut off, or that found no peer to merge
its work, comes back with a displacement of many sync intervals. Merged at full length it is one stride of a
single learner, in proportion to its tokens, which outer momentum then amplifies: it costs everybody loss for
hundreds of steps. In shares of twice the usual length, one in each round, it costs hardly any
(docs/lab/recovery.md, `scripts/bench/study/bench_absence.py`).

Rules: docs/protocol/weights.md, section 7.
"""

from __future__ import annotations

PERIODS = 2
"""Longest share, as a multiple of the usual number of inner steps between two merged contributions."""
LEAST_SHARE = 8
"""Divisor of the smallest share: at least an eighth of a displacement goes out. However irregularly
contributions are merged, what waits does not grow beyond eight times what is trained between two of them."""


class Stride:
    """Measure of what is usual for one fragment: H inner steps, or more where rounds take longer."""

    def __init__(self, inner_steps: int) -> None:
        """Begin with H as usual. `inner_steps`: H."""
        self._least = inner_steps
        self._last = self._before = inner_steps

    def rarer(self, inner_steps: int) -> None:
        """Make so many inner steps between two contributions the usual."""
        self._least = inner_steps

    def merged(self, steps: int) -> None:
        """Count a contribution that was merged, so many inner steps after the one before."""
        self._before, self._last = self._last, steps

    def carried(self, unmerged_steps: int) -> int:
        """Compute how many of a displacement's inner steps go into the next contribution: all of them, as a
        rule.

        One long interval is an absence; only two in a row are the pace of the rounds.
        """
        usual = max(self._least, min(self._before, self._last))
        return min(unmerged_steps, max(PERIODS * usual, -(-unmerged_steps // LEAST_SHARE)))
