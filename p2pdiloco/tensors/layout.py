"""Layout of fragments: the model's tensors cut into flat buffers, and the memory that holds these.

A fragment is a flat fp32 buffer; its layout says which piece of which named tensor lies where in it. All
peers of a run plan the same fragments from the same tensor list, so nothing about them crosses the wire.
`gather` and `scatter` copy between tensors and fragments. `Exchange` is memory that daemon and learner share.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from msgspec.structs import replace
from torch import Tensor

from p2pdiloco.errors import ConfigError, InvariantViolation, UserError, invariant
from p2pdiloco.tensors.sizes import AREAS, TensorSpec
from p2pdiloco.util import Frozen

Tensors = dict[str, Tensor]
"""Tensors by name."""
TensorMap = Mapping[str, Tensor]
"""Tensors by name, to look at."""
BALANCED = 1.1
"""Largest fragment of a good plan, as a multiple of the mean one."""
_LIMIT_RATIO = 1.5
_MAX_LIMITS = 24
MAX_CUTS = 1 << 17
"""Cuts of a plan: only shapes that never come out even would ask for more, some for a minute and a gigabyte.
"""


class Piece(Frozen):
    """A run of consecutive rows of one tensor inside one fragment; offsets and numel in elements."""

    tensor: str
    tensor_offset: int
    """Offset inside the flattened tensor."""
    fragment_offset: int
    """Offset inside the flat fragment."""
    numel: int
    plain_mean: bool
    """True: merged by plain weighted mean, not by radial-directional averaging. So are embeddings, and all
    where the run says so."""


class FragmentLayout(Frozen):
    """Pieces of which one fragment is made: they lie back to back, in order, without gaps."""

    index: int
    numel: int
    pieces: tuple[Piece, ...]

    def in_plain_mean(self) -> FragmentLayout:
        """Copy of this layout of which all pieces are merged by plain mean."""
        pieces = tuple(replace(piece, plain_mean=True) for piece in self.pieces)
        return replace(self, pieces=pieces)


Layouts = Sequence[FragmentLayout]


class _Cut(Frozen, order=True):
    """Rows of one tensor before it has a place. Sorts largest first, then in the order of the model."""

    minus_numel: int
    position: int
    offset: int


def plan_fragments(specs: Sequence[TensorSpec], fragments: int) -> tuple[FragmentLayout, ...]:
    """Put whole tensors, largest first, each into the currently smallest of P bins (Decoupled DiLoCo, arXiv
    2604.21428).

    A tensor that alone exceeds the mean fragment is split by rows. Where bins are still uneven after that,
    the size above which tensors are split is lowered step by step, until the largest bin is within
    `BALANCED` of the mean, or rows are as fine as it goes. So large tensors stay as whole as balance allows.
    Deterministic.

    Raises:
        ConfigError: more fragments than there are rows to share out, or rows too uneven for a bounded plan.
    """
    invariant(fragments >= 1, "a plan needs at least one fragment")
    invariant(len({spec.name for spec in specs}) == len(specs), "two tensors share one name")
    total = sum(spec.numel for spec in specs)
    rows = sum(spec.rows for spec in specs if spec.numel)
    if fragments > rows:
        raise ConfigError(
            f"sync.fragments is {fragments}, but this model can be cut into at most {rows} pieces",
            "lower sync.fragments in the manifest, or choose a larger model",
        )
    mean = total / fragments
    best: list[list[_Cut]] = []
    best_largest = math.inf
    limit = mean
    for _ in range(_MAX_LIMITS):
        if best and _count_cuts(specs, limit) > MAX_CUTS:
            break
        bins = _fill(_cut(specs, limit), fragments)
        largest = math.inf if not all(bins) else max(map(_bin_numel, bins))
        if largest < best_largest:
            best, best_largest = bins, largest
        if best_largest <= BALANCED * mean or limit < 1:
            break
        limit /= _LIMIT_RATIO
    if not best:  # a few huge rows beside many tiny ones: only the finest cut fills every bin
        if rows > MAX_CUTS:
            raise ConfigError("this model's tensors are too uneven to be cut into fragments")
        best = _fill(_cut(specs, 0.0), fragments)
    return tuple(_layout(index, cuts, specs) for index, cuts in enumerate(best))


def _cut(specs: Sequence[TensorSpec], limit: float) -> list[_Cut]:
    cuts = []
    for position, spec in enumerate(specs):
        if spec.numel == 0:
            continue
        parts = _count_cuts((spec,), limit)
        row_numel = spec.numel // spec.rows
        edges = [spec.rows * part // parts * row_numel for part in range(parts + 1)]
        cuts += [_Cut(low - high, position, low) for low, high in itertools.pairwise(edges)]
    return sorted(cuts)


def _count_cuts(specs: Sequence[TensorSpec], limit: float) -> int:
    return sum(
        spec.rows if limit < 1 else min(spec.rows, math.ceil(spec.numel / limit))
        for spec in specs
        if spec.numel
    )


def _fill(cuts: Sequence[_Cut], fragments: int) -> list[list[_Cut]]:
    bins: list[list[_Cut]] = [[] for _ in range(fragments)]
    smallest = [(0, index) for index in range(fragments)]
    for cut in cuts:
        numel, index = smallest[0]
        bins[index].append(cut)
        heapq.heapreplace(smallest, (numel - cut.minus_numel, index))
    return bins


def _bin_numel(cuts: Sequence[_Cut]) -> int:
    return -sum(cut.minus_numel for cut in cuts)


def _layout(index: int, cuts: Sequence[_Cut], specs: Sequence[TensorSpec]) -> FragmentLayout:
    """Pieces are in the order of the model, neighbours of one tensor joined again."""
    pieces: list[Piece] = []
    at = 0
    for cut in sorted(cuts, key=lambda cut: (cut.position, cut.offset)):
        spec, numel = specs[cut.position], -cut.minus_numel
        last = pieces[-1] if pieces else None
        if last and last.tensor == spec.name and last.tensor_offset + last.numel == cut.offset:
            whole = last.numel + numel
            pieces[-1] = Piece(spec.name, last.tensor_offset, last.fragment_offset, whole, spec.embedding)
        else:
            pieces.append(Piece(spec.name, cut.offset, at, numel, spec.embedding))
        at += numel
    return FragmentLayout(index, at, tuple(pieces))


@torch.no_grad()
def gather(params: TensorMap, layout: FragmentLayout, out: Tensor) -> None:
    """Copy a fragment out of named parameters (any device, float type and memory format) into `out`, fp32
    [layout.numel]."""
    invariant(out.shape == (layout.numel,), "gather needs a flat buffer of the fragment's size")
    for piece in layout.pieces:
        part = rows_of_piece(params, piece)
        out[piece.fragment_offset :][: piece.numel].view(part.shape).copy_(part)


@torch.no_grad()
def scatter(src: Tensor, layout: FragmentLayout, params: TensorMap) -> None:
    """Copy a flat fp32 fragment, `src` [layout.numel], in place into the named parameters."""
    invariant(src.shape == (layout.numel,), "scatter needs a flat buffer of the fragment's size")
    for piece in layout.pieces:
        part = rows_of_piece(params, piece)
        part.copy_(src[piece.fragment_offset :][: piece.numel].view(part.shape))


def rows_of_piece(params: TensorMap, piece: Piece) -> Tensor:
    """Rows of a piece, in their own memory and shape: their elements need not lie in logical order there."""
    tensor = params[piece.tensor].data
    if not tensor.dim():
        return tensor
    row_numel = tensor.numel() // tensor.shape[0]
    return tensor.narrow(0, piece.tensor_offset // row_numel, piece.numel // row_numel)


ALIGN_ELEMENTS = 16
"""Alignment of every area: a cache line (64 bytes)."""


class Exchange:
    """Memory that daemon and learner share, as seen from one of the two: three flat fp32 areas per fragment.

        base[0], base[1]   double buffer of the fragment's global parameters Theta. The learner's parameters
                           are measured against one of them; the daemon writes a newer version into the other
                           one and posts `Install`.
        sent               the learner's parameters theta as they were at the last copy-out; of a displacement
                           of many sync intervals a share (`core.api.versions.Stride`).

    No lock is needed. The daemon writes only the base buffer that the learner does not use, and not while it
    still reads that buffer to encode a contribution (`CopiedOut` names the buffer). The learner writes only
    `sent`, at a copy-out, and never while its slot is in use.

    The memory has no name in any file system (memfd, or a temporary file that is unlinked at once): the
    kernel frees it with the last process that maps it, also after kill -9. `fd` is what the other process
    needs for `attach`.
    """

    def __init__(self, fd: int, layouts: Layouts) -> None:
        """Map the memory behind `fd`, of which it takes ownership. Use `create` or `attach`."""
        self.fd = fd
        self._numels = [layout.numel for layout in layouts]
        memory = mmap.mmap(fd, exchange_bytes(layouts))
        self._flat: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.float32)
        self._offsets = []
        offset = 0
        for numel in self._numels:
            self._offsets.append(offset)
            offset += AREAS * _aligned(numel)

    @classmethod
    def create(cls, layouts: Layouts) -> Self:
        """Make new zeroed memory for these fragments.

        Raises:
            UserError: the machine has not enough memory (three times the model in fp32).
        """
        size = exchange_bytes(layouts)
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                # Without this a full memory is a SIGBUS in the middle of a merge instead of a sentence now.
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise _refused(size, error) from error
        return cls(fd, layouts)

    @classmethod
    def attach(cls, fd: int, layouts: Layouts) -> Self:
        """Map the memory behind an inherited descriptor; the layouts must be the creator's."""
        actual, expected = os.fstat(fd).st_size, exchange_bytes(layouts)
        invariant(actual == expected, f"exchange has {actual} bytes, these layouts need {expected}")
        return cls(fd, layouts)

    @property
    def fragments(self) -> int:
        """Number of fragments."""
        return len(self._numels)

    def base(self, fragment: int, index: int) -> torch.Tensor:
        """Base buffer 0 or 1 of a fragment: fp32, (numel,), a view of the shared memory."""
        invariant(index in (0, 1), f"base buffer {index}")
        return self._area(fragment, index)

    def sent(self, fragment: int) -> torch.Tensor:
        """The learner's parameters at the last copy-out: fp32, (numel,), a view of the shared memory."""
        return self._area(fragment, 2)

    def close(self) -> None:
        """Let go of the memory. Views that were handed out stay valid; it is freed with the last of them."""
        if self._flat is not None:
            self._flat = None
            os.close(self.fd)
            self.fd = -1

    def _area(self, fragment: int, area: int) -> torch.Tensor:
        if self._flat is None:
            raise InvariantViolation("exchange is closed")
        numel = self._numels[fragment]
        start = self._offsets[fragment] + area * _aligned(numel)
        return self._flat[start : start + numel]


def _refused(size: int, error: OSError) -> UserError:
    """The buffers are a file without a name, so limits of files hold."""
    what = f"fragment buffers ({size / 2**20:.3g} MiB)"
    if error.errno == errno.EFBIG:
        return UserError(
            f"the limit of the size of files is too small for the {what}",
            "raise it: `ulimit -f unlimited`, or LimitFSIZE=infinity in a systemd unit",
        )
    return UserError(
        f"no memory for the {what}: {error.strerror}",
        "close other programs, or raise the container's memory limit",
    )


def exchange_bytes(layouts: Layouts) -> int:
    """Size of the shared memory for these fragments."""
    return 4 * AREAS * sum(_aligned(layout.numel) for layout in layouts)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("p2pdiloco-exchange", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="p2pdiloco-") as file:  # unlinked before it is returned
        return os.dup(file.fileno())
