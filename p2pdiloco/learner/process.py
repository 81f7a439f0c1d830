"""Builds a learner from its `Start` command, and runs it."""

from __future__ import annotations

import signal
from pathlib import Path

from p2pdiloco.errors import StorageError
from p2pdiloco.learner import checkpoint
from p2pdiloco.learner.channel import LearnerEnd, Ready, Start
from p2pdiloco.learner.device import choose_device, configure, step_back
from p2pdiloco.learner.evaluate import heldout_batch
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.loop import Training, train
from p2pdiloco.learner.mailbox import Mailbox
from p2pdiloco.tasks.parameters import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.exchange import Exchange
from p2pdiloco.tensors.layout import plan_fragments


def run(channel: LearnerEnd, start: Start, exchange_fd: int) -> None:
    """Train until the daemon says stop.

    Raises:
        UserError: device or data cannot be used.
        TrainingDiverged: see there.
        ChannelBroken: the daemon is gone.
    """
    manifest, options = start.manifest, start.options
    device = choose_device(options.device)
    threads = configure(device, options.threads)
    task = task_of(manifest)
    task.tokenizer_path = options.tokenizer_path
    data = task.load_data(options.data_path)
    model = task.model().to(device)
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    place = Path(options.place_path) if options.place_path else None
    training = Training(task, model, data.train, options.peer, options.micro_batch_tokens, place)
    fragments = Fragments(
        named_parameters(model),
        layouts,
        Exchange.attach(exchange_fd, layouts),
        start.bases,
        manifest.sync.inner_steps,
        manifest.sync.keep_in_flight,
    )
    fragments.scatter_bases(named_parameters(model))
    restored, note = _restore(start, training, fragments)
    training.run_is_at(fragments.run_tokens(learners=1))
    mailbox = Mailbox(
        channel,
        training,
        fragments,
        heldout_batch(task, data.heldout, options.evaluation_tokens),
        lambda: task.model().to(device),
        options.status_interval_s,
        options.min_step_s,
    )
    signal.signal(signal.SIGTERM, lambda *_: setattr(mailbox, "stopping", True))
    parameters = sum(layout.numel for layout in layouts)
    channel.emit(Ready(str(device), parameters, threads, training.inner_step, restored, note))
    mailbox.obey()
    goes_on = mailbox.boundary(training.step())
    # Only now: starting up, of which the first step is a part, is waited for; training is not.
    step_back(options.niceness)
    if goes_on:
        train(training, mailbox.boundary)


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
