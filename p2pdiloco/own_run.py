"""Run file of a program with a training loop of its own, from its model's names and shapes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from p2pdiloco.adapters.disk.result_file import Arrays, checksum, save_tensors
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.models import table
from p2pdiloco.config.outer import LENGTHS, with_schedule
from p2pdiloco.config.presets import for_other_model, for_run, without_end
from p2pdiloco.daemon.run_files.initial_file import constants_table, first_not_finite, initial_beside
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.learner.parallel.sharding import is_shared_out
from p2pdiloco.tasks.manifests import manifest_from_table, render_toml
from p2pdiloco.tasks.models.description import Description, carried, describe
from p2pdiloco.tasks.models.parameters import named_parameters, unwrapped
from p2pdiloco.tasks.own_loop import NAME, section_of
from p2pdiloco.tensors.spec import TensorSpec


def new_run(
    model: nn.Module,
    path: str | Path,
    name: str,
    tokens_per_step: int,
    schedule_steps: int = LENGTHS["day"].steps,
    frozen: bool = False,
    average_statistics: bool = False,
    own_buffers: Collection[str] = (),
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
        average_statistics: True: running means and variances (of batch norm) are merged as parameters are, by
            plain mean. Else they stay each program's own.
        own_buffers: names of other persistent buffers that training changes: they stay each program's own,
            too. All that are not named are constants, which every program gets from the run.
        sync: keys of [sync], such as inner_steps and fragments. All else can be edited in the file.

    Raises:
        UserError: the name, a key, or the model is not one for a run (a parameter that is not finite,
            either); the file exists already, or cannot be written.
    """
    out = Path(path)
    if out.exists():
        raise UserError(f"{out} exists already", "give it to Session as it is, or write another one")
    model = unwrapped(model)
    parts = describe(model)
    specs = _merged(parts, frozen, average_statistics)
    if unknown := [name for name in own_buffers if name not in parts.constants]:
        raise UserError(f"own_buffers: the model has no buffer {unknown[0]}, or it is none of its constants")
    constants = carried({n: value for n, value in parts.constants.items() if n not in own_buffers})
    arrays = _values(named_parameters(model) | parts.statistics, specs)
    fixed = {name: value.numpy() for name, value in constants.items()}
    kind = type(model).__name__[:100]
    base = without_end(for_other_model(for_run("tiny", name)))
    try:
        manifest = msgspec.structs.replace(
            base,
            run=msgspec.structs.replace(
                base.run, task=NAME, initial=checksum(arrays | fixed), initial_name=kind
            ),
            model=table(section_of(specs)) | constants_table(fixed),
            inner=msgspec.structs.replace(base.inner, tokens_per_step=tokens_per_step),
            sync=msgspec.structs.replace(base.sync, **sync),
        )
    except TypeError as error:
        raise UserError(f"[sync] of a run.toml has no such key: {error}") from error
    # Before the schedule, too: it is reckoned from these keys.
    manifest = with_schedule(_accepted(manifest, out), schedule_steps)
    text = render_toml(_accepted(manifest, out))
    save_tensors(initial_beside(out), arrays | fixed, {})  # first: a run.toml is never without them
    _write(out, text)
    if left := parts.left_out([spec.name for spec in specs] + list(fixed)):
        have = f"{len(specs)} tensors ({sum(spec.numel for spec in specs):,} elements)"
        say(f"the run has {have} of the model; {'; '.join(left)}")
    return out


def _values(found: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> Arrays:
    """Copy tensors of a model, fp32. Raises: UserError (they are cut up, or not finite)."""
    if any(map(is_shared_out, found.values())):
        raise UserError("the model is cut up (fully_shard)", "new_run comes before that, in one process")
    arrays = {spec.name: found[spec.name].detach().float().cpu().contiguous().numpy() for spec in specs}
    if first_not_finite(arrays):
        raise UserError(f"the parameter {first_not_finite(arrays)} has values that are not finite")
    return arrays


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}") from error


def _merged(parts: Description, frozen: bool, average_statistics: bool) -> list[TensorSpec]:
    specs = [spec for spec in parts.parameters if frozen or spec.name in parts.trained]
    if not specs:
        raise UserError(
            "the model has no parameters that are trained (requires_grad)",
            "new_run takes the module that is trained",
        )
    return [*specs, *(parts.averageable if average_statistics else ())]


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
