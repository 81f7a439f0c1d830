"""Two small image classifiers. Norms keep no running state: what is not a parameter is not merged.

Parameters are created in the order of `image_classification.vit_shapes` and `cnn_shapes`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import STAGES, ImageSection
from p2pdiloco.tasks.models.cpu_bf16 import attention

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
