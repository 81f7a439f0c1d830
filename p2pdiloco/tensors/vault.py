"""Owner of Theta and outer momentum: the committed state, and a spare for the next version.

A version is first made in the spare (`merge`, `apply`, `load_spare`), its digest told, and only after the
core has decided and persisted does `commit` swap it in. Methods are synchronous and called from one worker
thread; only `Pin.release` may come from another. Steady state allocates payloads and tiles of at most 2 MiB
(`result`, for whoever takes the parameters away, a fragment).

Behind it: the file of what a learner process appraises (`Appraisable`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2pdiloco.config.manifest import Manifest, OuterSection
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NO_LIMITS, MergeLimits
from p2pdiloco.errors import StorageError, invariant
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import Buffer, Unsound, bytes_of, codec, norm
from p2pdiloco.tensors.layout import Layouts, TensorMap, gather
from p2pdiloco.tensors.merge import (
    Findings,
    Given,
    Payload,
    Work,
    check_magnitude,
    check_partial,
    encode_partial,
    parts_of,
)
from p2pdiloco.tensors.outer_update import (
    EMPTY,
    Correction,
    FragmentState,
    Loan,
    OwnContributions,
    Pin,
    Residual,
    UpdateMaker,
    check_length,
    check_stated,
    first_length,
    longest_encoded,
    momentum_at,
    outer_step,
    without_lookahead,
)
from p2pdiloco.util import Frozen

_MAX_STATE = 2.0**100


class PartialMerge(Frozen):
    """Sums of a group's contributions, encoded."""

    payload: bytearray
    digest: bytes
    found: Findings


class MergeResult(Frozen):
    """An outer update, and the state that everyone who applies it reaches."""

    update: bytearray
    update_digest: bytes
    state_digest: bytes
    norm: float
    """Length (L2) of the update, as everybody decodes it."""
    found: Findings


