"""A p2pdiloco task of one's own: a small network learns the sine of a number.

Everything that a task has to say is here. What is not (specs, version 0) is the base class's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional

from p2pdiloco.config.manifest import ModelSection
from p2pdiloco.tasks.task import Data, Task

TRAIN_POINTS, HELDOUT_POINTS = 4096, 256


class RegressionSection(ModelSection, frozen=True, kw_only=True):
    """What the manifest's [model] may say. Anything else is an error in one sentence."""

    comments: ClassVar[dict[str, str]] = {"hidden": "Width of the hidden layer."}
    hidden: Annotated[int, Meta(ge=1, le=4096)] = 32


class Points:
    """Points of the sine: the samples. Every index below the length is one."""

    def __init__(self, count: int, offset: float) -> None:
        self._x = 6 * (np.arange(count) + offset) / count - 3

    def __len__(self) -> int:
        return len(self._x)

    def batch(self, indices):
        x = torch.from_numpy(self._x[indices]).float().unsqueeze(1)
        return x, x.sin()


class Regression(Task):
    """Named `regression` by the entry point in pyproject.toml."""

    Section = RegressionSection

    def model(self) -> nn.Module:
        hidden = self.section.hidden
        return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def load_data(self, path: str | None) -> Data:
        return Data(Points(TRAIN_POINTS, 0.0), Points(HELDOUT_POINTS, 0.5))

    def loss(self, model, batch):
        x, y = batch
        return functional.mse_loss(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        error = model(x) - y
        return {"loss": error.square().mean(), "mean_error": error.abs().mean()}

    def sample(self, model) -> str:
        return f"sin(1) is about {model(torch.tensor([[1.0]])).item():.3f}"
