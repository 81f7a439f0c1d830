"""Log lines and other words of a process: text or JSON on stderr, or the "latest" lines of the live view.

Figures of a JSON line are in its `fields`: those that the message names (`"%(peers)d peers", {"peers": 3}`),
and `extra={"event": ..., "fields": {...}}`. Text may hold what peers said, so control characters never reach
the terminal. What a daemon says goes through an `Outlet`. `lasting` shows work that takes long,
`ask_terminal` asks a question.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from types import TracebackType
from typing import IO, Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from p2pdiloco.daemon.display.snapshot import MAX_RECENT_LINES, newest_lines
from p2pdiloco.errors import UserError, clean, json_line
from p2pdiloco.util import Action, Frozen, Now

Style = Literal["text", "json", "tui"]
OWNERS_LOGGERS = "p2pdiloco.daemon.owner"
OWNERS_EVENTS = "rest", "progress"
"""Loggers (by the beginning of their names) and events of what the machine's owner wishes, which others
are not told. A line of progress says why the node rests, too."""


class Audience(IntEnum):
    """Readers of a line beside this machine's owner: each reads what is for those after it, too."""

    OWNER = 0
    MEMBERS = 1
    """Members of the run. A log line is for them, as it may name what is of this machine, such as paths."""
    ANYBODY = 2


LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}


def resolve_style(asked: Literal["auto", "text", "json", "tui"], stream: TextIO | None = None) -> Style:
    """Resolve "auto": the live view on a terminal, plain lines otherwise. `stream`: stderr."""
    if asked != "auto":
        return asked
    return "tui" if (stream or sys.stderr).isatty() else "text"


def level_name(record: logging.LogRecord) -> str:
    """Name the level in our own words: libraries rename the standard library's (hivemind: WARN)."""
    return LEVELS.get(record.levelno, str(record.levelno))


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line (docs/reference/events.md): time, level, logger, event, message,
    fields, perhaps exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": level_name(record),
            "logger": record.name,
            "event": getattr(record, "event", ""),
            "message": record.getMessage(),
            "fields": {
                **(record.args if isinstance(record.args, Mapping) else {}),
                **getattr(record, "fields", {}),
            },
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_line(entry)