class Vault:
    """Global parameters of all fragments. Host memory: 16 bytes per parameter, and 8 where contributions have
    error feedback; 8 more of what we merge ourselves where updates are sparse."""

    def __init__(
        self,
        layouts: Layouts,
        outer: OuterSection,
        period: int,
        contribution_codec: str,
        update_codec: str,
        keep_in_flight: float = 1.0,
        open_share: float = 1.0,
    ) -> None:
        """Make a vault without a version. `period` is H, `keep_in_flight` is rho. `open_share`: of a merge,
        that all contributions without a seat have at most."""
        self.layouts = tuple(
            layout.in_plain_mean() if outer.merge == "mean" else layout for layout in layouts
        )
        self._outer, self._period, self._rho = outer, period, keep_in_flight
        self._open_share = open_share
        self._contribution, self._update = codec(contribution_codec), codec(update_codec)
        self._states = [FragmentState(layout.numel) for layout in self.layouts]
        self._spares = [FragmentState(layout.numel) for layout in self.layouts]
        # Who merges next is somebody else, mostly: only what would be lost for good is worth the memory.
        self._left_out: list[Residual | None] = [None] * len(self.layouts)
        self._first_lengths = [math.inf] * len(self.layouts)
        self._pin_lock = threading.Lock()
        largest = max(layout.numel for layout in self.layouts)
        self._delta, self._decoded = torch.zeros(largest), torch.zeros(largest)
        self._sums = torch.zeros(largest)
        self.own = OwnContributions(self.layouts, self._contribution, self._delta, self._decoded)
        self.maker = UpdateMaker(
            self.layouts,
            period,
            self._contribution,
            self._update,
            self._delta,
            self._decoded,
            self._sums,
            open_share,
        )

    @classmethod
    def of(cls, manifest: Manifest, layouts: Layouts) -> Vault:
        """Make an empty vault for that run."""
        sync, codecs = manifest.sync, manifest.codec
        return cls(
            layouts,
            manifest.outer,
            sync.inner_steps,
            codecs.contribution,
            codecs.update,
            sync.keep_in_flight,
            manifest.weight.open_share,
        )

    # --- committed state ---------------------------------------------------------------------------------

    def load_initial(self, params: TensorMap) -> None:
        """Commit version 0 of every fragment: the given parameters, momentum zero."""
        for layout, state in zip(self.layouts, self._states, strict=True):
            invariant(state.number == EMPTY, f"fragment {layout.index} already has a version")
            gather(params, layout, state.theta)
            state.momentum.zero_()
            state.seal(0)
            self._first_lengths[layout.index] = first_length(state.theta)

    def first_length(self, fragment: int) -> float:
        """Length of version 0 (`tensors.outer_update.first_length`); infinite where it was not loaded."""
        return self._first_lengths[fragment]

    def version(self, fragment: int) -> int | None:
        """Number of the committed version; None before the first."""
        number = self._states[fragment].number
        return None if number == EMPTY else number

    @property
    def merges(self) -> int:
        """Number of versions of all fragments together."""
        return sum(self.version(layout.index) or 0 for layout in self.layouts)

    def state_digest_of(self, fragment: int, number: int) -> bytes:
        """Digest of the committed version, which must be `number`."""
        return self._committed(fragment, number).digest

    def is_whole(self, fragment: int) -> bool:
        """Tell whether the committed state still has its digest: memory may have been damaged since."""
        return self._committed(fragment).is_whole()

    def theta(self, fragment: int) -> Tensor:
        """Committed global parameters, fp32 [numel]. Read only, and only until the next commit."""
        return self._committed(fragment).theta

    def result(self, fragment: int) -> Tensor:
        """Parameters of the committed version for use outside the run
        (`tensors.outer_update.without_lookahead`): fp32 [numel], new memory."""
        state = self._committed(fragment)
        if not state.number:
            return state.theta.clone()
        mu = self._momentum_at(state.number)
        return without_lookahead(state.theta, state.momentum, self._outer.learning_rate, mu)

    def momentum(self, fragment: int) -> Tensor:
        """Committed outer momentum, fp32 [numel]. Read only, and only until the next commit."""
        return self._committed(fragment).momentum

    def spare(self, fragment: int) -> tuple[Tensor, Tensor]:
        """Theta and momentum in the spare, fp32 [numel]. Read only, and only until it is used again."""
        spare = self._spares[fragment]
        invariant(spare.number != EMPTY, f"the spare of fragment {fragment} is empty")
        return spare.theta, spare.momentum

    def state_buffers(self, fragment: int) -> list[memoryview]:
        """Bytes of committed Theta and momentum, shared: read before the next commit, or `pin`."""
        return self._committed(fragment).buffers()

    def pin(self, fragment: int) -> Pin:
        """Pin the committed state for a reader that takes long: it keeps its bytes until the release.

        A pin costs nothing unless the fragment moves on meanwhile; then its memory lives until the release.
        The caller bounds how many it hands out.
        """
        state = self._committed(fragment)
        with self._pin_lock:
            state.pin()
        released = False

        def release() -> None:
            nonlocal released
            with self._pin_lock:
                if not released:
                    state.unpin()
                released = True

        return Pin(state.number, state.digest, state.buffers(), release)

    # --- what peers sent ---------------------------------------------------------------------------------

    def check_payload(self, fragment: int, payload: Payload, codec_name: str) -> None:
        """Judge a contribution or an update on receipt, without decoding it.

        Raises:
            Unsound: "wrong-codec" (not one of this run's), "wrong-size", "non-finite", "out-of-range".
            StorageError: a payload that is not in memory cannot be read; so of all that take payloads.
        """
        chosen = next((c for c in (self._contribution, self._update) if c.name == codec_name), None)
        if chosen is None:
            raise Unsound(Verdict.WRONG_CODEC, f"{codec_name[:16]!r} is not used in this run")
        for part, start, stop in parts_of(chosen, payload, self.layouts[fragment].numel):
            check_magnitude(chosen, part, stop - start)

    def check_partial(
        self,
        fragment: int,
        payload: Payload,
        work: Iterable[Work],
        limits: MergeLimits = NO_LIMITS,
        leaf: bool = True,
    ) -> None:
        """Judge a group's partial merge on receipt: see `tensors.merge.check_partial`."""
        layout, period, share = self.layouts[fragment], self._period, self._open_share
        check_partial(layout, payload, work, period, self._delta, limits, share, leaf)

    def merge_partial(
        self,
        fragment: int,
        inputs: Sequence[Given],
        partials: Sequence[Payload],
        limits: MergeLimits = NO_LIMITS,
        seed: bytes = b"",
    ) -> PartialMerge:
        """Add up contributions, then partials, in the given order. State and spare are not touched. `seed`:
        as of `merge`.

        Raises:
            UnusableInputs: as `merge`.
        """
        accumulator, found = self.maker.add_up(fragment, inputs, partials, limits, seed)
        payload = encode_partial(accumulator)
        return PartialMerge(payload, content_digest(payload), found)

    def merge(
        self,
        fragment: int,
        number: int,
        inputs: Sequence[Given],
        partials: Sequence[Payload] = (),
        longest_steps: int | None = None,
        limits: MergeLimits = NO_LIMITS,
        seed: bytes = b"",
        correction: Correction | None = None,
    ) -> MergeResult:
        """Merge contributions, then partials, in the given order and make version `number` in the spare.

        `longest_steps`: inner steps of the longest contribution, those in the partials too; None, where there
        are no partials: of the inputs. `limits` are those of the committed version; `seed` draws the
        sample on which inputs are compared; `correction`: of an earlier version, which goes into this one.

        Raises:
            UnusableInputs: those at fault, as `check_payload` or `tensors.merge.decode_partial`, or
                "implausible-tokens", or "out-of-range" for absurd lengths; the spare is then empty.
        """
        if longest_steps is None:
            invariant(not partials, "partials do not say how long their contributions are")
            longest_steps = max((given[2] for given in inputs), default=0)
        self._begin_next(fragment, number)
        accumulator, found = self.maker.add_up(fragment, inputs, partials, limits, seed)
        left_out = self._left_out_of_updates(fragment)
        is_bounded = bool(partials) or left_out is not None or correction is not None
        longest = longest_encoded(limits) if is_bounded else None
        update, delta = self.maker.encode(accumulator, longest, left_out, correction)
        digest = self._step(fragment, number, update, longest_steps)
        if left_out is not None:
            left_out.pend(delta, self._decoded[: len(delta)])
        length = norm(self._decoded[: len(delta)])
        return MergeResult(update, content_digest(update), digest, length, found)

    def apply(
        self, fragment: int, number: int, update: Buffer, longest_steps: int, stated: float | None = None
    ) -> bytes:
        """Make version `number` in the spare from a received outer update; returns its state digest.
        `longest_steps`: as of `merge`; `stated`: its length, as its syncer says; None: not asked.

        Raises:
            RemoteError: as `check_payload`, or "out-of-range": not so long; the spare is then empty.
        """
        self._begin_next(fragment, number)
        check_magnitude(self._update, update, self.layouts[fragment].numel)
        return self._step(fragment, number, update, longest_steps, stated)

    def load_spare(self, fragment: int, number: int, theta: Buffer, momentum: Buffer) -> bytes:
        """Take a whole state (fp32 bytes) from a peer or a checkpoint into the spare: its state digest.

        Raises:
            Unsound: "wrong-size", "non-finite", "out-of-range"; the spare is then empty.
        """
        spare, raw = self._free_spare(fragment), codec("fp32")
        for payload, out in ((theta, spare.theta), (momentum, spare.momentum)):
            check_magnitude(raw, payload, len(out), _MAX_STATE)
            raw.decode(payload, out)
            check_length(out, self._first_lengths[fragment])
        return spare.seal(number)

    def lend_spare(self, fragment: int, before: Loan | None = None) -> Loan:
        """Lend the spare for a state that comes from peers piece by piece.

        Anybody may write into it until `take_loan` or the next use of the spare, which the core does not
        begin before. `before`: an earlier loan, which goes on with what was written if the spare was not used
        since.
        """
        spare = self._spares[fragment]
        if before is not None and spare is before.state and spare.uses == before.uses:
            return before
        spare = self._free_spare(fragment)
        return Loan((bytes_of(spare.theta), bytes_of(spare.momentum)), spare, spare.uses)

    def take_loan(self, fragment: int, number: int, loan: Loan) -> bytes:
        """Take what was written as version `number`; returns its state digest.

        Raises:
            Unsound: "non-finite", "out-of-range"; the spare is then empty.
        """
        spare = self._spares[fragment]
        invariant(spare is loan.state and spare.uses == loan.uses, "the spare was used while it was lent")
        for values in loan.buffers:
            check_magnitude(codec("fp32"), values, self.layouts[fragment].numel, _MAX_STATE)
        for part in (spare.theta, spare.momentum):
            check_length(part, self._first_lengths[fragment])
        return spare.seal(number)

    def commit(self, fragment: int, number: int, expected_digest: bytes | None = None) -> None:
        """Swap in the spare, which must hold `number` (and, where given, have that state digest)."""
        spare = self._spares[fragment]
        invariant(spare.number != EMPTY, f"commit of version {number}, but the spare is empty")
        invariant(spare.number == number, f"commit of version {number}, the spare holds {spare.number}")
        same = expected_digest is None or expected_digest == spare.digest
        invariant(same, f"commit of another version {number} than the spare holds")
        self._states[fragment], self._spares[fragment] = spare, self._states[fragment]
        left_out = self._left_out[fragment]
        if left_out is not None and left_out.pending:
            left_out.commit()
        self.drop_spare(fragment)

    def drop_spare(self, fragment: int) -> None:
        """Forget what is in the spare. Nothing happens where it is empty."""
        self._spares[fragment].empty()
        left_out = self._left_out[fragment]
        if left_out is not None:
            left_out.discard()

    # --- inside ------------------------------------------------------------------------------------------

    def _left_out_of_updates(self, fragment: int) -> Residual | None:
        """Error feedback of our updates of this fragment, if their codec leaves out so much that it matters;
        else None."""
        if self._update.sparse and self._left_out[fragment] is None:
            self._left_out[fragment] = Residual(self.layouts[fragment].numel)
        return self._left_out[fragment]

    def _committed(self, fragment: int, number: int | None = None) -> FragmentState:
        state = self._states[fragment]
        invariant(state.number != EMPTY, f"fragment {fragment} has no version yet")
        wrong = number is not None and number != state.number
        invariant(not wrong, f"fragment {fragment} is at version {state.number}, not {number}")
        return state

    def _begin_next(self, fragment: int, number: int) -> None:
        self._committed(fragment, number - 1)
        self._free_spare(fragment)

    def _free_spare(self, fragment: int) -> FragmentState:
        """The spare, emptied; another one where somebody reads it."""
        with self._pin_lock:
            pinned = self._spares[fragment].pins > 0
        if pinned:
            self._spares[fragment] = FragmentState(self.layouts[fragment].numel)
        self.drop_spare(fragment)
        self._spares[fragment].begin()
        return self._spares[fragment]

    def _momentum_at(self, number: int) -> float:
        return momentum_at(number, self._outer.momentum, self._outer.momentum_warmup_merges)

    def _step(
        self, fragment: int, number: int, update: Buffer, longest_steps: int, stated: float | None = None
    ) -> bytes:
        """Decode the update and make the outer step from the committed state into the spare."""
        state, spare = self._committed(fragment), self._spares[fragment]
        delta = self._decoded[: self.layouts[fragment].numel]
        self._update.decode(update, delta)
        check_stated(delta, stated)
        outer_step(
            state.theta,
            state.momentum,
            delta,
            self._outer.learning_rate,
            self._momentum_at(number),
            spare.theta,
            spare.momentum,
            self._share(longest_steps),
        )
        return spare.seal(number)

    def _share(self, longest_steps: int) -> float:
        """Share of an interval that a version covers. With rho = 0 every contribution lacks the steps that
        were in flight, however many they were, so that its steps do not say."""
        return min(1.0, longest_steps / self._period) if self._rho else 1.0


