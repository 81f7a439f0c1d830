"""Partial merges: the label with which a group's goes to the group above, and how a version names them.

Who merged what follows from a version's header alone: which leaf group a learner was in, and which groups are
below which, is arithmetic (`core.api.grouping`). So a partial is named by its group, its syncer, and the
digest of its sums, and its syncer's signature holds for the contributions that the header has of that group.

Rules: docs/protocol/groups.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from p2pdiloco.core.api import merkle
from p2pdiloco.core.api.grouping import is_below, leaf_index, level_sizes, parent_index, parse_group
from p2pdiloco.core.api.types import (
    MAX_CONTRIBUTORS,
    NO_LIMITS,
    Contributor,
    Count,
    Digest,
    GroupId,
    MergeLimits,
    PeerId,
    RunId,
    Signature,
    SignedContribution,
    Wire,
)

MAX_PARTIALS = 4096
"""Limit of partial merges in a version: as many as so many contributors in groups of more than four make."""


class PartialLabel(Wire, frozen=True):
    """Label that the syncer of a group signs of its partial merge, and answers for."""

    run: RunId
    fragment: Count
    group: GroupId
    syncer: PeerId
    payload_digest: Digest
    limits: MergeLimits
    parts: Digest
    """Merkle root over its encoded contributors, in the order of their learners."""
    below: Digest
    """Merkle root over the encoded partials of all groups below it that are in it, each with limits, sorted
    by group: nobody above can change one, and leave the blame to this syncer."""


class MergedPartial(Wire, frozen=True):
    """Partial merge in a version, as its header names it."""

    group: GroupId
    syncer: PeerId
    payload_digest: Digest
    signature: Signature
    """Signature of that syncer, of its `PartialLabel`."""
    limits: MergeLimits | None = None
    """Limits by which its contributions were weighed and cut; None: those of the version."""

    def by(self, limits: MergeLimits) -> MergeLimits:
        """Find its limits, in a version of these."""
        return self.limits or limits


class PartialHeader(Wire, frozen=True):
    """Label of a group's partial merge, on its way to the syncer of the group above (docs/protocol/groups.md,
    section 3)."""

    run: RunId
    group: GroupId
    """Group whose contributions were merged."""
    fragment: Count
    syncer: PeerId
    """Syncer of that group; the author."""
    number: Count
    """Number of the head upon which the next version is to be made, for all that the author knows."""
    digest: Digest
    parts: Annotated[tuple[Contributor, ...], Meta(min_length=1, max_length=MAX_CONTRIBUTORS)]
    due: bool
    """True: the group's round began with what was due, or something in it was; a round may start with it."""
    payload_digest: Digest
    payload_bytes: Count
    limits: MergeLimits = NO_LIMITS
    """Limits by which the contributions were weighed and cut: those of the head at that time."""
    below: Annotated[tuple[MergedPartial, ...], Meta(max_length=MAX_PARTIALS)] = ()
    """Partials of all groups below it that are in it, each with limits, sorted by the group's name."""

    def named(self) -> bytes:
        """Encode what its author signs: the `PartialLabel`. The rest is the word of the syncer that is
        connected."""
        return _label(
            self.run,
            self.fragment,
            self.group,
            self.syncer,
            self.payload_digest,
            self.limits,
            self.parts,
            _in_order(self.below),
        ).named()

    def tree(self, plan: Plan) -> Tree | None:
        """Find out what was merged in each partial in it, itself too; None: that cannot be."""
        return tree_of(plan, self.parts, (*self.below, self.merged(b"")), self.group)

    def merged(self, signature: bytes) -> MergedPartial:
        """Make its entry in a version, with limits."""
        return MergedPartial(self.group, self.syncer, self.payload_digest, signature, self.limits)


class SignedPartial(Wire, frozen=True):
    """Header of a partial merge, signed by its author over `signed_bytes("partial", header)`."""

    header: PartialHeader
    signature: Signature


SignedOffer = SignedContribution | SignedPartial
"""Offer to a syncer: a learner's work, or the sums of a whole group's."""


class Plan(NamedTuple):
    """Plan by which a fragment's members fall into groups for one version."""

    run: str
    fragment: int
    epoch: int
    groups: int
    """Number of leaf groups."""
    group_size: int

    def place(self, group: str) -> tuple[int, int] | None:
        """Find (level, index) of a group; None: there is no such group."""
        parsed, sizes = parse_group(group), level_sizes(self.groups, self.group_size)
        if parsed is None or self.groups == 1 or parsed[0] != self.epoch:
            return None
        _, level, index = parsed
        return (level, index) if level < len(sizes) and index < sizes[level] else None

    def leaf_of(self, peer: str) -> tuple[int, int]:
        """Find the leaf group of a peer, (0, index)."""
        return 0, leaf_index(self.run, self.fragment, self.epoch, self.groups, peer)


