"""The inner loop: training, its checkpoint, evaluation and appraisal. It does not know that peers exist.

After every inner step `train` calls `boundary`, which may change the parameters (`learner.mailbox` does, a
benchmark does not) and says whether to go on.

Checkpoint: one safetensors file, written atomically. It keeps what no peer has: of every fragment the
displacement from the base and the part of it that was not in flight, the optimizer's moments, and the
counters. A displacement does not depend on which version the base is, so it can be put on a newer one.
(`learner.samples` keeps the place in the data.) The digest is SHA-256 over the metadata and the bytes of all
tensors by name. It lies in the file's own metadata, so one rename replaces file and digest together.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from p2pdiloco.core.api.config import Amendment, in_force
from p2pdiloco.errors import P2PDilocoError, StorageError, UserError, first_line
from p2pdiloco.learner.channel import Appraise, Appraised, PassOptions, RestoreMode, Start
from p2pdiloco.learner.fragments import FragmentCounters, Fragments
from p2pdiloco.learner.inner_step import Passes, RecordedUpdate
from p2pdiloco.learner.lifeline import PassTooLarge
from p2pdiloco.learner.optimizer import (
    clip_gradients,
    make_optimizer,
    optimizer_kind,
    set_learning_rate,
    set_moments,
)
from p2pdiloco.learner.ranks import (
    ALONE,
    Ranks,
    autocast,
    give_memory_back,
    micro_batch_tokens,
    out_of_memory,
    passes_in_bf16,
    staged,
)
from p2pdiloco.learner.samples import SampleStream
from p2pdiloco.learner.schedule import learning_rate, schedule_of
from p2pdiloco.tasks.initial import evaluating, named_parameters, plain_parameters
from p2pdiloco.tasks.task import Samples, Shards, Task
from p2pdiloco.tensors.layout import FragmentLayout, TensorMap, Tensors, scatter
from p2pdiloco.tensors.vault import Appraisable, read_appraisal
from p2pdiloco.util import Frozen, Say, clear_folder_at, set_aside

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch


class TrainingCounts:
    """Steps and tokens of one learner, and of its run as far as known: what a checkpoint keeps beside moments
    and displacements.
    """

    def __init__(self) -> None:
        self.inner_step = 0
        self.tokens_total = 0
        self.run_tokens = 0
        """Tokens that all learners of the run have consumed, as far as known: the schedule's clock."""
        self.learners = 1
        """Learners of the run now, as far as known, this one included."""
        self.optimizer_steps = 0
        """Number of optimizer steps that the moments are made of."""
        self.amendments: tuple[Amendment, ...] = ()
        """Changes of the run by its owner."""

    def count(self, tokens: int) -> None:
        """Count an inner step over so many tokens."""
        self.inner_step += 1
        self.tokens_total += tokens
        self.run_tokens += tokens

    def run_is_at(self, run_tokens: int, learners: int = 1, ahead: int | None = None) -> None:
        """Tell the schedule how many tokens the run has consumed, by so many learners. It goes forward only,
        but where it is `ahead` tokens further: then this node holds another chain now, or believed that there
        are more learners than there are. None: however far."""
        if run_tokens > self.run_tokens or (ahead is not None and run_tokens + ahead < self.run_tokens):
            self.run_tokens = run_tokens
        self.learners = max(1, learners)

    @property
    def amendment(self) -> Amendment | None:
        """Amendment that is in force where the run is, as far as known; None: there is none."""
        return in_force(self.amendments, self.run_tokens)

    def amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Go by these amendments from now on."""
        self.amendments = amendments

    def goes_on_from(self, meta: LearnerMeta, with_moments: bool) -> None:
        """Go on where an earlier life ended, with its moments or without them."""
        self.inner_step, self.tokens_total = meta.inner_step, meta.tokens_total
        self.run_is_at(meta.run_tokens)
        if with_moments:
            self.optimizer_steps = meta.optimizer_steps


MAX_SKIPPED_IN_A_ROW = 10
COMPILING = "compiling the passes: the next inner step takes as long as that, often a minute"


class TrainingDiverged(P2PDilocoError):
    """Error: loss or gradient was not finite for `MAX_SKIPPED_IN_A_ROW` inner steps in a row."""


class StepReport(Frozen):
    """Result of an inner step."""

    inner_step: int
    """Inner steps made so far, this one included."""
    loss: float
    """Loss that was minimised, a mean over the step's samples (text: nats per token)."""
    tokens: int
    """Tokens that went into the parameters; 0 if the step was skipped."""


