"""The task own-loop: a model that programs train in loops of their own (`p2pdiloco.Session`).

The manifest has the names and shapes of its parameters, which is all that a daemon needs; version 0 is given
(`run.initial`). Model, data, loss and optimizer are the programs'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, field

from p2pdiloco.config.manifest import SHA256_PATTERN, ModelSection
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.constants import Listed, broken_constants
from p2pdiloco.tasks.task import Data, Task
from p2pdiloco.tensors.sizes import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from p2pdiloco.tasks.task import Batch

NAME = "own-loop"
MAX_PARAMETERS = 4096
EMBEDDING = " embedding"
_FORM = re.compile(r"([^\s\x00-\x1f\x7f]{1,200}) (-|[0-9]{1,12}(?:x[0-9]{1,12}){0,7})( embedding)?")
_WHY = "the run is trained by programs with a loop of their own"


class OwnLoopSection(ModelSection, frozen=True, kw_only=True, omit_defaults=True):
    """Names and shapes of the parameters."""

    comments: ClassVar[dict[str, str]] = {
        "parameters": "Name and shape of every parameter, such as layer.weight 64x32; written by new_run.",
        "constants": "Name, shape and type of what else belongs to the model, and is not trained.",
        "constants_sum": "SHA-256 of the constants' values.",
    }
    parameters: Annotated[
        list[Annotated[str, Meta(max_length=320)]], Meta(min_length=1, max_length=MAX_PARAMETERS)
    ]
    constants: Listed = field(default_factory=list)
    constants_sum: Annotated[str, Meta(pattern=SHA256_PATTERN)] = ""


class OwnLoop(Task):
    """The task own-loop."""

    Section: ClassVar[type[ModelSection]] = OwnLoopSection
    section: OwnLoopSection

    def broken_rule(self) -> str | None:
        if not self.manifest.run.initial:
            return "run.initial must name version 0: p2pdiloco.new_run writes such a run.toml"
        return broken_shapes(self.section.parameters) or broken_constants(self.manifest.model, self.specs())

    def specs(self) -> tuple[TensorSpec, ...]:
        return specs_from_texts(self.section.parameters)

    def model(self) -> nn.Module:
        raise UserError(
            f"{_WHY}: a node alone cannot", "use p2pdiloco.Session in yours, see docs/topics/session.md"
        )

    def load_data(self, path: str | None) -> Data:
        raise UserError(f"{_WHY}: their data is not known here")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise UserError(f"{_WHY}: their loss is not known here")

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        raise UserError(f"{_WHY}: their figures are not known here")


def section_of(specs: Sequence[TensorSpec]) -> OwnLoopSection:
    """`[model]` of a run that trains such parameters."""
    return OwnLoopSection(parameters=texts_from_specs(specs))


def texts_from_specs(specs: Sequence[TensorSpec]) -> list[str]:
    """Write shapes as `[model]` has them: "layer.weight 64x32", "embed.weight 256x64 embedding"."""
    return list(map(_text, specs))


def specs_from_texts(texts: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Read names and shapes off such texts."""
    return tuple(map(_spec, texts))


def broken_shapes(texts: Sequence[str]) -> str | None:
    """Say what is wrong with such texts, as half a sentence; None: nothing."""
    for text in texts:
        if not _FORM.fullmatch(text):
            return f'model.parameters has "{text}", which is not a name and a shape'
    if len({spec.name for spec in specs_from_texts(texts)}) < len(texts):
        return "model.parameters has one name twice"
    return None


def _text(spec: TensorSpec) -> str:
    shape = "x".join(map(str, spec.shape)) or "-"
    return f"{spec.name} {shape}{EMBEDDING if spec.embedding else ''}"


def _spec(text: str) -> TensorSpec:
    embedding = text.endswith(EMBEDDING)
    name, shape = text.removesuffix(EMBEDDING).split(" ", 1)
    sizes = () if shape == "-" else tuple(map(int, shape.split("x")))
    return TensorSpec(name, sizes, embedding=embedding)
