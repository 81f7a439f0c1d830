"""Names, shapes and sizes of a model's tensors, by arithmetic and without torch: known before anything is
made.

Fragments are planned from `TensorSpec`s. Listed in docs/reference/wire.md, section 4.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from msgspec import Struct

AREAS = 3
"""Flat fp32 areas of every fragment that daemon and learner share (`tensors.layout.Exchange`)."""


class Encoding(Struct, frozen=True):
    """Figures of a codec (`tensors.codecs`)."""

    bytes_per_parameter: float
    """Bytes of a payload for every parameter, whole blocks."""
    feedback: bool
    """True: what an encoding leaves out is kept and added to the next one."""


ENCODINGS = MappingProxyType(
    {
        "fp32": Encoding(4, feedback=False),
        "bf16": Encoding(2, feedback=False),
        "int8": Encoding(1 + 4 / 1024, feedback=False),
        "int4": Encoding(34 / 64, feedback=True),
        "e3m0": Encoding(34 / 64, feedback=True),
        "topk": Encoding(108 / 4096, feedback=True),
    }
)
"""Figures by codec."""


def vault_bytes(numel: int, contribution_codec: str) -> int:
    """Host memory of a vault of so many parameters, at least."""
    return (24 if ENCODINGS[contribution_codec].feedback else 16) * numel


def shared_bytes(numel: int) -> int:
    """Memory that daemon and learner share for so many parameters, at least."""
    return 4 * AREAS * numel


def appraisal_bytes(numel: int, contribution_codec: str) -> int:
    """Host memory in which a learner measures two contributions of so many parameters, at least: what its
    daemon gave it, both decoded, and the end of a step. Its daemon had less of it just before."""
    given = 4 + 2 * ENCODINGS[contribution_codec].bytes_per_parameter
    return math.floor((given + 3 * 4) * numel)


def second_model_bytes(numel: int) -> int:
    """Memory of the second instance of a model of so many parameters, in which the global parameters are
    evaluated and contributions measured: on the learner's device. A model that is shared out over several has
    none."""
    return 4 * numel


def training_bytes(numel: int, optimizer: str) -> int:
    """Memory of parameters, gradients and moments of so many parameters; Muon has one moment for most."""
    return (12 if optimizer == "muon" else 16) * numel


MAX_TENSORS = 1 << 15
"""Tensors of one model: more, and only looking at a manifest would take seconds."""
MAX_NUMEL = 1 << 46
"""Elements of one model: beyond it are mistakes, and numbers that overflow."""


class TensorSpec(Struct, frozen=True):
    """A named parameter. `embedding` tensors are merged by plain weighted mean (Decoupled DiLoCo, arXiv
    2604.21428)."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of slices along the first dimension: the finest pieces that a tensor is cut into."""
        return self.shape[0] if self.shape else 1
