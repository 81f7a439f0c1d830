"""`run new --from` and `--architecture`: a run whose version 0 is a model that exists, or a new one of any
architecture that `transformers` knows.

A model that exists is a checkpoint or an export of p2pdiloco, or a Hugging Face folder (config.json and
safetensors). What is of Llama's or Mixtral's form becomes causal-lm, the rest hf-causal-lm. `for_existing`
chooses the settings: presets are for models that begin with nothing. A model that exists has a context; its
rate is lower, by its size and by the kind of training (`presets.row_for`); and its run is short, so H follows
from the length. `settings_lines` and `settings_warnings` tell a person what was chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from p2pdiloco.adapters.result_file import (
    KEY,
    Arrays,
    checksum,
    load_metadata,
    load_result_file,
    save_tensors,
)
from p2pdiloco.cli.given_files import CONFIG, ModelFiles, as_folder, dtype_in
from p2pdiloco.cli.given_wish import MOST_CONTEXT, TrainingWish
from p2pdiloco.cli.options import say
from p2pdiloco.config.manifest import (
    MAX_NAME,
    ExportSection,
    InnerSection,
    Manifest,
    SyncSection,
    manifest_from_canonical,
    table,
)
from p2pdiloco.config.presets import (
    CONTINUE,
    FINETUNE,
    LENGTHS,
    USUAL_INNER_STEPS,
    VERBS,
    expected_members,
    expected_merges,
    for_given,
    for_length,
    for_other_model,
    inner_steps_of,
    row_for,
    too_large,
    warmup_steps,
    with_schedule,
    with_tokens,
)
from p2pdiloco.config.values import is_whole
from p2pdiloco.daemon.display.snapshot import count, counted
from p2pdiloco.daemon.run_files.shared_files import constants_table, first_not_finite, initial_beside
from p2pdiloco.errors import UserError, clean
from p2pdiloco.tasks.causal_lm import HUB_TASK, built, check_causal, existing
from p2pdiloco.tasks.causal_lm import section_of as hub_section
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
from p2pdiloco.tasks.own_tasks import specs_from_texts
from p2pdiloco.tasks.registry import numel_of, task_of
from p2pdiloco.tasks.task import constants_of
from p2pdiloco.util import DAMAGE, Frozen, Values

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
        say(files.words())
    found = {}
    constants = {}
    if checkpoints:
        checkpoint = load_result_file(checkpoints[0])
        found = checkpoint.parameters
        theirs = manifest_from_canonical(checkpoint.signed.manifest)
        # Their tasks may demand a given version 0, whose checksum is known below only.
        run = replace(base.run, task=theirs.run.task, task_package=theirs.run.task_package, initial=NOT_YET)
        manifest = replace(base, run=run, model=theirs.model, data=theirs.data, export=theirs.export)
        constants = {constant.name: found.pop(constant.name) for constant in constants_of(theirs.model)}
    else:
        config = _config(source)
        refuse_quantised(config, str(source))
        export = ExportSection(dtype=dtype_in(config), context_tokens=_made_for(config))
        manifest = _of_config(config, replace(base, export=export))
    task = task_of(_fitting(manifest))
    manifest = task.manifest
    specs = task.specs()
    if manifest.run.task == HUB_TASK and not checkpoints:
        # Names in files are an architecture's own affair: the library knows them.
        config = _config(source)
        with files.alone() as folder:
            model = existing(folder, config, str(source), files.types(), say)
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
    run = replace(manifest.run, initial=checksum(given), initial_name=clean(source.resolve().name[:MAX_NAME]))
    return replace(manifest, run=run), given


def with_given_model(
    source: Path | None, architecture: str, base: Manifest
) -> tuple[Manifest, Arrays | None]:
    """Do that with the model at `source`, or a new one of an architecture: a config.json, its folder, or a
    name. With AdamW, whatever `base` has; neither is given: as it is.

    Raises:
        UserError: both are given, or one is not what it should be.
    """
    if source is None and not architecture:
        return base, None
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
        say(f"asking the hub for {CONFIG} of {name}")
        path = hub_file(name, CONFIG, revision)
    config = _read_config(path)
    manifest = _fitting(_of_hub(config, base))
    specs = specs_from_texts(manifest.model["parameters"])  # type: ignore[arg-type]
    model = built(json.loads(str(manifest.model["config"])), specs, base.run.seed)
    check_causal(model, config.get("model_type"))
    constants = _constants(model)
    manifest, arrays = _with_constants(manifest, constants), _arrays(model) | constants
    run = replace(
        manifest.run, initial=checksum(arrays), initial_name=f"new {config.get('model_type')}"[:100]
    )
    return replace(manifest, run=run), arrays


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


def _arrays(model: Any) -> Arrays:
    from p2pdiloco.tasks.initial import named_parameters  # with torch

    return {name: value.contiguous().numpy() for name, value in named_parameters(model).items()}


def _constants(model: Any) -> Arrays:
    """Constants of the model; a sentence names what is none, and changes in training."""
    from p2pdiloco.tasks.description import carried, describe  # with torch

    found = describe(model)
    if moving := list(found.statistics):
        say(
            f"{len(moving)} buffers of the model change in training, the first is {moving[0]}: every node "
            "has its own, and they are not exported",
        )
    return {name: value.numpy() for name, value in carried(found.constants).items()}


def _with_constants(manifest: Manifest, constants: Arrays) -> Manifest:
    """List these constants in the manifest."""
    return replace(manifest, model=manifest.model | constants_table(constants))


def save_beside(out: Path, parameters: Arrays) -> Path:
    """The parameters, where the manifest's reader looks for them. Raises: StorageError."""
    save_tensors(initial_beside(out), parameters, {})
    return initial_beside(out)


