"""Images for an image classifier, for training and held out.

Sources. "embedded" are scikit-learn's digits, 1797 grey ones of 8 x 8 pixels, which come with that package.
"files" is a folder of folders, of which each is a class. An image is held out if the hash of its file's bytes
(or, of a digit, its number) says so, wherever it lies. All images lie in memory, scaled to the manifest's
size, a byte for a pixel and channel.

Models. `VisionTransformer` and `ConvNet` are small. Their norms keep no running state: what is not a
parameter is not merged.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import STAGES, DataSection, ImageSection
from p2pdiloco.errors import DataError, UserError, first_line, needing
from p2pdiloco.tasks.documents import check_path, is_heldout
from p2pdiloco.tasks.task import Data
from p2pdiloco.tasks.transformer import attention

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Indices

FILES_MAX_BYTES = 4 << 30
DIGITS = 10
_DIGIT_RANGE = 16
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}

Pixels = NDArray[Any]


class Images:
    """Labelled images: `tasks.task.Samples`. A batch is fp32 (n, channels, side, side) from -1 to 1, and
    labels, int64 (n)."""

    def __init__(self, pixels: Pixels, labels: Pixels) -> None:
        """Take pixels, uint8 (n, channels, side, side), and labels, int64 (n)."""
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Indices) -> Batch:
        """The images with these indices, and their classes."""
        pixels = torch.from_numpy(self.pixels[indices]).float() / 127.5 - 1
        return pixels, torch.from_numpy(self.labels[indices])


def load_images(section: DataSection, model: ImageSection, path: str | None) -> Data:
    """Read all images of the manifest's source into memory.

    Raises:
        UserError: scikit-learn (or Pillow) is missing; no --data for source "files"; there are no images,
            none for one side of the split, too many, damaged ones, or not the manifest's classes.
    """
    if section.source == "embedded":
        pixels, labels, keys = _digits(model)
    elif path is None:
        raise DataError("this run trains on each node's own images, and none are given", "add --data FOLDER")
    else:
        pixels, labels, keys = _folders(Path(path), model)
    held = np.array([is_heldout(key, section.heldout_percent) for key in keys])
    if held.all() or not held.any():
        raise DataError(
            f"{len(set(keys))} different images are too few to train on some and hold out "
            f"{section.heldout_percent} %",
            "give more images with --data",
        )
    return Data(Images(pixels[~held], labels[~held]), Images(pixels[held], labels[held]))


def _digits(model: ImageSection) -> tuple[Pixels, Pixels, list[str]]:
    with needing("the embedded images need the package scikit-learn", "vision", DataError):
        from sklearn.datasets import load_digits
    if model.classes != DIGITS:
        raise DataError(f"the embedded images have {DIGITS} classes, model.classes is {model.classes}")
    found = load_digits()
    grey = (found.images * (255 / _DIGIT_RANGE)).round().astype(np.uint8)
    pixels = np.stack([_scaled(_pillow().fromarray(image), model) for image in grey])
    return pixels, found.target.astype(np.int64), [str(index) for index in range(len(grey))]


def _folders(root: Path, model: ImageSection) -> tuple[Pixels, Pixels, list[str]]:
    files = _files(root, _class_folders(root, model))
    size = model.channels * model.image_pixels**2
    if len(files) * size > FILES_MAX_BYTES:
        raise DataError(f"{root} has more than {FILES_MAX_BYTES >> 30} GiB of images", "give fewer")
    if not files:
        raise DataError(f"there is no image in the folders of {root}", "check --data")
    pixels = np.empty((len(files), model.channels, model.image_pixels, model.image_pixels), dtype=np.uint8)
    keys = []
    for index, (path, _) in enumerate(files):
        pixels[index], key = _read(path, model)
        keys.append(key)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return pixels, labels, keys


def _class_folders(root: Path, model: ImageSection) -> Sequence[str]:
    """By class. Some of those that the manifest names may be missing here."""
    check_path(root)
    try:
        found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise UserError(f"cannot read the data path {root}: {error.strerror}", "check --data") from error
    named = model.class_folders
    if not named and len(found) != model.classes:
        folders = "1 folder" if len(found) == 1 else f"{len(found)} folders"
        raise DataError(
            f"{root} has {folders}, but the run has {model.classes} classes",
            "each folder is a class; model.class_folders in the manifest may name them",
        )
    strange = [name for name in found if named and name not in named]
    if strange:
        raise DataError(f'the folder "{strange[0]}" of {root} is no class of this run', "remove it")
    return named or found


def _files(root: Path, folders: Sequence[str]) -> list[tuple[Path, int]]:
    """Image files below each class's folder with its number, sorted; no hidden ones."""
    return [
        (path, label)
        for label, folder in enumerate(folders)
        for path in sorted((root / folder).rglob("*"))
        if path.suffix.lower() in _SUFFIXES and path.name[0] != "." and path.is_file()
    ]


