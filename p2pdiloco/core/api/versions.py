"""Versions of a fragment: their headers, the partial merges and groups in them, and what follows from them.

`VersionHeader` describes a version, `PartialHeader` a group's partial merge on its way up. `Plan` says which
member belongs to which group. `Mean` is the trust weight of a learner, `Stride` the share of a displacement
that goes into one contribution.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from p2pdiloco.core.api.papers import MAX_PAPERS, Paper
from p2pdiloco.core.api.types import (
    EMPTY_TABLE,
    FULL_TRUST,
    LEAST_SCORE,
    LEAST_TRUST,
    MAX_CONTRIBUTORS,
    MOST_SCORE,
    NO_LIMITS,
    NOT_FINAL,
    NOTHING,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    WHOLE_RUN,
    Certificate,
    Contributor,
    Count,
    Digest,
    Finality,
    GroupId,
    Head,
    HeaderStart,
    MergeLimits,
    PeerId,
    RunId,
    ShortHeader,
    Signature,
    SignedContribution,
    Wire,
    merkle_root,
    plausible_work,
)
from p2pdiloco.util import BoundedDict


class VersionHeader(HeaderStart, frozen=True):
    """Description of a version: parent, what was merged, and the digests of update and resulting state."""

    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_CONTRIBUTORS)]
    epoch: Count = 0
    """Epoch of the grouping under which the *next* version is made; grows when the groups rotate."""
    groups: Annotated[int, Meta(ge=1, le=MAX_CONTRIBUTORS)] = 1
    """Number of groups into which the members fall for the next version; 1: all are in one
    (`core.api.versions.Plan`)."""
    table: Digest = EMPTY_TABLE
    """Digest of the table of watermarks after this version (`table_digest`): nobody can forge it beside a
    state."""
    unit: Count = 0
    """Tokens of a usual contribution (`core.chain.Scale`); 0: H inner steps'."""
    norm: float = 0.0
    """Length (L2) of the outer update, as its syncer found it; of version 0, its own, about."""
    reach: float = 0.0
    """Length of a usual contribution; 0: not known, and nothing is cut."""
    limits: MergeLimits = NO_LIMITS
    """Limits by which its contributions were merged, which follow from its parent."""
    partials: Annotated[tuple[MergedPartial, ...], Meta(max_length=MAX_PARTIALS)] = ()
    """Partial merges of which it was made, those inside others too, sorted by group; none where one group
    made it."""
    repairs: Digest | None = None
    """Digest of an earlier version, a false one, whose update is taken back in this one's, and the true one
    added (docs/protocol/audits.md, section 4)."""
    finality: Finality = NOT_FINAL
    """Milestones of its chain, and how far they are attested: it follows from its parent and its
    contributors."""
    papers: Annotated[tuple[Paper, ...], Meta(max_length=MAX_PAPERS)] = ()
    """Papers by which the seats of its table are others than its parent's. Its name does not cover them: the
    table follows from them."""
    elected: Certificate | None = None
    """Proof of its syncer's office, where it does not go on with its parent's term. Its name does not
    cover it: a vote may come later than the version."""

    def short(self) -> ShortHeader:
        """Make what stands for it wherever it is named or signed: contributors by their one digest."""
        fields: dict[str, Any] = asdict(self)
        fields["contributors"] = merkle_root([part.named() for part in self.contributors])
        fields["partials"] = merkle_root([entry.named() for entry in self.partials])
        del fields["papers"], fields["elected"]
        return ShortHeader(**fields)

    def named(self) -> bytes:
        """Encode what stands for it: the short header."""
        return _facts(self).named

    def digest(self) -> bytes:
        """Compute SHA-256 of the short header's canonical encoding."""
        return _facts(self).digest

    def longest_steps(self) -> int:
        """Find the inner steps of its longest contribution; 0 for version 0."""
        return _facts(self).longest_steps

    def plausible(self, tokens_per_step: int, period: int) -> bool:
        """Tell whether every contributor can have trained so much in so many inner steps
        (`plausible_work`)."""
        return _facts(self).plausible(tokens_per_step, period)

    def tree(self, plan: Plan) -> Tree | None:
        """Find out what was merged in each of its partials, where the members were grouped so; None: that
        cannot be."""
        return _facts(self).tree(plan)

    def head(self) -> Head:
        """Make the short name of this version."""
        return Head(self.number, self.digest(), self.tokens, self.term)


