"""Notes: small files that a node writes for its next start, and could do without.

Disks and people damage files. A note that cannot be made out is set aside under another name, for people to
look at, and the node goes on as if it had never been written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
MAX_BYTES = 1 << 20
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of a decoder that is given something else than it wrote (`UnicodeDecodeError` is a `ValueError`)."""
ASIDE = (".corrupt", ".corrupt-2", ".corrupt-3")
"""Endings of what is set aside, as many as are kept of one name."""


def read_note(
    path: Path, decode: Callable[[bytes], T], tell: Callable[[str], None], most_bytes: int = MAX_BYTES
) -> T | None:
    """Read and decode a note; None: there is none, or it is damaged, which is told and the file set aside.

    `decode` raises one of `DAMAGE` at what it cannot make out.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
        return decode(content)
    except FileNotFoundError:
        return None
    except (IsADirectoryError, *DAMAGE) as error:
        tell(f"{path} is damaged ({error}): {set_aside(path)}, and it is as if it had never been")
    except OSError as error:
        tell(f"{path} cannot be read, and it is as if it had never been: {error.strerror}")
    return None


def set_aside(path: Path) -> str:
    """Rename what is damaged, over what was set aside before; say in a few words what became of it."""
    for ending in ASIDE:
        aside = path.with_name(path.name + ending)
        with contextlib.suppress(OSError):  # a folder there, or of another kind than what comes
            path.replace(aside)
            return f"set aside as {aside.name}"
    return "it stays, as it cannot be renamed"


def clear_folder_at(path: Path) -> None:
    """Set aside a folder that is where a file is to be written. Whatever else is there can be written over.

    Nothing is told: what wanted to read it has."""
    if path.is_dir() and not path.is_symlink():
        set_aside(path)
