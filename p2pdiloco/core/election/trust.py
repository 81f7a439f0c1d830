"""Trust of a member in the syncer in office, by what it has seen itself.

Rules: docs/protocol/election.md, section 2.
"""

from __future__ import annotations

from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.core.api.types import Certificate
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.candidates import Candidates
from p2pdiloco.core.election.electorate import Electorate

REST_S = 60.0
"""Time for which this member does not stand again against a holder that others count on, though it has found
something against it itself. Others may find the same: then they stand."""
FIRST_REST_S = 2.0
"""Rest after what it suspects, the first time in a term; twice as long every further time, up to
`REST_S`."""


class Trust:
    """Trust of one member in one group's syncer."""

    def __init__(
        self, context: FragmentContext, group: str, electorate: Electorate, candidates: Candidates
    ) -> None:
        self._electorate = electorate
        self._shared = context.shared
        self._fragment = context.index
        self._group = group
        self._candidates = candidates
        self.suspected: Suspicion | None = None
        """Reason why this one is not counted on, though it is alive; None if it is."""
        self.outvoted = False
        """True: others count on it, and so it stays."""
        self._vain: tuple[int, int] = 0, 0
        """Term in which others let stay whom we suspected, and how many times."""
        self._endured_term = 0
        self._rests_until_s = 0.0

    def doubt(self, why: Suspicion, certificate: Certificate | None) -> None:
        """Stop counting on it. If others let it stay in this term before, we go by that for now."""
        self.suspected = why
        self.outvoted = certificate is not None and certificate.term == self._vain[0]

    def renew(self) -> None:
        """Count on it again, or on the next."""
        self.suspected, self.outvoted = None, False

    def overruled(self, counted_on: bool, certificate: Certificate | None, now: float) -> None:
        """Take in whether those that refused us their votes count on it, where we do not."""
        self.outvoted = counted_on and self.suspected is not None
        if counted_on and certificate is not None and self._found(certificate.syncer, now):
            self._endured_term, self._rests_until_s = certificate.term, now + REST_S
        elif self.outvoted and certificate is not None:
            times = self._vain[1] if self._vain[0] == certificate.term else 0
            self._vain = certificate.term, times + 1
            self._rests_until_s = now + min(REST_S, FIRST_REST_S * (1 << min(times, 8)))

    def endures(self, certificate: Certificate, now: float) -> bool:
        """Tell whether the holder stays: others count on it, and only what we found speaks against it."""
        return certificate.term == self._endured_term and not self._seen(certificate, now, "")

    def rests(self, certificate: Certificate | None, now: float) -> bool:
        """Tell whether to stand against it is in vain for now: others have just let it stay."""
        if certificate is None or now >= self._rests_until_s:
            return False
        suspected = self.outvoted and certificate.term == self._vain[0]
        return self.endures(certificate, now) or (suspected and not self._gone(certificate, now, ""))

    def why_not(self, certificate: Certificate, now: float, candidate: str = "") -> str:
        """Say why the certified syncer cannot be counted on (or is to leave the office to `candidate`); empty
        if it can. For another than this node."""
        return self._seen(certificate, now, candidate) or self._found(certificate.syncer, now)

    def _found(self, syncer: str, now: float) -> str:
        """Say what audits of ours have found against it. Without a vote we cannot find out whether others
        count on it all the same, nor earn a vote without our work: it is to have that."""
        if not self._electorate.decides(self._shared.me, now):
            return ""
        if self._shared.distrust.has(syncer, now):
            return "a merge of the syncer's was false, or it left our work out"
        return "the syncer's work does harm, or nothing" if syncer in self._shared.loss_audits else ""

    def _seen(self, certificate: Certificate, now: float, candidate: str) -> str:
        """Say what else speaks against it, which others may see, too."""
        if certificate.syncer in self._shared.excluded:
            return "the syncer is excluded"
        return str(self.suspected) if self.suspected is not None else self._gone(certificate, now, candidate)

    def _gone(self, certificate: Certificate, now: float, candidate: str) -> str:
        """Say why it is not here any more, or is to leave the office to others."""
        if others := self._candidates.why_give_way(certificate, now, candidate=candidate):
            return f"the syncer {others}"
        view, syncer = self._shared.view, certificate.syncer
        if view.has_left(syncer):
            return "the syncer left"
        said = view.progress(syncer)
        if said and not said.votes and (self._group, self._fragment, certificate.term) not in said.offices:
            return "the syncer cannot save, and has laid the office down"
        if not view.alive(syncer, now) and not self._candidates.is_news(syncer, now):
            silent = view.silence_s(syncer, now) >= self._shared.timing.suspect_s
            return "the syncer is silent" if silent else "the syncer is unreachable"
        return ""
