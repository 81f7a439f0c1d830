"""Judge of others' candidacies: whether a candidate gets this member's vote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.core.api.messages import VoteRefused, VoteRequest
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.candidates import Candidates
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.election.terms import Terms
from p2pdiloco.core.election.voting import Voter


class KnownOffice(Protocol):
    """Office for which votes are asked, as far as its judge needs to know it (`core.election.office`)."""

    certificate: Certificate | None
    """Newest one that we hold."""

    @property
    def term(self) -> int:
        """Highest term of which we hold a certificate."""

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
        if request.term > max(self._terms.newest, self._office.term) + 1:
            return VoteRefusal.FAR_AHEAD
        if request.term <= self._office.term:
            return VoteRefusal.CERTIFIED
        given = self._voter.why_not(candidate, request.term)
        if given is not None:
            return given
        if request.head.weight < self._chain.head.weight:
            return VoteRefusal.LIGHTER
        certificate = self._office.certificate
        over = (
            certificate is None
            or certificate.syncer == candidate  # it laid that office down
            or request.head.number >= certificate.start_number + shared.config.term_versions
            or bool(self._candidates.why_give_way(certificate, now, request.head.number, candidate))
        )
        if not over and not self._office.why_open(now, candidate):
            return VoteRefusal.COUNTED_ON
        if self._busy():
            return VoteRefusal.CLOSING
        return None
