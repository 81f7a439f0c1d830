"""Making of outer updates from contributions: by their syncer, and again by whoever audits it.

Whoever has the contributions of a version makes the same bytes, with the weights and limits that its header
states and in its order (`UpdateMaker`). Only a syncer that sends on what its earlier updates left out
(`Residual`, sparse codecs) has something that nobody else has. `OwnContributions` encodes this node's
contributions, `outer_step` applies an update to a `FragmentState`, and `merges_as_everywhere` compares this
machine's arithmetic with a known answer.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NO_LIMITS, MergeLimits
from p2pdiloco.errors import invariant
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import (
    CODECS,
    Buffer,
    Codec,
    Unsound,
    add_scaled,
    bytes_of,
    norm,
    scale,
    scratch,
    state_digest,
)
from p2pdiloco.tensors.layout import FragmentLayout, Layouts, Piece
from p2pdiloco.tensors.merge import (
    MAX_MAGNITUDE,
    Accumulator,
    Findings,
    Given,
    Payload,
    Sample,
    add_up,
    check_magnitude,
    cosine,
    decode_contribution,
    encode_partial,
    partial_bytes,
)
from p2pdiloco.util import Action, Frozen

_ENCODED = 0.9
"""Share of the longest update to which one is cut: int4 may lengthen it by some hundredths, and everybody
would refuse it."""


def longest_encoded(limits: MergeLimits) -> float:
    """Compute the length to which an update is cut before it is encoded, where it may be too long."""
    return _ENCODED * limits.longest_update


class Remade(Frozen):
    """Result of a merge that was made again."""

    update: bytearray
    """Update, or the sums of a partial merge."""
    update_digest: bytes
    found: Findings


class Correction(NamedTuple):
    """Two updates of an earlier version, encoded: what it should have been, and what it was."""

    true: Buffer
    false: Buffer
    digests: tuple[bytes, bytes]
    """Digests that they had when they came."""

    def is_whole(self) -> bool:
        """Tell whether they are still what came."""
        return self.digests == (content_digest(self.true), content_digest(self.false))


@dataclass
class UpdateMaker:
    """Maker of outer updates, in memory that it shares with the vault: from the same thread.

    Args:
        delta, decoded, sums: scratch memory of the largest fragment's size, in use only within a call.
    """

    _layouts: Layouts
    _period: int
    _contribution: Codec
    _update: Codec
    _delta: Tensor
    _decoded: Tensor
    _sums: Tensor
    _open_share: float = 1.0

    @property
    def codec_name(self) -> str:
        """Name of the codec of contributions."""
        return self._contribution.name

    @property
    def repeatable(self) -> bool:
        """True: whoever has its contributions can make an update again."""
        return not self._update.sparse

    def contribution_bytes(self, fragment: int) -> int:
        """Size of every contribution to a fragment."""
        return self._contribution.encoded_bytes(self._layouts[fragment].numel)

    def partial_bytes(self, fragment: int) -> int:
        """Size of every partial merge of a fragment."""
        return partial_bytes(self._layouts[fragment])

    def add_up(
        self,
        fragment: int,
        inputs: Sequence[Given],
        partials: Sequence[Payload],
        limits: MergeLimits,
        seed: bytes,
    ) -> tuple[Accumulator, Findings]:
        """Add contributions up, then partials, in the given order. Raises: as `tensors.merge.add_up`."""
        layout = self._layouts[fragment]
        accumulator = Accumulator(layout, self._period, self._sums, limits, self._open_share)
        scratch = self._delta[: layout.numel]
        return accumulator, add_up(accumulator, self._contribution, inputs, partials, scratch, seed)

    def encode(
        self,
        accumulator: Accumulator,
        longest: float | None,
        left_out: Residual | None,
        correction: Correction | None = None,
    ) -> tuple[bytearray, Tensor]:
        """Encode the merge of what was added up: (update, what was encoded, valid until the next call).

        `longest`: length to which it is cut; None: it is not. `left_out`: what our earlier updates left out,
        which goes into this one. `correction`: what this update makes good.
        """
        delta = self._delta[: accumulator.layout.numel]
        accumulator.result(delta)
        if left_out is not None:
            left_out.add_to(delta)
        if correction is not None:
            self._correct(delta, correction)
        if longest is not None:
            shorten(delta, longest)
        delta.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)  # RDA may exceed its largest input; nobody takes that
        return self._update.encode(delta), delta

    def _correct(self, delta: Tensor, correction: Correction) -> None:
        """In this order, each sum rounded."""
        room, work = self._decoded[: len(delta)], scratch(len(delta))
        for update, sign in ((correction.true, 1.0), (correction.false, -1.0)):
            self._update.decode(update, room)
            add_scaled(delta, room, sign, work)

    def remake(
        self,
        fragment: int,
        inputs: Sequence[Given],
        limits: MergeLimits = NO_LIMITS,
        seed: bytes = b"",
        correction: Correction | None = None,
        partials: Sequence[Payload] = (),
    ) -> Remade:
        """Make the update of these contributions, and then partial merges, at least one, in this order.
        Neither state nor spare is touched. Of a run whose updates have a dense codec. `seed`: draws the
        sample on which contributions are compared.

        Raises:
            UnusableInputs, StorageError: as `Vault.merge`.
        """
        invariant(self.repeatable, "what a sparse update has of earlier ones only its syncer knows")
        accumulator, found = self.add_up(fragment, inputs, partials, limits, seed)
        longest = longest_encoded(limits) if partials or correction is not None else None
        update, _ = self.encode(accumulator, longest, None, correction)
        return Remade(update, content_digest(update), found)

    def remake_partial(
        self,
        fragment: int,
        inputs: Sequence[Given],
        limits: MergeLimits = NO_LIMITS,
        seed: bytes = b"",
        partials: Sequence[Payload] = (),
    ) -> Remade:
        """Make the sums of these, as `remake` takes them. Raises: likewise."""
        accumulator, found = self.add_up(fragment, inputs, partials, limits, seed)
        sums = encode_partial(accumulator)
        return Remade(sums, content_digest(sums), found)

    def cosine(self, fragment: int, own: Payload, update: Payload, seed: bytes) -> float | None:
        """Compare a contribution with an update on a sample that `seed` draws. None: one of them is zero
        there.

        Raises:
            Unsound, StorageError: one of them cannot be read.
        """
        sample = Sample(self._layouts[fragment].numel, seed)
        ours = sample.of(self._decode(fragment, self._contribution, own))
        return cosine(ours, sample.of(self._decode(fragment, self._update, update)))

    def _decode(self, fragment: int, codec: Codec, payload: Payload) -> Tensor:
        decoded = self._decoded[: self._layouts[fragment].numel]
        decode_contribution(codec, payload, decoded)
        return decoded


# --- known answer: a small merge whose bits every machine must make ----------------------------------
#
# An audit costs somebody its place, so a machine that makes them first shows that its own arithmetic is
# everybody's: there are processors and builds of torch that this project has never seen, and broken ones.
#
# A change of the answer is a change of what merges are: then WIRE_VERSION is raised, as nodes of both kinds
# would accuse each other.


class Encoded(Frozen):
    """A pseudo-gradient as it goes over the wire."""

    payload: bytearray
    digest: bytes
    length: float = 0.0
    """Length (L2); 0: not known."""


class Residual:
    """Error feedback of one fragment: the part that encodings left out, committed, and pending for the one in
    flight.

    A contribution may be lost for good, so its residual counts only once it is known to be merged.
    Memory: two fp32 fragments.
    """

    def __init__(self, numel: int) -> None:
        self._committed = torch.zeros(numel)
        self._next = torch.zeros(numel)
        self.pending = False

    def add_to(self, delta: Tensor) -> None:
        """Add what was left out to the pseudo-gradient that is about to be encoded, fp32 [numel]."""
        delta.add_(self._committed)

    def pend(self, delta: Tensor, decoded: Tensor) -> None:
        """Remember delta - decoded, both fp32 [numel], for when that contribution is merged."""
        torch.sub(delta, decoded, out=self._next)
        self.pending = True

    def commit(self) -> None:
        """Take over what the pending contribution left out: it was merged."""
        invariant(self.pending, "no encoded contribution is pending")
        self._committed, self._next = self._next, self._committed
        self.pending = False

    def discard(self) -> None:
        """Forget what the pending contribution left out: it will never be merged. Without a pending one
        nothing happens."""
        self.pending = False


@dataclass
class OwnContributions:
    """Encoder of one node's contributions: with error feedback, and added up after a fork. 8 bytes per
    parameter where its codec asks for error feedback: what a lossy encoding leaves out of one contribution
    goes into the next one.

    Args:
        delta, decoded: scratch memory of the largest fragment's size, in use only within a call.
    """

    _layouts: Layouts
    _codec: Codec
    _delta: Tensor
    _decoded: Tensor

    def __post_init__(self) -> None:
        self._residuals = [
            Residual(layout.numel) if self._codec.feedback else None for layout in self._layouts
        ]

    def encode(self, fragment: int, base: Tensor, local: Tensor) -> Encoded:
        """Encode base - local (both fp32 [numel]) plus what earlier encodings have left out.

        What this one leaves out stays pending until `commit_residual` or `discard_residual`; encoding the
        fragment again replaces what is pending.

        Raises:
            ValueError: base or local is not finite (the learner diverged).
        """
        numel = self._layouts[fragment].numel
        invariant(base.shape == local.shape == (numel,), "a contribution has its fragment's size")
        delta, residual = self._delta[:numel], self._residuals[fragment]
        torch.sub(base, local, out=delta)
        if residual is not None:
            residual.add_to(delta)
        payload = self._codec.encode(delta)
        if residual is not None:
            decoded = self._decoded[:numel]
            self._codec.decode(payload, decoded)
            residual.pend(delta, decoded)
        return Encoded(payload, content_digest(payload), norm(delta))

    def combine(self, fragment: int, sources: Sequence[Callable[[], Buffer]]) -> Encoded:
        """Encode the sum of several contributions of ours as one; of a single one, keep its own bytes.

        What this encoding leaves out is lost. It would belong into the error feedback only once the sum is
        merged, and a further fork may make another sum of it. Memory: one payload at a time.

        Raises:
            RemoteError: as `Vault.check_payload`. Errors of reading a source pass through.
        """
        numel = self._layouts[fragment].numel
        if len(sources) == 1:
            payload = bytearray(sources[0]())
            check_magnitude(self._codec, payload, numel)
            return Encoded(payload, content_digest(payload))
        total, part = self._delta[:numel].zero_(), self._decoded[:numel]
        for source in sources:
            content = source()
            check_magnitude(self._codec, content, numel)
            self._codec.decode(content, part)
            total.add_(part)
        total.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
        payload = self._codec.encode(total)
        return Encoded(payload, content_digest(payload))

    def commit_residual(self, fragment: int) -> None:
        """Take what the last encoded contribution left out into the next one: it was merged."""
        residual = self._residuals[fragment]
        if residual is not None:
            residual.commit()

    def discard_residual(self, fragment: int) -> None:
        """Forget what the last encoded contribution left out, as it will never be merged. What was left out
        before it stays."""
        residual = self._residuals[fragment]
        if residual is not None:
            residual.discard()


EMPTY = -1
"""Version number of a state that holds none."""
MOST_LENGTHS = 1024
"""Limit of a state's length (L2), as a multiple of version 0's. What is far beyond it is no state of a run,
not even an honest one's: a node that finds such a state on its disk, or is given one, is better off with
another."""
SMALL_PARAMETERS = 1 / 32
"""Least mean size that version 0's parameters are taken for: adapters begin with zeros."""
STATED_TOLERANCE = 0.01
"""Relative error allowed of a stated length: nodes of other releases sum in another order."""


