"""Channel between daemon and learner: small tagged messages over a unix socket pair.

Commands go to the learner, events to the daemon; the first message is `Start`. A frame is a 4-byte big-endian
length and a msgpack body of at most `MAX_FRAME_BYTES`: one message. Tensors never travel here, they are in
shared memory (`tensors.layout.Exchange`). A program's own learner connects with `join_daemon`.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, field, msgpack
from msgspec.structs import replace

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.settings import Compile
from p2pdiloco.core.api.config import Amendment
from p2pdiloco.errors import StorageError, TransportError, encoded
from p2pdiloco.learner.lifeline import DaemonStandstill
from p2pdiloco.util import DAMAGE, Frozen

MAX_SHARDS = 1024
"""Shards into which the data of an epoch is cut, at most (`learner.samples.Allotment`)."""
MAX_EPOCH = 1_000_000
"""Latest epoch that is believed: a later one is nobody's honest epoch."""

Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Text = Annotated[str, Meta(max_length=4096)]
InstallMode = Literal["merged", "rebase", "overwrite"]
RestoreMode = Literal["all", "rest", "none"]
Rests = Literal["no", "paused", "ended"]


# --- commands: daemon to learner ---------------------------------------------------------------------


class Command(Frozen, tag=True, forbid_unknown_fields=True):
    """Base of the daemon's messages."""


class BaseRef(Frozen):
    """The version of a fragment that lies in one of its base buffers."""

    number: int
    buffer: int
    tokens: int = 0
    """Tokens merged into this version and all before it."""