class PartOfTree(NamedTuple):
    """Partial in a merge, with what was merged in it."""

    entry: MergedPartial
    parts: tuple[Contributor, ...]
    """Contributions, those of the groups below too, in the order of the header."""
    below: tuple[MergedPartial, ...]
    """Partials that were added up, in that order; none of a leaf group."""
    inside: tuple[MergedPartial, ...] = ()
    """Partials of all groups below it that are in it, sorted by group."""

    def label(self, run: str, fragment: int, limits: MergeLimits) -> PartialLabel:
        """Make what its syncer signed, if it is in a version of these limits."""
        entry = self.entry
        names = run, fragment, entry.group, entry.syncer, entry.payload_digest
        inside = (replace(each, limits=each.by(limits)) for each in self.inside)
        return _label(*names, entry.by(limits), self.parts, inside)


Tree = Mapping[str, PartOfTree]
"""Partials in a merge, by their groups' names."""


def tree_of(
    plan: Plan, contributors: Sequence[Contributor], partials: Sequence[MergedPartial], top: str = ""
) -> Tree | None:
    """Find out what was merged in each of the partials of a version, or of a partial of group `top`, which is
    one of them. None: they are not those of such a merge, one for each group that has something, by somebody
    who belongs there."""
    places = _places(plan, partials, top)
    if places is None:
        return None
    sizes = level_sizes(plan.groups, plan.group_size)
    names = {place: group for group, place in places.items()}
    root = places[top] if top else (len(sizes) - 1, 0)
    parts: dict[str, list[Contributor]] = {group: [] for group in places}
    inside: dict[str, list[MergedPartial]] = {group: [] for group in places}
    below: dict[str, list[MergedPartial]] = {group: [] for group in places}
    for part in contributors:
        place = plan.leaf_of(part.learner)
        while place != root:
            if place not in names:
                return None  # what it contributed came by no partial
            parts[names[place]].append(part)
            place = place[0] + 1, parent_index(sizes, *place)
        if top:
            parts[top].append(part)
    for entry in partials:
        level, index = places[entry.group]
        if not parts[entry.group] or not is_below(sizes, plan.leaf_of(entry.syncer), (level, index)):
            return None
        place = level, index
        while place != root:
            place = place[0] + 1, parent_index(sizes, *place)
            if place in names:
                inside[names[place]].append(entry)
                if place[0] == level + 1:
                    below[names[place]].append(entry)
    return {
        each.group: PartOfTree(
            each, tuple(parts[each.group]), _in_order(below[each.group]), _in_order(inside[each.group])
        )
        for each in partials
    }


def _places(plan: Plan, partials: Sequence[MergedPartial], top: str) -> dict[str, tuple[int, int]] | None:
    """Find where these groups are. None: one has no place below `top`, or is named twice."""
    places: dict[str, tuple[int, int]] = {}
    highest = len(level_sizes(plan.groups, plan.group_size)) - 1
    if top:
        highest = (plan.place(top) or (0, 0))[0]
    for entry in partials:
        place = plan.place(entry.group)
        if place is None or (place[0] >= highest and entry.group != top):
            return None
        places[entry.group] = place
    return places if len(set(places.values())) == len(partials) else None


def in_a_version(limits: MergeLimits, partials: Iterable[MergedPartial]) -> tuple[MergedPartial, ...]:
    """Name partials in a version of these limits, which are not said again."""
    said = limits.named()  # of equal ones there are two zeros, and they were signed
    return _in_order(
        replace(each, limits=None) if each.limits and each.limits.named() == said else each
        for each in partials
    )


def _in_order(partials: Iterable[MergedPartial]) -> tuple[MergedPartial, ...]:
    return tuple(sorted(partials, key=lambda entry: entry.group))


def _label(
    run: str,
    fragment: int,
    group: str,
    syncer: str,
    payload_digest: bytes,
    limits: MergeLimits,
    parts: Iterable[Contributor],
    inside: Iterable[MergedPartial],
) -> PartialLabel:
    roots = (
        merkle.root([part.named() for part in parts]),
        merkle.root([entry.named() for entry in inside]),
    )
    return PartialLabel(run, fragment, group, syncer, payload_digest, limits, *roots)
