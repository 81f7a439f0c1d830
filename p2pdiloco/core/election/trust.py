"""Trust of a member in the syncer in office, by what it has seen itself.

Rules: docs/protocol/election.md, section 2.
"""

from __future__ import annotations

from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.core.api.types import Certificate
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.candidates import Candidates


class Trust:
    """Trust of one member in one group's syncer."""

    def __init__(self, context: FragmentContext, group: str, candidates: Candidates) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._group = group
        self._candidates = candidates
        self.suspected: Suspicion | None = None
        """Reason why this one is not counted on, though it is alive; None if it is."""
        self.outvoted = False
        """True: others count on it, and so it stays."""

    def doubt(self, why: Suspicion) -> None:
        """Stop counting on it."""
        self.suspected = why

    def renew(self) -> None:
        """Count on it again, or on the next."""
        self.suspected, self.outvoted = None, False

    def overruled(self, counted_on: bool) -> None:
        """Take in whether those that refused us their votes count on it, where we do not."""
        self.outvoted = counted_on and self.suspected is not None

    def why_not(self, certificate: Certificate, now: float, candidate: str = "") -> str:
        """Say why the certified syncer cannot be counted on (or is to leave the office to `candidate`); empty
        if it can. For another than this node."""
        if certificate.syncer in self._shared.excluded:
            return "the syncer is excluded"
        if self.suspected is not None:
            return str(self.suspected)
        if others := self._candidates.why_give_way(certificate, now, candidate=candidate):
            return f"the syncer {others}"
        view, syncer = self._shared.view, certificate.syncer
        if self._shared.distrust.has(syncer, now):
            return "a merge of the syncer's was false, or it left our work out"
        if syncer in self._shared.loss_audits:
            return "the syncer's work does harm, or nothing"
        if view.has_left(syncer):
            return "the syncer left"
        said = view.progress(syncer)
        if said and not said.votes and (self._group, self._fragment, certificate.term) not in said.offices:
            return "the syncer cannot save, and has laid the office down"
        if not view.alive(syncer, now) and not self._candidates.is_news(syncer, now):
            silent = view.silence_s(syncer, now) >= self._shared.timing.suspect_s
            return "the syncer is silent" if silent else "the syncer is unreachable"
        return ""
