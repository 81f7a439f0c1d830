"""Limits of this machine and of its peers: budgets of strangers, free memory and disk, background tasks,
threads.

Budgets are of what a peer is given that is no member of our run: it may ask for as much as it likes. Each is
a bucket that fills again with time, so what a peer had is remembered for longer than its connection. Peer ids
cost nothing: what all strangers have together is bounded by their streams (`adapters.streams`), and by the
states' share of the uplink (`daemon.bulk.states.Courtesy`). Listed in docs/reference/bounds.md, section 7.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from p2pdiloco.adapters.data_dir import storage_errors
from p2pdiloco.adapters.streams import PutOff
from p2pdiloco.util import BoundedDict, Frozen, Now, T, cancelled

MAX_PEERS = 4096
LISTING_BYTES = 1024 * 1024
REPORT_BYTES = 16 * 1024 * 1024
LISTING_S = 600.0
"""Time in which a peer has so many bytes of manifests and lists of runs, and of reports."""
HISTORY_BYTES = 256 * 1024 * 1024
"""Bytes of a run's history that a peer has at once: labels of more than a million contributions."""
HISTORY_S = 3600.0
COPIES = 3.0
"""Copies of a run's whole state, or of a file, that a peer has at once: one, and what was lost on the way."""
COPIES_S = 3600.0 / 2
"""Time in which it may have another one."""
SMALL_BYTES = 4 * 1024 * 1024
"""Bytes as which a smaller copy counts: nobody is hurt by a few."""
UPDATE_COPIES = 4
MAX_UPDATES = 8192


class Enough(Enum):
    """Kinds of what a stranger had enough of, as refusals are counted."""

    LISTINGS = "enough-listings"
    REPORTS = "enough-reports"
    FILES = "enough-files"
    STATES = "enough-states"
    UPDATES = "enough-updates"
    ADMISSIONS = "enough-admissions"
    HISTORIES = "enough-histories"


class Budget:
    """Budget of one kind of bytes for each peer."""

    def __init__(self, kind: Enough, most: float, full_again_s: float, now: Now) -> None:
        """`most`: what a peer has at once; `full_again_s`: time in which all of it is there again."""
        self._kind = kind
        self._most = most
        self._per_s = most / full_again_s
        self._now = now
        self._used: BoundedDict[str, tuple[float, float]] = BoundedDict(MAX_PEERS)
        """Amount that each peer had, as far as it is not there again, and when."""

    def check(self, peer: str) -> None:
        """Check that there is something left. Raises: PutOff."""
        if self._left(peer) <= 0:
            raise PutOff(self._kind.value)

    def take(self, peer: str, amount: float) -> None:
        """Count what the peer is given: the last time it may be more than was left."""
        self._used[peer] = (self._most - self._left(peer) + amount, self._now())

    def _left(self, peer: str) -> float:
        used, at_s = self._used.get(peer, (0.0, 0.0))
        return self._most - max(0.0, used - self._per_s * (self._now() - at_s))


class BulkBudgets:
    """Budgets of a run's states and updates."""

    def __init__(self, now: Now) -> None:
        self._states = Budget(Enough.STATES, COPIES, COPIES * COPIES_S, now)
        self._updates: BoundedDict[tuple[str, int, int], int] = BoundedDict(MAX_UPDATES)
        """Bytes of each update that each peer was given."""

    def check_state(self, peer: str) -> None:
        """Check that the peer may have something of a state. Raises: PutOff."""
        self._states.check(peer)

    def state(self, peer: str, size: int, all_bytes: int) -> None:
        """Count bytes of a state; those of all fragments are so many."""
        self._states.take(peer, size / max(all_bytes, SMALL_BYTES))

    def check_update(self, peer: str, fragment: int, number: int, update_bytes: int) -> None:
        """Check that the peer did not have all of that update too often. Raises: PutOff."""
        if self._updates.get((peer, fragment, number), 0) >= UPDATE_COPIES * max(update_bytes, 1):
            raise PutOff(Enough.UPDATES.value)

    def update(self, peer: str, fragment: int, number: int, size: int) -> None:
        """Count bytes of an update."""
        key = peer, fragment, number
        self._updates[key] = self._updates.get(key, 0) + size


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
    with storage_errors("look at", folder):
        return shutil.disk_usage(folder).free


class Background:
    """Tasks of a member beside its event handling: a bug of ours in any of them ends the daemon."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        """Future that fails with our own bug; the daemon ends then."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task of ours; an error in it that nobody expected ends the daemon."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Report a bug; of several the first counts."""
        if not self.broken.done():
            self.broken.set_exception(error)

    async def close(self) -> None:
        """End all tasks."""
        await cancelled(self._tasks)


NAME = "apart"


async def apart(work: Callable[[], T]) -> T:
    """Do the work in a thread of its own, beside the event loop; return its result, or raise what it raised.

    It goes on when cancelled, and nobody waits for it at the process's end: computing version 0 of a large
    model takes minutes, in which peers are answered and Ctrl-C is heard.
    """
    return await asyncio.wrap_future(begun(work))


def begun(work: Callable[[], T]) -> Future[T]:
    """Begin the work in a thread, for who comes again to see whether it is done."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may be cancelled; the work goes on

    def run() -> None:
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 (whoever takes the result raises it)
            done.set_exception(error)
        else:
            done.set_result(outcome)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return done


def is_working() -> bool:
    """Tell whether such work goes on, unheard by now. Python must not be taken down under it."""
    return any(thread.name == NAME for thread in threading.enumerate())


LINK_OVERHEAD = 1.04
"""Factor from payload bytes to bytes on the link: encryption, multiplexing, TCP and IP headers."""


class LinkCapacity(Frozen):
    """Rates and latency of one node's link to the others, as it was measured or told."""

    upload_bits_per_s: float
    download_bits_per_s: float
    latency_s: float = 0.05
    """Latency one way, half a round trip."""
