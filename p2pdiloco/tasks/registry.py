"""Tasks by name, and manifests with their task's own table.

Tasks are the built-in ones, and those that installed packages bring, by entry points of the group
`p2pdiloco.tasks`: `my-task = "my_module:MyTask"`. A manifest only names a task; its code is what this
machine's owner installed. `load_manifest` and `render_toml` read and write run.toml, with every rule between
keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec
from msgspec import msgpack

from p2pdiloco.config import manifest as loader
from p2pdiloco.config.manifest import FORMAT, Manifest, RunSection, table
from p2pdiloco.config.values import convert, read_toml
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.tasks.causal_lm import CausalLM, HubCausalLM
from p2pdiloco.tasks.own_tasks import ImageClassification, OwnLoop
from p2pdiloco.tasks.task import Task
from p2pdiloco.tensors.sizes import MAX_NUMEL, MAX_TENSORS

GROUP = "p2pdiloco.tasks"
BUILT_IN: dict[str, type[Task]] = {
    "causal-lm": CausalLM,
    "image-classification": ImageClassification,
    "hf-causal-lm": HubCausalLM,
    "own-loop": OwnLoop,
}

_encoder = msgpack.Encoder(order="deterministic")


def task_class(name: str, package: str = "") -> type[Task]:
    """Find the task of this name; `package`: what the manifest says that it is in.

    Raises:
        UserError: it is not installed, or it cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = sorted(entry_points(group=GROUP, name=name), key=lambda entry: entry.value)
    if not found:
        raise UserError(
            f'the task "{name}" is not installed on this machine',
            f"pip install {package}, if you trust it: tasks are code"
            if package
            else f"install the package that brings it ({GROUP}); the run's owner knows which one",
        )
    if len(found) > 1:
        raise UserError(
            f'{len(found)} installed packages bring a task "{name}": {", ".join(e.value for e in found)}',
            "uninstall all but one",
        )
    return _loaded(found[0])


def _loaded(entry: EntryPoint) -> type[Task]:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f'the task "{entry.name}" ({entry.value}) cannot be loaded: {error}') from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(
            f'the task "{entry.name}" ({entry.value}) is no subclass of p2pdiloco.tasks.task.Task'
        )
    return found


def task_of(manifest: Manifest, tokenizer_file: bytes | None = None) -> Task:
    """Make the run's task. `tokenizer_file`: content of the file that `data.tokenizer` names, if text is
    needed.

    Raises:
        UserError: it is not installed.
        ConfigError: `[model]` is not what the task wants, or a rule between keys is broken.
    """
    run = manifest.run
    kind = task_class(run.task, run.task_package)
    try:
        task = kind(manifest, tokenizer_file)
    except msgspec.ValidationError as error:
        raise ConfigError(f'[model] of run "{run.name}" is not for the task {run.task}: {error}') from error
    # Else the same run would be another one where the task's defaults are others.
    if _encoder.encode(table(task.section)) != _encoder.encode(manifest.model):
        raise ConfigError(f'[model] of run "{run.name}" does not state every key of the task {run.task}')
    broken = task.broken_rule() or _out_of_bounds(task)
    if broken:
        raise ConfigError(broken)
    return task


def numel_of(manifest: Manifest) -> int:
    """Number of parameters of a run. Raises: as `task_of`."""
    return sum(spec.numel for spec in task_of(manifest).specs())


def _out_of_bounds(task: Task) -> str | None:
    fragments, specs = task.manifest.sync.fragments, task.specs()
    if len(specs) > MAX_TENSORS:
        return f"a model must have at most {MAX_TENSORS} tensors, this one has {len(specs)}"
    # A size of 0 counts as 1: strides beside it are computed, and overflow, all the same.
    numel = sum(math.prod(max(1, size) for size in spec.shape) for spec in specs)
    if numel > MAX_NUMEL:
        return (
            f"a model must have at most 2^{MAX_NUMEL.bit_length() - 1} parameters, this one has {numel:.3g}"
        )
    rows = sum(spec.rows for spec in specs if spec.numel)
    if fragments <= rows:
        return None
    return f"sync.fragments must be at most {rows} for a model of this shape, it is {fragments}"


_NO_TASK = RunSection(name="-")


def load_manifest(path: Path) -> Manifest:
    """Read and check a run.toml.

    Raises:
        ConfigError: one sentence naming the file and the key or line.
        UserError: its task is not installed.
    """
    return manifest_from_table(read_toml(path), str(path))


def manifest_from_table(raw: Mapping[str, Any], label: str) -> Manifest:
    """Check a manifest that a TOML file says; `label` (the file's name) opens every sentence."""
    written = raw.get("format", FORMAT)
    if isinstance(written, int) and written != FORMAT:
        # First, since what its keys would be refused for is a consequence of it.
        raise ConfigError(
            f"{label}: format must be {FORMAT}, it is {written}",
            "the file is of another version of p2pdiloco; `p2pdiloco run new` writes one for this version",
        )
    run = raw.get("run")
    given = run if isinstance(run, Mapping) else {}
    name, package = given.get("task", _NO_TASK.task), given.get("task_package", "")
    # What is no string is refused below, in a sentence that names the key.
    known = isinstance(name, str) and isinstance(package, str)
    section = (task_class(name, package) if known else task_class(_NO_TASK.task)).Section
    manifest = loader.untyped(convert(raw, loader.typed(section), label))
    check_manifest(manifest, label)
    return manifest


def check_manifest(manifest: Manifest, label: str) -> None:
    """Check the rules that span several keys, and that it can be signed and sent.

    Raises:
        ConfigError: the first broken one; `label` (a file name) opens the sentence.
    """
    broken = loader.broken_rule(manifest)
    if broken:
        raise ConfigError(f"{label}: {broken}")
    size = len(loader.canonical_bytes(manifest))
    if size > loader.MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"{label}: the manifest has {size} bytes, at most {loader.MAX_MANIFEST_BYTES} travel",
            "[model] names too many parameters or classes; shorter names help",
        )
    try:
        task_of(manifest)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}", error.hint) from error


def render_toml(manifest: Manifest) -> str:
    """The manifest as a commented run.toml; `load_manifest` reads the same manifest back.

    Raises:
        UserError: its task is not installed.
    """
    section = task_class(manifest.run.task, manifest.run.task_package).Section
    return loader.render_toml(manifest, section)