def _config(source: Path) -> Values:
    """Read the configuration of the model at `source`: a folder, or a safetensors file in one."""
    return _read_config(source / CONFIG if source.is_dir() else source.with_name(CONFIG))


def _read_config(path: Path) -> Values:
    try:
        with path.open("rb") as file:
            return msgspec.convert(read_json(file.read(MAX_CONFIG_BYTES)), Values)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            "a model is a checkpoint, or a folder with config.json",
        ) from error
    except DAMAGE as error:
        raise UserError(f"{path} is not JSON of a model: {error}") from error


def _of_config(config: Values, base: Manifest) -> Manifest:
    """Fill in the model by its configuration, with no more context than an inner step has tokens."""
    most = with_defaults(config).get("max_position_embeddings")
    tokens = base.inner.tokens_per_step
    context = min(most, tokens) if is_whole(most) else tokens
    run = replace(base.run, task="causal-lm", task_package="")
    if difference_from_ours(config):
        return _of_hub(config, base)
    return replace(base, run=run, model=table(section_of(config, context)))


def _made_for(config: Values) -> int:
    """Tokens that a model of this configuration is made for; 0: it does not say."""
    found = longest(with_defaults(config))
    return found if 0 < found < 1 << 31 else 0


def _of_hub(config: Values, base: Manifest) -> Manifest:
    run = replace(base.run, task=HUB_TASK, task_package="", initial=NOT_YET)
    model = table(hub_section(config, base.inner.tokens_per_step))
    return replace(base, run=run, model=model)


