"""State of one node's audits: whom it excludes, distrusts or expels, and which accusations wait.

`Excluded` holds the members that lied, as a proof or an audit shows. `Accusations` wait until the merge was
made again here. `Distrust` is this node's own finding, for a while. `Audits` lets one audit run at a time.
`LossAudits` says whose contribution is measured next, and what that has shown of each learner so far
(`Accounts`).

Rules: docs/protocol/proofs.md, section 4; docs/protocol/audits.md, sections 1 and 3;
docs/protocol/loss-audits.md.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from p2pdiloco.core.api.evidence import MAX_PROOFS, Accusation, Evidence, Refutation, fingerprint
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.api.types import Verify
from p2pdiloco.util import BoundedDict

MAX_FOUND = 8
"""Proofs that one event may bring, at most; of more the first are dropped."""
STATEMENTS = Accusation, Refutation


class Excluded:
    """Table of evidence, one a culprit.

    Args:
        counts: question whether a peer counts by its work; of others no proof is worth keeping.
        votes: question whether a peer votes; in a full table others give way to those.
    """

    def __init__(
        self,
        run: str,
        me: str,
        verify: Verify,
        counts: Callable[[str], bool],
        votes: Callable[[str], bool],
    ) -> None:
        self._run = run
        self._me = me
        self._verify = verify
        self._counts = counts
        self._votes = votes
        self._proofs: dict[str, Evidence] = {}
        self._found: deque[tuple[Evidence, str, bool]] = deque(maxlen=MAX_FOUND)
        self.mark = 0
        """Number that says whom we exclude (`fingerprint`)."""

    def __contains__(self, peer: object) -> bool:
        """Tell whether that peer is excluded."""
        return peer in self._proofs

    def __bool__(self) -> bool:
        return bool(self._proofs)

    @property
    def peers(self) -> tuple[str, ...]:
        """Excluded peers, in the order in which they were found out."""
        return tuple(self._proofs)

    @property
    def proofs(self) -> tuple[Evidence, ...]:
        """Evidence against all of them."""
        return tuple(self._proofs.values())

    @property
    def kept(self) -> tuple[Evidence, ...]:
        """Evidence that holds after a restart as well: what others state is to be heard again."""
        return tuple(proof for proof in self._proofs.values() if self._rank(proof) > 0)

    def _rank(self, proof: Evidence) -> int:
        """Say how much evidence is worth: what others state, what we found ourselves, what all can check."""
        if not isinstance(proof, STATEMENTS):
            return 2
        return int(proof.author() == self._me)

    def proof_of(self, peer: str) -> Evidence | None:
        """Find the evidence for which that peer is excluded; None: it is not."""
        return self._proofs.get(peer)

    # --- proofs that are to be looked at ---------------------------------------------------------------

    def found(self, proof: Evidence | None, giver: str = "", certain: bool = False) -> None:
        """Note what may be a proof, or what we state ourselves, in the middle of something else; `giver` sent
        what makes it one. It is looked at once that is done (`Gossip`). `certain`: it holds."""
        if proof is not None:
            self._found.append((proof, giver, certain))

    @property
    def news(self) -> bool:
        """True: something was found."""
        return bool(self._found)

    def take_found(self) -> list[tuple[Evidence, str, bool]]:
        """Take what was found, with who gave it, and whether it holds for certain."""
        found = list(self._found)
        self._found.clear()
        return found

    # --- proofs that hold --------------------------------------------------------------------------------

    def worth(self, proof: Evidence) -> bool:
        """Tell whether a proof is worth its signatures: it is news, or worth more than what we have, and its
        culprit counts."""
        culprit, known = proof.culprit(), self._proofs.get(proof.culprit())
        if known is not None:
            return self._rank(proof) > self._rank(known)
        return culprit == self._me or self._counts(culprit)

    def holds(self, proof: Evidence) -> bool:
        """Tell whether the proof holds in this run, or is a statement of our own."""
        return self._rank(proof) > 0 and self.signed(proof)

    def signed(self, proof: Evidence) -> bool:
        """Tell whether all that it says is signed in this run: of a proof, that it holds."""
        return proof.holds(self._run, self._verify)

    def add(self, proof: Evidence) -> bool:
        """Exclude its culprit. In a full table one that counts no more gives way, or one that has no vote, to
        one that has; False: none does."""
        culprit = proof.culprit()
        if len(self._proofs) >= MAX_PROOFS and culprit not in self._proofs:
            others = [peer for peer in self._proofs if peer != self._me]
            idle = [peer for peer in others if not self._counts(peer)]
            if not idle and (culprit == self._me or self._votes(culprit)):
                idle = [peer for peer in others if not self._votes(peer)]
            if not idle:
                return False
            del self._proofs[idle[0]]
        self._proofs[culprit] = proof
        self.mark = fingerprint(set(self._proofs))
        return True

    def restore(self, proofs: Iterable[Evidence]) -> Evidence | None:
        """Take up what was saved, if it holds. Returns the one against ourselves, if there is one."""
        for proof in list(proofs)[:MAX_PROOFS]:
            if self.holds(proof):
                self._proofs[proof.culprit()] = proof
        self.mark = fingerprint(set(self._proofs))
        return self._proofs.get(self._me)


MAX_WAITING = 8
"""Number of accusers that are heard at one time."""
WAIT_S = 120.0
"""Time for which an accusation waits for the version to come here, and for its turn."""
PAUSE_S = 600.0
"""Time for which an accuser is not heard after an accusation of which nothing came."""
MAX_PAUSING = 64


class Accusations:
    """Accusations that this node has heard, and that wait until it has made the merge again for itself.

    One for each accuser: nobody can keep us busy. An accuser of a version whose contributions are not to be
    had is not heard again for a while. It had them all, and should have given them.

    Rules: docs/protocol/audits.md, section 3.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Accusation, float]] = {}
        """Accusations by accuser, and until when they wait."""
        self._pausing_until_s: BoundedDict[str, float] = BoundedDict(MAX_PAUSING)

    def hears(self, accuser: str, now: float) -> bool:
        """Tell whether an accusation of that member would be taken."""
        self._expire(now)
        room = accuser not in self._waiting and len(self._waiting) < MAX_WAITING
        return room and now >= self._pausing_until_s.get(accuser, 0.0)

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
        self._pausing_until_s[accusation.accuser] = now + PAUSE_S

    def _expire(self, now: float) -> None:
        for accusation in [each for each, until_s in self._waiting.values() if until_s <= now]:
            self.vain(accusation, now)


