"""Interface of a task: model, version 0, data, loss and figures of one kind of training.

A task is one class, made from a run's manifest. The built-in ones are found by name, others through the
entry-point group `p2pdiloco.tasks` (`tasks.registry`). The daemon asks for shapes and version 0 only; the
rest is the learner's. Importing a task should be cheap: torch is imported inside the methods that need it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from p2pdiloco.config.manifest import Manifest, ModelSection
from p2pdiloco.tensors.sizes import Specs, TensorSpec
from p2pdiloco.util import Frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, device, nn

    from p2pdiloco.tasks.tokens import Tokenizer
    from p2pdiloco.tensors.layout import Tensors

    Indices = NDArray[np.int64]
    Batch = tuple[Tensor, ...]
    """Tensors whose first dimension is the samples; split and moved to the device by the learner."""


Count = Annotated[int, Meta(ge=0)]


class Samples(Protocol):
    """A fixed number of samples: the learner walks through training ones in an order of its own."""

    def __len__(self) -> int:
        """Number of samples."""

    def batch(self, indices: Indices) -> Batch:
        """The samples with these indices (below the length), on the CPU."""


class Place(Frozen):
    """Position of a reader in its shard; it is written to disk now and then."""

    offset: Count = 0
    """Samples or documents of the shard before this place, as its reader counts."""
    taken: Count = 0
    """Samples taken of what is read at once from there."""
    carry: bytes = b""
    """Bytes that were left over by then, in a form of the reader's own. The next shard's reader goes on with
    them."""


class Reader(Protocol):
    """Reads one shard from a place on, in one order for all."""

    @property
    def place(self) -> Place:
        """Place of the next sample."""

    def take(self, samples: int) -> Batch | None:
        """The next so many samples, fewer at the end, then None."""

    def close(self) -> None:
        """End reading."""


@runtime_checkable
class Shards(Protocol):
    """Data without random access, in shards that peers divide among themselves
    (`learner.samples.Allotment`)."""

    count: int
    """Number of shards."""
    identity: str
    """Identity of the data: equal on all nodes where the data is."""

    def open(self, epoch: int, shard: int, place: Place) -> Reader:
        """Begin a shard, or go on with it. Raises: UserError (it cannot be read)."""


class Data(Frozen):
    """Samples that a learner trains on, and samples that nobody trains on."""

    train: Samples | Shards
    heldout: Samples
    note: str = ""
    """Remark for people on how the data was read; empty: none."""


class Task(ABC):
    """A kind of training. Subclasses set `Section` and fill in the abstract methods."""

    Section: ClassVar[type[ModelSection]]
    """Strict schema of the manifest's `[model]` table."""
    counted: ClassVar[str] = "tokens"
    """Name of what `tokens_per_sample` counts, for people."""

    def __init__(self, manifest: Manifest, tokenizer_file: bytes | None) -> None:
        """Decode `manifest.model` by `Section`. `tokenizer_file`: content of the file that `data.tokenizer`
        names, if it names one and text is needed.

        Raises:
            msgspec.ValidationError: it does not fit.
        """
        self.manifest = manifest
        self.tokenizer_file = tokenizer_file
        self.section: Any = msgspec.convert(manifest.model, self.Section, strict=True)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens, or other units, that one sample counts in `inner.tokens_per_step`, merge weights and
        reports."""
        return 1

    def shapes_change(self, device: device, bf16: bool) -> bool:
        """Tell whether shapes inside the model change from pass to pass there, in passes of bf16 or not. A
        compiler hardly gains anything then."""
        return False

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows; 0: it reads no text."""
        return 0

    def tokenizer(self) -> Tokenizer:
        """Load the run's tokenizer.

        Raises:
            UserError: its file is not here, is another one, or has more tokens than the model's vocabulary.
        """
        from p2pdiloco.tasks.tokens import load_tokenizer

        return load_tokenizer(self.manifest.data, self.tokenizer_file, self.vocabulary)

    def broken_rule(self) -> str | None:
        """Find the first rule about `[model]` and other tables that does not hold; returns half a sentence,
        or None."""
        return None

    def specs(self) -> Specs:
        """Name and shape of every parameter, in the model's order.

        This one builds the model on torch's meta device, whose first use imports for seconds; arithmetic is
        quicker, and every node pays at its start."""
        import torch

        from p2pdiloco.tasks.initial import tensor_specs

        with torch.device("meta"):
            return tensor_specs(self.model())

    def pass_bytes(self, samples: int) -> int:
        """Memory that a training pass over so many samples takes beside parameters and gradients, in fp32 on
        a CPU, at least, by arithmetic; 0: unknown."""
        return 0

    def initial_parameters(self) -> Tensors:
        """Version 0: name -> fp32 tensor, the same bytes on every machine (`tasks.initial`).

        This one: matrices uniform with standard deviation 1 / sqrt(inputs), embeddings 0.02, weights of
        norms one, all other vectors zero."""
        from p2pdiloco.tasks.initial import plain_start

        return {spec.name: plain_start(self.manifest.run.seed, spec) for spec in self.specs()}

    @abstractmethod
    def model(self) -> nn.Module:
        """A model whose parameters are as `specs` says, with any values. State beside parameters (the running
        means of batch norm, say) is not merged: do without."""

    @abstractmethod
    def load_data(self, path: str | None) -> Data:
        """Read the manifest's source; `path` is the node's --data.

        Raises:
            UserError: there is no such data, or too little.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Loss to minimise: a scalar, the mean over the batch's samples. May be called under torch.autocast:
        a layer's output may be bf16. It may be recorded, and replayed without its Python: it is a function
        of model and batch alone."""

    def metrics(self, model: nn.Module, batch: Batch) -> Tensors:
        """Figures of a held-out batch, each a mean over its samples. One is "loss"; this one has no other."""
        return {"loss": self.loss(model, batch)}

    def sample(self, model: nn.Module) -> str | None:
        """Text for people to look at, if the task has any."""
        return None

    def written(
        self, model: nn.Module, prompt: str, tokens: int, temperature: float, seed: int
    ) -> str | None:
        """Text that the model writes behind a prompt (temperature 0: always the likeliest token); None: this
        is no model that writes."""
        return None

    def hub_files(self) -> dict[str, bytes] | None:
        """config.json, and whatever else beside the parameters `transformers` needs to load the model; None:
        it knows no such model."""
        return None


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


class Constant(Frozen):
    """A named constant of a run's model, which belongs to it and which no training changes: its shape, and
    the type of its elements.

    Constants are the persistent buffers of a given model (a router's correction of its experts, say). A
    manifest lists them in `[model]`, a text each. Their values come after the parameters in the file of
    version 0, and go into every instance and every export. Neither torch nor the model's library is needed to
    read a list.
    """

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * KINDS[self.kind]


def constants_of(model: Mapping[str, Any]) -> tuple[Constant, ...]:
    """Read the list off a `[model]` table, in the order in which their values travel."""
    return tuple(_constant(text) for text in model.get("constants") or ())


def text_of(constant: Constant) -> str:
    """Write a constant as such a list has it: "layers.0.router.bias 64 float32"."""
    return f"{constant.name} {shape_text(constant.shape)} {constant.kind}"


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape as such lists have it: "64x32"; "-" of a scalar."""
    return "x".join(map(str, shape)) or "-"


def shape_of(text: str) -> tuple[int, ...]:
    """Read what `shape_text` wrote."""
    return () if text == "-" else tuple(map(int, text.split("x")))


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
    return Constant(name, shape_of(shape), kind)
