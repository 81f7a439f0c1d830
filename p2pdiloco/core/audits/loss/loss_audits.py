"""Loss audits of one node: when it makes one, of whom, and what it has found so far.

Rules: docs/protocol/loss-audits.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.audits.loss.accounts import MAX_LEARNERS, Accounts, ratio_of
from p2pdiloco.util import BoundedDict

PAYLOADS = 2
"""Payloads that a version is for a learner: its contribution and the update."""
FAILED_REST_S = 30.0
"""Rest after an audit that came to nothing; twice as long after each further one in a row."""
MAX_FAILED = 7


class LossAudits:
    """Loss audits of one node, one at a time, and their findings, which are for its own use."""

    def __init__(self, share: float, rng: random.Random) -> None:
        """`share`: of the learner's time, and of what is received, that they take; 0: there are none."""
        self._share, self._rng = share, rng
        self._accounts = Accounts()
        self._under_way = False
        self._failed = 0
        self._rested_s = -math.inf
        self._found: BoundedDict[str, LossFinding] = BoundedDict(MAX_LEARNERS)

    def __contains__(self, peer: object) -> bool:
        """Tell whether that peer is expelled here."""
        return peer in self._found

    @property
    def expels(self) -> bool:
        """True: somebody is expelled here."""
        return bool(self._found)

    def drawn(self, now: float) -> bool:
        """Draw whether a contribution to this version is audited."""
        if not self._share or self._under_way or now < self._rested_s:
            return False
        return self._rng.random() < PAYLOADS * self._share

    def choose(self, learners: Sequence[str]) -> str | None:
        """Draw one of these learners: that against which most speaks the more often, the more it is."""
        open_ = [learner for learner in learners if learner not in self._found]
        if not open_:
            return None
        worst = max(open_, key=self._accounts.doubt)
        if self._rng.random() * self._accounts.doubt(worst) > 1.0:
            return worst
        return self._rng.choice(open_)

    def begin(self) -> None:
        """Begin an audit."""
        self._under_way = True

    def end(
        self,
        learner: str,
        theirs: tuple[float, ...],
        ours: tuple[float, ...],
        same_data: bool,
        took_s: float,
        now: float,
        odd: bool = False,
    ) -> float | None:
        """End an audit. Returns the ratio that was measured; None: none was. `odd`: see `Accounts.add`."""
        self._under_way = False
        ratio = ratio_of(theirs, ours)
        if not ours:
            self._failed = min(MAX_FAILED, self._failed + 1)
            self._rested_s = now + FAILED_REST_S * 2 ** (self._failed - 1)
            return None
        self._failed = 0
        self._rested_s = now + took_s * max(0.0, 1.0 / self._share - 1.0)
        found = None if ratio is None else self._accounts.add(learner, ratio, same_data, odd)
        if found is not None:
            self._found[learner] = found
        return ratio

    def finding(self, learner: str) -> LossFinding | None:
        """Return why that learner is expelled here; None: it is not."""
        return self._found.get(learner)

    def audits(self, learner: str) -> int:
        """Count the measurements of that learner."""
        return self._accounts.audits(learner)
