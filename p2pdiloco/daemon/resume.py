"""After an orderly end: which of the learner's saved displacements may be taken up again.

A displacement that was saved while contributions went on (a regular checkpoint) may be in the chain by
now, as part of a later contribution; only what an orderly end wrote is beyond that doubt, and only while
the chain's watermark of ours is still the one that was noted then.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from p2pdiloco.core.node import Core
from p2pdiloco.core.types import NEVER, Stamp
from p2pdiloco.learner.channel import RestoreMode

logger = logging.getLogger(__name__)
FILE = "resume.json"
Stamps = dict[int, tuple[Stamp, Stamp | None]]
"""Fragment -> (our watermark in the chain, stamp of the contribution whose copy is still in the slot)."""


def write_resume(folder: Path, stamps: Stamps) -> None:
    """Note the state of our contributions at an orderly end; a missing note only costs the displacements."""
    temporary = folder / (FILE + ".tmp")
    try:
        temporary.write_bytes(msgspec.json.encode({str(k): v for k, v in stamps.items()}))
        temporary.replace(folder / FILE)
    except OSError as error:
        logger.error("the note for the next start is not saved, unmerged inner steps will be lost: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def restore_modes(folder: Path, core: Core) -> tuple[RestoreMode, ...]:
    """Per fragment what a new learner may take from the saved state; the note is used up by this."""
    path = folder / FILE
    fragments = core.fragments
    try:
        stamps = msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[Stamp, Stamp | None]])
        path.unlink()
    except FileNotFoundError:
        return tuple("none" for _ in fragments)
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be used, inner steps that it is about are lost: %s", path, error)
        return tuple("none" for _ in fragments)
    modes: list[RestoreMode] = []
    for fragment in fragments:
        after, pending = stamps.get(str(fragment.index), (NEVER, None))
        mark = fragment.chain.watermark(core.shared.me)
        if pending is None:
            modes.append("all" if mark == after else "none")
        else:
            # The one in flight may still be merged: take only what was made after it.
            modes.append("rest" if mark in (after, pending) else "none")
    return tuple(modes)
