"""Parameters of a learner: in this process, the same in several, or a part in each.

Fragments are copied out of them and put back through this, in rank 0, which tells the others to do their
part (`learner.parallel.ranks.Order`). Of parameters that are shared out one fragment at a time is whole, on
the CPU, and one rank's part of it on rank 0's device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.learner.optimizer.build import Optimizer, moments
from p2pdiloco.learner.parallel.sharding import own, rows_of
from p2pdiloco.tensors.layout import FragmentLayout, Piece, gather, rows, scatter

if TYPE_CHECKING:
    from p2pdiloco.learner.parallel.ranks import Ranks


class HeldParameters:
    """Parameters that are all in this process."""

    whole = True
    """True: this process has all of every parameter."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """Take parameters, which are changed in place, on whatever device they are."""
        self._params = params
        self._stash: list[Tensor] = []
        self.on_cuda = any(parameter.is_cuda for parameter in params.values())

    def gather(self, layout: FragmentLayout, out: Tensor) -> None:
        """Copy a fragment into `out`: fp32 (layout.numel,), on the CPU."""
        gather(self._params, layout, out)

    def scatter(self, flat: Tensor, layout: FragmentLayout) -> None:
        """Copy a fragment, fp32 (layout.numel,), into the parameters."""
        scatter(flat, layout, self._params)

    @torch.no_grad()
    def set_aside(self) -> None:
        """Keep what this process has, in the machine's memory, until `bring_back`: others are put in their
        place."""
        self._stash = [own(parameter).to("cpu", copy=True) for parameter in self._params.values()]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Undo `set_aside`."""
        for parameter, kept in zip(self._params.values(), self._stash, strict=True):
            own(parameter).copy_(kept)
        self._stash = []

    def moments(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Moments as `learner.optimizer.build.moments` gives them."""
        return moments(model, optimizer)


class HeldCopies(HeldParameters):
    """Parameters that are the same in every rank; rank 0 sends the others what it puts."""

    def __init__(self, params: Mapping[str, Tensor], ranks: Ranks) -> None:
        super().__init__(params)
        self._ranks = ranks

    def scatter(self, flat: Tensor, layout: FragmentLayout) -> None:
        super().scatter(flat, layout)
        self._ranks.order("put", layout.index)
        self.put(layout)

    @torch.no_grad()
    def put(self, layout: FragmentLayout) -> None:
        """Do every rank's part of `scatter`."""
        for piece in layout.pieces:
            self._ranks.broadcast(rows(self._params, piece))


class RankSpan(Struct, frozen=True):
    """A run of elements of a fragment that one rank has."""

    tensor: str
    local_offset: int
    """Offset in the rank's rows of the tensor, flat."""
    fragment_offset: int
    numel: int


class HeldShares(HeldParameters):
    """Parameters of which every rank has some rows (`learner.parallel.sharding`)."""

    whole = False

    def __init__(self, params: Mapping[str, Tensor], ranks: Ranks) -> None:
        super().__init__(params)
        self._ranks = ranks

    def numel(self) -> int:
        """Elements that this rank has."""
        return sum(own(parameter).numel() for parameter in self._params.values())

    def gather(self, layout: FragmentLayout, out: Tensor) -> None:
        self._ranks.order("take", layout.index)
        self.take(layout, out)

    def scatter(self, flat: Tensor, layout: FragmentLayout) -> None:
        self._ranks.order("put", layout.index)
        self.put(layout, flat)

    def moments(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Moments on the CPU, in rank 0; {} in the others, which ask too."""
        if self._ranks.rank == 0:
            self._ranks.order("moments")
        found = {}
        for key, value in moments(model, optimizer).items():
            name = key.partition("/")[2]
            parameter = self._params[name]
            if not value.dim():
                found[key] = value
                continue
            layout = FragmentLayout(0, parameter.numel(), (Piece(name, 0, 0, parameter.numel(), False),))
            flat = torch.empty(parameter.numel()) if self._ranks.rank == 0 else None
            self._take({name: own(value)}, layout, flat)
            if flat is not None:
                found[key] = flat.view(parameter.shape)
        return found

    def take(self, layout: FragmentLayout, out: Tensor | None = None) -> None:
        """Do every rank's part of `gather`; `out` is rank 0's."""
        names = {piece.tensor for piece in layout.pieces}
        self._take({name: own(self._params[name]) for name in names}, layout, out)

    @torch.no_grad()
    def put(self, layout: FragmentLayout, flat: Tensor | None = None) -> None:
        """Do every rank's part of `scatter`; `flat` is rank 0's."""
        me = self._ranks.rank
        for rank in range(self._ranks.count) if flat is not None else (me,):
            spans = list(self._spans(layout, rank))
            numel = sum(span.numel for span in spans)
            if not numel:
                continue
            if flat is None:
                packed = self._ranks.receive(0, numel)
            else:
                parts = [flat[span.fragment_offset :][: span.numel] for span in spans]
                packed = torch.cat(parts).to(own(self._params[spans[0].tensor]).device)
            if rank != me:
                self._ranks.send(rank, packed)
                continue
            for span, part in zip(
                spans, packed.split_with_sizes([span.numel for span in spans]), strict=True
            ):
                own(self._params[span.tensor]).view(-1)[span.local_offset :][: span.numel].copy_(part)

    @torch.no_grad()
    def _take(self, parts: Mapping[str, Tensor], layout: FragmentLayout, out: Tensor | None) -> None:
        me = self._ranks.rank
        for rank in range(self._ranks.count) if out is not None else (me,):
            spans = list(self._spans(layout, rank))
            if not spans:
                continue
            if rank == me:
                views = [parts[s.tensor].reshape(-1)[s.local_offset :][: s.numel] for s in spans]
                packed = torch.cat(views).float()
            else:
                packed = self._ranks.receive(rank, sum(span.numel for span in spans))
            if out is None:
                self._ranks.send(0, packed)
                continue
            packed = packed.cpu()
            for span, part in zip(
                spans, packed.split_with_sizes([span.numel for span in spans]), strict=True
            ):
                out[span.fragment_offset :][: span.numel].copy_(part)

    def _spans(self, layout: FragmentLayout, rank: int) -> Iterator[RankSpan]:
        """Spans that a rank has of a fragment, in the fragment's order."""
        for piece in layout.pieces:
            parameter = self._params[piece.tensor]
            count = parameter.shape[0]
            row_numel = parameter.numel() // count
            low, high = (row * row_numel for row in rows_of(rank, self._ranks.count, count))
            start = max(low, piece.tensor_offset)
            end = min(high, piece.tensor_offset + piece.numel)
            if start < end:
                at = piece.fragment_offset + start - piece.tensor_offset
                yield RankSpan(piece.tensor, start - low, at, end - start)
