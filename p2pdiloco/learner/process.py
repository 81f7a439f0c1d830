"""Builds a learner from its `Start` command, and runs it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from torch import Tensor

from p2pdiloco.errors import StorageError, invariant
from p2pdiloco.learner import checkpoint
from p2pdiloco.learner.channel import LearnerEnd, Ready, Start
from p2pdiloco.learner.device import choose_device, configure, step_back, threads_of
from p2pdiloco.learner.evaluate import heldout_batch
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.loop import StepReport, Training, train
from p2pdiloco.learner.mailbox import Mailbox
from p2pdiloco.learner.ranks import (
    ALONE,
    Boundary,
    Distributed,
    RankLost,
    Ranks,
    count_ranks,
    device_of,
)
from p2pdiloco.learner.siblings import Siblings
from p2pdiloco.tasks.parameters import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Data
from p2pdiloco.tasks.tokens import read_tokenizer
from p2pdiloco.tensors.exchange import Exchange
from p2pdiloco.tensors.layout import FragmentLayout, plan_fragments


class Parts(Struct, frozen=True):
    """What every process of a learner builds in the same way."""

    threads: int
    data: Data | None
    """Rank 0 reads it and deals."""
    layouts: tuple[FragmentLayout, ...]
    training: Training
    ranks: Ranks

    @property
    def params(self) -> dict[str, Tensor]:
        """The model's parameters by name."""
        return named_parameters(self.training.model)


def run(channel: LearnerEnd, start: Start, exchange_fd: int) -> None:
    """Train until the daemon says stop.

    Raises:
        UserError: device or data cannot be used.
        TrainingDiverged: see there.
        RankLost: another process of this learner is gone.
        ChannelBroken: the daemon is gone.
    """
    count = count_ranks(start.options.nproc, start.options.device)
    if count == 1:
        _lead(channel, start, exchange_fd, _build(start))
        return
    with Siblings(start, count) as siblings:
        try:
            parts = _build(start, 0, count, siblings.folder)
            siblings.met()
            _lead(channel, start, exchange_fd, parts)
        except RankLost as error:
            raise RankLost(siblings.why() or str(error)) from error


def follow(start: Start, rank: int, count: int, folder: Path) -> None:
    """Train as another process of a learner until rank 0 says stop.

    Raises:
        RankLost: rank 0 is gone, or another one.
        UserError, TrainingDiverged: as in `run`.
    """
    parts = _build(start, rank, count, folder)
    training, layouts, params = parts.training, parts.layouts, parts.params
    told = parts.ranks.boundary(None, len(layouts))
    if told.restored and start.restore_path is not None:
        checkpoint.restore_training(Path(start.restore_path), training, len(layouts))
    steps_back = True
    while told.go_on:
        training.run_is_at(told.run_tokens)
        parts.ranks.send(params, [layouts[index] for index in told.changed])
        training.step()
        for note in training.take_notes():
            print(f"rank {rank}: {note}", file=sys.stderr, flush=True)
        if steps_back:
            step_back(start.options.niceness)
            steps_back = False
        told = parts.ranks.boundary(None, len(layouts))


def _build(start: Start, rank: int = 0, count: int = 1, folder: Path | None = None) -> Parts:
    """`folder`: where several processes meet."""
    manifest, options = start.manifest, start.options
    device = choose_device(device_of(rank, count, options.device))
    threads = configure(device, options.threads or threads_of(count, device))
    ranks = ALONE if folder is None else Distributed(rank, count, folder, device)
    task = task_of(manifest)
    if options.tokenizer_path is not None:
        task.tokenizer_file = read_tokenizer(Path(options.tokenizer_path))
    data = task.load_data(options.data_path) if rank == 0 else None
    model = task.model().to(device)
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    place = Path(options.place_path) if options.place_path and rank == 0 else None
    batch, compiled, train = options.micro_batch_tokens, options.compile, data.train if data else None
    training = Training(task, model, train, options.peer, batch, place, ranks, compiled)
    return Parts(threads, data, layouts, training, ranks)


def _lead(channel: LearnerEnd, start: Start, exchange_fd: int, parts: Parts) -> None:
    manifest, options = start.manifest, start.options
    training, layouts, ranks = parts.training, parts.layouts, parts.ranks
    task, device = training.task, training.device
    invariant(parts.data is not None, "rank 0 reads the data")
    heldout = parts.data.heldout
    fragments = Fragments(
        parts.params,
        layouts,
        Exchange.attach(exchange_fd, layouts),
        start.bases,
        manifest.sync.inner_steps,
        manifest.sync.keep_in_flight,
    )
    fragments.scatter_bases(parts.params)
    restored, note = _restore(start, training, fragments)
    training.run_is_at(fragments.run_tokens(learners=1))
    mailbox = Mailbox(
        channel,
        training,
        fragments,
        heldout_batch(task, heldout, options.evaluation_tokens),
        lambda: task.model().to(device),
        options.status_interval_s,
        options.min_step_s,
    )
    signal.signal(signal.SIGTERM, lambda *_: setattr(mailbox, "stopping", True))

    def tell(go_on: bool, changed: Iterable[int], restored: bool = False) -> None:
        said = Boundary(go_on, training.run_tokens, tuple(sorted(changed)), restored)
        ranks.boundary(said, len(layouts))
        if go_on:
            ranks.send(parts.params, [layouts[index] for index in said.changed])

    def boundary(report: StepReport) -> bool:
        go_on = mailbox.boundary(report)
        tell(go_on, fragments.changed)
        fragments.changed.clear()
        return go_on

    parameters = sum(layout.numel for layout in layouts)
    where = str(device) if ranks.count == 1 else f"{ranks.count} x {device.type}"
    channel.emit(Ready(where, parameters, parts.threads, training.inner_step, restored, note))
    mailbox.obey()
    tell(True, range(len(layouts)), restored)
    fragments.changed.clear()
    goes_on = boundary(training.step())
    # Only now: starting up, of which the first step is a part, is waited for; training is not.
    step_back(options.niceness)
    if goes_on:
        train(training, boundary)


def _restore(start: Start, training: Training, fragments: Fragments) -> tuple[bool, str]:
    """Whether the saved state was taken, and if not, why. A bad file is set aside, not an end."""
    if start.restore_path is None:
        return False, ""
    path = Path(start.restore_path)
    try:
        return True, checkpoint.restore(path, start.restore, training, fragments)
    except StorageError as error:
        if not path.exists():
            return False, str(error)
        aside = path.with_name(path.name + ".corrupt")
        path.replace(aside)
        return False, f"{error}; set aside as {aside.name}"[:4096]
