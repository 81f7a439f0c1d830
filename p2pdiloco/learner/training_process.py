"""Building of a learner from its `Start` command, and its run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import torch
from msgspec.structs import replace
from torch import nn

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.settings import Shard
from p2pdiloco.errors import InvariantViolation, UserError, invariant
from p2pdiloco.learner import loop
from p2pdiloco.learner.channel import LearnerEnd, LearnerOptions, Note, Ready, Start
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.inner_step import bound_cache
from p2pdiloco.learner.lifeline import DRAIN_TIMEOUT_S
from p2pdiloco.learner.loop import StepReport, Training, evaluate, heldout_batch, train
from p2pdiloco.learner.mailbox import ANSWERING_DEVICES, Answering, Mailbox, Stillness
from p2pdiloco.learner.optimizer import (
    HeldCopies,
    HeldParameters,
    HeldShares,
    precision_of_shares,
    shard,
    wants_shards,
)
from p2pdiloco.learner.ranks import (
    ALONE,
    Distributed,
    Order,
    RankLost,
    Ranks,
    Siblings,
    choose_device,
    configure_torch,
    count_ranks,
    device_hints,
    device_of,
    step_back,
    threads_of,
)
from p2pdiloco.tasks.description import instance_of, load_constants
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Data, Task, constants_of
from p2pdiloco.tasks.tokens import read_tokenizer
from p2pdiloco.tensors.layout import Exchange, FragmentLayout, TensorMap, Tensors, plan_fragments
from p2pdiloco.util import Frozen


class LearnerParts(Frozen):
    """Parts that every process of a learner builds in the same way."""

    threads: int
    data: Data | None
    """Data, which rank 0 reads and deals."""
    layouts: tuple[FragmentLayout, ...]
    training: Training
    held: HeldParameters
    """The model's parameters."""
    ranks: Ranks
    still: Stillness
    constants: TensorMap
    """Constants of the model, for further instances."""


def run(channel: LearnerEnd, start: Start, exchange_fd: int) -> None:
    """Train until the daemon says stop.

    Raises:
        UserError: device or data cannot be used.
        TrainingDiverged: see there.
        RankLost, RankKilled, PassTooLarge: another process of this learner is gone.
        ChannelBroken: the daemon is gone.
    """
    count = count_ranks(start.options.nproc, start.options.device)
    if count == 1:
        if start.options.shard == "always":
            raise UserError("--shard always needs several processes, and this learner is one", "use --nproc")
        _lead(channel, start, exchange_fd, _build(start))
        return
    with Siblings(start, count) as siblings:
        try:
            parts = _build(start, 0, count, siblings.folder)
            siblings.met()
            _lead(channel, start, exchange_fd, parts)
        except (RankLost, RuntimeError) as error:
            why = siblings.why()
            if why is None:
                raise
            raise why from error


def follow(start: Start, rank: int, count: int, folder: Path) -> None:
    """Train as another process of a learner until rank 0 says stop.

    Raises:
        RankLost: rank 0 is gone, or another one.
        UserError, TrainingDiverged: as in `run`.
    """
    parts = _build(start, rank, count, folder)
    training = parts.training
    steps_back = True
    while (told := parts.ranks.next_order()).kind != "end":
        if told.kind != "step":
            _help(told, start, parts)
            continue
        training.run_is_at(told.number, told.learners, ahead=0)
        training.step()
        for note in training.take_notes():
            print(f"rank {rank}: {note}", file=sys.stderr, flush=True)
        if steps_back:
            step_back(start.options.niceness)
            steps_back = False


def _help(told: Order, start: Start, parts: LearnerParts) -> None:
    """Do this rank's part of what rank 0 does between two steps."""
    training, held, layouts = parts.training, parts.held, parts.layouts
    if told.kind == "restore":
        path = start.restore_path
        if path is None:
            raise InvariantViolation("rank 0 has taken over a state")
        loop.restore_training(path, training, len(layouts))
    elif told.kind == "put":
        held.put(layouts[told.number])
    elif told.kind == "take":
        held.take(layouts[told.number])
    elif told.kind == "moments":
        held.moments(training.model, training.optimizer)
    elif told.kind == "aside":
        held.set_aside()
    elif told.kind == "evaluate":
        share = parts.ranks.share(())
        evaluate(training.task, training.model, share, training.samples_at_once, training.precision)
    elif told.kind == "amend":
        training.amend(parts.ranks.hear_amendments(told))
    elif told.kind == "back":
        held.bring_back()
    else:
        invariant(False, f"{told.kind} is no order for such a learner")