class TextFormatter(logging.Formatter):
    """Formatter of lines like `12:34:56 warning  message`; the level is left out where it is info."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{level_name(record)}  "
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = clean(f"{time} {level}{record.getMessage()}")
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line = "\n".join([line, *(clean(part) for part in trace.splitlines())])
        return line


class RecentLines(logging.Handler):
    """Handler that keeps the newest messages for the live view's "latest" lines."""

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._lines: deque[tuple[str, Audience]] = deque(maxlen=MAX_RECENT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message; called by logging, from any thread."""
        is_owners = record.name.startswith(OWNERS_LOGGERS) or vars(record).get("event") in OWNERS_EVENTS
        audience = vars(record).get("audience", Audience.MEMBERS)
        self._lines.append((record.getMessage(), Audience.OWNER if is_owners else audience))

    def add(self, line: str, audience: Audience = Audience.MEMBERS) -> None:
        """Keep a line that is not a log message (a decision of the core, for example)."""
        self._lines.append((line, audience))

    def lines(self) -> tuple[str, ...]:
        """List the lines, newest last, as a snapshot carries them."""
        return newest_lines([line for line, _ in self._lines])

    def lines_for(self, reader: Audience) -> tuple[str, ...]:
        """List those of them that this reader may read."""
        return newest_lines([line for line, audience in self._lines if audience >= reader])


def configure_logging(
    style: Style, level: int = logging.INFO, stream: TextIO | None = None, recent: RecentLines | None = None
) -> None:
    """Make the root logger write in this style, and nothing else. "tui" writes nothing but `recent`.

    Libraries speak from warnings on only; this package from `level` on.
    """
    handlers: list[logging.Handler] = [recent] if recent is not None else []
    if style != "tui":
        stream, formatter = stream or sys.stderr, JsonFormatter() if style == "json" else TextFormatter()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        outlet = outlet_of(stream)
        if outlet is not None:
            outlet.word_losses(lambda lines: formatter.format(_loss(lines)))
        handlers.append(handler)
    if style == "json":
        _log_what_python_prints()
    root = logging.getLogger()
    root.handlers[:] = handlers or [logging.NullHandler()]
    root.setLevel(logging.WARNING)
    logging.getLogger("p2pdiloco").setLevel(level)


def complaint_line(error: UserError) -> str:
    """Word the error with which a command ends, as the last line of a JSON log."""
    fields = {"hint": error.hint, "details": list(error.details)}
    return JsonFormatter().format(_record(logging.ERROR, str(error), "error", fields))


def _log_what_python_prints() -> None:
    """Log warnings and the tracebacks of what nobody caught: the stream has the log and nothing else."""
    logger = logging.getLogger("p2pdiloco")

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.critical("%s", error or kind.__name__, exc_info=(kind, error, trace))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            uncaught(args.exc_type, args.exc_value, args.exc_traceback)

    logging.captureWarnings(True)
    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread


def _record(level: int, message: str, event: str, fields: Mapping[str, object]) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "p2pdiloco", "levelno": level, "msg": message, "event": event, "fields": fields}
    )


def _loss(lines: int) -> logging.LogRecord:
    return _record(logging.WARNING, words_of_loss(lines), "lost", {"lines": lines})


MAX_WAITING_BYTES = 1 << 20
IDLE_S, AT_MOST_S = 1.0, 5.0
"""Seconds that an end waits for a reader that takes nothing, and for one that goes on reading."""


class _Piece(Frozen):
    """Content written at once, and how many lines would be lost with it."""

    content: bytes
    lines: int


def words_of_loss(lines: int) -> str:
    """Word how much was dropped, for a stream that is no log."""
    return f"{lines} lines were dropped here: nobody read them"


class Outlet(io.RawIOBase):
    """Outlet to one descriptor: a bounded queue to a thread that may be left behind.

    A terminal's, pipe's or log collector's reader may stop for as long as it likes (Ctrl-S, a paused pager, a
    full disk), and the daemon must not wait for it. Writing never waits and never fails; it takes all or
    nothing. What does not fit is dropped, counted, and the number is said as soon as somebody reads again.
    """

    def __init__(self, descriptor: int, most_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._words: Callable[[int], str] = words_of_loss
        self._changed = threading.Condition()
        self._waiting: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._taken_bytes = 0
        self._lost_lines = 0
        self._is_full = False
        self._thread: threading.Thread | None = None

    @property
    def is_behind(self) -> bool:
        """True: something that was written has not been taken yet."""
        return bool(self._waiting)

    def word_losses(self, words: Callable[[int], str]) -> None:
        """Say with these words, which make one line, how many lines were dropped."""
        self._words = words

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        with self._changed:
            if self._is_full and self._waiting_bytes > self._most_bytes // 2:
                self._lost_lines += _lines(content)
                return len(content)
            self._say_losses()
            if self._waiting_bytes + len(content) > self._most_bytes:
                self._is_full = True
                self._lost_lines += _lines(content)
            else:
                self._put(_Piece(content, _lines(content)))
        return len(content)

    def drain(self, idle_s: float = IDLE_S, at_most_s: float = AT_MOST_S) -> bool:
        """Wait until all is written, or the reader has taken nothing for `idle_s`. False: some is left."""
        with self._changed:
            for _ in range(max(1, round(at_most_s / idle_s))):
                before = self._taken_bytes
                if self._changed.wait_for(lambda: not self._waiting and not self._is_full, idle_s):
                    return True
                if self._taken_bytes == before:
                    break
        return False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def _put(self, piece: _Piece) -> None:
        self._waiting.append(piece)
        self._waiting_bytes += len(piece.content)
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="outlet", daemon=True)
            self._thread.start()

    def _say_losses(self) -> None:
        lost, self._lost_lines, self._is_full = self._lost_lines, 0, False
        if lost:
            self._put(_Piece(f"{self._words(lost)}\n".encode(errors="backslashreplace"), lost))

    def _carry(self) -> None:
        while True:
            with self._changed:
                if self._is_full and not self._waiting:  # the reader is back, and we have nothing more to say
                    self._say_losses()
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting[0]
            is_written = self._written(piece.content)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(piece.content)
                self._lost_lines += 0 if is_written else piece.lines
                self._changed.notify_all()

    def _written(self, content: bytes) -> bool:
        """Write, and wait for the reader as long as it takes. False: it cannot be written (a closed pipe or
        terminal, a full disk), which is said before the next that can."""
        rest = memoryview(content)
        while rest:
            try:
                taken = os.write(self._descriptor, rest)
            except BlockingIOError:  # somebody else made the terminal so
                ready = select.poll()
                ready.register(self._descriptor, select.POLLOUT)
                ready.poll()
                continue
            except OSError:
                return False
            self._taken_bytes += taken
            rest = rest[taken:]
        return True


def _lines(content: bytes) -> int:
    return max(1, content.count(b"\n"))


_outlets: list[Outlet] = []
"""Outlets of this process's standard streams."""
_before_end: list[Action] = []
"""Calls that are made before this process ends."""


