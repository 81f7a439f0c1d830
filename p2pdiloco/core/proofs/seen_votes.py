"""Votes that a member has seen in one group: for itself, and in certificates. There is one in a term, so two
of one voter are a proof.

Rules: docs/protocol/proofs.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.api.proofs import TwoVotes
from p2pdiloco.core.api.types import MAX_VOTES, Certificate, Vote
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.voting import why_not_for
from p2pdiloco.util import BoundedDict


class SeenVotes:
    """Votes for us in the newest term in which we stood, to be compared with what certificates hold."""

    def __init__(self, context: FragmentContext, group: str) -> None:
        self._context = context
        self._excluded = context.shared.excluded
        self._group = group
        self._term = 0
        self._for_us: BoundedDict[str, Vote] = BoundedDict(MAX_VOTES)

    def given(self, vote: Vote, known: Certificate | None) -> None:
        """Take in a vote that its voter sent us. `known`: the newest certificate that we hold."""
        term, context = vote.body.term, self._context
        last, _ = context.ballots.last(self._group)
        stood = last is not None and (last.term, last.candidate) == (term, context.shared.me)
        if not stood or why_not_for(context, self._group, vote) is not None:
            return
        if term != self._term:
            self._term = term
            self._for_us.clear()
        self._for_us[vote.body.voter] = vote
        if known is not None:
            self._compare(vote, known.votes, "")

    def certified(self, sender: str, certificate: Certificate, known: Certificate | None) -> None:
        """Compare the votes of a certificate with those that we have: at most one proof comes of it."""
        seen = self._for_us if certificate.term == self._term else {}
        held = {v.body.voter: v for v in known.votes} if known and known.term == certificate.term else {}
        for vote in certificate.votes:
            voter = vote.body.voter
            ours = [v for v in (seen.get(voter), held.get(voter)) if v is not None]
            if voter not in self._excluded and self._compare(vote, tuple(ours), sender):
                return

    def _compare(self, vote: Vote, others: tuple[Vote, ...], giver: str) -> bool:
        """Note a proof, if one of these is another vote of the same voter in the same term."""
        body = vote.body
        for other in others:
            same = (other.body.term, other.body.voter) == (body.term, body.voter)
            if same and other.body.candidate != body.candidate:
                self._excluded.found(TwoVotes(other, vote), giver)
                return True
        return False
