"""Small helpers of all rooms: bounded tables, moving averages, notes on disk, transition tables,
ends of processes that others start."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar, dataclass_transform

import msgspec
from msgspec import Struct, field

from p2pdiloco.errors import invariant

if TYPE_CHECKING:  # `--help` of every command is without an event loop
    import asyncio


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen(Struct, frozen=True):
    """Base of records that never change once they are made."""


Values = dict[str, Any]
"""Values of any kinds by their names, as JSON, TOML and options have them."""
Now = Callable[[], float]
"""What tells the time, in seconds."""
Action = Callable[[], None]
Say = Callable[[str], None]
"""What takes a sentence."""
K = TypeVar("K")
V = TypeVar("V")


MOST_NOTED = 512
"""Usual bound of a table, where nothing but memory asks for one."""


class BoundedDict(OrderedDict[K, V]):
    """Table of at most so many entries: one too many, and the one that was set longest ago is forgotten.

    What peers make us remember must have a bound.
    """

    def __init__(self, most: int = MOST_NOTED) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


def loop_s() -> float:
    """Time of the running event loop, in seconds."""
    from asyncio import get_running_loop

    return get_running_loop().time()


class Rests(BoundedDict[K, tuple[float, float]]):
    """Rests of what failed: when each ends, and its length, which doubles until the key is removed."""

    def __init__(self, first_s: float, most_s: float, now: Now = loop_s) -> None:
        super().__init__(8 * MOST_NOTED)
        self._first_s, self._most_s, self._now = first_s, most_s, now

    def rests(self, key: K) -> bool:
        """Tell whether its rest goes on."""
        return key in self and self._now() < self[key][0]

    def lengthen(self, key: K) -> None:
        """Let it rest, for twice as long as before."""
        length_s = min(2 * self[key][1], self._most_s) if key in self else self._first_s
        self[key] = self._now() + length_s, length_s


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these tasks, and wait until all have ended, however they do."""
    from asyncio import gather

    ending = list(tasks)
    for task in ending:
        task.cancel()
    await gather(*ending, return_exceptions=True)


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


T = TypeVar("T")
MAX_NOTE_BYTES = 1 << 20
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of a decoder that is given something else than it wrote (`UnicodeDecodeError` is a `ValueError`)."""
ASIDE = (".corrupt", ".corrupt-2", ".corrupt-3")
"""Endings of what is set aside, as many as are kept of one name."""


def read_note(
    path: Path, decode: Callable[[bytes], T], tell: Say, most_bytes: int = MAX_NOTE_BYTES
) -> T | None:
    """Read and decode a note; None: there is none, or it is damaged, which is told and the file set aside.

    A note is a small file that a node writes for its next start, and could do without. Disks and people
    damage files: one that cannot be made out is set aside under another name, for people to look at, and the
    node goes on as if it had never been written. `decode` raises one of `DAMAGE` at what it cannot make out.
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
        with suppress(OSError):  # a folder there, or of another kind than what comes
            path.replace(aside)
            return f"set aside as {aside.name}"
    return "it stays, as it cannot be renamed"


def clear_folder_at(path: Path) -> None:
    """Set aside a folder that is where a file is to be written. Whatever else is there can be written over.

    Nothing is told: what wanted to read it has."""
    if path.is_dir() and not path.is_symlink():
        set_aside(path)


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
    """State and the table of its legal transitions, from which diagrams and tests come, too.

    An unlisted pair is a bug of ours, never a peer's.
    """

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


EXIT_ORPHANED = 70
"""Exit status of a process that ends with its other end."""
YIELDING = 500
"""Score by which the system ends a process for lack of memory: as if it had half of the machine's memory
more."""


def yield_memory() -> None:
    """Ask the system to end this process or its children when memory runs out, not the programs that its user
    works with."""
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # not Linux, or a sandbox forbids it
        score.write_text(str(max(YIELDING, int(score.read_text()))))


def listening_socket(path: Path) -> socket.socket:
    """Make a socket at a path, for this user only. Raises: OSError."""
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        path.chmod(0o600)
        undo.pop_all()
        return listener


def end_with(sock: socket.socket | TextIO) -> None:
    """End this process as soon as the other end of the socket, or the pipe, is closed, whatever it is
    doing."""
    threading.Thread(target=_watch, args=(sock,), name="lifeline", daemon=True).start()


def _watch(sock: socket.socket | TextIO) -> None:
    hang_up = getattr(select, "POLLRDHUP", 0) | select.POLLHUP
    poll = select.poll()
    poll.register(sock.fileno(), hang_up)
    while not any(happened & (hang_up | select.POLLERR) for _, happened in poll.poll()):
        pass
    os._exit(EXIT_ORPHANED)
