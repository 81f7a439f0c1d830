"""Making of outer updates from contributions: by their syncer, and again by whoever audits it.

Whoever has the contributions of a version makes the same bytes, with the weights and limits that its header
states and in its order. Only a syncer that sends on what its earlier updates left out (`Residual`, sparse
codecs) has something that nobody else has.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.types import NO_LIMITS, MergeLimits
from p2pdiloco.errors import invariant
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.digest import Buffer
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.merging.agreement import Sample, cosine
from p2pdiloco.tensors.merging.inputs import Findings, Given, add_up, decode
from p2pdiloco.tensors.merging.merge import MAX_MAGNITUDE, Accumulator
from p2pdiloco.tensors.merging.partial import encode_partial, partial_bytes
from p2pdiloco.tensors.own_contributions import Residual
from p2pdiloco.tensors.payload import Payload
from p2pdiloco.tensors.portable import add_scaled, scratch
from p2pdiloco.tensors.state import shorten

_ENCODED = 0.9
"""Share of the longest update to which one is cut: int4 may lengthen it by some hundredths, and everybody
would refuse it."""


def longest_encoded(limits: MergeLimits) -> float:
    """Compute the length to which an update is cut before it is encoded, where it may be too long."""
    return _ENCODED * limits.longest_update


class Remade(Struct, frozen=True):
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


class UpdateMaker:
    """Maker of outer updates, in memory that it shares with the vault: from the same thread.

    Args:
        delta, decoded, sums: scratch memory of the largest fragment's size, in use only within a call.
    """

    def __init__(
        self,
        layouts: Sequence[FragmentLayout],
        period: int,
        contribution: Codec,
        update: Codec,
        delta: Tensor,
        decoded: Tensor,
        sums: Tensor,
    ) -> None:
        self._layouts, self._period = layouts, period
        self._contribution, self._update = contribution, update
        self._delta, self._decoded, self._sums = delta, decoded, sums

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
        """Add contributions up, then partials, in the given order. Raises: as `merging.inputs.add_up`."""
        layout = self._layouts[fragment]
        accumulator = Accumulator(layout, self._period, self._sums, limits)
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
        """Add the true update, and subtract the false one: in this order, each sum rounded."""
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
        decode(codec, payload, decoded)
        return decoded
