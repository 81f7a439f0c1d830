"""`run new --from` and `--architecture`: a run whose version 0 is a model that exists, or a new one of any
architecture that `transformers` knows.

A model that exists is a checkpoint or an export of p2pdiloco, or a Hugging Face folder (config.json and
safetensors). What is of Llama's or Mixtral's form becomes causal-lm, the rest hf-causal-lm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from p2pdiloco.adapters.result_file import (
    KEY,
    Arrays,
    checksum,
    load_metadata,
    load_result_file,
    save_tensors,
)
from p2pdiloco.cli.given.besides import dtype_in
from p2pdiloco.cli.given.files import CONFIG, ModelFiles
from p2pdiloco.cli.given.gguf import as_folder
from p2pdiloco.config.manifest import MAX_NAME, ExportSection, Manifest, manifest_from_canonical, table
from p2pdiloco.config.presets import for_other_model
from p2pdiloco.daemon.run_files.shared_files import constants_table, first_not_finite, initial_beside
from p2pdiloco.errors import UserError, clean
from p2pdiloco.tasks.causal_lm import NAME, built, check_causal, existing
from p2pdiloco.tasks.causal_lm import section_of as hub_section
from p2pdiloco.tasks.description import carried, describe
from p2pdiloco.tasks.documents import hub_file, may_be_on_the_hub
from p2pdiloco.tasks.hub_models import (
    NOT_PARAMETERS,
    difference_from_ours,
    longest,
    read_json,
    refuse_codes,
    refuse_quantised,
    refuse_surplus,
    section_of,
    untied,
    with_defaults,
)
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.own_tasks import specs_from_texts
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import constants_of

NOT_YET = "0" * 64
"""Stands for a checksum that is computed later."""
MAX_CONFIG_BYTES = 4 << 20
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Names in causal-lm that one matrix has, if it is tied."""


def with_existing_model(source: Path, base: Manifest) -> tuple[Manifest, Arrays]:
    """The manifest `base` with the task and model of what is at `source`, and its parameters and constants.

    Raises:
        UserError: there is no model, or none that a built-in task has.
    """
    files = ModelFiles(source)
    checkpoints = [file for file in files.files if KEY in load_metadata(file)]
    if checkpoints and sum(KEY in load_metadata(file) for file in [*files.files, *files.foreign]) > 1:
        raise UserError(f"{source} has several checkpoints", "give one of them")
    if files.foreign:
        click.echo(files.words(), err=True)
    found: Arrays = {}
    constants: Arrays = {}
    if checkpoints:
        checkpoint = load_result_file(checkpoints[0])
        found = checkpoint.parameters
        theirs = manifest_from_canonical(checkpoint.signed.manifest)
        # Their tasks may demand a given version 0, whose checksum is known below only.
        run = msgspec.structs.replace(
            base.run, task=theirs.run.task, task_package=theirs.run.task_package, initial=NOT_YET
        )
        manifest = msgspec.structs.replace(
            base, run=run, model=theirs.model, data=theirs.data, export=theirs.export
        )
        constants = {constant.name: found.pop(constant.name) for constant in constants_of(theirs.model)}
    else:
        config = _config(source)
        refuse_quantised(config, str(source))
        export = ExportSection(dtype=dtype_in(config), context_tokens=_made_for(config))
        manifest = _of_config(config, msgspec.structs.replace(base, export=export))
    task = task_of(_fitting(manifest))
    manifest = task.manifest
    specs = task.specs()
    if manifest.run.task == NAME and not checkpoints:
        # Names in files are an architecture's own affair: the library knows them.
        config = _config(source)
        with files.alone() as folder:
            model = existing(folder, config, str(source), files.types(), _say)
        check_causal(model, config.get("model_type"))
        found, constants = _arrays(model), _constants(model)
        manifest = _with_constants(manifest, constants)
    elif not checkpoints:
        refuse_codes(files.types(), str(source))
        found = files.parameters()
    wanted = {spec.name: spec.shape for spec in specs}
    surplus = {n for n in found.keys() - wanted.keys() if not n.endswith(NOT_PARAMETERS)}
    refuse_surplus(surplus, str(source))
    if manifest.model.get("tied_head") and HEAD in surplus:  # a tied head is saved twice by some
        if EMBEDDING in found and checksum({"": found[HEAD]}) != checksum({"": found[EMBEDDING]}):
            raise untied(str(source), HEAD)
        surplus -= {HEAD}
    _compare(source, wanted, {name: array.shape for name, array in found.items()}, sorted(surplus))
    parameters = {spec.name: found[spec.name] for spec in specs}
    if first_not_finite(parameters):
        raise UserError(f"{source}: {first_not_finite(parameters)} has values that are not finite")
    given = parameters | constants
    run = msgspec.structs.replace(
        manifest.run, initial=checksum(given), initial_name=clean(source.resolve().name[:MAX_NAME])
    )
    return msgspec.structs.replace(manifest, run=run), given


