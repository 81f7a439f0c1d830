"""Versions of a fragment: their headers, long and short, and what follows from them."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from p2pdiloco.core.api import merkle
from p2pdiloco.core.api.partials import MAX_PARTIALS, MergedPartial, Plan, Tree, tree_of
from p2pdiloco.core.api.plausible import plausible_work
from p2pdiloco.core.api.types import (
    EMPTY_TABLE,
    MAX_CONTRIBUTORS,
    NO_LIMITS,
    Contributor,
    Count,
    Digest,
    GroupId,
    Head,
    MergeLimits,
    PeerId,
    RunId,
    Signature,
    Wire,
)


class HeaderStart(Wire, frozen=True):
    """First fields of a version's header, long and short: what it is, and of whom."""

    run: RunId
    group: GroupId
    fragment: Count
    number: Count
    parent: Digest
    """Digest of the parent's header; for version 0, the digest of the run id."""
    term: Count
    syncer: PeerId
    """Member that made the version; for version 0, the run id."""
    tokens: Count
    state_digest: Digest
    """Digest of (number, Theta, outer momentum) after the outer step; see `tensors.digest`."""
    update_digest: Digest
    update_bytes: Count
    codec: Annotated[str, Meta(max_length=16)]


class ShortHeader(HeaderStart, frozen=True):
    """Version header with the Merkle roots of contributors and partials in their place: it names the version,
    and is what its syncer signs. So a lie about one of thousands of contributors is shown in a few hundred
    bytes (docs/protocol/proofs.md, section 1)."""

    contributors: Digest
    """Merkle root over the encoded contributors, in their order (`core.api.merkle`)."""
    epoch: Count
    groups: Annotated[int, Meta(ge=1, le=MAX_CONTRIBUTORS)]
    table: Digest
    unit: Count
    norm: float
    reach: float
    limits: MergeLimits
    partials: Digest
    """Merkle root over the encoded partials, in their order."""
    repairs: Digest | None = None

    def digest(self) -> bytes:
        """Compute SHA-256 of the canonical encoding: the digest of the version."""
        return hashlib.sha256(self.named()).digest()


class VersionHeader(HeaderStart, frozen=True):
    """Description of a version: parent, what was merged, and the digests of update and resulting state."""

    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_CONTRIBUTORS)]
    epoch: Count = 0
    """Epoch of the grouping under which the *next* version is made; grows by one when the groups rotate."""
    groups: Annotated[int, Meta(ge=1, le=MAX_CONTRIBUTORS)] = 1
    """Number of groups into which the members fall for the next version; 1: all are in one
    (`core.api.grouping`)."""
    table: Digest = EMPTY_TABLE
    """Digest of the table of watermarks after this version (`table_digest`): nobody can forge it beside a
    state."""
    unit: Count = 0
    """Tokens of a usual contribution (`core.chain.scale`); 0: H inner steps'."""
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

    def short(self) -> ShortHeader:
        """Make what stands for it wherever it is named or signed: contributors by their one digest."""
        fields: dict[str, Any] = asdict(self)
        fields["contributors"] = merkle.root([part.named() for part in self.contributors])
        fields["partials"] = merkle.root([entry.named() for entry in self.partials])
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


_REMEMBERED_HEADERS = 64


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
            self._plausible = asked, _all_plausible(self.header.contributors, *asked)
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
        while len(_remembered) >= _REMEMBERED_HEADERS:
            _remembered.pop(next(iter(_remembered)), None)
        found = _remembered[id(header)] = _Facts(header)
    return found
