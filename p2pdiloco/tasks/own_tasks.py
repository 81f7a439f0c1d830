"""The tasks own-loop and image-classification.

own-loop is a model that programs train in loops of their own (`p2pdiloco.Session`). The manifest has the
names and shapes of its parameters, which is all that a daemon needs; version 0 is given (`run.initial`).
Model, data, loss and optimizer are the programs'. image-classification is a vision transformer or a
convolutional network (`tasks.images`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, field

from p2pdiloco.config.manifest import STAGES, Digest, ImageSection, ModelSection, first_broken, table
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.task import Data, Listed, Task, broken_constants, shape_of, shape_text
from p2pdiloco.tensors.sizes import Specs, TensorSpec, kept_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from p2pdiloco.tasks.task import Batch
    from p2pdiloco.tensors.layout import Tensors

OWN_LOOP = "own-loop"
MAX_PARAMETERS = 4096
EMBEDDING = " embedding"
_FORM = re.compile(r"([^\s\x00-\x1f\x7f]{1,200}) (-|[0-9]{1,12}(?:x[0-9]{1,12}){0,7})( embedding)?")
_WHY = "the run is trained by programs with a loop of their own"


class GivenSection(ModelSection, kw_only=True, omit_defaults=True):
    """Names and shapes of a given model's parameters and constants."""

    comments: ClassVar[dict[str, str]] = {
        "parameters": "Name and shape of every parameter, such as w 64x32; run new and new_run write them.",
        "constants": "Name, shape and type of what else belongs to the model, and is not trained.",
        "constants_sum": "SHA-256 of the constants' values.",
    }
    parameters: Annotated[
        list[Annotated[str, Meta(max_length=320)]], Meta(min_length=1, max_length=MAX_PARAMETERS)
    ]
    constants: Listed = field(default_factory=list)
    constants_sum: Digest = ""

    def broken(self) -> str | None:
        """Say what is wrong with both lists, as half a sentence; None: nothing."""
        for text in self.parameters:
            if not _FORM.fullmatch(text):
                return f'model.parameters has "{text}", which is not a name and a shape'
        specs = specs_from_texts(self.parameters)
        if len({spec.name for spec in specs}) < len(specs):
            return "model.parameters has one name twice"
        return broken_constants(table(self), specs)


class OwnLoop(Task):
    """The task own-loop."""

    Section: ClassVar[type[ModelSection]] = GivenSection
    section: GivenSection

    def broken_rule(self) -> str | None:
        if not self.manifest.run.initial:
            return "run.initial must name version 0: p2pdiloco.new_run writes such a run.toml"
        return self.section.broken()

    def specs(self) -> Specs:
        return specs_from_texts(self.section.parameters)

    def model(self) -> nn.Module:
        raise UserError(
            f"{_WHY}: a node alone cannot", "use p2pdiloco.Session in yours, see docs/topics/session.md"
        )

    def load_data(self, path: str | None) -> Data:
        raise UserError(f"{_WHY}: their data is not known here")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise UserError(f"{_WHY}: their loss is not known here")


def section_of(specs: Sequence[TensorSpec]) -> GivenSection:
    """`[model]` of a run that trains such parameters."""
    return GivenSection(parameters=texts_from_specs(specs))


def texts_from_specs(specs: Sequence[TensorSpec]) -> list[str]:
    """Write shapes as `[model]` has them: "layer.weight 64x32", "embed.weight 256x64 embedding"."""
    return [f"{spec.name} {shape_text(spec.shape)}{EMBEDDING if spec.embedding else ''}" for spec in specs]


def specs_from_texts(texts: Sequence[str]) -> Specs:
    """Read names and shapes off such texts."""
    return tuple(map(_spec, texts))


def _spec(text: str) -> TensorSpec:
    embedding = text.endswith(EMBEDDING)
    name, shape = text.removesuffix(EMBEDDING).split(" ", 1)
    return TensorSpec(name, shape_of(shape), embedding=embedding)


Shapes = dict[str, tuple[int, ...]]


