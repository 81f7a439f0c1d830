"""Paths as a person writes them: "~" is the home folder, which a user id without a name does not have."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from p2pdiloco.errors import ConfigError


def expanded(path: Path, flag: str = "--data-dir") -> Path:
    """Put the home folder in the place of "~".

    Raises:
        ConfigError: nobody says where it is: no HOME, and no name for the user id, as in many containers.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        whose = path.parts[0].removeprefix("~")
        nobody = f"HOME is not set, and the user id {os.getuid()} has no name"
        lacking = f'there is no user "{whose}"' if whose else nobody
        raise ConfigError(
            f"{flag} {path}: {lacking}, so there is no home folder",
            f"name a folder with {flag}, or set HOME",
        ) from error


def those_known(paths: Iterable[Path]) -> list[Path]:
    """Expand the default folders of several programs; without a home there are none."""
    try:
        return [path.expanduser() for path in paths]
    except RuntimeError:
        return []


def has_home() -> bool:
    """Tell whether "~" is a folder that somebody knows."""
    return bool(those_known([Path("~")]))
