"""`run new --from`: a run whose version 0 is a model that exists.

That model is a checkpoint or an export of p2pdiloco, or a Hugging Face folder (config.json and safetensors)
of a form that a built-in task has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.adapters.theta_file import KEY, Arrays, checksum, load_tensors, load_theta_file, save_tensors
from p2pdiloco.config.loader import manifest_from_canonical
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.models import table
from p2pdiloco.daemon.initial import beside, finite
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.hub_form import section_of
from p2pdiloco.tasks.registry import task_of

CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 << 20
NOT_PARAMETERS = (".inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of what older exports hold beside parameters."""


def started_from(source: Path, base: Manifest) -> tuple[Manifest, Arrays]:
    """The manifest `base` with the task and model of what is at `source`, and the parameters.

    Raises:
        UserError: there is no model, or none that a built-in task has.
    """
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files:
        raise UserError(f"{source} has no safetensors file", "give a folder that has, or a checkpoint")
    found: Arrays = {}
    label = ""
    for file in files:
        arrays, metadata = load_tensors(file)
        found |= arrays
        label = label or metadata.get(KEY, "")
    if label:
        theirs = manifest_from_canonical(load_theta_file(files[0]).signed.manifest)
        run = msgspec.structs.replace(base.run, task=theirs.run.task, task_package=theirs.run.task_package)
        manifest = msgspec.structs.replace(base, run=run, model=theirs.model, data=theirs.data)
    else:
        manifest = _of_config(_config(source), base)
    task = task_of(_fitting(manifest))
    manifest = task.manifest
    specs = task.specs()
    wanted = {spec.name: spec.shape for spec in specs}
    surplus = {n for n in found.keys() - wanted.keys() if not n.endswith(NOT_PARAMETERS)}
    # A tied head is saved twice by some.
    surplus -= {"lm_head.weight"} if manifest.model.get("tied_head") else set()
    wrong = [n for n, shape in wanted.items() if n not in found or found[n].shape != shape] + sorted(surplus)
    if wrong:
        raise UserError(
            f"{source}: {len(wrong)} parameters are not those of {manifest.run.task}, the first is {wrong[0]}"
        )
    parameters = {spec.name: found[spec.name] for spec in specs}
    if finite(parameters):
        raise UserError(f"{source}: {finite(parameters)} has values that are not finite")
    run = msgspec.structs.replace(
        manifest.run, initial=checksum(parameters), initial_name=source.resolve().name[:100]
    )
    return msgspec.structs.replace(manifest, run=run), parameters


def save_beside(out: Path, parameters: Arrays) -> Path:
    """The parameters, where the manifest's reader looks for them. Raises: StorageError."""
    save_tensors(beside(out), parameters, {})
    return beside(out)


def _config(source: Path) -> dict[str, Any]:
    path = source / CONFIG if source.is_dir() else source.with_name(CONFIG)
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=dict[str, Any])
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            "a model is a checkpoint, or a folder with config.json",
        ) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def _of_config(config: dict[str, Any], base: Manifest) -> Manifest:
    """Of Llama's or Mixtral's form, with no more context than an inner step has tokens."""
    most = config.get("max_position_embeddings")
    tokens = base.inner.tokens_per_step
    context = min(most, tokens) if isinstance(most, int) else tokens
    run = msgspec.structs.replace(base.run, task="causal-lm", task_package="")
    return msgspec.structs.replace(base, run=run, model=table(section_of(config, context)))


def _fitting(manifest: Manifest) -> Manifest:
    """With whole samples in an inner step: as many tokens as there were, or one sample."""
    sample = manifest.model.get("context_tokens", 1)
    if not isinstance(sample, int) or manifest.inner.tokens_per_step % sample == 0:
        return manifest
    tokens = max(1, manifest.inner.tokens_per_step // sample) * sample
    return msgspec.structs.replace(
        manifest, inner=msgspec.structs.replace(manifest.inner, tokens_per_step=tokens)
    )
