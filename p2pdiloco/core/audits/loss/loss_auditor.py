"""Loss auditor of one fragment: has a contribution to a version measured, against our own one to it.

Rules: docs/protocol/loss-audits.md, section 1.
"""

from __future__ import annotations

from p2pdiloco.core.api.effects import LossAudit
from p2pdiloco.core.api.events import LossAudited
from p2pdiloco.core.api.trust_weight import NONE_AT
from p2pdiloco.core.api.types import Contributor
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.own import ContributionQueue


class LossAuditor:
    """Loss auditor of the versions that this node applies."""

    def __init__(self, context: FragmentContext, own: ContributionQueue) -> None:
        self._context, self._own = context, own
        self._shared = context.shared
        self._under_way: tuple[SignedVersion, Contributor] | None = None

    def applied(self, version: SignedVersion, now: float) -> None:
        """Look at a version that was just applied."""
        audits, parts = self._shared.loss_audits, version.header.contributors
        if not audits.drawn(now) or self._own.ticket_in(parts) is None:
            return
        by_learner = {part.learner: part for part in parts if part.learner != self._shared.me}
        chosen = audits.choose(list(by_learner))
        if chosen is None:
            return
        audits.begin()
        self._under_way = version, by_learner[chosen]
        ours = next(part for part in parts if part.learner == self._shared.me)
        self._shared.out.put(LossAudit(self._context.index, version, by_learner[chosen], ours))

    def audited(self, event: LossAudited, now: float) -> None:
        """Take in what was measured, and draw the conclusion."""
        if self._under_way is None or self._under_way[0].header.digest() != event.digest:
            return
        (version, part), self._under_way = self._under_way, None
        shared, header, learner = self._shared, version.header, part.learner
        audits = shared.loss_audits
        measured = event.theirs, event.ours, event.same_data, event.took_s
        odd = self._context.chain.marks.mean(learner).agreement <= NONE_AT
        ratio = audits.end(learner, *measured, now, odd)
        words = f"a contribution to version {header.number} "
        words += "was not measured" if ratio is None else f"does {ratio:.2f} of what ours does"
        figures = {"number": header.number, "took_s": round(event.took_s, 3)}
        if ratio is not None:
            figures["ratio"] = round(ratio, 3)
        shared.out.record("audit", header.fragment, words, peer=learner, **figures)
        finding = audits.finding(learner)
        if finding is not None:
            counted = audits.audits(learner)
            shared.out.record("expelled", None, str(finding), peer=learner, audits=counted)
