"""The note of an orderly end, from which the next start knows what saved displacements it may take up again.

A displacement that was saved while contributions went on (a regular checkpoint) may be in the chain by
now, as part of a later contribution; only what an orderly end wrote is beyond that doubt (`core.unmerged`).
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from p2pdiloco.core.node import Core
from p2pdiloco.core.unmerged import Unmerged
from p2pdiloco.learner.channel import RestoreMode

logger = logging.getLogger(__name__)
FILE = "resume.json"
Note = dict[int, Unmerged]
"""By fragment."""


def write_resume(folder: Path, left: Note) -> None:
    """Note the state of our contributions at an orderly end; a missing note only costs the displacements."""
    temporary = folder / (FILE + ".tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(left))
        temporary.replace(folder / FILE)
    except OSError as error:
        logger.error("the note for the next start is not saved, unmerged inner steps will be lost: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def restore_modes(folder: Path, core: Core) -> tuple[RestoreMode, ...]:
    """Per fragment what a new learner may take from the saved state; the note is used up by this."""
    path = folder / FILE
    try:
        data = path.read_bytes()
        path.unlink()
        left = msgspec.json.decode(data, type=Note)
    except FileNotFoundError:
        left = {}
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be used, inner steps that it is about are lost: %s", path, error)
        left = {}
    modes = tuple(f.own.take_up(left[f.index]) if f.index in left else "none" for f in core.fragments)
    if left:
        whole, rest = modes.count("all"), modes.count("rest")
        logger.info(
            "what the last life left unmerged is taken up: of %d of %d fragments all, of %d what was made "
            "after the contribution that a syncer may have",
            whole,
            len(modes),
            rest,
        )
    return modes