class SignedVersion(Wire, frozen=True):
    """Version header with its syncer's signature over `signed_bytes("version", header)`, which are those of
    the short one."""

    header: VersionHeader
    signature: Signature


MAX_PARTIALS = 4096
"""Limit of partial merges in a version: as many as so many contributors in groups of more than four make."""


class PartialLabel(Wire, frozen=True):
    """Label that the syncer of a group signs of its partial merge, and answers for.

    Who merged what follows from a version's header alone: which leaf group a learner was in, and which groups
    are below which, is arithmetic (`core.api.versions.Plan`). So a partial is named by its group, its syncer,
    and the digest of its sums, and its syncer's signature holds for the contributions that the header has of
    that group.

    Rules: docs/protocol/groups.md, section 3.
    """

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
    """Plan by which a fragment's members fall into groups for one version: which member belongs to which, by
    arithmetic alone.

    Everybody computes the same (docs/protocol/groups.md, section 1). While a run has at most `group_size`
    members, all are in one group, `WHOLE_RUN`. Above that, every version header says into how many leaf
    groups (`groups`) the members fall for the next version, and in which `epoch`.

    A member's leaf group follows from its own peer id by a seeded hash. So nobody needs a list of all members
    to know where it belongs, and two peers with different lists still agree. The syncers of the leaf groups
    form groups one level up, and so on until one group is left. The syncer of that one is the root, and makes
    the version.

    Names of groups are "<epoch>/<level>/<index>"; level 0 are the leaves.
    """

    run: str
    fragment: int
    epoch: int
    groups: int
    """Number of leaf groups."""
    group_size: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of groups on every level, leaves first."""
        return level_sizes(self.groups, self.group_size)

    @property
    def topmost(self) -> str:
        """Name of the group whose syncer makes the next version."""
        return self.name(len(self.sizes) - 1, 0)

    def name(self, level: int, index: int) -> str:
        """Name a group."""
        return group_name(self.epoch, self.groups, level, index)

    def above(self, group: tuple[int, int], level: int) -> tuple[int, int]:
        """Find the group of that level over this one, (level, index) both; of its own level, itself."""
        at, index = group
        for below, over in itertools.pairwise(self.sizes[at : level + 1]):
            index = index * over // below
        return max(at, level), index

    def place(self, group: str) -> tuple[int, int] | None:
        """Find (level, index) of a group; None: there is no such group."""
        parsed, sizes = parse_group(group), self.sizes
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
        inside = (replace(each, limits=each.by(limits)) for each in self.inside)
        return _label(
            run,
            fragment,
            entry.group,
            entry.syncer,
            entry.payload_digest,
            entry.by(limits),
            self.parts,
            inside,
        )


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
    sizes = plan.sizes
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
            place = plan.above(place, place[0] + 1)
        if top:
            parts[top].append(part)
    for entry in partials:
        level, index = places[entry.group]
        if not parts[entry.group] or plan.above(plan.leaf_of(entry.syncer), level) != (level, index):
            return None
        place = level, index
        while place != root:
            place = plan.above(place, place[0] + 1)
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
    highest = len(plan.sizes) - 1
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
    return PartialLabel(
        run,
        fragment,
        group,
        syncer,
        payload_digest,
        limits,
        parts=merkle_root([part.named() for part in parts]),
        below=merkle_root([entry.named() for entry in inside]),
    )


OUTGROWN = 2
"""Factor: groups with so many times `group_size` members on average are too large."""


def level_sizes(groups: int, group_size: int) -> tuple[int, ...]:
    """Number of groups on every level, leaves first, 1 last: (625, 40, 3, 1) for 625 groups of 16.

    There are never two above four and more, as of two syncers one is no minority.
    """
    sizes = [groups]
    while sizes[-1] > 1:
        above = -(-sizes[-1] // group_size)
        sizes.append(above + (above == 2 < group_size and sizes[-1] > 3))
    return tuple(sizes)


def group_name(epoch: int, groups: int, level: int, index: int) -> str:
    """Name a group as it is called on the wire."""
    return WHOLE_RUN if groups == 1 else f"{epoch}/{level}/{index}"


def parse_group(name: str) -> tuple[int, int, int] | None:
    """Split a group's name into (epoch, level, index); None for `WHOLE_RUN` and for anything malformed."""
    parts = name.split("/")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        return None
    epoch, level, index = (int(part) for part in parts)
    return epoch, level, index


