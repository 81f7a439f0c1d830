"""Runs that a node joined, by id, in `<data_dir>/joined.txt`, the newest last.

At the next start it joins the same one again, whatever else is listed by its name by then, and whoever was
asked whether to join it is not asked again. A lost file costs just that.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.finding.peers_file import load_joined_through
from p2pdiloco.daemon.run_files.listing import choose_run, saved_runs
from p2pdiloco.errors import UserError
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
MAX_JOINED = 64
_ID = re.compile(r"[0-9a-f]{64}")


def joined_file(data_dir: Path) -> Path:
    """Path of the file with the ids."""
    return data_dir / "joined.txt"


def joined_runs(data_dir: Path) -> list[str]:
    """List the ids of the runs that were joined from this folder, the newest first."""
    return read_note(joined_file(data_dir), _decode, logger.warning) or []


def _decode(content: bytes) -> list[str]:
    """Raises: ValueError: of all that is there, nothing is an id."""
    lines = content.decode("ascii", "replace").splitlines()
    found = [line for line in reversed(lines) if _ID.fullmatch(line)]
    if content and not found:
        raise ValueError("there is no run id in it")
    return found


def remember_joined(data_dir: Path, run: str) -> None:
    """Remember a run as the newest that was joined.

    Raises: StorageError.
    """
    earlier = joined_runs(data_dir)
    if earlier[:1] != [run]:
        lines = [run, *(other for other in earlier if other != run)][:MAX_JOINED]
        content = "".join(f"{line}\n" for line in reversed(lines)).encode()
        Files().save(joined_file(data_dir), [content], durable=True)


def goes_on(settings: NodeSettings) -> bool:
    """Tell whether a start with these settings goes on where this folder was before: the run that is meant is
    saved here, and is named or is to be reached by what was given the last time. Whoever starts a service
    again with its machine does so. That nobody answers there yet is then no mistake of a person's.

    To be asked before the addresses of this start are kept.
    """
    saved = {run: listed for run, (listed, _) in saved_runs(settings.data_dir).items()}
    if settings.run_file is not None:
        is_saved, is_named = bool(saved), False
    else:
        try:
            chosen = choose_run(saved, settings.run, joined_runs(settings.data_dir))
        except UserError:  # several fit, which is said later
            return False
        is_saved, is_named = chosen is not None, bool(settings.run)
    before = load_joined_through(settings.data_dir)  # folders of earlier releases have none
    return is_saved and (is_named or not before or set(settings.join) <= set(before))
