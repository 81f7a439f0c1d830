"""State of the learner on disk: one safetensors file, written atomically, with a digest.

It keeps what no peer has: of every fragment the displacement from the base and the part of it that was not in
flight, the optimizer's moments, and the counters. A displacement does not depend on which version the base
is, so it can be put on a newer one. (`learner.reading.stream` keeps the place in the data.)

The digest is SHA-256 over the metadata and the bytes of all tensors by name. It lies in the file's own
metadata, so one rename replaces file and digest together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from p2pdiloco.errors import StorageError
from p2pdiloco.learner.channel_messages import RestoreMode, Start
from p2pdiloco.learner.fragments import FragmentCounters, Fragments
from p2pdiloco.learner.loop import Training
from p2pdiloco.learner.optimizer.build import kind, set_moments
from p2pdiloco.tasks.initial import plain_parameters
from p2pdiloco.util import clear_folder_at, set_aside

FORMAT = 2


class LearnerMeta(Struct, frozen=True):
    """The part of a learner state that is not tensors."""

    format: int
    schema: str
    """Digest of parameter names and shapes and of the number of fragments."""
    inner_step: int
    tokens_total: int
    run_tokens: int
    """Clock of the schedule: tokens that the run had consumed."""
    optimizer: str
    """Kind of the optimizer whose moments these are (`learner.optimizer.build.kind`)."""
    optimizer_steps: int
    counters: tuple[FragmentCounters, ...]


def save(path: Path, training: Training, fragments: Fragments) -> None:
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
            found[f"rest.{index}"] = fragments.rest(index)
        # Who diverged begins again at the global parameters, not with its NaN.
        finite = all(bool(value.isfinite().all()) for value in found.values())
        kept.append(counters if finite else FragmentCounters())
        tensors |= found if finite else {}
    meta = LearnerMeta(
        format=FORMAT,
        schema=_schema(training, len(fragments)),
        inner_step=training.inner_step,
        tokens_total=training.tokens_total,
        run_tokens=training.run_tokens,
        optimizer=kind(training.optimizer),
        optimizer_steps=training.optimizer_steps,
        counters=tuple(kept),
    )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = msgspec.json.encode(meta).decode()
    metadata = {"learner": text, "digest": _digest(text, tensors)}
    _write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def take_up(start: Start, training: Training, fragments: Fragments) -> tuple[bool, str]:
    """Take the saved state, if it can be read; returns whether it was taken, and why not. A bad file is set
    aside, not an end."""
    if start.restore_path is None:
        return False, ""
    path = start.restore_path
    try:
        return True, restore(path, start.restore, training, fragments)
    except StorageError as error:
        if not path.exists():
            return False, str(error)
        return False, f"{error}; {set_aside(path)}"[:4096]


def restore(path: Path, modes: Sequence[RestoreMode], training: Training, fragments: Fragments) -> str:
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


def restore_training(
    path: Path, training: Training, fragments: int
) -> tuple[LearnerMeta, dict[str, Tensor], str]:
    """Take over what concerns the training alone, as `restore` does; `fragments`: how many.

    Raises:
        StorageError: the file is damaged, or belongs to another model.
    """
    meta, tensors = _read(path)
    if meta.schema != _schema(training, fragments):
        raise StorageError(f"the learner state {path} belongs to another model", "use another data folder")
    note, wanted = "", kind(training.optimizer)
    if meta.optimizer == wanted:
        try:
            saved = {name: tensor for name, tensor in tensors.items() if "/" in name}
            set_moments(training.model, training.optimizer, saved)
        except ValueError as error:
            raise StorageError(f"the learner state {path} is incomplete: {error}") from error
        training.moments_are_of(meta.optimizer_steps)
    else:
        note = f"the saved moments are of {meta.optimizer}: those of {wanted} begin anew"
    training.goes_on_from(meta.inner_step, meta.tokens_total, meta.run_tokens)
    return meta, tensors, note


def _read(path: Path) -> tuple[LearnerMeta, dict[str, Tensor]]:
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
    if meta.format != FORMAT:
        raise StorageError(f"the learner state {path} has format {meta.format}, this version reads {FORMAT}")
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
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _schema(training: Training, fragments: int) -> str:
    shapes = [(name, list(p.shape)) for name, p in plain_parameters(training.model)]
    return hashlib.sha256(msgspec.json.encode((fragments, shapes))).hexdigest()


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        digest.update(f"\0{name}\0{flat.dtype}\0{list(tensors[name].shape)}\0".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
