"""Notice of a run's owner on the disk: `<data_dir>/runs/<run id, 16>/notice`."""

from __future__ import annotations

import logging
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.daemon.admission.papers import Notice, decode_notice, encode_notice, is_true_notice
from p2pdiloco.errors import RemoteError
from p2pdiloco.identity import verify
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
NAME = "notice"


def load_notice(folder: Path, run: str, owner: str) -> Notice | None:
    """Load the run's notice from its folder; None: there is none that the owner made."""

    def decode(content: bytes) -> Notice:
        try:
            notice = decode_notice(content)
        except RemoteError as error:
            raise ValueError(str(error)) from error
        if not is_true_notice(notice, run, owner, verify):
            raise ValueError("the run's owner did not sign it")
        return notice

    return read_note(folder / NAME, decode, logger.warning)


def save_notice(folder: Path, notice: Notice) -> None:
    """Save a notice durably. Raises: StorageError, UserError (it is too large)."""
    data = encode_notice(notice)
    Files().make_folder(folder)
    Files().save(folder / NAME, [data], durable=True)
