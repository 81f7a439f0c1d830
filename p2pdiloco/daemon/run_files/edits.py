"""Edits of a run.toml whose run was signed before: they make another run, and that is said first."""

from __future__ import annotations

from pathlib import Path

import msgspec

from p2pdiloco.config.manifest import Manifest, canonical_bytes, manifest_from_canonical
from p2pdiloco.daemon.run_files.listing import saved_runs

MOST_KEYS = 8


def words_of_edits(manifest: Manifest, data_dir: Path, owner: str) -> str:
    """Say in what a manifest differs from the run of its name that this owner has signed, which it is not; of
    several, from the nearest one. Empty: it is that run, or there is none."""
    named: dict[str, list[str]] = {}
    for run, (_, signed) in saved_runs(data_dir).items():
        if signed.owner != owner:
            continue
        if signed.manifest == canonical_bytes(manifest):
            return ""
        before = manifest_from_canonical(signed.manifest)
        if before.run.name == manifest.run.name:
            named[run] = changed_keys(before, manifest)
    if not named:
        return ""
    run, keys = min(named.items(), key=lambda item: len(item[1]))
    more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
    return (
        f"this is another run than {manifest.run.name} {run[:12]}, which this folder's owner signed before: "
        f"{', '.join(keys[:MOST_KEYS])}{more} differ. The members of that one stay there. "
        f"To change the length or the learning rate of a run that goes on: p2pdiloco run amend {run[:12]}"
    )


def changed_keys(before: Manifest, after: Manifest) -> list[str]:
    """List the keys of run.toml, as "inner.schedule_tokens", in which two manifests differ."""
    old, new = (_flat(msgspec.to_builtins(manifest)) for manifest in (before, after))
    return [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]


def _flat(tables: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found
