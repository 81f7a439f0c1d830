"""Run file of a program with a training loop of its own, from its model's names and shapes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from p2pdiloco.adapters.disk.result_file import checksum, save_tensors
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.models import table
from p2pdiloco.config.outer import LENGTHS, with_schedule
from p2pdiloco.config.presets import for_other_model, for_run, without_end
from p2pdiloco.daemon.run_files.initial_file import first_not_finite, initial_beside
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.tasks.manifests import manifest_from_table, render_toml
from p2pdiloco.tasks.models.parameters import (
    named_parameters,
    persistent_buffers,
    tensor_specs,
    trained_specs,
    uncompiled,
)
from p2pdiloco.tasks.own_loop import NAME, section_of
from p2pdiloco.tensors.spec import TensorSpec


def new_run(
    model: nn.Module,
    path: str | Path,
    name: str,
    tokens_per_step: int,
    schedule_steps: int = LENGTHS["day"].steps,
    frozen: bool = False,
    **sync: int | float,
) -> Path:
    """Write the run.toml of a run that trains such a model from the parameters that it has now, and these
    beside it. Serve it with `p2pdiloco bootstrap --run PATH`, or give it to the first `Session`.

    Args:
        tokens_per_step: the most that one inner step of one learner counts.
        schedule_steps: about so many inner steps of every learner the run is long. The outer step is chosen
            by it; the program's own learning rates are the program's.
        frozen: True: parameters that do not require gradients are in the run, too, and travel with every
            version. Else they stay each program's own: all must have the same.
        sync: keys of [sync], such as inner_steps and fragments. All else can be edited in the file.

    Raises:
        UserError: the name, a key, or the model is not one for a run (a parameter that is not finite,
            either); the file exists already, or cannot be written.
    """
    out = Path(path)
    if out.exists():
        raise UserError(f"{out} exists already", "give it to Session as it is, or write another one")
    model = uncompiled(model)
    specs = tensor_specs(model) if frozen else trained_specs(model)
    if not specs:
        raise UserError(
            "the model has no parameters that are trained (requires_grad)",
            "new_run takes the module that is trained",
        )
    found = named_parameters(model)
    arrays = {spec.name: found[spec.name].detach().float().cpu().contiguous().numpy() for spec in specs}
    if first_not_finite(arrays):
        raise UserError(f"the parameter {first_not_finite(arrays)} has values that are not finite")
    base = without_end(for_other_model(for_run("tiny", name)))
    try:
        manifest = msgspec.structs.replace(
            base,
            run=msgspec.structs.replace(
                base.run, task=NAME, initial=checksum(arrays), initial_name=type(model).__name__[:100]
            ),
            model=table(section_of(specs)),
            inner=msgspec.structs.replace(base.inner, tokens_per_step=tokens_per_step),
            sync=msgspec.structs.replace(base.sync, **sync),
        )
    except TypeError as error:
        raise UserError(f"[sync] of a run.toml has no such key: {error}") from error
    # Before the schedule, too: it is reckoned from these keys.
    manifest = with_schedule(_accepted(manifest, out), schedule_steps)
    text = render_toml(_accepted(manifest, out))
    save_tensors(initial_beside(out), arrays, {})  # first: a run.toml is never without them
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}") from error
    left = frozen_beside(model, specs)
    if left:
        have = sum(spec.numel for spec in specs)
        say(
            f"the run has the {len(specs)} parameters that are trained ({have:,} elements); {left} stay each "
            "program's own: new_run(…, frozen=True) takes them in"
        )
    return out


def tell_what_is_not_in_the_run(model: nn.Module, specs: Sequence[TensorSpec]) -> None:
    """Say what of a program's model is never merged: frozen parameters, and buffers."""
    left = frozen_beside(model, specs)
    if left:
        say(f"{left} are not in the run: they stay this program's own")
    buffers = [*persistent_buffers(model)]
    if buffers:
        more = f" and {len(buffers) - 1} more" if buffers[1:] else ""
        say(f"buffers stay each program's own: {buffers[0]}{more}; evaluate measures with yours")


def frozen_beside(model: nn.Module, specs: Sequence[TensorSpec]) -> str:
    """Count, for a sentence, the frozen parameters that are not among these; "": there are none."""
    names = {spec.name for spec in specs}
    own = [spec.numel for spec in tensor_specs(model) if spec.name not in names]
    return f"{len(own)} frozen parameters ({sum(own):,} elements)" if own else ""


def say(sentence: str) -> None:
    """Tell the program's people on stderr."""
    print(f"p2pdiloco: {sentence}", file=sys.stderr, flush=True)


def _accepted(manifest: Manifest, out: Path) -> Manifest:
    """Pass a manifest through the strict reader: what is written is what every node accepts. Raises:
    UserError."""
    return manifest_from_table(msgspec.to_builtins(manifest, enc_hook=_plain), str(out))


def _plain(value: Any) -> Any:
    """Take NumPy's integers as integers; all else is refused in a sentence by whoever reads it."""
    try:
        return operator.index(value)
    except TypeError:
        return str(value)


def compare(mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Check that a program's parameters are the run's. Raises: UserError (names the first that is not)."""
    wanted = {spec.name: spec.shape for spec in theirs}
    given = {spec.name: spec.shape for spec in mine}
    for name in [*wanted, *given]:
        if wanted.get(name) != given.get(name):
            raise UserError(
                f"the run trains another model than yours: {name} has shape {wanted.get(name, 'none')} "
                f"there, {given.get(name, 'none')} here"
            )
