"""Wishes of a machine's owner, kept for the node's next start: `<data_dir>/owner.json`.

Limits that were changed while a node ran, and a pause. A flag (a variable, a settings file) that is given at
a start wins over a kept limit, for that life.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.settings import DEFAULTS, FIELDS, OwnLimits, changed, changed_names, flag_of, value_text
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
FILE = "owner.json"


class KeptWishes(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    limits: OwnLimits = OwnLimits()
    changed: tuple[str, ...] = ()
    """Names of the limits that were changed, also back to none."""
    paused_since: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    """Seconds since 1970; 0: not paused."""


class LimitRow(Struct, frozen=True):
    """Row of one limit that can be changed while the node runs."""

    name: str
    """Name of its flag, without the dashes in front: "max-upload"."""
    value: str
    """Value as `limits` takes it, such as "20Mbit"; empty: no limit."""
    comes_from: str
    """Source of the value: "default", "start" (a flag, the environment or a file), "limits" (changed
    while it ran, and kept)."""


_decoder = msgspec.json.Decoder(KeptWishes)


def load_wishes(data_dir: Path) -> KeptWishes:
    """Load them; none if there are none."""
    known = read_note(data_dir / FILE, _decoder.decode, logger.warning)
    if known is None:
        return KeptWishes()
    return msgspec.structs.replace(known, changed=tuple(name for name in known.changed if name in FIELDS))


def save_wishes(data_dir: Path, wishes: KeptWishes) -> None:
    """Keep them. Raises: StorageError."""
    Files().save(data_dir / FILE, [msgspec.json.encode(wishes)], durable=True, private=True)


def combined(given: OwnLimits, kept: KeptWishes) -> tuple[OwnLimits, dict[str, str], list[str]]:
    """Combine what a start is given with what is kept.

    Returns the limits that hold, where each is from ("default", "start", "limits"), and sentences on kept
    ones that a given one takes the place of.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    words = []
    for name in FIELDS:
        asked, known = getattr(given, name), getattr(kept.limits, name)
        is_given = asked != DEFAULTS[name]
        values[name], sources[name] = asked, "start" if is_given else "default"
        if name not in kept.changed:
            continue
        if not is_given:
            values[name], sources[name] = known, "limits"
        elif known != asked:
            here, there = value_text(asked) or "none", value_text(known) or "none"
            words.append(
                f"{flag_of(name)} {here}, given at this start, wins over {there} of `p2pdiloco limits`"
            )
    return OwnLimits(**values), sources, words


def change_kept(data_dir: Path, changes: dict[str, str]) -> None:
    """Change what is kept, where no node runs. Raises: ConfigError, StorageError."""
    wishes = load_wishes(data_dir)
    save_wishes(data_dir, with_changes(wishes, changed(wishes.limits, changes), changes))


def with_changes(wishes: KeptWishes, limits: OwnLimits, changes: dict[str, str]) -> KeptWishes:
    """Keep these values of the limits that changes name."""
    names = changed_names(changes)
    return msgspec.structs.replace(
        wishes,
        limits=msgspec.structs.replace(wishes.limits, **{name: getattr(limits, name) for name in names}),
        changed=tuple(sorted({*wishes.changed, *names})),
    )
