"""Note of an orderly end: which saved displacements the next start may take up again.

A displacement that was saved while contributions went on (a regular checkpoint) may be in the chain by now,
as part of a later contribution. Only what an orderly end wrote is beyond that doubt
(`core.contributions.unmerged`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.core.node import Core
from p2pdiloco.core.pending import Unmerged
from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import RestoreMode
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
FILE = "resume.json"
Note = dict[int, Unmerged]
"""State of our contributions, by fragment."""
_decoder = msgspec.json.Decoder(Note)


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


class Resume:
    """Displacements that the last life left, until something is made of them.

    Where a learner died before it contributed or saved (its first step may have been too large), the next one
    takes up the same.
    """

    def __init__(self, folder: Path, core: Core) -> None:
        self._path = folder / FILE
        self._core = core

    def modes(self) -> tuple[RestoreMode, ...]:
        """Decide per fragment what a new learner may take from the saved state, as the chain is now."""
        left = self._read()
        modes = tuple(
            f.own.take_up(left[f.index]) if f.index in left else "none" for f in self._core.fragments
        )
        if left:
            whole, rest = modes.count("all"), modes.count("rest")
            logger.info(
                "what the last life left unmerged is taken up: all of it in %(whole)d of %(fragments)d "
                "fragments; in %(rest)d only what came after a contribution that may be merged already",
                {"whole": whole, "fragments": len(modes), "rest": rest},
            )
        return modes

    async def use_up(self) -> None:
        """Remove the note: what is left may be contributed, or saved in another state, from now on. No life
        may take it up again.

        Raises:
            UserError: the note stays, which could have inner steps merged twice.
        """
        try:
            await asyncio.to_thread(self._remove)
        except OSError as error:
            raise UserError(f"{self._path} cannot be removed: {error}", "see whose the folder is") from error

    def _remove(self) -> None:
        files = Files()
        files.remove(self._path)
        files.sync_folder(self._path.parent)

    def _read(self) -> Note:
        return read_note(self._path, _decoder.decode, logger.warning) or {}
