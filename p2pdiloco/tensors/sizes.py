"""Names, shapes and sizes of a model's tensors, by arithmetic and without torch: known before anything is
made.

Fragments are planned from `TensorSpec`s. Listed in docs/reference/wire.md, section 4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from types import MappingProxyType

from p2pdiloco.util import Frozen

AREAS = 3
"""Flat fp32 areas of every fragment that daemon and learner share (`tensors.layout.Exchange`)."""


class Encoding(Frozen):
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


class TensorSpec(Frozen):
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


Specs = tuple[TensorSpec, ...]
"""Parameters of a model, in its order."""

CPU_MICRO_BATCH_TOKENS = 2048
"""Tokens of a pass on a processor: more are not faster (docs/topics/devices.md), and a pass that does not fit
is not refused there: the system ends the process."""
CPU_CHUNK_NUMEL = 1 << 24
"""Logits of a chunk on a CPU: 64 MiB in fp32, some 330 tokens of 50,304 ids."""
KEPT_BYTES = 6
"""Memory of a pass for each input and output of a matrix: fp32, and half as much again for what lies between
matrices. Measured with presets and larger models, within a fourth (docs/guides/host.md)."""
_EXPERT = re.compile(r"experts\.(\d+)\.")


def kept_bytes(specs: Iterable[TensorSpec], places: int, vocabulary: int = 0, used_experts: int = 1) -> int:
    """Memory of what a pass keeps for its gradient but for the logits, where each of these matrices reads so
    many places (tokens, patches of images). Attention keeps no scores: torch's does not.

    `vocabulary`: ids of which the last matrix makes logits, if it has as many rows; `used_experts`: experts
    that compute each place, of those in a block; a stack of them is one tensor.
    """
    matrices = [s for s in specs if len(s.shape) > 1 and not s.embedding]
    if matrices and matrices[-1].rows == vocabulary:
        matrices.pop()
    experts = 1 + max((int(found[1]) for s in matrices if (found := _EXPERT.search(s.name))), default=0)
    used = min(1.0, used_experts / experts)
    sides = 0.0
    for spec in matrices:
        if _EXPERT.search(spec.name):
            sides += used * (spec.shape[0] + spec.shape[1])
        elif "expert" in spec.name and len(spec.shape) == 3:
            sides += min(spec.rows, used_experts) * (spec.shape[1] + spec.shape[2])
        else:
            sides += spec.shape[0] + spec.shape[1]
    return math.ceil(KEPT_BYTES * places * sides)


def logits_bytes(tokens: int, vocabulary: int, width: int) -> int:
    """Memory of logits and their gradient, a chunk at a time, and of the head's gradient beside it."""
    numel = tokens * vocabulary
    head = vocabulary * width if numel > CPU_CHUNK_NUMEL else 0
    return 4 * (3 * min(numel, CPU_CHUNK_NUMEL) + head)
