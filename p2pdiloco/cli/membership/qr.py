"""QR codes of words that people join with."""

from __future__ import annotations

import sys
from pathlib import Path

from p2pdiloco.adapters.data_dir import try_file
from p2pdiloco.errors import StorageError, UserError

FORMS = (".svg", ".png")
SCALE, BORDER = 6, 4
"""Pixels of a module, and modules of the quiet zone that readers need."""


def show_qr(word: str) -> None:
    """Draw the code on stderr."""
    import segno

    # Capital letters need fewer modules, and mean the same.
    segno.make(word.upper(), error="l", micro=False).terminal(out=sys.stderr, compact=True)


def check_qr_file(path: Path) -> None:
    """Check that a code can be written there. Raises: UserError, StorageError."""
    if path.suffix.lower() not in FORMS:
        raise UserError(f"--qr-file {path} must end in {' or '.join(FORMS)}")
    try_file(path, "--qr-file")


def save_qr(word: str, path: Path) -> None:
    """Write the code as an image of the form that the name ends in. Raises: StorageError."""
    import segno

    code = segno.make(word.upper(), error="m", micro=False)
    try:
        code.save(str(path), kind=path.suffix.lower()[1:], scale=SCALE, border=BORDER)
    except OSError as error:
        raise StorageError(f"--qr-file {path} cannot be written: {error.strerror}") from error
