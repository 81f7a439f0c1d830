"""State of one node's audits: which accusations wait, which audit runs, and what was measured.

`Accusations` wait until the merge was made again here. `Audits` lets one audit run at a time. `LossAudits`
says whose contribution is measured next, and what that has shown of each learner so far (`Accounts`).

Rules: docs/protocol/audits.md, sections 1 and 3; docs/protocol/loss-audits.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from msgspec import Struct

from p2pdiloco.core.api.evidence import Accusation
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.distrust import Cause, Distrust, backoff_s
from p2pdiloco.util import BoundedDict

WAIT_S = 120.0
"""Time for which an accusation waits for the version to come here, and for its turn."""


class Accusations:
    """Accusations that this node has heard, and that wait until it has made the merge again for itself.

    One for each accuser: nobody can keep us busy. An accuser of a version whose contributions are not to be
    had is not heard again for a while. It had them all, and should have given them.

    Rules: docs/protocol/audits.md, section 3.
    """

    def __init__(self, distrust: Distrust) -> None:
        self._distrust = distrust
        self._waiting: dict[str, tuple[Accusation, float]] = {}
        """Accusations by accuser, and until when they wait."""

    def hears(self, accuser: str, now: float) -> bool:
        """Tell whether an accusation of that member would be taken."""
        self._expire(now)
        return accuser not in self._waiting and not self._distrust.has(accuser, now, Cause.ACCUSED_IN_VAIN)

    def take(self, accusation: Accusation, now: float) -> bool:
        """Let an accusation wait. Tell whether it is the first one of its subject."""
        digest = accusation.subject.digest()
        first = not self.of(digest)
        self._waiting[accusation.accuser] = accusation, now + WAIT_S
        return first

    def of(self, digest: bytes) -> list[Accusation]:
        """List the accusations of one subject."""
        return [each for each, _ in self._waiting.values() if each.subject.digest() == digest]

    def waiting(self, fragment: int, now: float) -> list[Accusation]:
        """List the accusations that concern a fragment, the oldest first."""
        if not self._waiting:
            return []
        self._expire(now)
        return [each for each, _ in self._waiting.values() if each.subject.fragment == fragment]

    def settled(self, accusation: Accusation) -> None:
        """Let go of an accusation: the merge was made again."""
        self._waiting.pop(accusation.accuser, None)

    def vain(self, accusation: Accusation, now: float) -> None:
        """Let go of an accusation of which nothing follows."""
        self.settled(accusation)
        self._distrust.add(accusation.accuser, Cause.ACCUSED_IN_VAIN, now)

    def _expire(self, now: float) -> None:
        for accusation in [each for each, until_s in self._waiting.values() if until_s <= now]:
            self.vain(accusation, now)


class Audits:
    """Permission to audit: one version of all fragments at a time."""

    def __init__(self) -> None:
        self._fragment: int | None = None

    def begin(self, fragment: int) -> bool:
        """Ask for it. False: another audit is under way."""
        if self._fragment is not None:
            return False
        self._fragment = fragment
        return True

    def end(self, fragment: int) -> None:
        """Give it back."""
        if self._fragment == fragment:
            self._fragment = None


PAYLOADS = 2
"""Payloads that a version is for a learner: its contribution and the update."""
FAILED_REST_S = 30.0
"""Rest after an audit that came to nothing, and after the first of several in a row (`backoff_s`)."""


class LossAudits:
    """Loss audits of one node, one at a time, and their findings, which are for its own use."""

    def __init__(self, share: float, rng: random.Random, distrust: Distrust) -> None:
        """`share`: of the learner's time, and of what is received, that they take; 0: there are none."""
        self._share, self._rng, self._distrust = share, rng, distrust
        self._accounts = Accounts()
        self._under_way = False
        self._failed = 0
        self._rested_s = -math.inf

    def drawn(self, now: float) -> bool:
        """Draw whether a contribution to this version is audited."""
        if not self._share or self._under_way or now < self._rested_s:
            return False
        return self._rng.random() < PAYLOADS * self._share

    def choose(self, learners: Sequence[str]) -> str | None:
        """Draw one of these learners: that against which most speaks the more often, the more it is."""
        open_ = [learner for learner in learners if learner not in self._distrust.noted[Cause.USELESS]]
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
        """End an audit. Returns the ratio that was measured; None: none was. `odd`: by the chain its
        work agrees with nobody's."""
        self._under_way = False
        ratio = ratio_of(theirs, ours)
        if not ours:
            self._failed += 1
            self._rested_s = now + backoff_s(FAILED_REST_S, self._failed)
            return None
        self._failed = 0
        self._rested_s = now + took_s * max(0.0, 1.0 / self._share - 1.0)
        found = None if ratio is None else self._accounts.add(learner, ratio, same_data, odd)
        if found is not None:
            self._distrust.add(learner, Cause.USELESS, now)
        return ratio

    def finding(self, learner: str) -> LossFinding | None:
        """Return why that learner is expelled here; None: it is not."""
        return self._accounts.finding(learner)

    def audits(self, learner: str) -> int:
        """Count the measurements of that learner."""
        return self._accounts.audits(learner)


