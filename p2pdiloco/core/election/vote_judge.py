"""Judge of others' candidacies: whether a candidate gets this member's vote.

Rules: docs/protocol/election.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.core.api.messages import VoteRefused, VoteRequest
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate, Head
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.candidates import Candidates
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.election.terms import Terms
from p2pdiloco.core.election.voting import Voter

LAST_AFTER_S = 6.0
"""Time for which an office is open until who made nothing of its last term may have it again."""


class KnownOffice(Protocol):
    """Office for which votes are asked, as far as its judge needs to know it (`core.election.office`)."""

    certificate: Certificate | None
    """Newest one that we hold."""

    @property
    def term(self) -> int:
        """Highest term of which we hold a certificate."""

    def open_s(self, now: float) -> float:
        """Compute for how long nobody was in office, as far as we know."""

    def why_open(self, now: float, candidate: str = "") -> str:
        """Say why nobody can be counted on in it, or is to leave it to that candidate; empty if one can."""


class VoteJudge:
    """Judge in one group. Gives no vote itself; tells a candidate that gets none why.

    Args:
        busy: question whether a round of ours is closing right now: then we do not vote us away.
    """

    def __init__(
        self,
        context: FragmentContext,
        group: str,
        office: KnownOffice,
        electorate: Electorate,
        voter: Voter,
        terms: Terms,
        candidates: Candidates,
        busy: Callable[[], bool],
    ) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._chain = context.chain
        self._false_states = context.false_states
        self._group = group
        self._office = office
        self._electorate = electorate
        self._voter = voter
        self._terms = terms
        self._candidates = candidates
        self._busy = busy

    def grants(self, candidate: str, request: VoteRequest, now: float) -> bool:
        """Tell whether that candidate is to get our vote; one that is not is told why."""
        shared = self._shared
        self._terms.said(request.term - 1)
        refusal = self._why_no_vote(candidate, request, now)
        if refusal is not None and not refusal.soft:
            # Its own vote of that term is gone: standing in it ourselves would only cross its path again.
            self._terms.said(request.term)
        words = f"given: {request.reason}" if refusal is None else str(refusal)
        shared.out.record("vote", self._fragment, words, candidate=candidate, term=request.term)
        if refusal is not None:
            head = self._chain.head if shared.confirmed else None
            known = max(self._office.term, self._voter.term)
            refused = VoteRefused(self._group, self._fragment, request.term, known, head, refusal)
            shared.out.send(candidate, refused)
        return refusal is None

    def _why_no_vote(self, candidate: str, request: VoteRequest, now: float) -> VoteRefusal | None:
        shared = self._shared
        progress = shared.view.progress(candidate)
        if not shared.votes:
            return VoteRefusal.NO_DISK if shared.confirmed else VoteRefusal.CATCHING_UP
        if self._group != WHOLE_RUN and (progress is None or not self._electorate.admits(candidate, now)):
            return VoteRefusal.NOT_HEARD_OF
        if progress is None or not progress.confirmed:
            return VoteRefusal.NOT_CONFIRMED
        if not self._electorate.decides(candidate, now):
            return VoteRefusal.NO_VOTER
        if shared.distrust.has(candidate, now):
            return VoteRefusal.DISTRUSTED
        if candidate in shared.loss_audits:
            return VoteRefusal.EXPELLED
        if request.term > max(self._terms.newest, self._office.term) + 1:
            return VoteRefusal.FAR_AHEAD
        if request.term <= self._office.term:
            return VoteRefusal.CERTIFIED
        given = self._voter.why_not(candidate, request.term)
        if given is not None:
            return given
        # A version with a false state weighs nothing, whoever stands on it.
        if request.head.weight < self._chain.head.weight or request.head.digest in self._false_states:
            return VoteRefusal.LIGHTER
        certificate = self._office.certificate
        if certificate is not None and certificate.syncer != candidate:  # else it laid that office down
            refusal = self._why_not_over(candidate, request.head, certificate, now)
            if refusal is not None:
                return refusal
        if (
            self._candidates.comes_last(candidate, certificate, now)
            and self._office.open_s(now) < LAST_AFTER_S
        ):
            return VoteRefusal.OUT_OF_TURN
        if self._busy():
            return VoteRefusal.CLOSING
        return None

    def _why_not_over(
        self, candidate: str, head: Head, certificate: Certificate, now: float
    ) -> VoteRefusal | None:
        """Say why the holder is still in office, by our own chain, and by what the holder says of its own.

        What a candidate says of versions that we do not have proves nothing: it is asked again in a moment,
        as the holder's word, or the version itself, will be here if it is true."""
        end = certificate.start_number + self._shared.config.term_versions

        def over(number: int) -> bool:
            gives_way = self._candidates.why_give_way(certificate, now, number, candidate)
            return number >= end or bool(gives_way)

        said = self._shared.view.head(certificate.syncer, self._fragment)
        known = max(self._chain.head.number, said.number if said else 0)
        if over(known) or self._office.why_open(now, candidate):
            return None
        return VoteRefusal.NOT_PROVEN if over(max(known, head.number)) else VoteRefusal.COUNTED_ON
