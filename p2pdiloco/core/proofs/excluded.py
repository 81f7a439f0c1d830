"""Excluded members of one node: those of which it has a proof that they lied.

Rules: docs/protocol/proofs.md, section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from p2pdiloco.core.api.proofs import MAX_PROOFS, Proof, Verify, fingerprint

MAX_FOUND = 8
"""Proofs that one event may bring, at most; of more the first are dropped."""


class Excluded:
    """Table of proofs, one a culprit.

    Args:
        counts: question whether a peer counts by its work; of others no proof is worth keeping.
    """

    def __init__(self, run: str, me: str, verify: Verify, counts: Callable[[str], bool]) -> None:
        self._run = run
        self._me = me
        self._verify = verify
        self._counts = counts
        self._proofs: dict[str, Proof] = {}
        self._noted: set[str] = set()
        self._found: deque[tuple[Proof, str]] = deque(maxlen=MAX_FOUND)
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
    def proofs(self) -> tuple[Proof, ...]:
        """Proofs of all of them."""
        return tuple(self._proofs.values())

    def proof_of(self, peer: str) -> Proof | None:
        """Find the proof for which that peer is excluded; None: it is not."""
        return self._proofs.get(peer)

    # --- proofs that are to be looked at ---------------------------------------------------------------

    def found(self, proof: Proof | None, giver: str = "") -> None:
        """Note what may be a proof, in the middle of something else; `giver` sent what makes it one. It is
        looked at once that is done (`core.proofs.gossip`)."""
        if proof is not None:
            self._found.append((proof, giver))

    @property
    def news(self) -> bool:
        """True: something was found."""
        return bool(self._found)

    def take_found(self) -> list[tuple[Proof, str]]:
        """Take what was found, with who gave it."""
        found = list(self._found)
        self._found.clear()
        return found

    # --- proofs that hold --------------------------------------------------------------------------------

    def worth(self, proof: Proof) -> bool:
        """Tell whether a proof is worth its signatures: it is news, and its culprit counts."""
        culprit = proof.culprit()
        return culprit not in self._proofs and (culprit == self._me or self._counts(culprit))

    def holds(self, proof: Proof) -> bool:
        """Tell whether the proof holds in this run."""
        return proof.holds(self._run, self._verify)

    def add(self, proof: Proof) -> bool:
        """Exclude its culprit. In a full table, one that counts no more gives way; False: none does."""
        if len(self._proofs) >= MAX_PROOFS:
            idle = next((peer for peer in self._proofs if not self._counts(peer)), None)
            if idle is None:
                return False
            del self._proofs[idle]
            self._noted.discard(idle)
        self._proofs[proof.culprit()] = proof
        self.mark = fingerprint(set(self._proofs))
        return True

    def restore(self, proofs: Iterable[Proof]) -> Proof | None:
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