def install() -> None:
    """Let all that this process writes to stdout and stderr go through outlets from now on, to its end."""
    sys.stdout, sys.stderr = _through_outlet(sys.stdout), _through_outlet(sys.stderr)


def drain() -> None:
    """Wait for what was said to be written, with bounds. For an end, orderly or not."""
    for outlet in _outlets:
        outlet.drain()


def before_end(work: Action) -> None:
    """Remember what is done before this process ends, in order or at once: the newest first."""
    atexit.register(work)
    _before_end.append(work)


def not_before_end(work: Action) -> None:
    """Take back `before_end`. Idempotent."""
    atexit.unregister(work)
    _before_end[:] = [other for other in _before_end if other != work]


def end_at_once(status: int) -> None:
    """End this process without looking back, but for what it said, and the terminal that it changed."""
    for work in reversed(_before_end.copy()):
        work()
    os._exit(status)


def outlet_of(stream: IO[str]) -> Outlet | None:
    """Find the outlet behind a stream."""
    raw = getattr(stream, "buffer", None)
    return raw if isinstance(raw, Outlet) else None


def _through_outlet(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or outlet_of(stream) is not None:
        return stream
    stream.flush()
    outlet = Outlet(stream.fileno())
    if not _outlets:
        before_end(drain)
    _outlets.append(outlet)
    return io.TextIOWrapper(
        outlet,  # type: ignore[type-var]  # it takes all that it is given, as a buffer does
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


SAY_AFTER_S = 2.0
"""Time after which work is worth a word."""
LINE_EVERY_S, TICK_S = 10.0, 0.25
Tell = Callable[[float, float], None]
"""Function that is told how much is done, and of how much; of 0: nobody knows."""


@contextmanager
def lasting(what: str, stream: TextIO | None = None, now: Now = time.monotonic) -> Iterator[Tell]:
    """Show on stderr how far some work is, while the block runs. `what`: its words, as "copying a state".

    It is a bar on a terminal, elsewhere a line now and then, nothing for what is done at once.
    """
    shown = Lasting(clean(what), stream or sys.stderr, now)
    try:
        yield shown.tell
    finally:
        shown.end()


@contextmanager
def waiting(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show that some work goes on which does not say how far it is, while the block runs."""
    stop = threading.Event()
    with lasting(what, stream) as tell:

        def tick() -> None:
            while not stop.wait(TICK_S):
                tell(0, 0)

        thread = threading.Thread(target=tick, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@dataclass
class Lasting:
    """Display of one piece of work."""

    _what: str
    _stream: TextIO
    _now: Now

    def __post_init__(self) -> None:
        self._began_s = self._told_s = self._now()
        self._console = Console(file=self._stream)
        self._progress: Progress | None = None

    def tell(self, done: float, total: float) -> None:
        """Show how much is done, of how much (0: nobody knows)."""
        if self._now() - self._began_s < SAY_AFTER_S:
            return
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._draw(done, total)
        elif self._progress is None and self._is_due():
            share = (
                f": {min(1.0, done / total):.0%}"
                if total > 0
                else f" for {self._now() - self._began_s:.0f} s"
            )
            self._stream.write(f"{self._what}{share}\n")
            self._stream.flush()

    def end(self) -> None:
        """Leave the terminal as it was; the bar is gone."""
        if self._progress is not None:
            self._progress.stop()

    def _is_due(self) -> bool:
        now, first = self._now(), self._told_s == self._began_s
        if not first and now - self._told_s < LINE_EVERY_S:
            return False
        self._told_s = now
        return True

    def _draw(self, done: float, total: float) -> None:
        if self._progress is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
            self._progress.add_task(self._what, total=total or None)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total or None)


YES = ("y", "yes")


def at_terminal() -> bool:
    """Tell whether somebody can be asked: input and messages are a terminal, and we are in its foreground."""
    try:
        asked = os.isatty(sys.stdin.fileno()) and os.isatty(sys.stderr.fileno())
        return asked and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # there is no input, or it is closed
        return False


async def ask_terminal(question: str) -> bool:
    """Ask at the terminal for yes or no, beside the event loop's other work. The input's end is a no."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    answered: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        if not answered.done():
            answered.set_result(os.read(descriptor, 4096))

    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    loop.add_reader(descriptor, read)
    try:
        return (await answered).decode("ascii", "replace").strip().lower() in YES
    finally:
        loop.remove_reader(descriptor)
