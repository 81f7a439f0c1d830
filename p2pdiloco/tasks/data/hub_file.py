"""Download of one file of a repository on the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from p2pdiloco.config.manifest import TOKENIZER_PATTERN
from p2pdiloco.errors import UserError, first_line, install_hint

INSTALL = install_hint("hub")


def may_be_on_the_hub(name: str) -> bool:
    """Tell whether the name has the form [OWNER/]NAME and does not look like a path.

    Nobody should wait for a network to hear that a file is missing.
    """
    return re.match(TOKENIZER_PATTERN, name) is not None and not name.endswith(".json")


def hub_file(name: str, file: str, revision: str = "") -> Path:
    """Fetch a file into the hub's cache; `revision`: empty for the newest. Without a network that takes the
    library most of a minute.

    Raises:
        UserError: the package is missing, or there is no such file, or no way to it.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise UserError(f"{file} of the hub needs the package huggingface_hub", INSTALL) from error
    # It tells of every attempt; what came of them is one sentence.
    attempts = logging.getLogger("huggingface_hub")
    level = attempts.level
    attempts.setLevel(logging.ERROR)
    try:
        return Path(hf_hub_download(name, file, revision=revision or None))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} of {name} cannot be had from the hub: {first_line(error)}",
            "download it elsewhere and give its path",
        ) from error
    finally:
        attempts.setLevel(level)
