"""Settings of commands that watch a run or a machine: `top`, `doctor`, `log-to`."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class TopSettings(Struct, frozen=True, kw_only=True):
    """`p2pdiloco top`."""

    join: tuple[str, ...] = ()
    data_dir: Path | None = None
    """Folder of a node or bootstrap that runs here, asked if no peer is named; None: the usual ones."""
    run: str = ""
    timeout_s: float = 20.0
    """Time within which somebody must answer at the start."""
    every_s: float = 10.0
    """Seconds between two lines, where there is no terminal."""


class DoctorSettings(Struct, frozen=True, kw_only=True):
    """`p2pdiloco doctor`."""

    join: tuple[str, ...] = ()
    run: str = ""
    data_dir: Path | None = None
    """Folder of the node; None: the usual one."""
    json: bool = False
    timeout_s: float = 240.0
    probe_python: str = ""
    """Python of an environment with py-libp2p; empty: no such probe."""


class LogToSettings(Struct, frozen=True, kw_only=True):
    """`p2pdiloco log-to`."""

    data_dir: Path = Path("~/.p2pdiloco/node")
    follow: bool = False
    out: Path | None = None
    """Folder of the charts' files; None: in the data folder, by the charts' name."""
    project: str = "p2pdiloco"
    name: str = ""
    """Name of the run in the charts; empty: the data folder's."""
    again: bool = False


class BoardSettings(Struct, frozen=True, kw_only=True):
    """`p2pdiloco board`."""

    join: tuple[str, ...] = ()
    data_dir: Path | None = None
    """Folder of a node or bootstrap that runs here, asked if no peer is named; None: the usual ones."""
    run: str = ""
    out: Path = Path("board")
    """Folder of the files."""
    every: str = ""
    """Time between two versions of the files, such as 30s; empty: they are written once."""
    timeout_s: float = 20.0
    """Time within which somebody must answer."""
