"""Tensors without numbers: a fragment's state is the history of what was merged into it.

A learner's inner steps are numbered once and for ever, so a pseudo-gradient is the half-open range of steps
that it carries, and "nothing lost, nothing twice" can be checked exactly. `Substance` says what is done with
the bytes beside the lineage, by default nothing. `HashCrypto` and `Clock` stand in for signatures and time.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from p2pdiloco.core.api.events import Measured
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import MergeLimits, Stamp
from p2pdiloco.core.api.versions import Mean

# Substance.

Work = tuple[bytes, int, int, int]
"""A contribution that was merged: its payload, tokens, inner steps, trust weight."""
Resumed = tuple[int, bytes]
"""Work of a fragment that a returning learner takes up again: first unmerged inner step, displacement."""
Mode = Literal["merged", "rebase", "overwrite"]


class Losses(Struct, frozen=True):
    """Quality of the global parameters, in nats."""

    start: float
    """Loss of version 0."""
    end: float
    """Loss of the heaviest heads in the end."""
    floor: float
    """The data's entropy: nothing can be better."""


class MergeContribution(NamedTuple):
    """A contribution to a merge. What its learner is trusted with follows from the mean and its score."""

    matter: bytes
    tokens: int
    inner_steps: int
    mean: Mean
    digest: bytes
    """Digest of its payload."""
    votes: bool = False


class MergeOutcome(Struct, frozen=True):
    """Result of a merge, or of adding up a group's contributions."""

    matter: bytes
    found: tuple[Measured, ...]
    """Findings about each input."""
    cut: tuple[int, ...] = ()
    """Indices of the inputs that were cut: too long."""
    norm: float | None = None
    """Length of an update; None: nobody knows."""


class MergeTree(Struct, frozen=True):
    """Everything that is added up in a merge of groups, as its groups do it."""

    inputs: tuple[Work, ...]
    below: tuple[MergeTree, ...] = ()
    """Trees of its partial merges."""

    def flat(self) -> tuple[Work, ...]:
        """List all contributions."""
        return self.inputs + tuple(work for tree in self.below for work in tree.flat())


class UnusableMatter(Exception):
    """Error: inputs of a merge in which a fault was found."""

    def __init__(self, faults: Mapping[int, Verdict]) -> None:
        """`faults`: by index among the inputs and, after these, the partials."""
        super().__init__(f"{len(faults)} unusable")
        self.faults = faults


class Trainer:
    """The parameters of one node's learner, over all lives of its process. This one has none.

    `LearnerModel` decides when what happens; a trainer computes what has become due meanwhile."""

    def begin(self, step: int, resumed: dict[int, Resumed]) -> None:
        """A process starts after `step` inner steps, from the bases and what is resumed."""

    def end(self) -> None:
        """The process is gone, and its parameters with it."""

    def advance(self, step: int) -> None:
        """Make inner steps until there are `step` of them."""

    def copy_out(self, fragment: int, steps: int) -> bytes:
        """The encoded displacement, which has taken so many inner steps; its slot is in use from here on."""
        return b""

    def committed(self, fragment: int) -> None:
        """The daemon committed a version that contains the slot's copy."""

    def retire(self, fragment: int) -> None:
        """The slot's copy will not be merged as it stands."""

    def install(self, fragment: int, number: int, state: bytes, mode: Mode) -> None:
        """Go over to a version; without a process, only the base moves."""

    def saved(self, fragment: int) -> tuple[bytes, bytes]:
        """The displacement at an orderly end, and the part of it that is not in the slot's copy."""
        return b"", b""


class FalseWork(NamedTuple):
    """Contribution that a liar sends in place of its work."""

    matter: bytes
    work: float
    """Tokens and inner steps of its label, as multiples of the true ones."""