def _fitting(manifest: Manifest) -> Manifest:
    """Fit the inner step to whole samples: as many tokens as there were, or one sample."""
    sample = manifest.model.get("context_tokens", 1)
    if not isinstance(sample, int) or manifest.inner.tokens_per_step % sample == 0:
        return manifest
    return _with_step(manifest, max(1, manifest.inner.tokens_per_step // sample) * sample)


# Settings, and how a person changes any run's.

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


class RunLength(Frozen):
    """A run's length, as a person or a default has it. `tokens`: 0, it is `steps`."""

    tokens: int
    steps: int
    words: str


def length_of(wish: TrainingWish, counted: int, path: Path | None) -> RunLength:
    """Choose the length: the one that was wished for, or the usual one.

    `counted`: tokens of the data, 0: they were not counted.
    """
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
    return _with_step(manifest, MOST_CONTEXT)


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
    return _with_step(replace(manifest, model=model), max(1, step_tokens // context) * context)


def _with_step(manifest: Manifest, tokens: int) -> Manifest:
    inner = replace(manifest.inner, tokens_per_step=tokens)
    return replace(manifest, inner=inner)


def with_changes(manifest: Manifest, wish: TrainingWish, counted: int) -> Manifest:
    """Copy of a preset's run with the rate and the length that are wished for. Raises: UserError (too few
    tokens for one inner step of each learner)."""
    if wish.learning_rate is not None:
        inner = replace(manifest.inner, learning_rate=wish.learning_rate)
        manifest = replace(manifest, inner=inner)
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
    manifest = replace(manifest, inner=inner, sync=sync)
    return for_given(with_tokens(manifest, length.tokens or steps * step * members))


def _step_tokens(kind: str, sample: int, tokens: int) -> int:
    """Tokens of an inner step, whole samples, with which a learner's `tokens` (0: any) are enough steps."""
    if sample == 1:  # images, or what a program counts
        return _IMAGES_A_STEP
    wanted = tokens // _STEPS[kind] if tokens else USUAL_STEP_TOKENS
    return max(1, min(max(wanted, _LEAST_STEP_TOKENS), _MOST_STEP_TOKENS[kind]) // sample) * sample


# Settings in words: five lines, and warnings.

LEAST_MERGES = 20
"""Merges below which a run is hardly one of several."""


def settings_lines(manifest: Manifest, wish: TrainingWish, length: RunLength, own: object) -> list[str]:
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
    inner, numel = manifest.inner, numel_of(manifest)
    why = "as --learning-rate says" if wish.learning_rate else f"as in {row_for(numel).sources}"
    warmup = warmup_steps(inner_steps_of(manifest))
    return (
        f"rate: {inner.learning_rate:g} to {VERBS[wish.kind]} {count(numel)} parameters, {why}; AdamW, "
        f"{warmup} steps of warm-up, weight decay {inner.weight_decay:g}"
    )


def _length_words(manifest: Manifest, length: RunLength) -> str:
    inner = manifest.inner
    is_embedded = manifest.data.source == "embedded" and manifest.model.get("context_tokens") is not None
    text = "; the text is Python's own library, --data names yours" if is_embedded else ""
    merges = counted(expected_merges(manifest), "merge")
    return (
        f"length: {count(inner.schedule_tokens)} tokens ({length.words}), that is "
        f"{inner_steps_of(manifest)} steps of {inner.tokens_per_step} by each of "
        f"{counted(expected_members(manifest), 'member')}: {merges}{text}"
    )


def _outer_words(manifest: Manifest) -> str:
    outer, sync = manifest.outer, manifest.sync
    warm = f" after {outer.momentum_warmup_merges} merges" if outer.momentum_warmup_merges else ""
    return (
        f"outer step: rate {outer.learning_rate:g}, momentum {outer.momentum:g}{warm}, for so many merges; "
        f"each of {sync.fragments} fragments every {sync.inner_steps} steps"
    )


def settings_warnings(manifest: Manifest, wish: TrainingWish) -> list[str]:
    """Warnings about the settings of a run that begins with a model that exists."""
    merges, is_chosen = expected_merges(manifest), wish.is_chosen(True)
    is_long = wish.continued if is_chosen else inner_steps_of(manifest) >= LENGTHS["day"].steps
    kind = CONTINUE if is_long else FINETUNE
    few = (
        f"{counted(merges, 'merge')} of each fragment: {LEAST_MERGES} are wanted; take more --tokens or "
        "--epochs, fewer --expected-members, or a shorter --context"
    )
    found = too_large(manifest.inner.learning_rate, numel_of(manifest), kind)
    return ([found] if found else []) + ([few] if is_chosen and merges < LEAST_MERGES else [])