ENOUGH = float(1 << 20)
"""Money, in stakes, at which the mean is shown to be less."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the largest possible bet; a quarter of the stake is on each."""
Money = tuple[float, ...]
START: Money = (1.0,) * len(SHARES)


def bet(money: Money, value: float, least: float) -> Money:
    """Bet once more that a value in [-1, 1] is less than `least`, of (-1, 1).

    A player that bets a share of its money on each measurement being less than `least` cannot grow rich if
    the mean is at least that, whatever else is true of the measurements, and however they depend on what came
    before. (Each factor is then at most 1 on the mean: Ville's inequality; Waudby-Smith and Ramdas,
    2010.09686.) One that is rich has shown that the mean is less.

    Money never falls below its start, so that what was long good does not pay for what is bad now. So of n
    measurements of a learner that keeps `least` the chance that any of them makes `ENOUGH` is at most n /
    `ENOUGH`.

    Rules: docs/protocol/loss-audits.md, section 4.
    """
    gain = (least - value) / (1.0 - least)
    return tuple(max(1.0, each) * (1.0 + share * gain) for each, share in zip(money, SHARES, strict=True))


def stakes(money: Money) -> float:
    """Count the money, in stakes."""
    return sum(money) / len(money)


HARMS = -0.1
HELPS = 0.2


class Account(Struct, frozen=True):
    """Account of one learner."""

    audits: int = 0
    harm: Money = START
    nothing: Money = START


NEW = Account()


class Accounts:
    """Accounts of the learners that were measured last: what loss audits have shown of each so far.

    A measurement is a *ratio*: how much better a step along a learner's contribution makes the model, over
    how much a step as long along ours does, on the same samples. Two things can be shown (`bet`):

    - *harm*: the mean is less than `HARMS`, of a learner that was measured on its own share of the data, or
      that by the chain goes where no other does. Honest work on quite different data may do ours much harm.
    - *nothing*: it is less than `HELPS`, of a learner that says that it reads the same data as we do,
      measured on its own share of them.

    Rules: docs/protocol/loss-audits.md, section 4.
    """

    def __init__(self) -> None:
        self._accounts: BoundedDict[str, Account] = BoundedDict()

    def add(self, learner: str, ratio: float, same_data: bool, odd: bool = False) -> LossFinding | None:
        """Take a measurement in. Returns what is shown by now. `odd`: by the chain the learner's work agrees
        with nobody's."""
        before = self._accounts.get(learner, NEW)
        harm = bet(before.harm, ratio, HARMS) if same_data or odd else before.harm
        nothing = bet(before.nothing, ratio, HELPS) if same_data else before.nothing
        self._accounts[learner] = Account(before.audits + 1, harm, nothing)
        return self.finding(learner)

    def finding(self, learner: str) -> LossFinding | None:
        """Return what is shown of that learner; None: nothing."""
        account = self._accounts.get(learner, NEW)
        if stakes(account.harm) >= ENOUGH:
            return LossFinding.HARM
        return LossFinding.NOTHING if stakes(account.nothing) >= ENOUGH else None

    def audits(self, learner: str) -> int:
        """Count the measurements of that learner."""
        return self._accounts.get(learner, NEW).audits

    def doubt(self, learner: str) -> float:
        """Tell how much speaks against that learner; 1: nothing does."""
        account = self._accounts.get(learner, NEW)
        return max(stakes(account.harm), stakes(account.nothing))


def ratio_of(theirs: tuple[float, ...], ours: tuple[float, ...]) -> float | None:
    """Compare what a contribution does to the loss of each batch with what ours does. None: that says
    nothing, since ours does no good either."""
    if not ours or len(theirs) != len(ours) or not all(map(math.isfinite, (*theirs, *ours))):
        return None
    if min(ours) <= 0.0:
        return None
    return max(-1.0, min(1.0, sum(theirs) / sum(ours)))