class Substance:
    """Arithmetic of a whole world. Equal arguments give equal bytes.

    The simulator moves *matter*, opaque bytes, wherever a real node would move a payload or a state. A
    substance says what is done with them; `p2pdiloco_lab.vectors` has one that trains a small model with the
    real tensors code. Matter is never changed in place.
    """

    liars: frozenset[str] = frozenset()
    """Learners that lie about their work."""
    waits_s = 0.0
    """Time for which a liar looks at what others send."""

    def told(self, peer: str, fragment: int, matter: bytes) -> FalseWork:
        """Tell what a liar sends in place of this."""
        return FalseWork(matter, 1.0)

    def genesis(self, fragment: int) -> bytes:
        """State of version 0."""
        return b""

    def trainer(self, peer: str, states: list[tuple[int, bytes]]) -> Trainer:
        """A learner of this node; per fragment the number and state of the version that it starts from."""
        return Trainer()

    def combine(self, fragment: int, parts: list[bytes]) -> bytes:
        """Several contributions of one learner as one."""
        return b""

    def first_length(self, fragment: int) -> float | None:
        """Length of version 0; None: what the plan says."""
        return None

    def partial(
        self,
        fragment: int,
        inputs: list[MergeContribution],
        partials: list[bytes],
        limits: MergeLimits,
        seed: bytes,
    ) -> MergeOutcome:
        """A group's contributions, and partial merges from below, added up. Raises: UnusableMatter."""
        return MergeOutcome(b"", _invented_scores(inputs))

    def merge(
        self,
        fragment: int,
        number: int,
        state: bytes,
        inputs: list[MergeContribution],
        partials: list[bytes],
        longest_steps: int,
        limits: MergeLimits,
        seed: bytes,
    ) -> MergeOutcome:
        """The outer update that makes version `number` of `state`; `longest_steps`: of the longest
        contribution in it. Raises: UnusableMatter."""
        return MergeOutcome(b"", _invented_scores(inputs))

    def grouped_error(self, fragment: int, tree: MergeTree) -> float:
        """Distance of a merge of groups from that of all its contributions in one, where nothing is cut.

        As a share of the contributions' mean length.
        """
        return 0.0

    def outer_step(
        self, fragment: int, number: int, state: bytes, update: bytes, longest_steps: int
    ) -> bytes:
        """The state of version `number` after that update, whose longest contribution is so long."""
        return b""

    def losses(self, states: list[bytes]) -> Losses | None:
        """Evaluate these states of all fragments; None where nothing is trained."""
        return None


def _invented_scores(inputs: list[MergeContribution]) -> tuple[Measured, ...]:
    """Make findings up, of those that honest learners have: anything that can be."""
    return tuple(Measured(0.5 + given.digest[0] / 512, 48 + given.digest[1] % 32) for given in inputs)


NOTHING = Substance()


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
    tree: MergeTree = field(default=MergeTree(()), compare=False, repr=False)
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


# Signatures.

LONG_BYTES = 4096
_LAST: list[tuple[bytes, str, bytes, bool] | None] = [None]


class HashCrypto:
    """Implements `core.api.types.Crypto` for one peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer.encode()

    def sign(self, message: bytes) -> bytes:
        """The signature of this peer."""
        return hashlib.blake2b(message, digest_size=16, key=self._peer).digest()

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Check that `peer` signed `message`. Thousands of nodes look at the same long one."""
        if len(message) < LONG_BYTES:
            return self._right(peer, message, signature)
        known = _LAST[0]
        if known is None or known[0] is not message or known[1:3] != (peer, signature):
            known = _LAST[0] = (message, peer, signature, self._right(peer, message, signature))
        return known[3]

    def _right(self, peer: str, message: bytes, signature: bytes) -> bool:
        return hashlib.blake2b(message, digest_size=16, key=peer.encode()).digest() == signature


# Virtual time.

Action = Callable[..., None]


class Clock:
    """A discrete-event clock. Callbacks due at one instant run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fired = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` at virtual time `time_s` (not before now)."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._sequence, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` in `delay_s` virtual seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + max(delay_s, 0.0), self._sequence, action, args))

    def run_until(self, end_s: float) -> None:
        """Run everything that is due before `end_s`, then stand at `end_s`."""
        heap = self._heap
        while heap and heap[0][0] < end_s:
            self.now, _, action, args = heapq.heappop(heap)
            self.fired += 1
            action(*args)
        self.now = end_s