DISTRUST_S = 3600.0
"""Time for which a member is not counted on, and gets no vote of ours."""
MAX_DISTRUSTED = 256


class Distrust:
    """Members that this node counts on in no office, each for a time.

    The node made a merge of theirs again and found it false, or they left its work out, or do not give what
    they merged. It is this node's own finding, and moves nobody else. But a member that a false merge harms
    sees that, and makes it again for itself.

    Rules: docs/protocol/audits.md, section 3.
    """

    def __init__(self) -> None:
        self._until_s: BoundedDict[str, float] = BoundedDict(MAX_DISTRUSTED)
        self._withheld: BoundedDict[str, None] = BoundedDict(MAX_DISTRUSTED)
        """Members that did not give what they merged when we last audited a merge of theirs."""

    def add(self, peer: str, now: float) -> None:
        """Begin to distrust that peer, or go on."""
        self._until_s[peer] = now + DISTRUST_S

    def withheld(self, peer: str, looks_wrong: bool, now: float) -> None:
        """Note that a syncer which we are connected to did not give what it merged. Once it may have let go
        of that; twice in a row, or where its version `looks_wrong`, it has something to hide."""
        if looks_wrong or peer in self._withheld:
            self.add(peer, now)
        self._withheld[peer] = None

    def gave(self, peer: str) -> None:
        """Note that all was to be had of a merge of that syncer."""
        self._withheld.pop(peer, None)

    def has(self, peer: str, now: float) -> bool:
        """Tell whether that peer is distrusted now."""
        until_s = self._until_s.get(peer)
        return until_s is not None and now < until_s


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
        """End an audit. Returns the ratio that was measured; None: none was. `odd`: by the chain its
        work agrees with nobody's."""
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
        self._accounts: BoundedDict[str, Account] = BoundedDict(MAX_LEARNERS)

    def add(self, learner: str, ratio: float, same_data: bool, odd: bool = False) -> LossFinding | None:
        """Take a measurement in. Returns what is shown by now. `odd`: by the chain the learner's work agrees
        with nobody's."""
        before = self._accounts.get(learner, NEW)
        harm = bet(before.harm, ratio, HARMS) if same_data or odd else before.harm
        nothing = bet(before.nothing, ratio, HELPS) if same_data else before.nothing
        now = Account(before.audits + 1, harm, nothing)
        self._accounts[learner] = now
        if stakes(now.harm) >= ENOUGH:
            return LossFinding.HARM
        return LossFinding.NOTHING if stakes(now.nothing) >= ENOUGH else None

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
