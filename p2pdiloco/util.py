"""Tables that forget what was set longest ago: what peers make us remember must have a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from p2pdiloco.errors import invariant

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """Table of at most so many entries: one too many, and the one that was set longest ago is forgotten."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


# Moving averages: what is measured again and again, the newest sample with a fixed weight.

SHARE = 0.2
"""Weight of the newest sample."""


class MovingAverage:
    """Exponential moving average; the first sample stands as it is, before it the value is 0."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self.value = 0.0
        self.empty = True

    def add(self, sample: float) -> None:
        """Take one sample in."""
        self.value = sample if self.empty else (1 - self._share) * self.value + self._share * sample
        self.empty = False


# Notes: small files that a node writes for its next start, and could do without.
#
# Disks and people damage files. A note that cannot be made out is set aside under another name, for people to
# look at, and the node goes on as if it had never been written.

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


# Niceness of threads, processes and sessions: who steps back for whom on one machine.
#
# Linux shares the processor between sessions first (each is a scheduling group, if it is in no cgroup of its
# own, as services are), then within them by niceness. So whoever steps back does so with all its threads and,
# if its session is its own, with the session. What cannot be lowered stays as it is: nothing depends on it.

LINUX = sys.platform == "linux"
ATTEMPTS = 8
PAUSE_S = 0.12
BESIDE_GPU = 12
"""Niceness of the daemon beside a learner on a GPU: of 0, 10 and 12 the least with which such a learner kept
0.97 of its pace in rounds."""


def lower_process(pid: int, niceness: int) -> bool:
    """Let a process of ours, and its session if it leads one, step back to this niceness (0 to 19, never up;
    0: not at all). False: something of it stays as it was (`lower_session`, or a sandbox forbids it)."""
    known: set[int] = set()
    lowered = True
    for _ in range(2):  # who was not lowered yet may have started another thread meanwhile
        found = _threads(pid) - known
        lowered = all([_lower(thread, niceness) for thread in found]) and lowered
        known |= found
    return lower_session(pid, niceness) and lowered


def lower_session(pid: int, niceness: int) -> bool:
    """Let the session that a process of ours leads step back behind other sessions.
    False: it stays as it was, perhaps because Linux lets only ten a second be changed, of all users'.
    True also where it leads none, or sessions are not what is scheduled."""
    group = Path(f"/proc/{pid}/autogroup")
    try:
        if niceness and group.exists() and os.getsid(pid) == pid:
            words = group.read_text().split()  # "/autogroup-7 nice 0", or nothing
            if words and int(words[-1]) < niceness:
                group.write_text(str(niceness))
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    except OSError:
        return False
    return True


def daemon_niceness(device: str, wanted: str) -> int:
    """Niceness that `--daemon-nice` means beside a learner on `device` (as the learner names it).

    With "auto", a learner that waits for its GPU wants little of the processor, and at once. One on the CPU
    wants all there is, for which rounds would have to starve.
    """
    if wanted == "auto":
        return 0 if "cpu" in device else BESIDE_GPU
    return int(wanted)


async def patiently(lower: Callable[[int, int], bool], pid: int, niceness: int) -> bool:
    """Call `lower_process` or `lower_session`, again for a second while it comes too soon after others."""
    for _ in range(ATTEMPTS):
        if lower(pid, niceness):
            return True
        await asyncio.sleep(PAUSE_S)
    return False


def lower_thread(niceness: int) -> bool:
    """Let the calling thread step back behind the others of its session. Linux only: elsewhere a niceness is
    the whole process's. False: it stays as it was."""
    return not LINUX or _lower(threading.get_native_id(), niceness)


def _threads(pid: int) -> set[int]:
    try:
        return {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()} if LINUX else {pid}
    except OSError:  # it has ended, or there is no /proc: then at least its first thread
        return {pid}


def _lower(thread: int, niceness: int) -> bool:
    """Lower one thread. Some sandboxes (a service's system call filter) let nobody do even this: False."""
    try:
        if niceness and os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except ProcessLookupError:  # it has ended
        pass
    except OSError:
        return False
    return True


# Transition tables: states and signals as data, from which diagrams and tests come, too.

EnumClass = TypeVar("EnumClass", bound=Enum)


def direct_members(kind: type[EnumClass]) -> type[EnumClass]:
    """Make the members of a decorated enumeration plain attributes of it, as from Python 3.12 on.

    Python 3.11 finds each anew through a descriptor, fourteen times as slow, and the core asks for its states
    many times an event.
    """
    for name, member in kind.__members__.items():
        type.__setattr__(kind, name, member)
    return kind


State = TypeVar("State", bound=Enum)
Signal = TypeVar("Signal", bound=Enum)
Table = Mapping[tuple[State, Signal], State]


class Machine(Generic[State, Signal]):
    """State and the table of its legal transitions. An unlisted pair is a bug of ours, never a peer's."""

    def __init__(self, table: Table[State, Signal], start: State) -> None:
        self._table = table
        self.state = start

    def go(self, signal: Signal) -> State:
        """Follow one transition.

        Raises:
            InvariantViolation: the table has none.
        """
        after = self._table.get((self.state, signal))
        if after is None:
            invariant(False, f"no transition {signal.name} in {self.state.name}")
        else:
            self.state = after
        return self.state

    def may(self, signal: Signal) -> bool:
        """Tell whether the signal is legal now."""
        return (self.state, signal) in self._table


def mermaid(table: Table[State, Signal], *starts: State) -> str:
    """Draw a Mermaid state diagram of a table, for docs/reference/states.md."""
    lines = ["stateDiagram-v2", *(f"    [*] --> {start.name}" for start in starts)]
    lines += [f"    {a.name} --> {b.name}: {signal.name}" for (a, signal), b in table.items()]
    return "\n".join(lines)
