"""Accounts of loss audits: what they have shown of each learner so far.

A measurement is a *ratio*: how much better a step along a learner's contribution makes the model, over how
much a step as long along ours does, on the same samples. Two things can be shown (`bets`):

- *harm*: the mean is less than `HARMS`, of a learner that was measured on its own share of the data, or that
  by the chain goes where no other does. Honest work on quite different data may do ours much harm.
- *nothing*: it is less than `HELPS`, of a learner that says that it reads the same data as we do, measured
  on its own share of them.

Rules: docs/protocol/loss-audits.md, section 4.
"""

from __future__ import annotations

import math

from msgspec import Struct

from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.audits.loss.bets import ENOUGH, START, Money, after, worth
from p2pdiloco.util import BoundedDict

MAX_LEARNERS = 256
HARMS = -0.1
HELPS = 0.2


class Account(Struct, frozen=True):
    """Account of one learner."""

    audits: int = 0
    harm: Money = START
    nothing: Money = START


NEW = Account()


class Accounts:
    """Accounts of the learners that were measured last."""

    def __init__(self) -> None:
        self._accounts: BoundedDict[str, Account] = BoundedDict(MAX_LEARNERS)

    def add(self, learner: str, ratio: float, same_data: bool, odd: bool = False) -> LossFinding | None:
        """Take a measurement in. Returns what is shown by now. `odd`: by the chain the learner's work agrees
        with nobody's."""
        before = self._accounts.get(learner, NEW)
        harm = after(before.harm, ratio, HARMS) if same_data or odd else before.harm
        nothing = after(before.nothing, ratio, HELPS) if same_data else before.nothing
        now = Account(before.audits + 1, harm, nothing)
        self._accounts[learner] = now
        if worth(now.harm) >= ENOUGH:
            return LossFinding.HARM
        return LossFinding.NOTHING if worth(now.nothing) >= ENOUGH else None

    def audits(self, learner: str) -> int:
        """Count the measurements of that learner."""
        return self._accounts.get(learner, NEW).audits

    def doubt(self, learner: str) -> float:
        """Tell how much speaks against that learner; 1: nothing does."""
        account = self._accounts.get(learner, NEW)
        return max(worth(account.harm), worth(account.nothing))


def ratio_of(theirs: tuple[float, ...], ours: tuple[float, ...]) -> float | None:
    """Compare what a contribution does to the loss of each batch with what ours does. None: that says
    nothing, since ours does no good either."""
    if not ours or len(theirs) != len(ours) or not all(map(math.isfinite, (*theirs, *ours))):
        return None
    if min(ours) <= 0.0:
        return None
    return max(-1.0, min(1.0, sum(theirs) / sum(ours)))
