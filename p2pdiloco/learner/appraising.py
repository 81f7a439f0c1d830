"""Appraisal of contributions: what a step along each of two does to the loss, on the same samples.

It begins at the parameters that a version was made from, with the newest versions of all other fragments.
There contributions still help: a version goes further than any of them, and beyond it what was good in them
may be too much. Both go as far as ours is long, so length wins nothing. The difference between a step that
way and the opposite one does not depend on the curvature, and is measured best.

Rules: docs/protocol/loss-audits.md, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from p2pdiloco.errors import StorageError
from p2pdiloco.learner.channel_messages import Appraise, Appraised
from p2pdiloco.learner.evaluate import evaluate
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tensors.layout import FragmentLayout, scatter
from p2pdiloco.tensors.vault import Appraisable, read

if TYPE_CHECKING:
    from p2pdiloco.learner.loop import Training
    from p2pdiloco.tasks.task import Batch, Task

TOKENS = 512, 16_384
"""Least and most tokens of each of the two batches, about; between them, those of an inner step. Four
forward passes over each cost less than three such steps."""


class Appraiser:
    """Appraiser of one learner process.

    Args:
        global_model: puts the global parameters into the second instance of the model, and returns it.
        heldout: samples that nobody trains on.
    """

    def __init__(
        self,
        training: Training,
        layouts: Sequence[FragmentLayout],
        heldout: Batch,
        global_model: Callable[[], nn.Module],
    ) -> None:
        self._training, self._layouts = training, layouts
        self._heldout, self._global_model = heldout, global_model
        self._rng = np.random.default_rng()

    def appraise(self, command: Appraise) -> Appraised:
        """Measure two contributions. What cannot be measured has no figures."""
        layout = self._layouts[command.fragment]
        try:
            given = read(Path(command.path), self._training.task.manifest.codec.contribution, layout.numel)
        except StorageError:
            return Appraised(command.path)
        batches, same_data = self._batches(command.peer)
        model = self._global_model()
        training = self._training
        with training.meanwhile():
            found = gains(training.task, model, layout, given, batches)
        return Appraised(command.path, *found, same_data)

    def _batches(self, peer: str) -> tuple[list[Batch], bool]:
        """Draw held-out samples, and samples of that peer's share of the data, if it has one that is known;
        else any that we train on. Of a stream none can be drawn."""
        tokens = min(max(TOKENS[0], self._training.section.tokens_per_step), TOKENS[1])
        count = max(1, tokens // self._training.task.tokens_per_sample)
        drawn = torch.from_numpy(self._rng.permutation(len(self._heldout[0]))[:count])
        batches: list[Batch] = [tuple(column[drawn] for column in self._heldout)]
        stream = self._training.stream
        share = stream.share_of(peer, count, self._rng)
        more = share if share is not None else stream.anywhere(count, self._rng)
        return batches + ([] if more is None else [more]), share is not None


def gains(
    task: Task,
    model: nn.Module,
    layout: FragmentLayout,
    given: Appraisable,
    batches: Sequence[Batch],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure by how much each batch's loss is smaller after a step along (theirs, ours) than after one the
    other way, in fp32: gains are small. The fragment of the model is changed."""
    found, length = [], float(given.ours.norm())
    for way in (given.theirs, given.ours):
        own, losses = float(way.norm()), []
        scale = length / own if own > 0.0 else 1.0
        for sign in (1.0, -1.0):
            # One end at a time, and no copy of the way (`tensors.sizes.appraisal_bytes`).
            scatter(torch.add(given.start, way, alpha=sign * scale), layout, named_parameters(model))
            losses.append([evaluate(task, model, batch, precision="fp32").loss for batch in batches])
        found.append(tuple(before - after for before, after in zip(*losses, strict=True)))
    return found[0], found[1]