# --- appraisal: what two contributions do to the loss -------------------------------------------------

FP32_BYTES = 4


class Appraisable(Frozen):
    """Content of the file of what a learner process appraises, as its daemon gives it, decoded.

        start          fp32 [numel]: the fragment's parameters that the version was made from
        theirs, ours   contributions as their codec encodes them

    Rules: docs/protocol/loss-audits.md, section 2.
    """

    start: Tensor
    theirs: Tensor
    ours: Tensor


def start_of_version(result: Tensor, update: Buffer, codec_name: str, rate: float) -> Tensor:
    """Go back from a version without look-ahead (`Vault.result`), which is changed, by its update: an outer
    step of that rate."""
    delta = torch.empty_like(result)
    codec(codec_name).decode(update, delta)
    return result.add_(delta, alpha=rate)


def appraisal_bytes_on_disk(codec_name: str, numel: int) -> int:
    """Return the size of the file."""
    return FP32_BYTES * numel + 2 * codec(codec_name).encoded_bytes(numel)


def begin_appraisal(path: Path, start: Tensor) -> None:
    """Begin the file. Raises: StorageError."""
    _write(path, "wb", bytes_of(start))


def add_contributions(path: Path, theirs: Buffer, ours: Buffer) -> None:
    """Write the rest of the file. Raises: StorageError."""
    _write(path, "ab", theirs, ours)


def read_appraisal(path: Path, codec_name: str, numel: int) -> Appraisable:
    """Read the file. Raises: StorageError (it is not there, or not whole)."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot read {path.name}: {error.strerror}") from error
    if len(content) != appraisal_bytes_on_disk(codec_name, numel):
        raise StorageError(f"{path.name} is not whole")
    chosen = codec(codec_name)
    first, size = FP32_BYTES * numel, chosen.encoded_bytes(numel)
    start = torch.frombuffer(content, dtype=torch.float32, count=numel)
    theirs, ours = torch.empty(numel), torch.empty(numel)
    encoded = memoryview(content)[first:]  # no copies (`tensors.sizes.appraisal_bytes`)
    chosen.decode(encoded[:size], theirs)
    chosen.decode(encoded[size:], ours)
    return Appraisable(start, theirs, ours)


def _write(path: Path, mode: str, *parts: Buffer) -> None:
    try:
        with path.open(mode) as file:
            for part in parts:
                file.write(part)
    except OSError as error:
        raise StorageError(f"cannot write {path.name}: {error.strerror}") from error
