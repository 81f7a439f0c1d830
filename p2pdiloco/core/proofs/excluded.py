"""Excluded members of one node: those of which it has a proof that they lied, or found so by an audit.

Rules: docs/protocol/proofs.md, section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from p2pdiloco.core.api.proofs import MAX_PROOFS, Verify, fingerprint
from p2pdiloco.core.api.statements import Accusation, Evidence, Refutation

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
        self._noted: set[str] = set()
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
        what makes it one. It is looked at once that is done (`core.proofs.gossip`). `certain`: it holds."""
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
            self._noted.discard(idle[0])
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

    def first_time(self, peer: str) -> bool:
        """Tell whether this is the first message of that excluded peer: only that one is recorded."""
        new = peer not in self._noted
        self._noted.add(peer)
        return new
