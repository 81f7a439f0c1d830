"""Tables `[model]` of the built-in tasks: data only, so that manifests need no torch.

A task of somebody else's brings a table like these with it (`tasks.task.Task.Section`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    pass

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}\Z"
PACKAGE_PATTERN = r"^[A-Za-z0-9._-]{0,100}\Z"
DATASET_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?\Z"
"""Pattern with an owner: `datasets` takes a bare name like "text" for all such files of the current
folder."""
TOKENIZER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?\Z"
SHA256_PATTERN = r"^([0-9a-f]{64})?\Z"
Value = bool | int | float | str | list[str]
"""Type of a value in a `[model]` table."""
Positive = Annotated[int, Meta(ge=1, le=65536)]
Folder = Annotated[str, Meta(min_length=1, max_length=255)]
BYTE_VALUES = 256
BYTES = "bytes"
"""The tokenizer of raw bytes."""
SWIGLU_RATIO = 8 / 3
"""Hidden width over width at which three matrices have the parameters of the usual two of ratio 4."""
HIDDEN_MULTIPLE = 8
VOCABULARY_MULTIPLE = 64
"""Multiple of new vocabularies: a GPU's tensor cores want rows of 8 numbers (of 2 bytes) or a multiple, and
work on larger tiles."""


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the manifest: immutable, unknown keys refused. (msgspec inherits all but `kw_only`.)"""


class ModelSection(Section, frozen=True):
    """Base of what tasks read their `[model]` with; keys are numbers, strings, arrays of strings."""

    comments: ClassVar[dict[str, str]] = {}
    """Comments of run.toml, by key."""


class CausalLMSection(ModelSection, frozen=True, kw_only=True):
    """A transformer in Llama's form; with `experts`, in Mixtral's."""

    comments: ClassVar[dict[str, str]] = {
        "layers": "Transformer blocks.",
        "heads": "Attention heads.",
        "key_value_heads": "Heads of keys and values, shared by several queries' heads; 0: as many as heads.",
        "width": "Width of the residual stream; a multiple of heads.",
        "hidden_width": "Width inside the feed-forward part; 0: 8/3 of width.",
        "context_tokens": "Tokens that the model sees at once.",
        "vocabulary": "Token ids; 256 is raw bytes.",
        "tied_head": "Whether the output head is the token embedding.",
        "rope_base": "Base of the rotary positions' frequencies.",
        "norm_epsilon": "What the norms add to the mean square.",
        "experts": "Feed-forward parts per block, of which each token uses some; 0: one, dense.",
        "experts_per_token": "How many of them a token uses.",
        "balance_weight": "Weight of the loss that spreads tokens evenly over experts.",
    }
    layers: Annotated[int, Meta(ge=1, le=256)]
    heads: Annotated[int, Meta(ge=1, le=256)]
    key_value_heads: Annotated[int, Meta(ge=0, le=256)] = 0
    width: Annotated[int, Meta(ge=8, le=65536)]
    hidden_width: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    context_tokens: Annotated[int, Meta(ge=8, le=131072)]
    vocabulary: Annotated[int, Meta(ge=2, le=1 << 20)] = BYTE_VALUES
    tied_head: bool = True
    rope_base: Annotated[float, Meta(ge=1, le=1e9)] = 10_000.0
    norm_epsilon: Annotated[float, Meta(gt=0, le=0.1)] = 1e-6
    experts: Annotated[int, Meta(ge=0, le=1024)] = 0
    experts_per_token: Annotated[int, Meta(ge=1, le=64)] = 2
    balance_weight: Annotated[float, Meta(ge=0, le=10)] = 0.01

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def key_value_width(self) -> int:
        """Width of all heads of keys (or of values) together."""
        return (self.key_value_heads or self.heads) * self.head_width

    @property
    def feed_forward_width(self) -> int:
        """Hidden width of one feed-forward part, or of one expert."""
        if self.hidden_width:
            return self.hidden_width
        return -int(-SWIGLU_RATIO * self.width // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


class ImageSection(ModelSection, frozen=True, kw_only=True):
    """A small vision transformer, or a convolutional network."""

    comments: ClassVar[dict[str, str]] = {
        "architecture": "vit: a vision transformer; cnn: a residual convolutional network.",
        "classes": "Kinds of images.",
        "class_folders": "Their folders' names, in order; empty: each node's own, sorted, exactly so many.",
        "image_pixels": "Images are scaled to squares of this side.",
        "channels": "1: grey, 3: colour.",
        "layers": "Blocks.",
        "width": "Width of the residual stream (cnn: of its first third).",
        "heads": "Attention heads (cnn: unused).",
        "patch_pixels": "Side of the squares that the transformer reads (cnn: unused).",
    }
    architecture: Literal["vit", "cnn"] = "vit"
    classes: Annotated[int, Meta(ge=2, le=65536)]
    class_folders: list[Folder] = []
    image_pixels: Annotated[int, Meta(ge=4, le=1024)]
    channels: Literal[1, 3] = 3
    layers: Annotated[int, Meta(ge=1, le=256)]
    width: Annotated[int, Meta(ge=8, le=65536)]
    heads: Annotated[int, Meta(ge=1, le=256)] = 4
    patch_pixels: Annotated[int, Meta(ge=1, le=256)] = 4


def vocabulary_for(tokens: int) -> int:
    """The vocabulary of a new model for a tokenizer of so many tokens: ids beyond them never occur."""
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def table(section: ModelSection) -> dict[str, Any]:
    """The struct as `Manifest.model`: every key, with its value."""
    found = msgspec.to_builtins(section)
    assert isinstance(found, dict)
    return found


STAGES = 3
"""Parts of the convolutional network: from the second on, each halves the image and doubles the width."""
