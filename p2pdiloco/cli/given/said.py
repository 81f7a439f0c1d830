"""Words about the settings that were chosen for a model that exists: five lines, and warnings."""

from __future__ import annotations

from p2pdiloco.cli.given.settings import RunLength
from p2pdiloco.cli.given.wish import TrainingWish
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import (
    CONTINUE,
    FINETUNE,
    LENGTHS,
    VERBS,
    expected_members,
    expected_merges,
    inner_steps_of,
    row_for,
    too_large,
    warmup_steps,
)
from p2pdiloco.daemon.display.snapshot import count, counted
from p2pdiloco.tasks.registry import task_of

LEAST_MERGES = 20
"""Merges below which a run is hardly one of several."""


def lines_of(manifest: Manifest, wish: TrainingWish, length: RunLength, own: object) -> list[str]:
    """Five lines for a person: context, rate, length, outer step, and how all of it is changed. `own`: the
    context that the model is made for."""
    return [
        _context_words(manifest.model.get("context_tokens"), wish, own),
        _rate_words(manifest, wish),
        _length_words(manifest, length),
        _outer_words(manifest),
        f"change it: {'--finetune' if wish.continued else '--continue'}, --learning-rate, --context, "
        "--tokens or --epochs, --expected-members; --preset takes another run's settings instead",
    ]


def _context_words(context: object, wish: TrainingWish, own: object) -> str:
    if context is None:
        return "context: none, the model reads no text"
    if context == own or wish.context:
        return f"context: {context} of the {own} tokens that the model is made for"
    return f"context: {context} tokens, since more takes much memory; --context goes up to the model's {own}"


def _rate_words(manifest: Manifest, wish: TrainingWish) -> str:
    inner, numel = manifest.inner, _numel(manifest)
    why = "as --learning-rate says" if wish.learning_rate else f"as in {row_for(numel).sources}"
    warmup = warmup_steps(inner_steps_of(manifest))
    return (
        f"rate: {inner.learning_rate:g} to {VERBS[wish.kind]} {count(numel)} parameters, {why}; AdamW, "
        f"{warmup} steps of warm-up, weight decay {inner.weight_decay:g}"
    )


def _length_words(manifest: Manifest, length: RunLength) -> str:
    inner = manifest.inner
    text = "; the text is Python's own library, --data names yours" if _is_embedded(manifest) else ""
    merges = counted(expected_merges(manifest), "merge")
    return (
        f"length: {count(inner.schedule_tokens)} tokens ({length.words}), that is "
        f"{inner_steps_of(manifest)} steps of {inner.tokens_per_step} by each of "
        f"{counted(expected_members(manifest), 'member')}: {merges}{text}"
    )


def _is_embedded(manifest: Manifest) -> bool:
    return manifest.data.source == "embedded" and manifest.model.get("context_tokens") is not None


def _outer_words(manifest: Manifest) -> str:
    outer, sync = manifest.outer, manifest.sync
    warm = f" after {outer.momentum_warmup_merges} merges" if outer.momentum_warmup_merges else ""
    return (
        f"outer step: rate {outer.learning_rate:g}, momentum {outer.momentum:g}{warm}, for so many merges; "
        f"each of {sync.fragments} fragments every {sync.inner_steps} steps"
    )


def warnings_of(manifest: Manifest, wish: TrainingWish) -> list[str]:
    """Warnings about the settings of a run that begins with a model that exists."""
    merges, is_chosen = expected_merges(manifest), wish.is_chosen(True)
    is_long = wish.continued if is_chosen else inner_steps_of(manifest) >= LENGTHS["day"].steps
    kind = CONTINUE if is_long else FINETUNE
    few = (
        f"{counted(merges, 'merge')} of each fragment: {LEAST_MERGES} are wanted; take more --tokens or "
        "--epochs, fewer --expected-members, or a shorter --context"
    )
    found = too_large(manifest.inner.learning_rate, _numel(manifest), kind)
    return ([found] if found else []) + ([few] if is_chosen and merges < LEAST_MERGES else [])


def _numel(manifest: Manifest) -> int:
    return sum(spec.numel for spec in task_of(manifest).specs())
