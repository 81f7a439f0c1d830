"""Settings of a run that trains a model that exists, and how a person changes any run's.

Presets are for models that begin with nothing. A model that exists has a context; its rate is lower, by its
size and by the kind of training (`config.given_rates`); and its run is short, so H follows from the length.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from msgspec import Struct

from p2pdiloco.cli.given.wish import MOST_CONTEXT, TrainingWish
from p2pdiloco.config.manifest import InnerSection, Manifest, SyncSection
from p2pdiloco.config.presets import (
    CONTINUE,
    FINETUNE,
    LENGTHS,
    USUAL_INNER_STEPS,
    expected_members,
    for_given,
    for_length,
    row_for,
    with_schedule,
    with_tokens,
)
from p2pdiloco.daemon.display.snapshot import count
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.registry import task_of

MOST_CHOSEN_CONTEXT = 2048
"""Longest context that is chosen unasked: activations grow with it, and published fine-tunings of models of 1
to 8 B parameters take 2048 to 4096, on accelerators far larger than a volunteer's."""
WANTED_MERGES = 30
"""Merges that H leaves room for."""
LEAST_INNER_STEPS = 4
USUAL_STEP_TOKENS = 8192
EPOCHS = {FINETUNE: 2, CONTINUE: 1}
"""Epochs where data are named and no length: Tulu 3 and OLMo 2 fine-tune for two."""
_LENGTH = {FINETUNE: "demo", CONTINUE: "day"}
"""RunLength where neither data nor a length are named."""
_STEPS = {FINETUNE: 700, CONTINUE: 2800}
"""Inner steps of each learner that a step's tokens leave room for."""
_MOST_STEP_TOKENS = {FINETUNE: 16_384, CONTINUE: 65_536}
_LEAST_STEP_TOKENS = 1024
_IMAGES_A_STEP = 64
_DECAY = {FINETUNE: 0.0, CONTINUE: 0.1}
"""Weight decay: Tulu 3, OLMo 2 and TinyLlama fine-tune without, pre-training has 0.1."""
_FRAGMENTS = ((1e6, 4), (2e7, 8), (1e8, 12), (1e9, 24), (math.inf, 48))
"""Fragments by most parameters, as in the presets."""


class RunLength(Struct, frozen=True):
    """A run's length, as a person or a default has it. `tokens`: 0, it is `steps`."""

    tokens: int
    steps: int
    words: str


def length_of(wish: TrainingWish, counted: int, path: Path | None) -> RunLength:
    """RunLength that was wished for, or is usual. `counted`: tokens of the data, 0: they were not counted."""
    if wish.tokens is not None:
        return RunLength(wish.tokens, 0, "as --tokens says")
    if counted:
        epochs = wish.epochs or EPOCHS[wish.kind]
        times = "once" if epochs == 1 else f"{epochs} times"
        what = path or "the embedded data"
        return RunLength(epochs * counted, 0, f"{what} {times}, {count(counted)} tokens each")
    name = wish.length or _LENGTH[wish.kind]
    return RunLength(
        0, LENGTHS[name].steps, f"{'as' if wish.length else 'no --data PATH is named:'} --length {name}"
    )


def with_room(manifest: Manifest, wish: TrainingWish, is_given: bool) -> Manifest:
    """Copy of a preset's run of its length. Where a context is chosen for a model that is yet to be read, the
    inner step has room for any: contexts are cut to it. `is_given`: that model exists."""
    if wish.length is not None and not wish.is_chosen(is_given):
        manifest = for_length(manifest, wish.length)
    if wish.context is None and not wish.is_chosen(is_given):
        return manifest
    inner = msgspec.structs.replace(manifest.inner, tokens_per_step=MOST_CONTEXT)
    return msgspec.structs.replace(manifest, inner=inner)


