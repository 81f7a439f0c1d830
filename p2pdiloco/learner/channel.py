"""Channel between daemon and learner: frames over a unix socket pair, the learner's end.

Frames are a 4-byte big-endian length and a msgpack body of at most `MAX_FRAME_BYTES`: one message of
`learner.channel_messages`.

The learner's end never blocks its training loop: it polls for commands at step boundaries (for closing calls
another thread does in between, never both at a time). Events that the daemon does not read are queued up to a
bound (statuses are folded into one), beyond which the learner ends itself.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from p2pdiloco.errors import TransportError, encoded
from p2pdiloco.learner.channel_messages import (
    AnyCommand,
    AnyEvent,
    Command,
    CopyOut,
    FreeSlot,
    Install,
    LearnerEvent,
    Save,
    Start,
    Status,
    Stop,
    StopStepping,
    TakePart,
)
from p2pdiloco.learner.standstill import DaemonStandstill

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
    """Encode a path, whose name may be no text."""
    return os.fsencode(path)  # type: ignore[arg-type]


def _path_from_bytes(kind: type, found: object) -> Path:
    if kind is Path and isinstance(found, bytes) and 0 < len(found) <= MAX_PATH_BYTES:
        return Path(os.fsdecode(found))
    raise ValueError("not a path")


_encoder = msgspec.msgpack.Encoder(enc_hook=_path_as_bytes)
_commands: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(
    AnyCommand, dec_hook=_path_from_bytes
)
_events: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent, dec_hook=_path_from_bytes)


# --- frames ------------------------------------------------------------------------------------------


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChannelBroken(f"not a command: {error}") from error


def decode_event(body: bytes) -> AnyEvent:
    """Decode a frame from the learner. Raises: ChannelBroken."""
    try:
        return _events.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChannelBroken(f"not an event: {error}") from error


# --- the learner's end -------------------------------------------------------------------------------


class LearnerEnd:
    """The learner's end of the channel: nothing here blocks, except `wait_start`, `wait` and `drain`."""

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
    """Fold two statuses into the newer one, with the longest pauses of both: a slow reader misses none."""
    if older is None:
        return newer
    return msgspec.structs.replace(
        newer,
        longest_gap_s=max(older.longest_gap_s, newer.longest_gap_s),
        longest_aside_s=max(older.longest_aside_s, newer.longest_aside_s),
    )
