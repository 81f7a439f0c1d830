"""A sharded learner of one process: what FSDP2 does to a model's passes, without others to start."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from p2pdiloco.learner import optimizer
from p2pdiloco.learner.channel import PassOptions
from p2pdiloco.learner.inner_step import Passes
from p2pdiloco.tasks.task import Task


@contextmanager
def one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.distributed, of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def assert_same_gradients(task: Task, model: nn.Module, batch: tuple[torch.Tensor, ...], blocks: int) -> None:
    """Sharded or not; `blocks` of it are whole one at a time. The model is sharded afterwards."""
    plain = deepcopy(model)
    assert len(optimizer.blocks_of(model)) == blocks
    optimizer.shard(model, torch.device("cpu"))
    losses = []
    for each, together in ((plain, 1), (model, 2)):  # of two, whose other has no samples
        samples = len(batch[0])
        passes = Passes(task, each, samples, PassOptions(), together, bf16=False)
        losses.append(passes.gradients(batch, samples))
    assert losses[0] == losses[1]
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and optimizer.is_shared_out(gradient), name
        torch.testing.assert_close(optimizer.own(gradient), expected[name].grad)
