"""run.toml in and out: the manifest with its task's own table, and every rule between keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2pdiloco.config import manifest as loader
from p2pdiloco.config.manifest import FORMAT, Manifest, RunSection
from p2pdiloco.config.values import convert, read_toml
from p2pdiloco.errors import ConfigError
from p2pdiloco.tasks.registry import task_class, task_of

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
    section = task_class(*(name, package) if known else (_NO_TASK.task,)).Section
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