class Training(TrainingCounts):
    """State that inner steps read and write. Public attributes are what a checkpoint keeps."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        samples: Samples | Shards | None,
        peer: str,
        place: Path | None = None,
        ranks: Ranks = ALONE,
        options: PassOptions = PassOptions(),  # noqa: B008 (frozen)
        meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`model` is on its device already. `place`: the file that keeps the place in the data. `samples` is
        None if rank 0 of `ranks` has them. `meanwhile`: context for computations that take long and write no
        parameters.

        Raises:
            UserError: tokens_per_step is no whole number of samples, or there are none.
        """
        super().__init__()
        per_sample = task.tokens_per_sample
        self.section = task.manifest.inner
        if self.section.tokens_per_step % per_sample:
            raise UserError(
                f"inner.tokens_per_step {self.section.tokens_per_step} is not a multiple of {per_sample}, "
                "the tokens of a sample"
            )
        self.task, self.model = task, model
        self.device = next(model.parameters()).device
        self.precision = options.precision
        self.bf16 = passes_in_bf16(self.device, options.precision)
        """True: passes are made in bf16."""
        self.optimizer = make_optimizer(model, self.section)
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._samples = self.section.tokens_per_step // per_sample
        self.ranks = ranks
        self.meanwhile = meanwhile
        self.stream: SampleStream
        """Samples of rank 0, which deals; other ranks have no stream."""
        if samples is not None:
            self.stream = SampleStream(samples, task.manifest.run.seed, peer, self._samples, place)
        tokens = micro_batch_tokens(self.device, options.micro_batch_tokens, self.section.tokens_per_step)
        together = ranks.count if ranks.sharded else 1
        # Of processes that compute together a pass is a rank's part of the step at most.
        at_once = min(max(1, tokens // per_sample), -(-self._samples // together))
        first = max(1, at_once >> options.halvings)
        self._passes = Passes(task, model, first, options, together, self.bf16)
        self._recorded_update: RecordedUpdate | None = None
        self._records_updates = True
        self._say: Say = lambda _text: None
        self._ahead: Batch | None = None
        """Samples of the next step, taken and on their way to the accelerator while that computes."""

    def step(self) -> StepReport:
        """Make an inner step: forward, backward, clip, optimizer.

        Raises:
            TrainingDiverged: see there.
            UserError: not even a single sample fits into memory.
            ChannelBroken: the daemon is gone.
        """
        forms = self._passes.forms
        forms.before_step(self.steps_left)
        if forms.compiles_now:
            self._say(COMPILING)
        began = time.perf_counter()
        rate = learning_rate(self.section, self.run_tokens, self.optimizer_steps, self.amendment)
        set_learning_rate(self.optimizer, rate)
        with self.meanwhile():
            batch, self._ahead = self._ahead or self._take(), None
            loss = self._passes.gradients(batch, self._samples)
            self.ranks.sum_gradients(self.model, loss)
            norm = clip_gradients(self.model, self.section)
            if self.device.type != "cpu":
                self._ahead = self._take()
            loss_value, norm_value = torch.stack((loss, norm)).tolist()  # the one wait for an accelerator
        tokens = self._update(math.isfinite(loss_value) and math.isfinite(norm_value))
        if self.ranks.rank == 0:
            self.stream.used()
        self.count(tokens)
        forms.step_took(time.perf_counter() - began, self._passes.made)
        return StepReport(self.inner_step, loss_value, tokens)

    @property
    def samples_at_once(self) -> int:
        """Samples of one pass."""
        return self._passes.samples

    def listen(self, say: Say) -> None:
        """Be told, from now on, of what takes long, before it does."""
        self._say = say

    def take_notes(self) -> list[str]:
        """Remarks for a person since the last call."""
        return self._passes.take_notes()

    @property
    def steps_left(self) -> float:
        """Inner steps of this learner until the end of the schedule, if the others go on as well."""
        tokens = schedule_of(self.section, self.amendment) - self.run_tokens
        return max(0, tokens) / self.section.tokens_per_step / self.learners

    def amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Go by these amendments from now on, in all processes of this learner."""
        if amendments != self.amendments:
            super().amend(amendments)
            self.ranks.tell("amend", amendments)

    def _take(self) -> Batch:
        batch = self.ranks.deal(lambda: self.stream.take(self._samples), self._samples)
        return staged(batch, self.device)

    def _update(self, finite: bool) -> int:
        """Make the optimizer step, or skip it: a bad batch must not become a peer's parameters."""
        if finite:
            self._skipped_in_a_row = 0
            if not self._replay_update():
                self.optimizer.step()
            self.optimizer_steps += 1
            return self.section.tokens_per_step
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(
                f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} inner steps in a row "
                f"(up to inner step {self.inner_step})"
            )
        return 0

    def _replay_update(self) -> bool:
        """False: nothing is recorded that fits, and the optimizer step is to be made."""
        if not self._passes.forms.is_replayed:
            self._recorded_update = None  # its gradients are gone
            return False
        if self._recorded_update is None and self._records_updates:
            try:
                self._recorded_update = RecordedUpdate(self.optimizer, self.device)
            except RuntimeError as error:
                print(f"the optimizer step is not recorded: {first_line(error)}", file=sys.stderr, flush=True)
                self._records_updates = False
        return self._recorded_update is not None and self._recorded_update.replay()


def train(training: Training, boundary: Callable[[StepReport], bool]) -> None:
    """Make inner steps until `boundary` says no."""
    while boundary(training.step()):
        pass


CHECKPOINT_FORMAT = 2


class LearnerMeta(Frozen):
    """The part of a learner state that is not tensors."""

    format: int
    schema: str
    """Digest of parameter names and shapes and of the number of fragments."""
    inner_step: int
    tokens_total: int
    run_tokens: int
    """Clock of the schedule: tokens that the run had consumed."""
    optimizer: str
    """Kind of the optimizer whose moments these are (`learner.optimizer.optimizer_kind`)."""
    optimizer_steps: int
    counters: tuple[FragmentCounters, ...]


def save_checkpoint(path: Path, training: Training, fragments: Fragments) -> None:
    """Write the state of training and fragments; at every moment `path` is a whole file, old or new.

    Raises:
        StorageError: the disk is full or the folder cannot be written; an older file is untouched.
    """
    tensors = fragments.held.moments(training.model, training.optimizer)
    kept = []
    for index, counters in enumerate(fragments.counters):
        found = {}
        if counters.unmerged_steps:
            found[f"displacement.{index}"] = fragments.displacement(index)
        if counters.slot_in_use:
            found[f"rest.{index}"] = fragments.not_in_flight(index)
        # Who diverged begins again at the global parameters, not with its NaN.
        finite = all(bool(value.isfinite().all()) for value in found.values())
        kept.append(counters if finite else FragmentCounters())
        tensors |= found if finite else {}
    meta = LearnerMeta(
        format=CHECKPOINT_FORMAT,
        schema=_schema(training, len(fragments)),
        inner_step=training.inner_step,
        tokens_total=training.tokens_total,
        run_tokens=training.run_tokens,
        optimizer=optimizer_kind(training.optimizer),
        optimizer_steps=training.optimizer_steps,
        counters=tuple(kept),
    )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = msgspec.json.encode(meta).decode()
    metadata = {"learner": text, "digest": _digest(text, tensors)}
    _write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def take_up_checkpoint(start: Start, training: Training, fragments: Fragments) -> tuple[bool, str]:
    """Take the saved state, if it can be read; returns whether it was taken, and why not. A bad file is set
    aside, not an end."""
    if start.restore_path is None:
        return False, ""
    path = start.restore_path
    try:
        return True, restore_checkpoint(path, start.restore, training, fragments)
    except StorageError as error:
        if not path.exists():
            return False, str(error)
        return False, f"{error}; {set_aside(path)}"[:4096]


def restore_checkpoint(
    path: Path, modes: Sequence[RestoreMode], training: Training, fragments: Fragments
) -> str:
    """Take over a saved state: time and moments always, displacements by `modes` (`Start.restore`).

    theta of every fragment is set to its base minus what is taken. Nothing is changed on an error. Returns
    what a person should know: moments of another optimizer are not taken, all else is.

    Raises:
        StorageError: no file, a torn or corrupt one, or one of another model.
    """
    meta, tensors, note = restore_training(path, training, len(fragments))
    for index, mode in enumerate(modes):
        counted = meta.counters[index]
        if mode == "none":
            continue
        whole = mode == "all" or not counted.slot_in_use
        displacement = tensors.get(f"displacement.{index}" if whole else f"rest.{index}")
        counters = FragmentCounters(
            unmerged_tokens=counted.unmerged_tokens - (0 if whole else counted.sent_tokens),
            unmerged_steps=counted.unmerged_steps - (0 if whole else counted.sent_steps),
            steps_since_base=counted.steps_since_base,
        )
        fragments.take_up(index, displacement, counters)
    return note


def restore_training(path: Path, training: Training, fragments: int) -> tuple[LearnerMeta, Tensors, str]:
    """Take over what concerns the training alone, as `restore_checkpoint` does; `fragments`: how many.

    Raises:
        StorageError: the file is damaged, or belongs to another model.
    """
    meta, tensors = _read_checkpoint(path)
    if meta.schema != _schema(training, fragments):
        raise StorageError(f"the learner state {path} belongs to another model", "use another data folder")
    note, wanted = "", optimizer_kind(training.optimizer)
    if meta.optimizer == wanted:
        try:
            saved = {name: tensor for name, tensor in tensors.items() if "/" in name}
            set_moments(training.model, training.optimizer, saved)
        except ValueError as error:
            raise StorageError(f"the learner state {path} is incomplete: {error}") from error
    else:
        note = f"the saved moments are of {meta.optimizer}: those of {wanted} begin anew"
    training.goes_on_from(meta, with_moments=not note)
    return meta, tensors, note


def _read_checkpoint(path: Path) -> tuple[LearnerMeta, Tensors]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        text = metadata["learner"]
        if metadata["digest"] != _digest(text, tensors):
            raise StorageError(f"the learner state {path} is corrupt: its digest does not match")
        meta = msgspec.json.decode(text, type=LearnerMeta)
    except FileNotFoundError as error:
        raise StorageError(f"there is no learner state {path}") from error
    except (OSError, SafetensorError, KeyError, ValueError, msgspec.DecodeError) as error:
        raise StorageError(f"the learner state {path} is torn or corrupt: {error}") from error
    if meta.format != CHECKPOINT_FORMAT:
        raise StorageError(
            f"the learner state {path} has format {meta.format}, this version reads {CHECKPOINT_FORMAT}"
        )
    return meta, tensors


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        _sync(temporary)
        clear_folder_at(path)
        temporary.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"cannot save the learner state {path}: {error}", "free some disk space"
        ) from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _schema(training: Training, fragments: int) -> str:
    shapes = [(name, list(p.shape)) for name, p in plain_parameters(training.model)]
    return hashlib.sha256(msgspec.json.encode((fragments, shapes))).hexdigest()


