"""Memory and disk that this machine has left for a node."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from p2pdiloco.adapters.data_dir import storage_error

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def free_memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Memory that programs can have without swapping: of the machine, or of the container's limit if that is
    less."""
    return min([int(psutil.virtual_memory().available), *_left_in_cgroups(cgroups, own)])


def _left_in_cgroups(cgroups: Path, own: Path) -> list[int]:
    """Memory left within each limit of ours: of our cgroup and of those that it is in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []  # no Linux
    left = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        names = (
            ("memory.max", "memory.current")
            if not controllers
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        root = cgroups / "memory" if controllers else cgroups
        # In a container the path may be the host's: what is mounted there is ours all the same.
        folder = root / path.strip("/")
        for place in {root, folder, *(f for f in folder.parents if f.is_relative_to(root))}:
            limit, used = _number(place / names[0]), _number(place / names[1])
            if limit is not None and used is not None:
                left.append(max(0, limit - used + _cached(place / "memory.stat")))
    return left


def _number(path: Path) -> int | None:
    """None: there is no such file, or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(path: Path) -> int:
    """Bytes of files in memory, which give way."""
    try:
        lines = path.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, IndexError):
        return 0


def free_disk_bytes(folder: Path) -> int:
    """Bytes that may still be written into that folder. Raises: StorageError."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise storage_error(error, "look at", folder) from error