def with_context(manifest: Manifest, wish: TrainingWish, is_given: bool, step_tokens: int) -> Manifest:
    """Copy of the manifest with the context that is wanted, or for a model that exists its own as far as
    memory is likely to go. Its inner step has so many tokens, or fewer, in whole samples.

    Raises:
        UserError: the model has no context, or is not made for one so long.
    """
    own, wanted = manifest.model.get("context_tokens"), wish.context
    if wanted is None and not wish.is_chosen(is_given):
        return manifest
    if not isinstance(own, int):
        if wanted is not None:
            raise UserError(f"--context is for models of text, and this one is of {manifest.run.task}")
        return _with_step(manifest, step_tokens)
    if wanted is not None and manifest.run.initial and wanted > own:
        raise UserError(
            f"--context {wanted} is more than the model is made for, {own} tokens", f"give at most {own}"
        )
    context = wanted or min(own, MOST_CHOSEN_CONTEXT)
    model = manifest.model | {"context_tokens": context}
    return _with_step(
        msgspec.structs.replace(manifest, model=model), max(1, step_tokens // context) * context
    )


def _with_step(manifest: Manifest, tokens: int) -> Manifest:
    inner = msgspec.structs.replace(manifest.inner, tokens_per_step=tokens)
    return msgspec.structs.replace(manifest, inner=inner)


def with_changes(manifest: Manifest, wish: TrainingWish, counted: int) -> Manifest:
    """Copy of a preset's run with the rate and the length that are wished for. Raises: UserError (too few
    tokens for one inner step of each learner)."""
    if wish.learning_rate is not None:
        inner = msgspec.structs.replace(manifest.inner, learning_rate=wish.learning_rate)
        manifest = msgspec.structs.replace(manifest, inner=inner)
    if wish.length is not None and wish.context is not None:  # inner steps have other tokens by now
        manifest = with_schedule(manifest, LENGTHS[wish.length].steps)
    tokens = (wish.epochs or 0) * counted or wish.tokens
    return with_tokens(manifest, tokens) if tokens else manifest


def for_existing(manifest: Manifest, wish: TrainingWish, length: RunLength) -> Manifest:
    """Copy of the manifest, which has model, data and context, with all settings for a model that exists.

    Raises:
        UserError: the length is too short for one merge.
    """
    task, kind = task_of(manifest), wish.kind
    specs, sample, members = task.specs(), task.tokens_per_sample, expected_members(manifest)
    numel = sum(spec.numel for spec in specs)
    step = _step_tokens(kind, sample, length.tokens // members)
    steps = length.steps or length.tokens // (members * step)
    least = LEAST_INNER_STEPS * members * step
    if steps < LEAST_INNER_STEPS:
        raise UserError(
            f"{length.tokens} tokens are too few for one merge, which takes {least}",
            "take more --tokens or --epochs, fewer --expected-members, or a shorter --context",
        )
    inner_steps = min(max(steps // WANTED_MERGES, LEAST_INNER_STEPS), USUAL_INNER_STEPS)
    fragments = next(count for most, count in _FRAGMENTS if numel <= most)
    inner = InnerSection(
        learning_rate=wish.learning_rate or row_for(numel).rate(kind),
        weight_decay=_DECAY[kind],
        tokens_per_step=step,
        warmup_tokens=0,
        schedule_tokens=1,
    )
    sync = SyncSection(
        fragments=min(fragments, sum(spec.rows for spec in specs if spec.numel)),
        inner_steps=inner_steps,
        delay_steps=min(6, max(1, inner_steps // 3)),
    )
    manifest = msgspec.structs.replace(manifest, inner=inner, sync=sync)
    return for_given(with_tokens(manifest, length.tokens or steps * step * members))


def _step_tokens(kind: str, sample: int, tokens: int) -> int:
    """Tokens of an inner step, whole samples, with which a learner's `tokens` (0: any) are enough steps."""
    if sample == 1:  # images, or what a program counts
        return _IMAGES_A_STEP
    wanted = tokens // _STEPS[kind] if tokens else USUAL_STEP_TOKENS
    return max(1, min(max(wanted, _LEAST_STEP_TOKENS), _MOST_STEP_TOKENS[kind]) // sample) * sample
