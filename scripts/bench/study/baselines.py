"""Baselines of a swarm: one data-parallel process, and DiLoCo as simple as it can be.

Both take the same samples in the same inner steps as the learners of a swarm of the same names, from the same
version 0. Nothing of production's merge, codecs, fragments or outer step is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.learner.loop import evaluate, heldout_batch
from p2pdiloco.learner.samples import SampleStream
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from study.computing import Computing
from study.data import acquainted, data_of

if TYPE_CHECKING:
    from torch import nn

    from p2pdiloco.tasks.task import Batch, Task

Curve = list[tuple[int, float]]
"""(inner step, held-out loss)."""


class Work(Struct, frozen=True):
    """Task that a swarm is given, too."""

    manifest: Manifest
    names: list[str]
    """Names of the learners."""
    steps: int
    """Inner steps."""
    evaluate_every: int
    heldout_tokens: int
    computing: Computing


class _Together:
    """The batches of several learners as one."""

    def __init__(self, streams: list[SampleStream]) -> None:
        self._streams = streams

    def take(self, samples: int) -> Batch:
        """Take as many samples from each."""
        parts = [stream.take(samples // len(self._streams)) for stream in self._streams]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def used(self) -> None:
        """Note that what was taken last has gone into the parameters."""
        for stream in self._streams:
            stream.used()


def data_parallel(work: Work) -> Curve:
    """One process whose batch is that of all learners together, with the manifest's inner learning rate."""
    manifest, names = work.manifest, work.names
    tokens = len(names) * manifest.inner.tokens_per_step
    together = msgspec.structs.replace(
        manifest, inner=msgspec.structs.replace(manifest.inner, tokens_per_step=tokens)
    )
    task = task_of(together)
    data, model = data_of(task), task.model().to(work.computing.device)
    _start(named_parameters(model), task.initial_parameters())
    training = work.computing.training(task, model, data.train, names[0])
    samples = manifest.inner.tokens_per_step // task.tokens_per_sample
    streams = {name: SampleStream(data.train, manifest.run.seed, name, samples) for name in names}
    acquainted(streams)
    training.stream = _Together(list(streams.values()))  # type: ignore[assignment]
    heldout = heldout_batch(task, data.heldout, work.heldout_tokens)
    return _curve(work, training.step, lambda: _loss(work, task, model, heldout))


def oracle(work: Work) -> Curve:
    """Synchronous DiLoCo: every H inner steps the fp32 mean of all pseudo-gradients, an outer Nesterov step
    with the manifest's momentum warm-up, and everybody goes on from there. No delay, no codec, no fragments.
    Its loss is measured where a swarm's is, without Nesterov's look-ahead."""
    manifest, names = work.manifest, work.names
    task = task_of(manifest)
    data, outer = data_of(task), manifest.outer
    computing = work.computing
    models = [task.model().to(computing.device) for _ in names]
    theta = {name: value.clone() for name, value in task.initial_parameters().items()}
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    result = dict(theta)
    for model in models:
        _start(named_parameters(model), theta)
    made_of = zip(models, names, strict=True)
    learners = [computing.training(task, model, data.train, name) for model, name in made_of]
    acquainted({name: learner.stream for name, learner in zip(names, learners, strict=True)})
    evaluated = task.model().to(computing.device)
    heldout = heldout_batch(task, data.heldout, work.heldout_tokens)
    made = [0, 0]

    def step() -> None:
        for learner in learners:
            learner.run_is_at(made[0] * len(learners) * manifest.inner.tokens_per_step)
            learner.step()
        made[0] += 1
        if made[0] % manifest.sync.inner_steps:
            return
        warm = min(1.0, made[1] / outer.momentum_warmup_merges) if outer.momentum_warmup_merges else 1.0
        made[1] += 1
        mu = outer.momentum * warm
        locals_ = [named_parameters(model) for model in models]
        for name, value in theta.items():
            delta = torch.stack([value - local[name].detach().cpu() for local in locals_]).mean(dim=0)
            momentum[name].mul_(mu).add_(delta)
            result[name] = value - outer.learning_rate * delta
            value.sub_(outer.learning_rate * (delta + mu * momentum[name]))
        for local in locals_:
            _start(local, theta)

    def loss() -> float:
        _start(named_parameters(evaluated), result)
        return _loss(work, task, evaluated, heldout)

    return _curve(work, step, loss)


def _loss(work: Work, task: Task, model: nn.Module, heldout: Batch) -> float:
    with work.computing.passes():
        return evaluate(task, model, heldout).loss


def _curve(work: Work, step: Callable[[], object], loss: Callable[[], float]) -> Curve:
    found = []
    for number in range(1, work.steps + 1):
        step()
        if number % work.evaluate_every == 0 or number == work.steps:
            found.append((number, loss()))
    return found


@torch.no_grad()
def _start(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