def is_group(name: str) -> bool:
    """Tell whether this may be the name of a group, now or in another epoch."""
    return name == WHOLE_RUN or parse_group(name) is not None


def leaf_index(run: str, fragment: int, epoch: int, groups: int, peer: str) -> int:
    """Compute the leaf group of a peer by a seeded hash; another one for every fragment and epoch."""
    text = f"group/{run}/{fragment}/{epoch}/{peer}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % groups


EPOCHS_TRIED = 16
"""Epochs from which the next one is chosen."""


FOR_THREE = 9
"""Members from which on three groups of three each, in which one is a minority, take the place of two."""


def next_plan(
    epoch: int,
    groups: int,
    number: int,
    members: int,
    group_size: int,
    epoch_versions: int,
    vacant: Callable[[int, int], int] = lambda epoch, groups: 0,
) -> tuple[int, int]:
    """Decide (epoch, groups) that the header of version `number` states for the version after it.

    Groups rotate after every `epoch_versions` versions, and at once when they have become twice too large, or
    when fewer of others are vacant. A run that fits into one group does not rotate (the office's term does).
    `vacant`: computes how many of so many groups have no seat that is here in an epoch. So many fewer there
    are, if there are any in every epoch that is tried. There are not two where three could have three members
    each, as of two syncers one is no minority.
    """
    empty, ends = vacant(epoch, groups), not number % epoch_versions
    if not (ends or empty or members > OUTGROWN * groups * group_size):
        return epoch, groups
    avoided = 2 if members >= FOR_THREE else 0
    wanted = -(-members // group_size) or 1
    chosen, wanted = _best(epoch, wanted + (wanted == avoided), vacant)
    wanted = wanted - vacant(chosen, wanted) or 1
    chosen, wanted = _best(epoch, wanted - (wanted == avoided), vacant)
    better = wanted > groups or vacant(chosen, wanted) < empty
    stays = wanted == groups == 1 or not (ends or better)
    return (epoch, groups) if stays else (chosen, wanted)


def _best(epoch: int, groups: int, vacant: Callable[[int, int], int]) -> tuple[int, int]:
    """Find the first of the next epochs in which the fewest of so many groups are vacant."""
    return min(range(epoch + 1, epoch + 1 + EPOCHS_TRIED), key=lambda each: vacant(each, groups)), groups


REMEMBERED = 64
"""Partitions into leaf groups, or headers, of which is remembered what follows from them: more than fragments
that change at one time."""


class MemberList:
    """Immutable list of all listed members; one object may serve many readers.

    `members` is sorted: (peer, incarnation).
    """

    def __init__(self, members: tuple[tuple[str, int], ...]) -> None:
        self.members = tuple(sorted(members))
        self._leaves: BoundedDict[Plan, tuple[tuple[str, ...], ...]] = BoundedDict(REMEMBERED)
        self._incarnations: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return (
            f"MemberList({', '.join(peer for peer, _ in self.members[:8])}{', …' if len(self) > 8 else ''})"
        )

    def incarnation(self, peer: str) -> int | None:
        """Incarnation of a listed peer; None for one that is not listed."""
        if not self._incarnations and self.members:
            self._incarnations.update(self.members)
        return self._incarnations.get(peer)

    def leaves(self, plan: Plan) -> tuple[tuple[str, ...], ...]:
        """List the peers of every leaf group, sorted. Worked out once; the last few answers are
        remembered."""
        found = self._leaves.get(plan)
        if found is None:
            lists: list[list[str]] = [[] for _ in range(plan.groups)]
            for peer, _ in self.members:
                lists[plan.leaf_of(peer)[1]].append(peer)
            found = tuple(tuple(peers) for peers in lists)
            self._leaves[plan] = found
        return found


USUAL = 1024
"""Agreement of a usual learner, as a mean."""
ALL_AT = USUAL // 6
"""Mean agreement from which on a learner has all of the weight, up to 0 it has the least: a sixth of the
usual, an honest learner whose data are quite different from the others' has as much (docs/results.md)."""
BEGINS = ALL_AT // 2
"""Mean agreement of a newcomer: half of the weight."""
MOST = 2 * ALL_AT
"""Largest mean agreement: nobody saves up trust to be wrong with later."""
AGAINST = 2
"""Times that a score below zero counts besides, if it is the reverse of the usual, and by as much less as it
is smaller: honest work goes a little against all others' now and then, but never far."""
SLOWNESS, FIRST_SLOWNESS = 8, 2
"""Divisor of a step: the mean moves by so small a part of the way to the newest figure. It begins with a
larger one, and grows by one in each round: what a newcomer begins with is worth no more than one score."""
UNTOLD = (UNCLEAR, UNMEASURED)
"""Scores that say nothing of a contribution."""
FORGIVEN = 8
"""Step of the mean towards all of the weight in a round too small to be measured."""


class Mean(Struct, frozen=True):
    """Mean agreement of a learner in one fragment, and of how many contributions it is. Its trust weight
    follows: how much of its contributions' weight counts.

    A learner that leads where no other goes is wrong, or a liar, and nobody can tell by one contribution. So
    the syncer measures of every contribution how far it agrees with the others of its round
    (`tensors.merge`), and states it in the header. The table of watermarks keeps a slow mean of that for
    every learner (`Watermark.agreement`). It follows from the parent's table and the header: all members work
    it out anew. The mean decides what a contribution weighs, its own score included: so a liar does harm in
    no round, and one contribution of an honest learner that goes nowhere costs it nothing. Trust is lost
    faster than it is won: the mean is bounded, and what goes against the others counts the more, the farther
    it does, so that a learner that turns has some of its weight once, and then next to nothing. It follows
    from the parent and from what the syncer states, so that partial merges compose.

    A newcomer begins with half of the weight. Nobody has none: where all are doubted, all count alike.

    Rules: docs/protocol/weights.md, section 5.
    """

    agreement: int = BEGINS
    merges: int = 0

    def after(self, score: int) -> int:
        """Compute the mean agreement once a contribution with that score is merged."""
        if score == UNCLEAR and self.agreement < BEGINS:
            return self.agreement  # who was found to disagree is not forgiven by keeping others from agreeing
        if score in UNTOLD:
            return max(self.agreement, min(self.agreement + FORGIVEN, ALL_AT))
        slowness = min(FIRST_SLOWNESS + self.merges, SLOWNESS)
        newest = in_means(score)
        if newest < 0:
            newest -= AGAINST * newest * newest // USUAL
        return min(self.agreement + (newest - self.agreement) // slowness, MOST)

    def trust(self, score: int) -> int:
        """Compute the trust weight of a contribution with that score."""
        if score == NOTHING:
            return LEAST_TRUST
        return trust_of(self.after(score))


def trust_of(agreement: int) -> int:
    """Compute the trust weight, of `FULL_TRUST`, of a learner with that mean agreement."""
    return LEAST_TRUST + (FULL_TRUST - LEAST_TRUST) * min(max(agreement, 0), ALL_AT) // ALL_AT


def in_means(score: int) -> int:
    """Compute a score in units of the mean."""
    return 0 if score == NOTHING else score * USUAL // USUAL_SCORE


def plausible_score(score: int) -> bool:
    """Tell whether that is a score, or says why there is none."""
    return score in (*UNTOLD, NOTHING) or LEAST_SCORE <= score <= MOST_SCORE


def sample_seed(parts: Iterable[Contributor]) -> bytes:
    """Compute what draws the sample on which these contributions, in the order in which they are merged, are
    compared: nobody knows it before all of them are here. It follows from what they are alone, so that
    whoever makes the merge again finds the same scores."""
    return hashlib.sha256(b"sample" + b"".join(part.payload_digest for part in parts)).digest()


FEWEST_REFERENCES = 3
"""Least number of seats of which a minority can be told from the others."""
Each = TypeVar("Each")


def references(parts: Sequence[Each], votes: Sequence[bool]) -> list[Each]:
    """Choose those that are the measure of all: those with a seat, if there are enough; else none.

    Identities are free, so strangers can be most of a round: they are never a measure. One or two seats are
    no majority of anybody, and measure nothing.

    Rules: docs/protocol/weights.md, section 5.
    """
    voting = [part for part, votes_too in zip(parts, votes, strict=True) if votes_too]
    return voting if len(voting) >= FEWEST_REFERENCES else []


PERIODS = 2
"""Longest share, as a multiple of the usual number of inner steps between two merged contributions."""
LEAST_SHARE = 8
"""Divisor of the smallest share: at least an eighth of a displacement goes out. However irregularly
contributions are merged, what waits does not grow beyond eight times what is trained between two of them."""

MOST_GIVEN_UP = 2
"""Number of copies of the same displacement that are given up, until an inner step changes it."""


class Stride:
    """Share of a learner's displacement that one contribution carries, in one fragment.

    It knows what is usual, which is H inner steps, or more where rounds take longer, and what has become of
    copies since the last inner step. Steps are counted from any beginning.

    `learner.fragments` and the simulator ask for it. A learner that was cut off, or that found no peer to
    merge its work, comes back with a displacement of many sync intervals. Merged at full length it is one
    stride of a single learner, in proportion to its tokens, which outer momentum then amplifies: it costs
    everybody loss for hundreds of steps. In shares of twice the usual length, one in each round, it costs
    hardly any (docs/results.md, `scripts/bench/study/bench_absence.py`).

    Rules: docs/protocol/weights.md, section 7.
    """

    def __init__(self, inner_steps: int, at_step: int = 0) -> None:
        """Begin with H as usual. `inner_steps`: H."""
        self._least = inner_steps
        self._last = self._before = inner_steps
        self._merged_at = self._stands_at = at_step
        """Step at which something was merged last; step after which what follows was counted."""
        self._carried = self._given_up = 0
        """Inner steps of what was merged last; number of copies that were given up since."""

    def rarer(self, inner_steps: int) -> None:
        """Make so many inner steps between two contributions the usual."""
        self._least = inner_steps

    def merged(self, steps: int, at_step: int) -> None:
        """Count a contribution of so many inner steps that was merged."""
        self._before, self._last = self._last, at_step - self._merged_at
        self._merged_at = self._stands_at = at_step
        self._carried, self._given_up = steps, 0

    def given_up(self, at_step: int) -> None:
        """Count a copy that will not be merged as it stands."""
        if at_step != self._stands_at:
            self._stands_at, self._carried, self._given_up = at_step, 0, 0
        self._given_up += 1

    def carried(self, unmerged_steps: int, at_step: int) -> int:
        """Compute how many of a displacement's inner steps go into the next contribution: all of them, as a
        rule. 0: there is nothing to send before the next inner step.

        One long interval is an absence; only two in a row are the pace of the rounds. Shares of as many steps
        of one displacement have the same bytes, and syncers refuse a copy of what was merged last. So without
        an inner step in between it is another number than that one's.
        """
        stands = at_step == self._stands_at
        if stands and self._given_up >= MOST_GIVEN_UP:
            return 0
        usual = max(self._least, min(self._before, self._last))
        steps = min(unmerged_steps, max(PERIODS * usual, -(-unmerged_steps // LEAST_SHARE)))
        return steps - 1 if stands and 0 < steps == self._carried else steps


def _all_plausible(contributors: tuple[Contributor, ...], tokens_per_step: int, period: int) -> bool:
    return all(
        plausible_work(part.tokens, part.inner_steps, tokens_per_step, period) for part in contributors
    )


class _Facts:
    """Answers about a header, which are asked for again and again.

    In a large run a header names thousands of learners, and in the simulator thousands of nodes hold the same
    one. Remembered for the object, never for its value.
    """

    __slots__ = ("_plausible", "_tree", "digest", "header", "longest_steps", "named")

    def __init__(self, header: VersionHeader) -> None:
        self.header = header
        self.named = header.short().named()
        self.digest = hashlib.sha256(self.named).digest()
        self.longest_steps = max((part.inner_steps for part in header.contributors), default=0)
        self._plausible: tuple[tuple[int, int], bool] | None = None
        self._tree: tuple[Plan, Tree | None] | None = None

    def plausible(self, tokens_per_step: int, period: int) -> bool:
        """Tell whether all its contributors' work is plausible; a run has one step and one H."""
        asked = tokens_per_step, period
        if self._plausible is None or self._plausible[0] != asked:
            self._plausible = asked, _all_plausible(self.header.contributors, tokens_per_step, period)
        return self._plausible[1]

    def tree(self, plan: Plan) -> Tree | None:
        """Find out what was merged in each of its partials; a version has one parent, which says how."""
        if self._tree is None or self._tree[0] != plan:
            self._tree = plan, tree_of(plan, self.header.contributors, self.header.partials)
        return self._tree[1]


_remembered: dict[int, _Facts] = {}
"""Facts by the header's identity, which no other object has while the header is kept here."""


def _facts(header: VersionHeader) -> _Facts:
    found = _remembered.get(id(header))
    if found is None:
        while len(_remembered) >= REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)
        found = _remembered[id(header)] = _Facts(header)
    return found
