"""Audits of one fragment: merges of others made again, contributions measured, and what follows.

Rules: docs/protocol/audits.md, sections 1 and 3; docs/protocol/loss-audits.md, section 1.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import NamedTuple

from p2pdiloco.core.api.events import Audit, Audited, CastOut, LossAudit, LossAudited
from p2pdiloco.core.api.evidence import (
    Accusation,
    FalsePartial,
    FalseState,
    FalseVersion,
    Refutation,
    Subject,
    cause_of,
    label_digest,
    short_of,
)
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import LEAST_SCORE, WHOLE_RUN, Contributor, MergeLimits, Ticket, weight_of
from p2pdiloco.core.api.versions import (
    ALL_AT,
    PartialLabel,
    PartOfTree,
    Plan,
    SignedVersion,
    Tree,
    VersionHeader,
)
from p2pdiloco.core.base import Shared
from p2pdiloco.core.chain import plan_of
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions import ContributionQueue
from p2pdiloco.core.distrust import Cause
from p2pdiloco.core.pending import signed_by_syncer
from p2pdiloco.util import BoundedDict


class AuditedMerge(NamedTuple):
    """Merge for which one syncer answers: a version, or a partial merge in it that has one learner's
    contribution.

    Where several groups made a version, its syncer answers for the sum of the partial merges right below, and
    each group's syncer for its own. A syncer has looked at the signatures of what it merged: it answers
    for those, too.

    Rules: docs/protocol/audits.md, section 1.
    """

    version: SignedVersion
    part: PartOfTree | None = None
    """Partial merge of a group; None: the version."""
    below: tuple[PartOfTree, ...] = ()
    """Partial merges that were added up, in that order; none: contributions were."""
    inside: tuple[PartOfTree, ...] = ()
    """Partial merges in it, those in others too."""

    @property
    def group(self) -> str:
        """Name of the group that made it."""
        return WHOLE_RUN if self.part is None else self.part.entry.group

    @property
    def syncer(self) -> str:
        """Member that answers for it."""
        return self.version.header.syncer if self.part is None else self.part.entry.syncer

    @property
    def name(self) -> str:
        """Name it for people."""
        of_group = "" if self.part is None else f" of group {self.group}"
        return f"version {self.version.header.number}{of_group}"

    def effect(self, givers: tuple[str, ...], repairs: SignedVersion | None) -> Audit:
        """Ask for it to be made again; `givers`: those who accuse it, `repairs`: version that it repairs."""
        fragment = self.version.header.fragment
        return Audit(fragment, self.version, givers, repairs, self.part, self.below)

    def subject(self) -> Subject:
        """Name it in an accusation."""
        if self.part is None:
            return FalseVersion(short_of(self.version))
        header = self.version.header
        return FalsePartial(header.number, header.digest(), self._label(self.part), self.part.entry.signature)

    def digest(self) -> bytes:
        """Compute what names it, as in an accusation."""
        return self.version.header.digest() if self.part is None else label_digest(self._label(self.part))

    def _label(self, part: PartOfTree) -> PartialLabel:
        header = self.version.header
        return part.label(header.run, header.fragment, header.limits)

    def signed(self, shared: Shared) -> bool:
        """Tell whether its syncer itself says so; whoever says that of a version was asked before."""
        return self.part is None or self._is_signed(shared, self.part)

    def signed_inside(self, shared: Shared) -> bool:
        """Tell whether the syncers of all groups in it say so themselves."""
        return all(self._is_signed(shared, part) for part in self.inside)

    def _is_signed(self, shared: Shared, part: PartOfTree) -> bool:
        header = self.version.header
        return signed_by_syncer(shared, header.fragment, part, header.limits)


DRAWN = 0.04
"""Share of versions that somebody audits by lot: each costs the contributions of one round once more."""
SUSPICIOUS = 0.5
"""Share of the cosine that its contributor expects of an update; with less it is audited."""
LEAST_COSINE = 0.05
"""Least expected cosine from which anything can be concluded."""


class Auditor:
    """Auditor of one fragment: has versions of others merged again, and draws the conclusion.

    A version is audited because it looks wrong to us, or by lot.

    - *Suspicion.* A learner in a version knows how far the update should go its way, whatever all others
      sent: they are nearly orthogonal to it, and have a little of it. An update that goes less than half as
      far is not their merge, as a rule. Nor is it usual that one who agreed with the others for long suddenly
      does not, as a version says. That is free, and finds at once what does harm.
    - *Lot.* Each node draws for itself, so that no syncer can foresee or avoid it.
    - *Accusation.* Another member says that it is false.

    Of what several groups made, our group's partial merge comes first, then those in which it is, and the sum
    of all at last. One merge is made again at a time by a node. A node that finds one false accuses its
    syncer before all others, and one that finds right what another has accused says so: both under their
    signatures, and both exclude the liar for good.

    Rules: docs/protocol/audits.md, sections 1 and 3.
    """

    def __init__(self, context: FragmentContext, own: ContributionQueue) -> None:
        self._context = context
        self._own = own
        self._shared = context.shared
        self._rng = random.Random(context.shared.rng.random() if context.shared.config.audited else 0)
        self._suspected: tuple[AuditedMerge, ...] = ()
        """Merges of the newest version that waits until another audit is done, as it looks wrong."""
        self._next: tuple[AuditedMerge, ...] = ()
        """Merges of the version that is being audited whose turn comes if those before are right."""
        self._under_way: AuditedMerge | None = None
        self._givers: tuple[str, ...] = ()
        """Accusers of what is under way who were asked for what they have."""
        self._right: BoundedDict[bytes, bool] = BoundedDict()
        """Merges that we made again, and whether we found them right."""
        self._looks_wrong: bytes | None = None
        """Newest version of one group that looks wrong."""
        self._repair: SignedVersion | None = None
        """Repair that is judged once the version that it repairs is: we had not looked at that before."""
        self._agreement = 0
        """Our mean agreement before the version that is being applied."""
        self._works = False
        """True: since our start something of ours was merged. Before, others may not know us as a member yet,
        and give us nothing, or we catch up with versions of which the contributions are gone."""
        self.loss = LossAuditor(context, own)

    def _plan(self, header: VersionHeader) -> Plan | None:
        """Find how members were grouped for that child of our head, or for a version in our log. None: that
        is not known, or nothing is audited in this run."""
        parent, config = self._context.chain.logged(header.number - 1), self._shared.config
        return plan_of(parent.header, config) if config.audited and parent is not None else None

    def own_part(self, header: VersionHeader) -> Ticket | None:
        """Find our own contribution to a version, which is to be compared with its update; None: there is
        none, or nothing is compared."""
        self._agreement = self._context.chain.marks.mean(self._shared.me).agreement
        return self._own.ticket_in(header.contributors) if self._plan(header) else None

    def applied(self, version: SignedVersion, cosine: float | None, now: float) -> None:
        """Look at a version of another member that was just applied. `cosine`: of our own contribution in it
        with the update; None: there is none."""
        header, shared = version.header, self._shared
        self.loss.applied(version, now)
        plan = self._plan(header)
        if plan is None or header.syncer == shared.me:
            return
        if header.repairs is not None:
            self._repaired(version, header.repairs, now)
            return
        merges = tuple(each for each in merges_of(version, plan, shared.me) if each.syncer != shared.me)
        self._works |= any(part.learner == shared.me for part in header.contributors)
        if cosine is not None:
            expected = expected_cosine(header.contributors, shared.me, header.limits)
            if expected > LEAST_COSINE and cosine < SUSPICIOUS * expected:
                self._suspect(merges)
                words = f"version {header.number} hardly goes the way of our contribution to it"
                figures = {"cosine": round(cosine, 4), "expected": round(expected, 4)}
                shared.out.record("audit", header.fragment, words, peer=header.syncer, **figures)
        if self._disowned(header):
            self._suspect(merges)
            words = f"version {header.number} says that our contribution to it goes against the others"
            shared.out.record("audit", header.fragment, words, peer=header.syncer)
        drawn = [merge for merge in merges if self._works and self._drawn(merge)]
        if drawn and not self._suspected and shared.audits.begin(self._context.index):
            self._begin(self._rng.choice(drawn), now)
        self.poll(now)

    def _suspect(self, merges: tuple[AuditedMerge, ...]) -> None:
        self._suspected = merges
        if len(merges) == 1:  # of several groups it may be another one's merge that is false
            self._looks_wrong = merges[0].digest()

    def _repaired(self, repair: SignedVersion, digest: bytes, now: float) -> None:
        """Look at a repair: anything could hide in it. It can be made again with the true update alone, which
        whoever found the version false has. So others first find out about that."""
        first = self._context.chain.find(digest)
        if self._context.repairs.has(digest):
            self._suspected = self._whole(repair)
        elif self._right.get(digest):
            self._repairs_what_was_right(repair, now)
        elif first is not None:
            self._suspected, self._repair = self._whole(first), repair
        self.poll(now)

    def _whole(self, version: SignedVersion) -> tuple[AuditedMerge, ...]:
        plan = self._plan(version.header)
        return merges_of(version, plan, self._shared.me)[-1:] if plan is not None else ()

    def _repairs_what_was_right(self, repair: SignedVersion, now: float) -> None:
        header = repair.header
        self._shared.distrust.add(header.syncer, Cause.FALSE, now)
        words = f"version {header.number} takes back a version that was right"
        self._shared.out.record("audit", header.fragment, words, peer=header.syncer, number=header.number)

    def _judge_repair(self, digest: bytes, answer: Audited, now: float) -> None:
        repair = self._repair
        if repair is None or repair.header.repairs != digest:
            return
        self._repair = None
        if answer.remade:
            self._suspected = self._whole(repair)
        elif answer.outcome is AuditOutcome.SAME:
            self._repairs_what_was_right(repair, now)

    def _disowned(self, header: VersionHeader) -> bool:
        """Tell whether a version says that our contribution goes against the others', although we had all of
        our weight: it takes away what we are trusted with, and so what makes us suspicious."""
        parts = (part for part in header.contributors if part.learner == self._shared.me)
        return self._agreement >= ALL_AT and any(LEAST_SCORE <= part.score < 0 for part in parts)

    def _drawn(self, merge: AuditedMerge) -> bool:
        """Draw whether we audit it, as all those do whose merge it is."""
        of_all = self._context.chain.marks.lately
        together = of_all if merge.part is None else len(merge.part.parts)
        return self._rng.random() * max(1, together) < DRAWN

    def poll(self, now: float) -> None:
        """Begin with what waits, if nothing is under way."""
        while (waiting := self._next or self._suspected) and self._shared.audits.begin(self._context.index):
            if not self._next:
                self._suspected = ()
            self._next = waiting[1:]
            self._begin(waiting[0], now)
        for accusation in self._shared.accusations.waiting(self._context.index, now):
            self._look_into(accusation, now)

    def finds_out(self, digest: bytes) -> bool:
        """Tell whether that merge is being made again here, or waits for its turn."""
        now = self._under_way is not None and self._under_way.digest() == digest
        return now or bool(self._shared.accusations.of(digest))

    def found_right(self, subject: Subject) -> bool:
        """Tell whether we made that merge again lately, or that outer step, and found it right."""
        if isinstance(subject, FalseState):
            return self._context.false_states.made_here(subject)
        return self._right.get(subject.digest(), False)

    def found_false(self, subject: Subject) -> bool:
        """Tell whether we made that merge again lately, or that outer step, and found it false."""
        if isinstance(subject, FalseState):
            return subject.version_digest() in self._context.false_states
        return not self._right.get(subject.digest(), True)

    def _look_into(self, accusation: Accusation, now: float) -> None:
        """Begin to find out whether it is true, if that is known not yet, and the version is here."""
        subject, heard = accusation.subject, self._shared.accusations
        if self.found_right(subject):
            self._refute(accusation)
            return
        version = self._context.chain.logged(subject.number)
        if version is None or version.header.digest() != subject.version_digest():
            return  # it may be on its way to us
        # Who copied a state cannot tell how it was made.
        plan = None if isinstance(subject, FalseState) else self._plan(version.header)
        merge = None if plan is None else merge_accused(version, plan, subject)
        if merge is None or not merge.signed(self._shared):
            heard.vain(accusation, now)
        elif self._under_way is None and self._shared.audits.begin(self._context.index):
            self._begin(merge, now)

    def _begin(self, merge: AuditedMerge, now: float) -> None:
        """Begin with one, as we may. What its syncer did not sign, whoever merged it answers for."""
        shared, fragment = self._shared, self._context.index
        if merge.signed(shared) and merge.signed_inside(shared):
            self._under_way = merge
            self._givers = tuple(each.accuser for each in shared.accusations.of(merge.digest()))
            repaired = merge.version.header.repairs
            repairs = self._context.chain.find(repaired) if repaired is not None else None
            shared.out.ask(merge.effect(self._givers, repairs), partial(self._audited, merge), fragment)
            return
        shared.audits.end(fragment)
        if merge.signed(shared):
            self._found(merge, AuditOutcome.DIFFERENT, now)

    def _audited(self, merge: AuditedMerge, answer: Audited, now: float) -> None:
        """Take in what came of an audit."""
        header = merge.version.header
        self._under_way = None
        self._shared.audits.end(self._context.index)
        if answer.remade:
            self._context.repairs.remade(header.digest())
        self._judge_repair(header.digest(), answer, now)
        if answer.outcome is AuditOutcome.MISSING and answer.withheld and self._works:
            # Once it may have let go of that; where its version looks wrong, it has something to hide.
            cause = Cause.FALSE if merge.digest() == self._looks_wrong else Cause.WITHHELD
            self._shared.distrust.add(merge.syncer, cause, now)
            words = f"{merge.name}: its syncer does not give what it merged"
            self._shared.out.record("audit", header.fragment, words, peer=merge.syncer)
        elif answer.outcome is AuditOutcome.SAME:
            self._shared.distrust.forgive(merge.syncer, Cause.WITHHELD, now)
        self._found(merge, answer.outcome, now)

    def _found(self, merge: AuditedMerge, outcome: AuditOutcome, now: float) -> None:
        header, digest = merge.version.header, merge.digest()
        self._shared.out.record(
            "audit",
            header.fragment,
            f"{merge.name}: {outcome}",
            peer=merge.syncer,
            number=header.number,
            outcome=outcome.value,
        )
        accused = self._shared.accusations.of(digest)
        if outcome is AuditOutcome.SAME:
            self._right[digest] = True
            for accusation in accused:
                self._refute(accusation)
        elif outcome is AuditOutcome.DIFFERENT:
            self._right[digest] = False
            self._found_false(merge, accused, now)
        else:
            for accusation in accused:
                if accusation.accuser in self._givers:  # else it is tried once more, with what that one has
                    self._shared.accusations.vain(accusation, now)

    def _found_false(self, merge: AuditedMerge, accused: list[Accusation], now: float) -> None:
        """Accuse the syncer before all others, which excludes it here; if we are it, end. What is above that
        merge is not false for it."""
        shared = self._shared
        if self._next and self._next[0].version == merge.version:
            self._next = ()
        for accusation in accused:
            shared.accusations.settled(accusation)
        subject = merge.subject()
        ours = Accusation(subject, shared.me, shared.sign("accusation", subject))
        if merge.syncer == shared.me:
            shared.out.put(CastOut(ours.words(), cause_of(ours)))
        else:
            shared.excluded.found(ours)

    def _refute(self, accusation: Accusation) -> None:
        """Say before all others that an accusation is false, which excludes its author here."""
        shared = self._shared
        shared.accusations.settled(accusation)
        shared.excluded.found(Refutation(accusation, shared.me, shared.sign("refutation", accusation)))


class LossAuditor:
    """Loss auditor of one fragment: has a contribution to a version measured, against our own one to it.

    Rules: docs/protocol/loss-audits.md, section 1.
    """

    def __init__(self, context: FragmentContext, own: ContributionQueue) -> None:
        self._context, self._own = context, own
        self._shared = context.shared

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
        theirs, index = by_learner[chosen], self._context.index
        ours = next(part for part in parts if part.learner == self._shared.me)
        heard = partial(self._audited, version.header, theirs.learner)
        self._shared.out.ask(LossAudit(index, version, theirs, ours), heard, index)

    def _audited(self, header: VersionHeader, learner: str, answer: LossAudited, now: float) -> None:
        """Take in what was measured, and draw the conclusion."""
        shared, audits = self._shared, self._shared.loss_audits
        odd = self._context.chain.marks.mean(learner).agreement <= 0
        ratio = audits.end(learner, answer.theirs, answer.ours, answer.same_data, answer.took_s, now, odd)
        words = f"a contribution to version {header.number} "
        words += "was not measured" if ratio is None else f"does {ratio:.2f} of what ours does"
        figures = {"number": header.number, "took_s": round(answer.took_s, 3)}
        if ratio is not None:
            figures["ratio"] = round(ratio, 3)
        shared.out.record("audit", header.fragment, words, peer=learner, **figures)
        finding = audits.finding(learner)
        if finding is not None:
            counted = audits.audits(learner)
            shared.out.record("expelled", None, str(finding), peer=learner, audits=counted)


def merges_of(version: SignedVersion, plan: Plan, learner: str) -> tuple[AuditedMerge, ...]:
    """List the merges in which that learner's contribution is, from its own group's up to the version; only
    that, where nothing of it is there."""
    tree = version.header.tree(plan) or {}
    mine = [part for part in tree.values() if any(each.learner == learner for each in part.parts)]
    mine.sort(key=lambda part: _level(plan, part))
    return (*(_partial(version, tree, part) for part in mine), _whole(version, plan, tree))


def merge_accused(version: SignedVersion, plan: Plan, subject: Subject) -> AuditedMerge | None:
    """Find what is accused in that version; None: it is not there."""
    tree = version.header.tree(plan) or {}
    if isinstance(subject, FalseVersion):
        return _whole(version, plan, tree)
    part = tree.get(subject.label.group)
    merge = None if part is None else _partial(version, tree, part)
    return merge if merge is not None and merge.digest() == subject.digest() else None


def _level(plan: Plan, part: PartOfTree) -> int:
    place = plan.place(part.entry.group)
    return place[0] if place else 0


def _partial(version: SignedVersion, tree: Tree, part: PartOfTree) -> AuditedMerge:
    below, inside = ([tree[entry.group] for entry in entries] for entries in (part.below, part.inside))
    return AuditedMerge(version, part, tuple(below), tuple(inside))


def _whole(version: SignedVersion, plan: Plan, tree: Tree) -> AuditedMerge:
    levels = {group: _level(plan, part) for group, part in tree.items()}
    highest = max(levels.values(), default=0)
    below = tuple(tree[group] for group in sorted(tree) if levels[group] == highest)
    return AuditedMerge(version, None, below, tuple(tree.values()))


def expected_cosine(parts: tuple[Contributor, ...], learner: str, limits: MergeLimits) -> float:
    """Compute the cosine of that learner's contribution with the merge of all, if contributions are
    orthogonal; 0 if none is that learner's."""
    most = limits.most_tokens
    weights = {p.learner: weight_of(p.tokens, p.inner_steps, most, p.trust) for p in parts}
    whole = math.sqrt(math.fsum(weight * weight for weight in weights.values()))
    return weights.get(learner, 0.0) / whole if whole else 0.0