def _read(path: Path, model: ImageSection) -> tuple[Pixels, str]:
    """Read an image as `_scaled` does; returns the digest of the file, too: pixels differ with the release of
    Pillow."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            # Of an image so large that it may be made to exhaust memory.
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with path.open("rb") as file:
                with pillow.open(file) as image:
                    pixels = _scaled(image, model)
                file.seek(0)
                return pixels, hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError, Warning) as error:
        raise DataError(
            f"the image {path} cannot be read: {first_line(error)}", "remove it or mend it"
        ) from error


def _scaled(image: Any, model: ImageSection) -> Pixels:
    """To uint8 (channels, side, side)."""
    side = model.image_pixels
    image = image.convert("L" if model.channels == 1 else "RGB")
    if image.size != (side, side):
        image = image.resize((side, side), _pillow().Resampling.BILINEAR)
    values = np.asarray(image, dtype=np.uint8)
    return values[None] if model.channels == 1 else values.transpose(2, 0, 1)


def _pillow() -> Any:
    with needing("images need the package Pillow", "vision", DataError):
        from PIL import Image
    return Image


# Parameters are created in the order of `tasks.own_tasks.vit_shapes` and `cnn_shapes`.

GROUPS = 8
"""Groups of channels in a group norm (1 where the width is no multiple)."""


class VisionTransformer(nn.Module):
    """Images (n, channels, side, side) to logits (n, classes): 2010.11929, with the mean of all patches
    instead of a class token."""

    def __init__(self, section: ImageSection) -> None:
        super().__init__()
        width, patch = section.width, section.patch_pixels
        self.patches = nn.Conv2d(section.channels, width, patch, stride=patch, bias=False)
        self.positions = nn.Embedding((section.image_pixels // patch) ** 2, width)
        self.blocks = nn.ModuleList(PatchBlock(width, section.heads) for _ in range(section.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, section.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


class PatchBlock(nn.Module):
    """Attention, then MLP, each on the normalised stream and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention_in(self.attention_norm(x)).unflatten(2, (3, self._heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attention(query, key, value, causal=False)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class ConvNet(nn.Module):
    """Images (n, channels, side, side) to logits (n, classes): residual (1603.05027), with group norm.

    `section.layers` blocks in each of three stages of width, twice and four times the width."""

    def __init__(self, section: ImageSection) -> None:
        super().__init__()
        widths = [section.width << stage for stage in range(STAGES)]
        self.stem = nn.Conv2d(section.channels, widths[0], 3, padding=1, bias=False)
        blocks = []
        for stage, width in enumerate(widths):
            for index in range(section.layers):
                shrinks = stage > 0 and index == 0
                blocks.append(ResidualBlock(width // 2 if shrinks else width, width, shrinks))
        self.blocks = nn.ModuleList(blocks)
        self.norm = group_norm(widths[-1])
        self.head = nn.Linear(widths[-1], section.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(functional.relu(self.norm(x)).mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3, each after norm and ReLU, added to what came in."""

    def __init__(self, before: int, width: int, shrinks: bool) -> None:
        super().__init__()
        stride = 2 if shrinks else 1
        self.norm1 = group_norm(before)
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = group_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, width, 1, stride=stride, bias=False) if shrinks else None

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(x))
        around = x if self.shortcut is None else self.shortcut(inner)
        inner = self.conv1(inner)
        out: Tensor = around + self.conv2(functional.relu(self.norm2(inner)))
        return out


def group_norm(width: int) -> nn.GroupNorm:
    """Make a group norm of `GROUPS` groups, or of one where the width is no multiple."""
    return nn.GroupNorm(GROUPS if width % GROUPS == 0 else 1, width)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of images whose likeliest class is theirs."""
    return (logits.argmax(dim=-1) == labels).to(torch.float32).mean()