class ImageClassification(Task):
    """The task image-classification. A sample is an image and counts one token. Figures: "loss" in nats,
    "accuracy"."""

    Section: ClassVar[type[ModelSection]] = ImageSection
    section: ImageSection
    counted: ClassVar[str] = "images"

    def broken_rule(self) -> str | None:
        model = self.section
        is_vit, named = model.architecture == "vit", len(model.class_folders)
        source = self.manifest.data.source
        rules = (
            (
                source in ("embedded", "files"),
                f'data.source must be embedded or files for images, it is "{source}"',
            ),
            (
                not is_vit or model.width % model.heads == 0,
                f"model.width must be a multiple of model.heads ({model.heads}), it is {model.width}",
            ),
            (
                not is_vit or model.image_pixels % model.patch_pixels == 0,
                f"model.image_pixels must be a multiple of model.patch_pixels ({model.patch_pixels}), "
                f"it is {model.image_pixels}",
            ),
            (
                named in (0, model.classes) and len(set(model.class_folders)) == named,
                f"model.class_folders must name {model.classes} different folders (model.classes) or none",
            ),
            (
                not any("/" in name or name.startswith(".") for name in model.class_folders),
                "model.class_folders must be names of folders, without / and not hidden",
            ),
        )
        return first_broken(rules)

    def specs(self) -> Specs:
        """Names and shapes of the parameters, by arithmetic: the daemon never builds a model."""
        shapes = vit_shapes(self.section) if self.section.architecture == "vit" else cnn_shapes(self.section)
        return tuple(
            TensorSpec(name, shape, embedding=name == "positions.weight") for name, shape in shapes.items()
        )

    def pass_bytes(self, samples: int) -> int:
        model = self.section
        if model.architecture == "vit":
            return kept_bytes(self.specs(), samples * (model.image_pixels // model.patch_pixels) ** 2)
        kept = 0
        for spec in self.specs():  # each stage of convolutions has half of the side of the one before
            if len(spec.shape) < 4:
                continue
            _, _, rest = spec.name.rpartition("blocks.")
            index = int(rest.partition(".")[0]) if rest[:1].isdigit() else 0
            kept += kept_bytes([spec], samples * (model.image_pixels >> index // model.layers) ** 2)
        return kept

    def model(self) -> nn.Module:
        from p2pdiloco.tasks.images import ConvNet, VisionTransformer

        return (VisionTransformer if self.section.architecture == "vit" else ConvNet)(self.section)

    def load_data(self, path: str | None) -> Data:
        from p2pdiloco.tasks.images import load_images

        return load_images(self.manifest.data, self.section, path)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.metrics(model, batch)["loss"]

    def metrics(self, model: nn.Module, batch: Batch) -> Tensors:
        from torch.nn import functional

        from p2pdiloco.tasks.images import accuracy

        images, labels = batch
        logits = model(images).float()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}


def vit_shapes(section: ImageSection) -> Shapes:
    """Parameters of `tasks.images.VisionTransformer`, in its order."""
    width, patch = section.width, section.patch_pixels
    block: Shapes = {
        **_affine("attention_norm", width),
        "attention_in.weight": (3 * width, width),
        "attention_out.weight": (width, width),
        **_affine("mlp_norm", width),
        "mlp_in.weight": (4 * width, width),
        "mlp_in.bias": (4 * width,),
        "mlp_out.weight": (width, 4 * width),
        "mlp_out.bias": (width,),
    }
    return {
        "patches.weight": (width, section.channels, patch, patch),
        "positions.weight": ((section.image_pixels // patch) ** 2, width),
        **{f"blocks.{i}.{name}": shape for i in range(section.layers) for name, shape in block.items()},
        **_affine("norm", width),
        "head.weight": (section.classes, width),
        "head.bias": (section.classes,),
    }


def cnn_shapes(section: ImageSection) -> Shapes:
    """Parameters of `tasks.images.ConvNet`, in its order."""
    shapes: Shapes = {"stem.weight": (section.width, section.channels, 3, 3)}
    before = section.width
    for index in range(STAGES * section.layers):
        width = section.width << (index // section.layers)
        block: Shapes = {
            **_affine("norm1", before),
            "conv1.weight": (width, before, 3, 3),
            **_affine("norm2", width),
            "conv2.weight": (width, width, 3, 3),
            **({"shortcut.weight": (width, before, 1, 1)} if width != before else {}),
        }
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
        before = width
    last = {"head.weight": (section.classes, before), "head.bias": (section.classes,)}
    return shapes | _affine("norm", before) | last


def _affine(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