class Pin(Frozen):
    """A committed version that is being read, for example by a transfer: not overwritten until released."""

    number: int
    state_digest: bytes
    buffers: list[memoryview]
    """Theta, then momentum: fp32 little-endian bytes."""
    release: Action
    """Function that ends the reading; idempotent, from any thread."""


class Loan(Frozen):
    """Right to write a state that comes from peers into the spare (`Vault.lend_spare`)."""

    buffers: tuple[memoryview, memoryview]
    """Theta, then momentum: to be filled with fp32 little-endian bytes."""
    state: FragmentState
    uses: int

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes of the state at this offset; Theta comes first."""
        first, second = self.buffers
        here = data[: max(0, first.nbytes - offset)]
        first[offset : offset + here.nbytes] = here
        there = data[here.nbytes :]
        if there.nbytes:
            at = offset + here.nbytes - first.nbytes
            second[at : at + there.nbytes] = there


class FragmentState:
    """Theta and momentum of one fragment in one version; 8 bytes per parameter."""

    def __init__(self, numel: int) -> None:
        self.theta = torch.zeros(numel)
        self.momentum = torch.zeros(numel)
        self.number = EMPTY
        self.digest = b""
        self.pins = 0
        self.uses = 0
        """Number of times that something began to be made in this state."""

    def begin(self) -> None:
        """Begin to make something else in it."""
        self.empty()
        self.uses += 1

    def empty(self) -> None:
        """Declare that it holds no version."""
        self.number = EMPTY

    def pin(self) -> None:
        """Count a reader more: what it holds stays."""
        self.pins += 1

    def unpin(self) -> None:
        """Count a reader less."""
        self.pins -= 1

    def seal(self, number: int) -> bytes:
        """Declare that the state holds this version; returns its state digest."""
        self.number, self.digest = number, state_digest(number, self.theta, self.momentum)
        return self.digest

    def is_whole(self) -> bool:
        """Tell whether what it holds still has its digest."""
        return state_digest(self.number, self.theta, self.momentum) == self.digest

    def buffers(self) -> list[memoryview]:
        """Theta, then momentum: shared, read-only bytes."""
        return [bytes_of(self.theta).toreadonly(), bytes_of(self.momentum).toreadonly()]


def first_length(theta: Tensor) -> float:
    """Length of version 0, rounded up to a power of two. It is in the header of version 0, which must be the
    same on all machines."""
    return float(2.0 ** math.ceil(math.log2(max(norm(theta), SMALL_PARAMETERS * math.sqrt(len(theta))))))


def shorten(update: Tensor, limit: float) -> None:
    """Cut an update to this length, in place."""
    length = norm(update)
    if length > limit:
        scale(update, limit / length, out=update)


def check_stated(update: Tensor, stated: float | None) -> None:
    """Compare an update's length with what its syncer says; None: it says nothing.

    Raises:
        Unsound: "out-of-range".
    """
    if stated is not None and not math.isclose(norm(update), stated, rel_tol=STATED_TOLERANCE):
        raise Unsound(Verdict.OUT_OF_RANGE, f"length {norm(update):.3g}, stated {stated:.3g}")


def check_length(values: Tensor, first: float) -> None:
    """Judge parameters or momentum by the length of version 0 (`first_length`).

    Raises:
        Unsound: "out-of-range".
    """
    length, limit = norm(values), MOST_LENGTHS * first
    if length > limit:
        raise Unsound(Verdict.OUT_OF_RANGE, f"a state of length {length:.3g}, at most {limit:.3g}")


_TILE = 1 << 16
"""Elements per pass: so many that starting an operation costs little, so few that the next one finds what it
wrote in a cache."""


def momentum_at(number: int, momentum: float, warmup_merges: int) -> float:
    """Outer momentum of the merge that makes version `number` (from 1).

    Grows linearly from 0 (version 1) to `momentum` (version warmup_merges + 1): full Nesterov on a fragment's
    first few pseudo-gradients overshoots (Pier, 2511.17849).
    """
    invariant(number >= 1, "version 0 is not made by a merge")
    if number > warmup_merges:
        return momentum
    return momentum * ((number - 1) / warmup_merges)


@torch.no_grad()
def without_lookahead(
    theta: Tensor, momentum_buffer: Tensor, learning_rate: float, momentum: float
) -> Tensor:
    """Parameters without Nesterov's look-ahead, x = theta + eta mu m: fp32 [numel] in new memory, equal bits
    everywhere.

    x is the theta before minus eta times the last delta. Nesterov's theta is ahead of it by a step of
    momentum (-eta mu m), so that the next pseudo-gradients are measured where momentum leads; they correct
    what it overshoots, and for whoever takes the parameters away there are none. `momentum`: of the merge
    that made this theta. (Sutskever et al. 2013, section 2: their theta is our x, and their gradient is
    taken at our theta.)
    """
    return torch.mul(momentum_buffer, momentum).mul_(learning_rate).add_(theta)


@torch.no_grad()
def outer_step(
    theta: Tensor,
    momentum_buffer: Tensor,
    delta: Tensor,
    learning_rate: float,
    momentum: float,
    out_theta: Tensor,
    out_momentum: Tensor,
    share: float = 1.0,
) -> None:
    """Make the outer step of Decoupled DiLoCo: SGD with Nesterov momentum, with delta = base - local.

        m' = mu m + delta;   theta' = theta - eta (delta + mu m')

    `share` f < 1: delta is of that part of an interval only (somebody leaves, or all have just begun). So
    momentum does that part of its work, with this version's mu throughout, also while it warms up:

        m' = (1 - f (1 - mu)) m + delta;   theta' = theta - eta (delta + mu m' - (1 - f) mu m)

    With f = 0 and no delta nothing changes. A whole step of momentum would lead everybody away from where the
    learners are, and so short a delta does not bring them back.

    All tensors fp32 [numel]; outputs do not overlap inputs. eta, mu and what is made of mu and f are rounded
    to fp32 before use. Each multiplication and each addition is a torch operation of its own that writes fp32
    to memory, so none can be fused and each is rounded by IEEE 754, whatever the processor: the bits are the
    same on every machine.
    """
    numel = theta.numel()
    shapes = {t.shape for t in (theta, momentum_buffer, delta, out_theta, out_momentum)}
    invariant(shapes == {(numel,)}, "the outer step needs flat buffers of one size")
    scratch = torch.empty(min(numel, _TILE), dtype=torch.float32)
    decay = momentum if share == 1 else 1 - share * (1 - momentum)
    for start in range(0, numel, _TILE):
        tile = slice(start, min(start + _TILE, numel))
        change, work = delta[tile], scratch[: tile.stop - start]
        velocity = torch.mul(momentum_buffer[tile], decay, out=out_momentum[tile])
        velocity.add_(change)
        torch.mul(velocity, momentum, out=work)
        work.add_(change)
        if share < 1:
            work.sub_(torch.mul(momentum_buffer[tile], (1 - share) * momentum))
        work.mul_(learning_rate)
        torch.sub(theta[tile], work, out=out_theta[tile])


MERGE_ANSWER = "2df16ae439c1df563476cbc4becd817f8635b2c810c7fcbe865ecf8045d6dae3"


STEP_ANSWER = "b0cb1078596dc9a1fd842f0365298b3cada3f7fac5fa74ec4743b7e5381907db"


_SIZES = (4_099, 513, 600)
"""Elements of the pieces, the last one an embedding: several widths of squares with a rest, and few."""


_FAINT = 64
"""Elements of which momentum is next to nothing."""


_FAINT_BLOCK = 1_024
"""Elements that lie below fp32's normal numbers in contributions, some whole blocks of every codec."""


_LIMITS = MergeLimits(most_tokens=300, longest=8.0, of_median=3.0)


def _layout() -> FragmentLayout:
    pieces, offset = [], 0
    for number, numel in enumerate(_SIZES):
        pieces.append(Piece(f"piece {number}", 0, offset, numel, number == len(_SIZES) - 1))
        offset += numel
    return FragmentLayout(0, offset, tuple(pieces))


def _delta(numel: int, learner: int) -> Tensor:
    """Numbers that fp32 holds exactly, by arithmetic of whole numbers alone."""
    places = torch.arange(numel, dtype=torch.int64)
    drawn = (places * (2_654_435_761 + 2 * learner) + learner) % 65_521
    return (drawn - 32_760).float() * (0.5**18 * (learner + 1))


def _contribution(codec: Codec, numel: int, learner: int, faint: int) -> bytearray:
    """Encode a contribution whose first elements are below fp32's normal numbers, which some machines make
    zero. An encoder sends zeros for most of these, but a learner may send them all the same: the bits of its
    elements, or of its scales, are written as they are."""
    payload, width = codec.encode(_delta(numel, learner)), codec.sections[0]
    for block in range(-(-faint // codec.block)):
        bits = 1 + (5 * block + learner) % 8 if width == 2 else 4_001 + 37 * (block + learner)
        payload[width * block : width * (block + 1)] = bits.to_bytes(width, "little")
    return payload


def merge_answer() -> str:
    """Make the merges, with every dense codec, and compute one digest of them.

    The fourth contribution has nothing but faint elements, so it has a length and no direction. What an
    update's codec cuts off is in a partial merge, whose sums are fp32.
    """
    layout, made = _layout(), hashlib.sha256()
    for name, codec in sorted(CODECS.items()):
        if codec.sparse:
            continue
        delta, decoded, sums = (torch.empty(layout.numel) for _ in range(3))
        maker = UpdateMaker((layout,), 24, codec, codec, delta, decoded, sums)
        faint = (_FAINT_BLOCK, _FAINT_BLOCK, _FAINT_BLOCK, layout.numel)
        inputs = [
            (
                _contribution(codec, layout.numel, n, faint[n]),
                100 * (n + 1),
                20 + 3 * n,
                64 - 20 * n,
                None,
                True,
            )
            for n in range(4)
        ]
        partial = maker.remake_partial(0, inputs, _LIMITS, b"known")
        for merge in (maker.remake(0, inputs, _LIMITS, b"known", partials=[partial.update]), partial):
            figures = merge.found.cut, merge.found.lengths, merge.found.scores
            made.update(f"{name} {merge.update_digest.hex()} {figures}".encode())
    return made.hexdigest()


def step_answer() -> str:
    """Make outer steps, a whole one and a shorter one, and compute the digest of the state after them."""
    layout = _layout()
    theta, momentum, out_theta, out_momentum = (_delta(layout.numel, n) for n in range(4))
    delta = _delta(layout.numel, 5)
    # The momentum of what is trained no more falls below fp32's normal numbers, which some machines cut off.
    momentum[:_FAINT] *= 0.5**130
    delta[:_FAINT] = 0.0
    for share in (1.0, 0.625):
        outer_step(theta, momentum, delta, 0.7, 0.9, out_theta, out_momentum, share)
        theta, momentum, out_theta, out_momentum = out_theta, out_momentum, theta, momentum
    return state_digest(2, theta, momentum).hex()


@cache
def steps_as_everywhere() -> bool:
    """Tell whether this machine makes the outer steps that others make. Looked at once in a process."""
    return step_answer() == STEP_ANSWER and merges_as_everywhere()


@cache
def merges_as_everywhere() -> bool:
    """Tell whether this machine makes the known answer. Looked at once in a process."""
    return merge_answer() == MERGE_ANSWER
