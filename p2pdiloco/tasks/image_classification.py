"""The task image-classification: a vision transformer or a convolutional network."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from p2pdiloco.config.manifest import STAGES, ImageSection, ModelSection
from p2pdiloco.tasks.task import Data, Task
from p2pdiloco.tensors.sizes import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from p2pdiloco.tasks.task import Batch

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
        return next((sentence for holds, sentence in rules if not holds), None)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Names and shapes of the parameters, by arithmetic: the daemon never builds a model."""
        shapes = vit_shapes(self.section) if self.section.architecture == "vit" else cnn_shapes(self.section)
        return tuple(
            TensorSpec(name, shape, embedding=name == "positions.weight") for name, shape in shapes.items()
        )

    def model(self) -> nn.Module:
        from p2pdiloco.tasks.models.vision import ConvNet, VisionTransformer

        return (VisionTransformer if self.section.architecture == "vit" else ConvNet)(self.section)

    def load_data(self, path: str | None) -> Data:
        from p2pdiloco.tasks.data.images import load_images

        return load_images(self.manifest.data, self.section, path)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.metrics(model, batch)["loss"]

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from torch.nn import functional

        from p2pdiloco.tasks.models.vision import accuracy

        images, labels = batch
        logits = model(images).float()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}


def vit_shapes(section: ImageSection) -> Shapes:
    """Parameters of `vision.VisionTransformer`, in its order."""
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
    """Parameters of `vision.ConvNet`, in its order."""
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
    last: Shapes = {"head.weight": (section.classes, before), "head.bias": (section.classes,)}
    return shapes | _affine("norm", before) | last


def _affine(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
