"""Checks of this machine alone, without a network."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from p2pdiloco.adapters.data_dir import DataDir, DataDirInUse
from p2pdiloco.cli.doctor.findings import Diagnosis, bad, good, skipped, warning
from p2pdiloco.config.values import size_text
from p2pdiloco.daemon.budgets import free_disk_bytes, free_memory_bytes
from p2pdiloco.errors import install_hint
from p2pdiloco.release import VERSION, WIRE_VERSION

OLDEST, NEWEST = (3, 11), (3, 14)
LEAST_MEMORY, LEAST_DISK = 1 << 30, 1 << 30
FEW_FILES, TOO_FEW_FILES = 1024, 256
NVIDIA = Path("/proc/driver/nvidia/version")
TORCH_S = 90.0
ASK_TORCH = """
import json, torch
from p2pdiloco.learner.ranks import accelerators
from p2pdiloco.tensors.outer_update import steps_as_everywhere
found = list(accelerators())
device = found[0] if found else "cpu"
works = (torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)).sum().item() == 64.0**3
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
print(json.dumps({"version": torch.__version__, "device": device, "names": names, "free": free,
                  "works": works, "threads": torch.get_num_threads(), "built": torch.version.cuda or "",
                  "same": steps_as_everywhere()}))
"""
"""Program that looks at torch, in a process of its own: a broken driver may end it, or hang."""


def python_here() -> Iterator[Diagnosis]:
    """Check Python, and say what this is."""
    yield good("p2pdiloco", f"version {VERSION}, protocol version {WIRE_VERSION}")
    version, here = platform.python_version(), f"{platform.system()} {platform.machine()}"
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        yield bad("python", f"{version} on {here}", "use Python 3.11 to 3.14")
    elif sys.platform not in ("linux", "darwin"):
        yield warning("python", f"{version} on {here}", "nodes were tested on Linux only")
    else:
        yield good("python", f"{version} on {here}, {os.cpu_count()} processors")


async def torch_here() -> list[Diagnosis]:
    """Check PyTorch, and the device that a learner would take."""
    if find_spec("torch") is None:
        return [
            skipped("torch", "PyTorch is not installed: a bootstrap needs none, a node does", install_hint())
        ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASK_TORCH, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines()[-1:] or [
            f"it ends with {process.returncode}"
        ]
        return [
            bad(
                "torch", f"PyTorch does not work here: {words[0][:200]}", f"install it anew; {install_hint()}"
            )
        ]
    return list(_of_torch(json.loads(out.splitlines()[-1])))


def _of_torch(said: dict[str, object]) -> Iterator[Diagnosis]:
    yield good("torch", f"{said['version']}, {said['threads']} threads")
    if not said["same"]:
        words = "merges have other bits here than on all others: this node audits nobody, and is no syncer"
        yield bad("merges", words, f"install PyTorch anew; {install_hint()}")
    device = str(said["device"])
    if not said["works"]:
        yield bad("device", f"{device} multiplies wrongly", "update its driver, or choose --device cpu")
    elif device == "cpu" and NVIDIA.exists():
        yield warning(
            "device",
            "cpu, although this system has NVIDIA's driver",
            "install a PyTorch for CUDA (docs/topics/devices.md)"
            if not said["built"]
            else "run nvidia-smi, and restart",
        )
    elif device == "cuda":
        names = said["names"] if isinstance(said["names"], list) else []
        free = said["free"] if isinstance(said["free"], int) else 0
        yield good("device", f"cuda: {', '.join(map(str, names))}; {size_text(free)} free")
    else:
        yield good("device", device)


def memory_and_disk(data_dir: Path) -> Iterator[Diagnosis]:
    """Say what is left; whether it suffices for a run is looked at with the run."""
    memory = free_memory_bytes()
    if memory < LEAST_MEMORY:
        todo = "close other programs, or raise the container's limit"
        yield warning("memory", f"{size_text(memory)} free", todo)
    else:
        yield good("memory", f"{size_text(memory)} free")
    disk, where = free_disk_bytes(existing(data_dir)), f"free for {data_dir}"
    if disk < LEAST_DISK:
        yield warning(
            "disk", f"{size_text(disk)} {where}", "make room, or choose another disk with --data-dir"
        )
    else:
        yield good("disk", f"{size_text(disk)} {where}")


def existing(folder: Path) -> Path:
    """Find the folder, or the nearest above it that is there."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def files_limit() -> Iterator[Diagnosis]:
    """Check how many files, and so connections, a process may have open."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words, todo = f"{most} files and connections open at once", f"ulimit -n {min(4096, max(hard, most))}"
    if most == resource.RLIM_INFINITY or most >= FEW_FILES:
        yield good("limits", words)
    elif most >= TOO_FEW_FILES:
        yield warning("limits", f"{words} at most", todo)
    else:
        yield bad("limits", f"{words} at most", todo)


def data_folder(data_dir: Path) -> Iterator[Diagnosis]:
    """Check the data folder, and who has it. Raises: StorageError."""
    if not data_dir.exists():
        yield good("folder", f"{data_dir} is not there yet: the first start makes it")
        return
    folder = DataDir(data_dir, create=False)
    try:
        folder.lock()
    except DataDirInUse:
        yield good("folder", f"{data_dir}, and a node or bootstrap runs with it")
        return
    folder.unlock()
    yield good("folder", f"{data_dir}, free for a node to start")


def leftovers() -> Iterator[Diagnosis]:
    """Look for processes of nodes that are gone: p2pd and learners end with their node."""
    alone, others = [], 0
    for process in psutil.process_iter(["pid", "name", "ppid", "cmdline", "uids"]):
        said = process.info
        if said["uids"] is None or said["uids"].real != os.getuid():
            continue
        words = " ".join(said["cmdline"] or [])
        is_p2pd = said["name"] == "p2pd"
        is_learner = "p2pdiloco.learner" in words
        if (is_p2pd or is_learner) and said["ppid"] == 1:
            alone.append(said["pid"])
        elif "p2pdiloco" in words and (" node " in f"{words} " or " bootstrap " in f"{words} "):
            others += 1
    if alone:
        pids = " ".join(map(str, alone[:8]))
        yield warning("processes", f"left behind by a node that is gone: {pids}", f"end them: kill {pids}")
    else:
        yield good("processes", f"none left behind; nodes and bootstraps of yours that run here: {others}")
