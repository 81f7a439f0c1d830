"""File of proofs against members, `proofs` in a run's folder: replaced as a whole for every new one.

Each proof holds by its signatures or not at all, so the file has no checksum; a damaged one is set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.core.api.evidence import MAX_PROOFS, Evidence
from p2pdiloco.util import clear_folder_at, read_note

NAME = "proofs"
_decoder = msgspec.msgpack.Decoder(Annotated[tuple[Evidence, ...], Meta(max_length=MAX_PROOFS)])


def load_proofs(folder: Path, tell: Callable[[str], None]) -> tuple[Evidence, ...]:
    """Read the proofs; `tell` hears of damage. Whether they hold is for the reader to see."""
    return read_note(folder / NAME, _decoder.decode, tell) or ()


def save_proofs(folder: Path, proofs: Sequence[Evidence], files: Files) -> None:
    """Write all proofs durably, over those before. Raises: StorageError."""
    path = folder / NAME
    clear_folder_at(path)
    files.save(path, [msgspec.msgpack.encode(tuple(proofs))], durable=True)