def with_given_model(source: Path | None, architecture: str, base: Manifest) -> tuple[Manifest, Arrays]:
    """Do that with the model at `source`, or a new one of an architecture: a config.json, its folder, or a
    name. With AdamW, whatever `base` has.

    Raises:
        UserError: both are given, or one is not what it should be.
    """
    base = for_other_model(base)
    if source is not None:
        if architecture:
            raise UserError("--from and --architecture are both given", "a model that exists has its own")
        return with_existing_model(source, base)
    path, (name, _, revision) = Path(architecture), architecture.partition("@")
    if path.is_dir():
        path /= CONFIG
    elif not path.exists():
        if not may_be_on_the_hub(name):
            raise UserError(
                f"there is no file or folder {architecture}",
                f"give a {CONFIG}, its folder, or NAME[@REVISION] of the Hugging Face hub",
            )
        click.echo(f"asking the hub for {CONFIG} of {name}", err=True)
        path = hub_file(name, CONFIG, revision)
    config = _read_config(path)
    manifest = _fitting(_of_hub(config, base))
    specs = specs_from_texts(manifest.model["parameters"])  # type: ignore[arg-type]
    model = built(json.loads(str(manifest.model["config"])), specs, base.run.seed)
    check_causal(model, config.get("model_type"))
    constants = _constants(model)
    manifest, arrays = _with_constants(manifest, constants), _arrays(model) | constants
    run = msgspec.structs.replace(
        manifest.run, initial=checksum(arrays), initial_name=f"new {config.get('model_type')}"[:100]
    )
    return msgspec.structs.replace(manifest, run=run), arrays


def opened(source: Path | None, out: Path, tokenizer: bool) -> Path | None:
    """Make what is at `source` a file or folder that is read here, until the command's end (`as_folder`)."""
    return click.get_current_context().with_resource(as_folder(source, out, tokenizer))


def _compare(
    source: Path,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    surplus: Sequence[str],
) -> None:
    """Compare parameters by name and shape. Raises: UserError (it names the first of each kind of fault)."""
    missing = [name for name in wanted if name not in found]
    others = [name for name in wanted if name in found and found[name] != wanted[name]]
    for names, what in (
        (missing, "is missing"),
        (others, f"has shape {found[others[0]]}, not {wanted[others[0]]}" if others else ""),
        (surplus, "has no place in the model that config.json describes"),
    ):
        if names:
            more = f", and so for {len(names) - 1} more" if names[1:] else ""
            raise UserError(
                f"{source}: the parameter {names[0]} {what}{more}",
                "give the whole folder, with the config.json that belongs to its weights",
            )


def _say(words: str) -> None:
    click.echo(words, err=True)


def _arrays(model: Any) -> Arrays:
    return {name: value.contiguous().numpy() for name, value in named_parameters(model).items()}


def _constants(model: Any) -> Arrays:
    """Constants of the model; a sentence names what is none, and changes in training."""
    found = describe(model)
    if moving := list(found.statistics):
        click.echo(
            f"{len(moving)} buffers of the model change in training, the first is {moving[0]}: every node "
            "has its own, and they are not exported",
            err=True,
        )
    return {name: value.numpy() for name, value in carried(found.constants).items()}


def _with_constants(manifest: Manifest, constants: Arrays) -> Manifest:
    """List these constants in the manifest."""
    return msgspec.structs.replace(manifest, model=manifest.model | constants_table(constants))


def save_beside(out: Path, parameters: Arrays) -> Path:
    """The parameters, where the manifest's reader looks for them. Raises: StorageError."""
    save_tensors(initial_beside(out), parameters, {})
    return initial_beside(out)


def _config(source: Path) -> dict[str, Any]:
    """Read the configuration of the model at `source`: a folder, or a safetensors file in one."""
    return _read_config(source / CONFIG if source.is_dir() else source.with_name(CONFIG))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return msgspec.convert(read_json(file.read(MAX_CONFIG_BYTES)), dict[str, Any])
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            "a model is a checkpoint, or a folder with config.json",
        ) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON of a model: {error}") from error


def _of_config(config: dict[str, Any], base: Manifest) -> Manifest:
    """Fill in the model by its configuration, with no more context than an inner step has tokens."""
    most = with_defaults(config).get("max_position_embeddings")
    tokens = base.inner.tokens_per_step
    context = min(most, tokens) if isinstance(most, int) else tokens
    run = msgspec.structs.replace(base.run, task="causal-lm", task_package="")
    if difference_from_ours(config):
        return _of_hub(config, base)
    return msgspec.structs.replace(base, run=run, model=table(section_of(config, context)))


def _made_for(config: dict[str, Any]) -> int:
    """Tokens that a model of this configuration is made for; 0: it does not say."""
    found = longest(with_defaults(config))
    return found if 0 < found < 1 << 31 else 0


def _of_hub(config: dict[str, Any], base: Manifest) -> Manifest:
    run = msgspec.structs.replace(base.run, task=NAME, task_package="", initial=NOT_YET)
    model = table(hub_section(config, base.inner.tokens_per_step))
    return msgspec.structs.replace(base, run=run, model=model)


def _fitting(manifest: Manifest) -> Manifest:
    """Fit the inner step to whole samples: as many tokens as there were, or one sample."""
    sample = manifest.model.get("context_tokens", 1)
    if not isinstance(sample, int) or manifest.inner.tokens_per_step % sample == 0:
        return manifest
    tokens = max(1, manifest.inner.tokens_per_step // sample) * sample
    return msgspec.structs.replace(
        manifest, inner=msgspec.structs.replace(manifest.inner, tokens_per_step=tokens)
    )
