"""Patience of a learner with a syncer that took its contribution."""

from __future__ import annotations

from p2pdiloco.core.api.grouping import level_sizes
from p2pdiloco.core.api.reasons import Then, Verdict
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.timing import answer_bound_s, patience_s
from p2pdiloco.util import MovingAverage


class Patience:
    """Patience in one fragment, learned from how long contributions took until they were merged."""

    def __init__(self, context: FragmentContext) -> None:
        self._context = context
        self._round_s = MovingAverage()

    def merged(self, took_s: float) -> None:
        """Note how long after its last offer a contribution was in our chain."""
        self._round_s.add(took_s)

    def wait_s(self, took_s: float, verdict: Verdict, now: float) -> float:
        """Compute how long to wait for the version, from the answer on. `took_s`: seconds from the offer to
        the answer."""
        shared, groups = self._context.shared, self._context.chain.header.groups
        config, timing = shared.config, shared.timing
        step_s = shared.median_step_s(now)
        # Others' payloads may well take as long as ours has taken.
        round_s = max(self._round_s.value, took_s)
        wait_s = patience_s(timing.answer_floor_s, round_s, config.delay_steps, step_s)
        # A round may be open for so long, for the sake of one that does not answer.
        wait_s += min(config.grace_cap_s, answer_bound_s(config.inner_steps, step_s))
        if verdict.then is Then.WAIT_LONGER or config.quorum > 1:
            wait_s += 2 * config.inner_steps * step_s + timing.hold_floor_s
        # The syncers above are doubted first, by those below them.
        return wait_s * len(level_sizes(groups, config.group_size))
