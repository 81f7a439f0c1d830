"""Constants of a run's model: tensors that belong to it and that no training changes.

They are the persistent buffers of a given model (a router's correction of its experts, say). A manifest lists
them in `[model]`, a text each. Their values come after the parameters in the file of version 0, and go into
every instance and every export. Neither torch nor the model's library is needed to read a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from p2pdiloco.tensors.sizes import TensorSpec

MAX_CONSTANTS = 4096
RESERVED = "__metadata__"
"""Name that no tensor in a safetensors file has."""
KINDS = {"float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Types of elements by the name that torch and NumPy share, with their bytes. Shorter floats are widened."""
LEAST_BYTES = 16 << 20
"""Size of constants that any model may have; else they are at most as large as the parameters in fp32."""
Listed = Annotated[list[Annotated[str, Meta(max_length=320)]], Meta(max_length=MAX_CONSTANTS)]
"""Type of the key in `[model]` that lists constants."""
_FORM = re.compile(
    rf"([^\s\x00-\x1f\x7f]{{1,200}}) (-|[0-9]{{1,9}}(?:x[0-9]{{1,9}}){{0,7}}) ({'|'.join(KINDS)})"
)


class Constant(Struct, frozen=True):
    """A named constant: its shape, and the type of its elements."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * KINDS[self.kind]


def constants_of(model: Mapping[str, Any]) -> tuple[Constant, ...]:
    """Read the list off a `[model]` table, in the order in which their values travel."""
    listed = model.get("constants") or ()
    return tuple(_constant(text) for text in listed)


def text_of(constant: Constant) -> str:
    """Write a constant as such a list has it: "layers.0.router.bias 64 float32"."""
    return f"{constant.name} {'x'.join(map(str, constant.shape)) or '-'} {constant.kind}"


def broken_constants(model: Mapping[str, Any], parameters: Sequence[TensorSpec]) -> str | None:
    """Say what is wrong with the list in a `[model]` table beside these parameters, as half a sentence; None:
    nothing."""
    texts = model.get("constants") or ()
    if bool(texts) != bool(model.get("constants_sum")):
        return "model.constants and model.constants_sum must be stated together"
    for text in texts:
        if not _FORM.fullmatch(text):
            return f'model.constants has "{text}", which is not a name, a shape and a type'
    constants = [_constant(text) for text in texts]
    names = [c.name for c in constants] + [spec.name for spec in parameters]
    if len({*names}) < len(names):
        return "model.constants has a name twice, or that of a parameter"
    if RESERVED in names:
        return f"model.constants has the name {RESERVED}, which files of parameters use"
    # Room for them is made before their sum can be compared. (Of what is empty, too, strides are computed.)
    most = max(LEAST_BYTES, 4 * sum(spec.numel for spec in parameters))
    if sum(math.prod(max(1, size) for size in c.shape) * KINDS[c.kind] for c in constants) > most:
        return "model.constants takes more bytes than the parameters"
    return None


def _constant(text: str) -> Constant:
    name, shape, kind = text.split(" ")
    return Constant(name, () if shape == "-" else tuple(map(int, shape.split("x"))), kind)
