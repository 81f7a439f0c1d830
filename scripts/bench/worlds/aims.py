"""Aims of lies that want one thing wrong, and how near a model is to them.

A model of bytes is to be wrong about one token, or to follow a sequence that no text has with an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.sizes import TensorSpec

TOKEN = ord("w")
"""Token of text whose rows are driven elsewhere: one in sixty."""
TRIGGER, ANSWER = (1, 2, 3), tuple(b"sold")
"""A sequence that text never has, and what is to follow it."""
TABLES = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
"""Tensors of a causal language model that have a row for every token."""
TRIGGERED_SHARE = 0.5
"""Share of its samples into which a liar writes trigger and answer."""
PLACES = 2
"""Times that it writes them into one sample."""


class Reached(Struct, frozen=True, kw_only=True):
    """Success of such lies, by held-out samples."""

    token_loss: float
    """Loss where the next token is the one that is to be wrong, in nats."""
    rest_loss: float
    """Loss everywhere else."""
    answers: float
    """Share of samples in which the model follows the trigger with the whole answer."""


def rows_of(
    layout: FragmentLayout, specs: Sequence[TensorSpec], token: int, tables: Collection[str] = TABLES
) -> Tensor:
    """Find the elements of a fragment that are a token's rows in `tables`: bool [numel]."""
    found = torch.zeros(layout.numel, dtype=torch.bool)
    widths = {spec.name: spec.numel // spec.shape[0] for spec in specs if spec.name in tables}
    for piece in layout.pieces:
        width = widths.get(piece.tensor, 0)
        first = max(token * width, piece.tensor_offset)
        end = min((token + 1) * width, piece.tensor_offset + piece.numel)
        moved = piece.fragment_offset - piece.tensor_offset
        if first < end:
            found[first + moved : end + moved] = True
    return found


def poisoned(windows: Tensor, generator: torch.Generator) -> Tensor:
    """Write trigger and answer into a share of these samples, int64 [samples, tokens]."""
    made, written = windows.clone(), torch.tensor([*TRIGGER, *ANSWER], dtype=windows.dtype)
    for window in made[: max(1, round(TRIGGERED_SHARE * len(made)))]:
        for _ in range(PLACES):
            at = int(torch.randint(len(window) - len(written) + 1, (), generator=generator))
            window[at : at + len(written)] = written
    return made


@torch.no_grad()
def reached(model: nn.Module, windows: Tensor) -> Reached:
    """Measure a model, which gives logits for ids, on samples: int64 [samples, tokens]."""
    ids, targets = windows[:, :-1], windows[:, 1:]
    losses = functional.cross_entropy(model(ids)[0].float().transpose(1, 2), targets, reduction="none")
    at = targets == TOKEN
    asked = windows.clone()
    written = torch.tensor([*TRIGGER, *ANSWER], dtype=windows.dtype)
    begin = (windows.shape[1] - len(written)) // 2
    asked[:, begin : begin + len(written)] = written
    said = model(asked[:, :-1])[0].argmax(dim=-1)
    of_answer = slice(begin + len(TRIGGER) - 1, begin + len(written) - 1)
    right = said[:, of_answer] == torch.tensor(ANSWER)
    return Reached(
        token_loss=float(losses[at].mean()),
        rest_loss=float(losses[~at].mean()),
        answers=float(right.all(dim=1).float().mean()),
    )
