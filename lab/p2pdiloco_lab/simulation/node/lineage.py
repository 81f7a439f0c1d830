"""Tensors without numbers: a fragment's state is the history of what was merged into it.

A learner's inner steps are numbered once and for ever, so a pseudo-gradient is the half-open range of
steps that it carries, and "nothing lost, nothing twice" can be checked exactly.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from p2pdiloco.core.api.types import Stamp
from p2pdiloco_lab.simulation.node.substance import NOTHING, Substance, Tree

Spans = tuple[tuple[int, int], ...]
"""Disjoint, sorted, non-adjacent half-open ranges of inner steps."""


@dataclass(frozen=True, slots=True)
class Displacement:
    """A learner's pseudo-gradient of one fragment: the inner steps [first, end)."""

    fragment: int
    learner: str
    first: int
    end: int
    base: bytes
    """Header digest of the version that the learner's parameters were measured against."""
    pieces: Spans = ()
    """Parts of [first, end) that a sum of several displacements carries; empty: all of it."""
    matter: bytes = field(default=b"", compare=False, repr=False)
    """The encoded pseudo-gradient, where numbers are simulated too."""

    @property
    def spans(self) -> Spans:
        """The ranges of inner steps that it carries."""
        return self.pieces or ((self.first, self.end),)

    @property
    def steps(self) -> int:
        """Number of inner steps that the displacement carries."""
        return sum(end - first for first, end in self.spans)

    def digest(self) -> bytes:
        """Stands for the payload digest. Where there are bytes it is theirs alone: copies have the same."""
        text = repr((self.fragment, self.learner, self.spans))
        return hashlib.sha256(self.matter or text.encode()).digest()


def combine(parts: list[Displacement]) -> Displacement:
    """The sum of several displacements of one learner. Raises: ValueError when they overlap."""
    spans: Spans = ()
    for part in parts:
        for first, end in part.spans:
            if any(a < end and first < b for a, b in spans):
                raise ValueError(f"steps {first}..{end} of {part.learner} are combined twice")
            spans = add_span(spans, first, end)
    some = parts[-1]
    return Displacement(some.fragment, some.learner, spans[0][0], spans[-1][1], some.base, spans)


@dataclass(frozen=True, slots=True)
class MergedPart:
    """Inner steps that one contribution brought into a version."""

    learner: str
    stamp: Stamp
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class PartialSum:
    """A group's contributions, added up: the union of what they carry."""

    fragment: int
    parts: tuple[MergedPart, ...]
    matter: bytes = field(default=b"", repr=False)
    """The sums, encoded."""
    tree: Tree = field(default=Tree(()), compare=False, repr=False)
    """Every contribution in `matter`, so that it can be checked what the root makes of it."""
    false: bool = False
    """True: it is not the sum of its parts, though it says so."""
    below: tuple[PartialSum, ...] = field(default=(), compare=False, repr=False)

    def digest(self) -> bytes:
        """Stands for the payload digest."""
        text = repr((self.fragment, [(p.learner, p.stamp, p.first, p.end) for p in self.parts]))
        text += "false" * self.false
        return hashlib.sha256(text.encode() + self.matter).digest()


@dataclass(frozen=True, slots=True)
class OuterUpdate:
    """The merged and encoded pseudo-gradient that every peer applies."""

    fragment: int
    number: int
    parts: tuple[MergedPart, ...]
    digest: bytes
    matter: bytes = field(default=b"", repr=False)
    """The merged pseudo-gradient, encoded."""
    longest_steps: int = 0
    """Inner steps of the longest contribution, as its syncer told them to the outer step."""
    false: bool = False
    """True: it is not the merge of its parts, though it says so."""
    repairs: bytes = b""
    """Digest of the false version that it takes back."""
    false_partials: dict[bytes, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)
    """Digest of each false partial merge in it -> the learners whose contributions were to be in that."""

    def has_truly(self, learner: str) -> bool:
        """Tell whether nobody lied about what that learner contributed."""
        return not self.false and not any(learner in harmed for harmed in self.false_partials.values())

    @staticmethod
    def of(
        fragment: int,
        number: int,
        parts: tuple[MergedPart, ...],
        matter: bytes = b"",
        longest_steps: int = 0,
        false: bool = False,
        repairs: bytes = b"",
        partials: tuple[PartialSum, ...] = (),
    ) -> OuterUpdate:
        """Encode a merge."""
        text = repr((fragment, number, [(p.learner, p.stamp, p.first, p.end) for p in parts]))
        text += "false" * false + repairs.hex()
        digest = hashlib.sha256(text.encode() + matter).digest()
        harmed: dict[bytes, frozenset[str]] = {}
        rest = [*partials]
        while rest:
            partial = rest.pop()
            rest += partial.below
            if partial.false:
                harmed[partial.digest()] = frozenset(part.learner for part in partial.parts)
        return OuterUpdate(fragment, number, parts, digest, matter, longest_steps, false, repairs, harmed)


