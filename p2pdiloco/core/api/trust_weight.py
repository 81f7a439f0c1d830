"""Trust weight of a learner in one fragment: how much of its contributions' weight counts.

Who leads where all others do not go is wrong, or a liar, and nobody can tell by one contribution. So the
syncer measures of every contribution how far it agrees with the others of its round
(`tensors.merging.agreement`), and states it in the header. The table of watermarks keeps a slow mean of that
for every learner (`Watermark.agreement`). It follows from the parent's table and the header: all members work
it out anew.
The mean decides what a contribution weighs, its own score included: so a liar does harm in no round, and one
contribution of an honest learner that goes nowhere costs it nothing. Trust is lost faster than it is won: the
mean is bounded, and what goes against the others counts the more, the farther it does, so that whoever turns
has some of its weight once, and then next to nothing. It follows from the parent and from what the syncer
states, so that partial merges compose.

A newcomer begins with half of the weight. Nobody has none: where all are doubted, all count alike.

Rules: docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import Struct

from p2pdiloco.core.api.plausible import FULL_TRUST, LEAST_TRUST
from p2pdiloco.core.api.types import (
    LEAST_SCORE,
    MOST_SCORE,
    NOTHING,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    Contributor,
)

USUAL = 1024
"""Agreement of a usual learner, as a mean."""
NONE_AT, ALL_AT = 0, USUAL // 6
"""Mean agreement up to which a learner has the least weight, and from which on it has all, a sixth of the
usual: an honest learner whose data are quite different from the others' has as much (docs/results.md)."""
BEGINS = ALL_AT // 2
"""Mean agreement of a newcomer: half of the weight."""
MOST = 2 * ALL_AT
"""Largest mean agreement: nobody saves up trust to be wrong with later."""
AGAINST = 2
"""Times that a score below zero counts besides, if it is the reverse of the usual, and by as much less as it
is smaller: honest work goes a little against all others' now and then, but never far."""
SLOWNESS, FIRST_SLOWNESS = 8, 2
"""Divisor of a step: the mean moves by so small a part of the way to the newest figure. It begins with a
larger one, and grows by one in each round: what a newcomer begins with is worth no more than one score."""
UNTOLD = (UNCLEAR, UNMEASURED)
"""Scores that say nothing of a contribution."""
FORGIVEN = 8
"""Step of the mean towards all of the weight in a round too small to be measured."""


def trust_of(agreement: int) -> int:
    """Compute the trust weight, of `FULL_TRUST`, of a learner with that mean agreement."""
    share = min(max(agreement - NONE_AT, 0), ALL_AT - NONE_AT)
    return LEAST_TRUST + (FULL_TRUST - LEAST_TRUST) * share // (ALL_AT - NONE_AT)


def in_means(score: int) -> int:
    """Compute a score in units of the mean."""
    return 0 if score == NOTHING else score * USUAL // USUAL_SCORE


class Mean(Struct, frozen=True):
    """Mean agreement of a learner in one fragment, and of how many contributions it is."""

    agreement: int = BEGINS
    merges: int = 0

    def after(self, score: int) -> int:
        """Compute the mean agreement once a contribution with that score is merged."""
        if score == UNCLEAR and self.agreement < BEGINS:
            return self.agreement  # who was found to disagree is not forgiven by keeping others from agreeing
        if score in UNTOLD:
            return max(self.agreement, min(self.agreement + FORGIVEN, ALL_AT))
        slowness = min(FIRST_SLOWNESS + self.merges, SLOWNESS)
        newest = in_means(score)
        if newest < 0:
            newest -= AGAINST * newest * newest // USUAL
        return min(self.agreement + (newest - self.agreement) // slowness, MOST)

    def trust(self, score: int) -> int:
        """Compute the trust weight of a contribution with that score."""
        if score == NOTHING:
            return LEAST_TRUST
        return trust_of(self.after(score))


def plausible(score: int) -> bool:
    """Tell whether that is a score, or says why there is none."""
    return score in (*UNTOLD, NOTHING) or LEAST_SCORE <= score <= MOST_SCORE


def sample_seed(parts: Iterable[Contributor]) -> bytes:
    """Compute what draws the sample on which these contributions, in the order in which they are merged, are
    compared: nobody knows it before all of them are here. It follows from what they are alone, so that
    whoever makes the merge again finds the same scores."""
    return hashlib.sha256(b"sample" + b"".join(part.payload_digest for part in parts)).digest()