def _digest(text: str, tensors: TensorMap) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        digest.update(f"\0{name}\0{flat.dtype}\0{list(tensors[name].shape)}\0".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


EVALUATION_TOKENS_AT_ONCE = 8192


class Evaluation(Frozen):
    """Figures of a model, means over held-out samples."""

    loss: float
    """Nats per token (text) or per image."""
    tokens: int
    metrics: dict[str, float]
    """Figures that the task measures beside the loss: "accuracy", for instance."""


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batch: Batch,
    together: int = 0,
    precision: str = "auto",
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Evaluation:
    """The task's figures of this model on a batch of held-out samples (`heldout_batch`), on its device;
    without what a model does in training only. `together`: samples at a time, where several processes compute
    it together (0: it is one alone). `precision` as in `LearnerOptions`, but on CPUs always fp32: it costs
    little, and machines with and without bf16 then tell the same. `tell` is told how many samples are done,
    and of how many.

    Raises:
        PassTooLarge: they do not fit, and others compute them too.
    """
    device = next(model.parameters()).device
    bf16 = device.type != "cpu" and passes_in_bf16(device, precision)
    count = len(batch[0])
    size = together or max(1, EVALUATION_TOKENS_AT_ONCE // task.tokens_per_sample)
    sums: dict[str, float] = {}
    done = 0
    with evaluating(model):
        while done < count:
            part = tuple(tensor[done : done + size] for tensor in batch)
            found = _metrics(task, model, part, device, bf16)
            if found is None and together:
                raise PassTooLarge(
                    f"{len(part[0])} samples do not fit while evaluating: half as many from now on"
                )
            if found is None:  # training left less memory than that
                size = (size + 1) // 2
                give_memory_back(device)
                continue
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value * len(part[0])
            done += len(part[0])
            tell(done, count)
    means = {name: total / count for name, total in sums.items()}
    return Evaluation(means.pop("loss"), count * task.tokens_per_sample, means)


def _metrics(
    task: Task, model: nn.Module, part: Batch, device: torch.device, bf16: bool
) -> dict[str, float] | None:
    """None: the samples do not fit into memory, and fewer might."""
    try:
        with autocast(device, bf16):
            found = task.metrics(model, tuple(tensor.to(device) for tensor in part))
        return {name: float(value) for name, value in found.items()}
    except (RuntimeError, MemoryError) as error:
        if len(part[0]) == 1 or not out_of_memory(error):
            raise
        return None


def heldout_batch(task: Task, samples: Samples, tokens: int) -> Batch:
    """Pick the same held-out samples every time, evenly spread: about `tokens` tokens, or one sample."""
    count = min(len(samples), max(1, tokens // task.tokens_per_sample))
    return samples.batch(np.arange(count, dtype=np.int64) * len(samples) // count)


APPRAISAL_TOKENS = 512, 16_384
"""Least and most tokens of each of the two batches, about; between them, those of an inner step. Four
forward passes over each cost less than three such steps."""


def appraise(
    command: Appraise,
    training: Training,
    layout: FragmentLayout,
    heldout: Batch,
    global_model: Callable[[], nn.Module],
) -> Appraised:
    """Measure what a step along each of two contributions does to the loss, on the same samples. What cannot
    be measured has no figures.

    It begins at the parameters that a version was made from, with the newest versions of all other fragments.
    There contributions still help: a version goes further than any of them, and beyond it what was good in
    them may be too much. Both go as far as ours is long, so length wins nothing. The difference between a
    step that way and the opposite one does not depend on the curvature, and is measured best.

    Rules: docs/protocol/loss-audits.md, section 3.

    Args:
        heldout: samples that nobody trains on.
        global_model: puts the global parameters into the second instance of the model, and returns it.
    """
    try:
        given = read_appraisal(command.path, training.task.manifest.codec.contribution, layout.numel)
    except StorageError:
        return Appraised(command.path)
    batches, same_data = _appraised_on(training, heldout, command.peer)
    model = global_model()
    with training.meanwhile():
        theirs, ours = gains(training.task, model, layout, given, batches)
    return Appraised(command.path, theirs, ours, same_data)


def _appraised_on(training: Training, heldout: Batch, peer: str) -> tuple[list[Batch], bool]:
    """Draw held-out samples, and samples of that peer's share of the data, if it has one that is known; else
    any that we train on. Of a stream none can be drawn."""
    rng, stream = np.random.default_rng(), training.stream
    tokens = min(max(APPRAISAL_TOKENS[0], training.section.tokens_per_step), APPRAISAL_TOKENS[1])
    count = max(1, tokens // training.task.tokens_per_sample)
    drawn = torch.from_numpy(rng.permutation(len(heldout[0]))[:count])
    share = stream.share_of(peer, count, rng)
    more = share if share is not None else stream.anywhere(count, rng)
    batches: list[Batch] = [tuple(column[drawn] for column in heldout)]
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
