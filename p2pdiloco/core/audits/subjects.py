"""Subjects of audits: a version, and the partial merges in it that have one learner's contribution.

Where several groups made a version, its syncer answers for the sum of the partial merges right below, and
each group's syncer for its own. Whose signature a syncer merged it had looked at: it answers for that, too.

Rules: docs/protocol/audits.md, section 1.
"""

from __future__ import annotations

from typing import NamedTuple

from p2pdiloco.core.api.effects import Audit
from p2pdiloco.core.api.partials import PartialLabel, PartOfTree, Plan, Tree
from p2pdiloco.core.api.proofs import short_of
from p2pdiloco.core.api.statements import FalsePartial, FalseVersion, Subject, label_digest
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.contributions.label import signed_by_syncer
from p2pdiloco.core.shared import Shared


class AuditedMerge(NamedTuple):
    """Merge for which one syncer answers."""

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
