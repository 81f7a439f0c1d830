"""Contributions of this node: encoded with error feedback, and added up after a fork.

Error feedback: what a lossy encoding leaves out of one contribution goes into the next one. Called by
`daemon.learner.learner_link`, in the tensors thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.errors import invariant
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.digest import Buffer
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.merging.merge import MAX_MAGNITUDE
from p2pdiloco.tensors.payload import check_magnitude
from p2pdiloco.tensors.portable import norm


class Encoded(Struct, frozen=True):
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


class OwnContributions:
    """Encoder of one node's contributions; 8 bytes per parameter where its codec asks for error feedback.

    Args:
        delta, decoded: scratch memory of the largest fragment's size, in use only within a call.
    """

    def __init__(
        self, layouts: Sequence[FragmentLayout], codec: Codec, delta: Tensor, decoded: Tensor
    ) -> None:
        self._layouts, self._codec = layouts, codec
        self._residuals = [Residual(layout.numel) if codec.feedback else None for layout in layouts]
        self._delta, self._decoded = delta, decoded

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
