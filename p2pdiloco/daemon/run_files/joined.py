"""Runs that a node joined, by id, in `<data_dir>/joined.txt`, the newest last.

At the next start it joins the same one again, whatever else is listed by its name by then, and whoever was
asked whether to join it is not asked again. A lost file costs just that.
"""

from __future__ import annotations

import re
from pathlib import Path

from p2pdiloco.adapters.disk.files import Files

MAX_JOINED = 64
MAX_BYTES = 65 * 2 * MAX_JOINED
_ID = re.compile(r"[0-9a-f]{64}")


def joined_file(data_dir: Path) -> Path:
    """Path of the file with the ids."""
    return data_dir / "joined.txt"


def joined_runs(data_dir: Path) -> list[str]:
    """List the ids of the runs that were joined from this folder, the newest first."""
    try:
        text = joined_file(data_dir).read_bytes()[:MAX_BYTES].decode("ascii", "replace")
    except OSError:
        return []
    return [line for line in reversed(text.splitlines()) if _ID.fullmatch(line)]


def remember_joined(data_dir: Path, run: str) -> None:
    """Remember a run as the newest that was joined.

    Raises: StorageError.
    """
    earlier = joined_runs(data_dir)
    if earlier[:1] != [run]:
        lines = [run, *(other for other in earlier if other != run)][:MAX_JOINED]
        content = "".join(f"{line}\n" for line in reversed(lines)).encode()
        Files().save(joined_file(data_dir), [content], durable=True)