@dataclass(frozen=True, slots=True)
class FragmentLineage:
    """Theta and outer momentum of a fragment, as the history that made them."""

    fragment: int
    number: int
    digest: bytes
    covered: dict[str, Spans] = field(default_factory=dict)
    """learner -> inner steps in this state. Never changed after construction."""
    following: dict[bytes, FragmentLineage] = field(default_factory=dict, compare=False, repr=False)
    """Update digest -> the state that it leads to: worked out once for all nodes that hold this one."""
    repeated: tuple[MergedPart, ...] = ()
    """Parts of the newest update whose steps were in the parent already: always a bug."""
    matter: bytes = field(default=b"", compare=False, repr=False)
    """Theta and momentum themselves, where numbers are simulated too; then in `digest` as well."""

    def apply(self, update: OuterUpdate, substance: Substance = NOTHING) -> FragmentLineage:
        """The outer step: a new state, whose digest depends on the whole history, and on its bytes. Those
        every node computes for itself."""
        found = self.following.get(update.digest)
        if found is None:
            found = self.following[update.digest] = self._apply(update)
        matter = substance.outer_step(
            self.fragment, found.number, self.matter, update.matter, update.longest_steps
        )
        if not matter:
            return found
        digest = hashlib.sha256(found.digest + matter).digest()
        return replace(found, digest=digest, matter=matter, following={})

    def miscomputed(self) -> FragmentLineage:
        """Return this state with one bit wrong."""
        spoiled = self.matter[:-1] + bytes([self.matter[-1] ^ 1]) if self.matter else b""
        return replace(self, digest=hashlib.sha256(self.digest).digest(), matter=spoiled, following={})

    def _apply(self, update: OuterUpdate) -> FragmentLineage:
        covered = dict(self.covered)
        repeated = []
        for part in update.parts:
            spans = covered.get(part.learner, ())
            if any(first < part.end and part.first < end for first, end in spans):
                repeated.append(part)
            covered[part.learner] = add_span(spans, part.first, part.end)
        number = self.number + 1
        digest = hashlib.sha256(b"%d/" % number + self.digest + update.digest).digest()
        return FragmentLineage(self.fragment, number, digest, covered, repeated=tuple(repeated))


def genesis_state(fragment: int) -> FragmentLineage:
    """Version 0: nothing merged."""
    return FragmentLineage(fragment, 0, hashlib.sha256(b"genesis/%d" % fragment).digest())


def add_span(spans: Spans, first: int, end: int) -> Spans:
    """The union of `spans` and [first, end)."""
    if first >= end:
        return spans
    if spans and spans[-1][1] == first:  # as nearly always
        return (*spans[:-1], (spans[-1][0], end))
    kept = [span for span in spans if span[1] < first or span[0] > end]
    touching = [span for span in spans if not (span[1] < first or span[0] > end)]
    joined = (min([first, *(a for a, _ in touching)]), max([end, *(b for _, b in touching)]))
    return tuple(sorted([*kept, joined]))


def missing_spans(spans: Spans, first: int, end: int) -> Spans:
    """The parts of [first, end) that are not in `spans`."""
    gaps, at = [], first
    for a, b in spans:
        if a >= end:
            break
        if a > at:
            gaps.append((at, a))
        at = max(at, b)
    if at < end:
        gaps.append((at, end))
    return tuple(gaps)
