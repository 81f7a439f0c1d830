"""Distrust of one node in its peers, of which there are two kinds.

`Excluded` holds those that lied, as a proof or an audit shows: they count for nothing, for good. `Distrust`
is the ledger of all else in which a peer has disappointed this node: for each `Cause` how often, and until
when it is distrusted for it. That is this node's own finding, and moves nobody else.

Rules: docs/protocol/proofs.md, section 4; docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, unique

from p2pdiloco.core.api.evidence import MAX_PROOFS, Accusation, Evidence, Refutation, fingerprint
from p2pdiloco.core.api.types import Verify
from p2pdiloco.util import BoundedDict, direct_members

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


@direct_members
@unique
class Cause(Enum):
    """Causes of distrust: how often each happens in a row until the peer is distrusted, and for how long the
    first time; that doubles with each further one (`backoff_s`)."""

    FALSE = 1, 3600.0
    """The peer's repair was false, or a merge looks so and the peer does not give what is in it; or it leaves
    our work out time and again (`Withheld`)."""
    WITHHELD = 2, 3600.0
    """The peer is connected, and does not give what it merged. It may have let go of that once."""
    USELESS = 1, math.inf
    """The peer's work does harm, or no good, by our loss audits: it is expelled."""
    ACCUSED_IN_VAIN = 1, 600.0
    """Nothing came of an accusation of the peer's."""
    ABSENT = 3, math.inf
    """A round called the peer, or a version waited for it, in vain."""
    GAVE_NOTHING = 1, 2.0
    """The peer did not give what it names as its head, or gave something false."""


OF_OFFICE = Cause.FALSE, Cause.WITHHELD, Cause.USELESS
"""Causes for which a peer is counted on in no office, and gets no vote of ours."""
NEVER_NOTED = 0, -math.inf


class Distrust:
    """Ledger of one node: how often each peer gave it a cause, and until when it is distrusted for that.

    A follower has one of its own, for the holders of its fragment, and a syncer for the members of its group.
    """

    def __init__(self) -> None:
        # A table for each cause: what costs a peer nothing pushes nobody out who did worse.
        self.noted = {cause: BoundedDict[str, tuple[int, float]]() for cause in Cause}
        """Peers that gave each cause: how often since they were forgiven, and when distrust ends."""

    def add(self, peer: str, cause: Cause, now: float, least_s: float = 0.0) -> bool:
        """Note that it happened once more. Tell whether that is often enough. `least_s`: of the pause."""
        most, pause_s = cause.value
        times = self.noted[cause].get(peer, NEVER_NOTED)[0] + 1
        self.noted[cause][peer] = times, now + max(least_s, backoff_s(pause_s, times - most + 1))
        return times >= most

    def until_s(self, peer: str, cause: Cause) -> float:
        """Find when distrust of that peer for that cause ends, or ended."""
        return self.noted[cause].get(peer, NEVER_NOTED)[1]

    def has(self, peer: str, now: float, *causes: Cause) -> bool:
        """Tell whether that peer is distrusted now for any of these causes."""
        return any(now < self.until_s(peer, cause) for cause in causes)

    def forgive(self, peer: str, cause: Cause, now: float) -> None:
        """Count anew, since it did not happen this time. A pause that has an end goes on until then."""
        if not now < self.until_s(peer, cause) < math.inf:
            self.noted[cause].pop(peer, None)


def backoff_s(first_s: float, attempt: int) -> float:
    """Compute the pause before attempt 1, 2, …: doubles, at most 16 times the first."""
    return first_s * min(16, 1 << min(attempt - 1, 4)) if attempt > 0 else 0.0