def _build(start: Start, rank: int = 0, count: int = 1, folder: Path | None = None) -> LearnerParts:
    """`folder`: where several processes meet."""
    manifest, options = start.manifest, start.options
    device = choose_device(device_of(rank, count, options.device))
    if rank == 0 and options.compile_cache is not None:
        bound_cache(options.compile_cache)  # others wait to be met below: none of them compiles yet
    threads = configure_torch(device, options.threads or threads_of(count, device))
    ranks = ALONE if folder is None else Distributed.meet(rank, count, folder, device)
    task, constants = task_and_constants(manifest, options)
    data = load_data(task, options) if rank == 0 else None
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    model = instance_of(task, constants)
    held = _place(model, device, task, options, ranks)
    place = options.place_path if rank == 0 else None
    if ranks.sharded:
        options = replace(options, precision=precision_of_shares(device, options.precision))
    still = Stillness(device)
    training = Training(
        task,
        model,
        data.train if data else None,
        options.peer,
        place,
        ranks,
        options,
        still.meanwhile,
    )
    return LearnerParts(threads, data, layouts, training, held, ranks, still, constants)


def task_and_constants(manifest: Manifest, options: LearnerOptions) -> tuple[Task, Tensors]:
    """Make a run's task, and read its model's constants. Raises: UserError."""
    tokenizer, initial = options.tokenizer_path, options.initial_path
    task = task_of(manifest, None if tokenizer is None else read_tokenizer(tokenizer))
    return task, {} if initial is None else load_constants(initial, constants_of(manifest.model))


def load_data(task: Task, options: LearnerOptions) -> Data:
    """Read the data of this node. Raises: UserError."""
    return task.load_data(None if options.data_path is None else str(options.data_path))


def _place(
    model: nn.Module, device: torch.device, task: Task, options: LearnerOptions, ranks: Ranks
) -> HeldParameters:
    numel = sum(parameter.numel() for parameter in model.parameters())
    samples = task.manifest.inner.tokens_per_step // task.tokens_per_sample
    wished = cast(Shard, options.shard)
    if isinstance(ranks, Distributed) and wants_shards(wished, numel, device, samples, ranks):
        ranks.shard()
    if not (ranks.sharded and isinstance(ranks, Distributed)):
        model.to(device)
        params = named_parameters(model)
        return HeldCopies(params, ranks) if isinstance(ranks, Distributed) else HeldParameters(params)
    shard(model, device, options.precision)
    held = HeldShares(dict(model.named_parameters()), ranks)
    print(f"rank {ranks.rank} has {held.numel()} of {numel} parameters", file=sys.stderr, flush=True)
    return held


def _give_up(channel: LearnerEnd) -> NoReturn:
    """Called by a thread beside the inner step."""
    try:
        channel.drain(DRAIN_TIMEOUT_S)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _lead(channel: LearnerEnd, start: Start, exchange_fd: int, parts: LearnerParts) -> None:
    manifest, options = start.manifest, start.options
    training, layouts, ranks = parts.training, parts.layouts, parts.ranks
    task, device = training.task, training.device
    data = parts.data
    if data is None:
        raise InvariantViolation("rank 0 reads the data")
    heldout = data.heldout
    fragments = Fragments(
        parts.held,
        layouts,
        Exchange.attach(exchange_fd, layouts),
        start.bases,
        manifest.sync.inner_steps,
        manifest.sync.keep_in_flight,
    )
    for fragment in range(len(fragments)):
        fragments.reset_to_base(fragment)
    restored, note = loop.take_up_checkpoint(start, training, fragments)
    if restored:
        ranks.order("restore")
    training.run_is_at(fragments.run_tokens(learners=1))
    mailbox = Mailbox(
        channel,
        training,
        fragments,
        heldout_batch(task, heldout, options.evaluation_tokens),
        lambda: instance_of(task, parts.constants).to(device),
        options.status_interval_s,
    )
    mailbox.follow(start.course)
    mailbox.spare(start.spare)

    def boundary(report: StepReport) -> bool:
        go_on = mailbox.boundary(report)
        ranks.order("step" if go_on else "end", training.run_tokens, training.learners)
        return go_on

    parameters = sum(layout.numel for layout in layouts)
    where = str(device) if ranks.count == 1 else f"{ranks.count} x {device.type}"
    where += ", bf16" if training.bf16 else ""
    where += ", sharded" if ranks.sharded else ""
    answers = (
        device.type in ANSWERING_DEVICES and not ranks.sharded
    )  # of shares, other ranks copy at boundaries only
    gives_up = answers and ranks is ALONE  # others wait in the middle of a step until all are there
    step, appraises = training.inner_step, mailbox.appraises
    channel.emit(Ready(where, parameters, parts.threads, step, restored, note, gives_up, appraises))
    for text in (data.note, *device_hints(options.device, device)):
        if text:
            channel.emit(Note(text[:4096]))
    training.listen(lambda text: channel.emit(Note(text)))
    if not mailbox.begin():
        ranks.order("end")
        return
    with ExitStack() as stack:
        if answers:
            give_up = (lambda: _give_up(channel)) if gives_up else None
            answer = partial(mailbox.answer_calls, give_up)
            stack.enter_context(Answering(parts.still, channel.wait_or, answer, device))
        ranks.order("step", training.run_tokens, training.learners)
        goes_on = boundary(training.step())
        # Only now: starting up, of which the first step is a part, is waited for; training is not.
        step_back(options.niceness)
        if goes_on:
            train(training, boundary)