class DataShare(Frozen):
    """Progress in the data, as readers of the same data tell each other (`learner.samples.Allotment`)."""

    data: Annotated[str, Meta(max_length=64)]
    """Identity of the data: others may read something else."""
    epoch: Epoch
    taken: Annotated[bytes, Meta(max_length=MAX_SHARDS // 8)]
    """Bits, one for every shard of the epoch: 1 if somebody has begun it."""
    readers: tuple[str, ...] = ()
    """Peer ids of the other readers; sent to the learner only."""
    shards: Annotated[int, Meta(ge=0, le=MAX_SHARDS)] = 0
    """Number of shards of an epoch; sent by the learner only. Bits of `taken` beyond so many are 0."""


class PassOptions(Frozen):
    """Node-local choices about forward and backward passes (`learner.inner_step`)."""

    micro_batch_tokens: int = 0
    """Tokens of one pass, to begin with; 0: the whole step, within a bound on an accelerator. Halved for as
    long as memory does not suffice."""
    halvings: int = 0
    """Times that the tokens of a pass were halved already, since earlier processes ended for lack of memory
    (`learner.lifeline.EXIT_TOO_LARGE`)."""
    compile: Compile = "never"
    """Compiling of passes (`learner.inner_step.Forms`): "auto", where it pays, after some inner steps;
    "always", at the first one. What cannot be compiled is trained as it is."""
    compile_cache: Path | None = None
    """Folder for compiled code; None: torch's own."""
    precision: str = "auto"
    """Arithmetic of the passes: "auto", bf16 where the device is fast at it, or "fp32"."""


class LearnerOptions(PassOptions, kw_only=True):
    """Node-local choices for the learner process."""

    peer: str
    """Peer id: picks this learner's data stream."""
    data_path: Path | None = None
    """Value of --data: a file or a folder, for all sources but "embedded"."""
    tokenizer_path: Path | None = None
    """Path of the tokenizer file that the manifest names, if it names one."""
    initial_path: Path | None = None
    """File of version 0, of a run whose model has constants (`tasks.task.Constant`)."""
    place_path: Path | None = None
    """File in which the place in the data is kept (`learner.samples.SampleStream`)."""
    device: str = "auto"
    threads: int = 0
    """CPU threads of torch; 0: torch's own choice."""
    nproc: int = 1
    """Processes of this learner, each with a device of its own; 0: one for every GPU
    (`learner.ranks`)."""
    shard: str = "auto"
    """Sharing of the parameters among these processes: auto, never, always (`learner.optimizer.shard`)."""
    niceness: int = 10
    """Niceness while the learner trains, not while it starts: a daemon on the same cores stays responsive,
    and so does the user's machine."""
    status_interval_s: float = 1.0
    evaluation_tokens: int = 16_384


class FollowCourse(Command):
    """Course of the run: what its owner changed, and whether inner steps are to be made now."""

    amendments: tuple[Amendment, ...] = ()
    rests: Rests = "no"
    """Reason why no inner steps are made; what was made is handed out, and commands are obeyed."""


class SpareMachine(Command):
    """Wish of the machine's owner: how much of it inner steps leave to others. The run's course is apart."""

    rests: bool = False
    """True: no inner steps are made; what was made is handed out, and commands are obeyed."""
    min_step_s: float = 0.0
    """Least seconds of an inner step, on average."""


class Start(Command):
    """First frame: everything that the learner needs to begin."""

    manifest: Manifest
    options: LearnerOptions
    bases: tuple[BaseRef, ...]
    """Base of every fragment that the daemon has put into the exchange: theta starts from it."""
    restore_path: Path | None = None
    """Learner state file (`learner.loop.save_checkpoint`); moments and counters of time are taken."""
    restore: tuple[RestoreMode, ...] = ()
    """Share of the saved displacement to take, per fragment (empty: none). "all" takes the whole, "rest" only
    what was not in flight in a contribution when it was saved, "none" starts at the base."""
    course: FollowCourse = FollowCourse()
    spare: SpareMachine = SpareMachine()


class Install(Command):
    """Order to go over to a newer version of a fragment, which lies in base buffer `buffer`
    (`learner.fragments`)."""

    fragment: int
    number: int
    buffer: int
    mode: InstallMode
    tokens: int = 0
    """Tokens merged into this version and all before it."""


class CopyOut(Command):
    """Closing call: copy this fragment out, as it is or as it will be at the next boundary
    (`learner.mailbox.Answering`). `CopiedOut` or `NothingToCopy`."""

    fragment: int


class FreeSlot(Command):
    """Message that the last copy of this fragment will never be merged as it stands."""

    fragment: int
    not_finite: bool = False
    """True: it holds NaN or infinity."""


class TakePart(Command):
    """Order to contribute to every `every`-th version only: the link does not carry more."""

    every: Annotated[int, Meta(ge=1)]


class Learners(Command):
    """Number of learners that train in this run now, as far as the daemon knows, this one included."""

    count: Annotated[int, Meta(ge=1)]


class ShareData(Command):
    """Other readers of the data, and the shards that are begun. Also sent right after `Start`."""

    share: DataShare


class Evaluate(Command):
    """Order to measure the held-out loss of the global parameters (the current bases): `Evaluated`."""


class Appraise(Command):
    """Order to measure what a peer's contribution does to the loss, and what ours does, both in the file
    (`tensors.vault.Appraisable`): `Appraised`."""

    fragment: int
    peer: str
    path: Path
    """File of this question alone: the answer names it, too."""


class Save(Command):
    """Order to write the learner's state to this file: `Saved`."""

    path: Path


class StopStepping(Command):
    """Order to make no more inner steps and obey at once, until `Stop`. A step that is under way is given up,
    where that can be done (`learner.mailbox.Answering`)."""


class Stop(Command):
    """Order to end at the next boundary, after saving if a path is given."""

    save_path: Path | None = None


class TryOrder(Command):
    """Order to a program of its own (`learner.trial`): measure others' states in the file beside ours.
    `StatesTried`; `Failed`."""

    manifest: Manifest
    options: LearnerOptions
    fragments: tuple[int, ...]
    path: Path
    best: float | None = None
    """Lowest loss of ours that earlier trials measured."""


AnyCommand = (
    Start
    | TryOrder
    | Install
    | CopyOut
    | FreeSlot
    | TakePart
    | ShareData
    | Learners
    | FollowCourse
    | SpareMachine
    | Evaluate
    | Appraise
    | Save
    | StopStepping
    | Stop
)


# --- events: learner to daemon -----------------------------------------------------------------------


class LearnerEvent(Frozen, tag=True, forbid_unknown_fields=True):
    """Base of the learner's messages."""


class Ready(LearnerEvent):
    """Message that start-up is over and the first inner step begins."""

    device: str
    parameters: int
    threads: int
    inner_step: int
    restored: bool
    """True: `Start.restore_path` was taken."""
    note: Text = ""
    """Remark for people: why a given state was not taken, or what of a taken one begins anew (moments of
    another optimizer)."""
    gives_up: bool = False
    """True: `StopStepping` is obeyed in the middle of an inner step."""
    appraises: bool = False
    """True: it can measure contributions (`Appraise`)."""


class CopiedOut(LearnerEvent):
    """Message that theta of a fragment, or a share of the way to it, is in `exchange.sent`; the
    pseudo-gradient is `base[base_buffer] - sent`.

    The slot is in use until an `Install` of mode merged or overwrite, or `FreeSlot`.
    """

    fragment: int
    tokens: int
    inner_steps: int
    base_number: int
    base_buffer: int
    inner_step: int
    due: bool


class NothingToCopy(LearnerEvent):
    """Answer to `CopyOut`: the slot is in use, no inner step was made since the last copy-out, or it is not
    this learner's turn (`TakePart`)."""

    fragment: int
    slot_in_use: bool


class Applied(LearnerEvent):
    """Message that an `Install` is done: theta of the fragment is measured against this version."""

    fragment: int
    number: int
    inner_step: int


class Note(LearnerEvent):
    """Remark that a person should read."""

    text: Text


class Status(LearnerEvent):
    """Progress of the learner; about every `status_interval_s`, the latest one wins."""

    inner_step: int
    tokens_total: int
    tokens_per_s: float
    step_time_s: float
    """Moving average over inner steps, without evaluation and saving."""
    loss: float | None
    """Moving average of the training loss, nats per token; None before the first step."""
    longest_gap_s: float
    """Longest time from the end of an inner step to the end of the next since the previous Status,
    without evaluation, saving and rests."""
    cpu_s: float
    """CPU seconds of the learner process, all threads, since it started."""
    longest_aside_s: float = 0.0
    """Longest time since the previous Status in which it evaluated or saved instead."""
    skipped_steps: int = 0
    """Inner steps skipped for a non-finite loss or gradient."""
    run_tokens: int = 0
    """Tokens that all learners of the run have consumed, for the schedule
    (`learner.schedule.learning_rate`)."""
    learning_rate: float = 0.0
    """Learning rate of the last inner step."""
    deferred_copies: int = 0
    """Times that a fragment was due while its slot was in use (counted once per due date)."""
    handed_over: bool = False
    """True: it rests for the machine's owner, and all that it made is merged."""
    share: DataShare | None = None
    """Shards that are begun, by this learner and, as far as it was told, by others."""


class Evaluated(LearnerEvent):
    """Held-out loss of the global parameters, nats per token, over `tokens` tokens."""

    loss: float | None
    """None: this program has nothing to measure it with."""
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures that the task measures beside the loss."""
    took_s: float = 0.0
    """Seconds in which no inner step was made."""


class Appraised(LearnerEvent):
    """Gain of two contributions: by how much, in nats, each makes the loss of each batch smaller. Empty: the
    file is not to be had."""

    path: Path
    """File of the question that this answers."""
    theirs: tuple[float, ...] = ()
    ours: tuple[float, ...] = ()
    same_data: bool = False
    """True: the last batch was of that peer's own share of the data."""
    took_s: float = 0.0
    """Seconds in which no inner step was made."""


class StatesTried(LearnerEvent):
    """Outcome of a `TryOrder`."""

    passed: bool
    """True: others' states in the file are no worse than ours."""
    ours: float
    """Held-out loss of ours."""
    words: Text
    """Losses, for people."""


class StateSaved(LearnerEvent):
    """Message that a save is over. A failed one changes nothing else: an older file is still there."""

    path: Path
    ok: bool
    reason: Text = ""
    last: bool = False
    """True: `Stop` asked for it, and no inner step comes after it."""


class Failed(LearnerEvent):
    """Message that the learner cannot go on and ends; the last event."""

    reason: Text
    hint: Text = ""
    """Advice on what the person at the keyboard can do about it."""


AnyEvent = (
    Ready
    | CopiedOut
    | NothingToCopy
    | Applied
    | Note
    | Status
    | Evaluated
    | Appraised
    | StateSaved
    | StatesTried
    | Failed
)


# --- frames ------------------------------------------------------------------------------------------

MAX_FRAME_BYTES = 256 * 1024
MAX_PATH_BYTES = 4096
MAX_PENDING_EVENTS = 8192
MAX_WAITING_COMMANDS = 1024
"""Commands that wait for a boundary, at most. Few of them are larger than 100 bytes."""
_READ_BYTES = 64 * 1024
_MAX_READ_PER_POLL = 1024 * 1024


class ChannelBroken(TransportError):
    """Error: the other end is gone, does not read, or sent something that is not a frame of ours."""


def _path_as_bytes(path: object) -> bytes:
    return os.fsencode(path)  # type: ignore[arg-type]  # its name may be no text


def _path_from_bytes(kind: type, found: object) -> Path:
    if kind is Path and isinstance(found, bytes) and 0 < len(found) <= MAX_PATH_BYTES:
        return Path(os.fsdecode(found))
    raise ValueError("not a path")


_encoder = msgpack.Encoder(enc_hook=_path_as_bytes)
_commands: msgpack.Decoder[AnyCommand] = msgpack.Decoder(AnyCommand, dec_hook=_path_from_bytes)
_events: msgpack.Decoder[AnyEvent] = msgpack.Decoder(AnyEvent, dec_hook=_path_from_bytes)


def frame(message: Command | LearnerEvent) -> bytes:
    """Encode a command or an event as a frame."""
    body = encoded(message, _encoder, _path_as_bytes)
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelBroken(f"{type(message).__name__} has {len(body)} bytes")
    return len(body).to_bytes(4, "big") + body


class Deframer:
    """Cutter of a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Cut off the bodies that are complete now. Raises: ChannelBroken (an oversized frame)."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise ChannelBroken(f"a frame of {size} bytes")
            if len(self._buffer) < 4 + size:
                break
            bodies.append(bytes(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]
        return bodies


def decode_command(body: bytes) -> AnyCommand:
    """Decode a frame from the daemon. Raises: ChannelBroken."""
    try:
        return _commands.decode(body)
    except DAMAGE as error:
        raise ChannelBroken(f"not a command: {error}") from error


def decode_event(body: bytes) -> AnyEvent:
    """Decode a frame from the learner. Raises: ChannelBroken."""
    try:
        return _events.decode(body)
    except DAMAGE as error:
        raise ChannelBroken(f"not an event: {error}") from error


# --- the learner's end -------------------------------------------------------------------------------


class LearnerEnd:
    """The learner's end of the channel: nothing here blocks, except `wait_start`, `wait` and `drain`.

    It is polled for commands at step boundaries (for closing calls another thread does in between, never both
    at a time). Events that the daemon does not read are queued up to a bound (statuses are folded into one),
    beyond which the learner ends itself.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self.standstill = DaemonStandstill(sock)
        """Standstill of the daemon."""
        self._deframer = Deframer()
        self._commands: deque[AnyCommand] = deque()
        self._pending: deque[LearnerEvent] = deque()
        self._status: Status | None = None
        self._partial = b""

    def wait_start(self) -> Start | None:
        """Wait for the first frame, whenever it comes; None: the daemon does not need a learner after all.

        Raises:
            ChannelBroken: the daemon is gone.
        """
        while not self._commands:
            _ready(None, self._socket)
            self._read()
        first = self._commands.popleft()
        if isinstance(first, Stop):
            return None
        if not isinstance(first, Start):
            raise ChannelBroken(f"{type(first).__name__} before Start")
        return first

    def arrived(self, timeout_s: float) -> bool:
        """Tell whether a command is here, or comes in this time. Raises: ChannelBroken (daemon gone)."""
        if not self._commands and _ready(timeout_s, self._socket):
            self._read()
        return bool(self._commands)

    def wait(self, timeout_s: float) -> None:
        """Wait until something can be read (or the daemon is gone), at most so long."""
        _ready(timeout_s, self._socket)

    def wait_or(self, other: socket.socket) -> bool:
        """Wait until something can be read here (or the daemon is gone): True; or at `other`: False."""
        return other not in _ready(None, self._socket, other)

    def take_calls(self) -> list[CopyOut]:
        """Take the closing calls that have arrived, but for those that came behind a command that bears upon
        what they copy.

        All else stays for `poll`. Raises: ChannelBroken (daemon gone, or commands are not taken).
        """
        self._read()
        if len(self._commands) > MAX_WAITING_COMMANDS:
            raise ChannelBroken("the inner loop takes no commands")
        calls: list[CopyOut] = []
        left: deque[AnyCommand] = deque()
        changed: set[int] = set()
        while self._commands and not isinstance(
            self._commands[0], Start | TakePart | Save | StopStepping | Stop
        ):
            command = self._commands.popleft()
            if isinstance(command, CopyOut) and command.fragment not in changed:
                calls.append(command)
                continue
            if isinstance(command, Install | FreeSlot):
                changed.add(command.fragment)
            left.append(command)
        self._commands.extendleft(reversed(left))
        return calls

    def told_to_finish(self) -> bool:
        """Tell whether `StopStepping` or `Stop` is among the commands that were read and not taken yet."""
        return any(isinstance(command, StopStepping | Stop) for command in self._commands)

    def poll(self) -> Iterator[AnyCommand]:
        """Commands that have arrived, oldest first, each taken when it is its turn. Raises: ChannelBroken
        (daemon gone)."""
        self._read()
        for _ in range(len(self._commands)):  # what comes meanwhile waits until another step was made
            if self._commands:  # `take_calls` may have taken some
                yield self._commands.popleft()

    def emit(self, event: LearnerEvent) -> None:
        """Send an event, or queue it. Raises: ChannelBroken (the daemon has not read for very long)."""
        if isinstance(event, Status):
            self._status = _folded(self._status, event)
        else:
            self._pending.append(event)
        self.flush()
        if len(self._pending) > MAX_PENDING_EVENTS:
            raise ChannelBroken("the daemon does not read")

    def flush(self) -> None:
        """Send as much as the socket takes now. Raises: ChannelBroken (daemon gone)."""
        while self._partial or self._pending or self._status is not None:
            if not self._partial:
                self._partial = frame(self._next())
            try:
                sent = self._socket.send(self._partial)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelBroken(f"the daemon is gone: {error.strerror}") from error
            self._partial = self._partial[sent:]

    def drain(self, timeout_s: float) -> None:
        """Wait, before the end, until everything is sent, or the daemon did not read for timeout_s."""
        self.flush()
        while self._partial:
            if not _ready(timeout_s, self._socket, events=select.POLLOUT):
                raise ChannelBroken("the daemon does not read")
            self.flush()

    def _next(self) -> LearnerEvent:
        if self._pending:
            return self._pending.popleft()
        status, self._status = self._status, None
        assert status is not None
        return status

    def _read(self) -> None:
        taken = 0
        while taken < _MAX_READ_PER_POLL:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelBroken(f"the daemon is gone: {error.strerror}") from error
            if not data:
                raise ChannelBroken("the daemon is gone")
            taken += len(data)
            self._commands.extend(decode_command(body) for body in self._deframer.feed(data))


def _ready(
    timeout_s: float | None, *sockets: socket.socket, events: int = select.POLLIN
) -> list[socket.socket]:
    """Wait for any of these, at most so long, and list those that are ready or broken. Unlike `select` it can
    wait for descriptors above 1023, which large programs have."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, events)
    found = dict(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
    return [one for one in sockets if one.fileno() in found]


def _folded(older: Status | None, newer: Status) -> Status:
    """Keep the longest pauses of both: a slow reader misses none."""
    if older is None:
        return newer
    return replace(
        newer,
        longest_gap_s=max(older.longest_gap_s, newer.longest_gap_s),
        longest_aside_s=max(older.longest_aside_s, newer.longest_aside_s),
    )


# --- a program's learner -----------------------------------------------------------------------------

HELLO = b"p2pdiloco-learner-1\n"
"""First bytes from the daemon (`GuestHost`) on the socket; the exchange's descriptor comes with them."""


def join_daemon(path: Path, timeout_s: float) -> tuple[socket.socket, int]:
    """Connect to the daemon; returns the connection, and a descriptor of the exchange.

    Raises:
        StorageError: nobody listens there (yet).
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
        hello, descriptors, _, _ = socket.recv_fds(connection, len(HELLO), 1)
    except OSError as error:
        connection.close()
        raise StorageError(f"no daemon at {path}: {error}") from error
    if hello != HELLO or len(descriptors) != 1:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise StorageError(f"{path} is no daemon that waits for a learner, or it has one already")
    return connection, descriptors[0]
