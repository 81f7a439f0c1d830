"""Log lines of a process: text or JSON on stderr, or the "latest" lines of the live view.

Figures of a JSON line are in its `fields`: those that the message names (`"%(peers)d peers", {"peers": 3}`),
and `extra={"event": ..., "fields": {...}}`. Text may hold what peers said, so control characters never reach
the terminal.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from types import TracebackType
from typing import Literal, TextIO

from p2pdiloco.daemon.display.outlet import outlet_of, words_of_loss
from p2pdiloco.daemon.display.snapshot import MAX_RECENT_LINES, newest_lines
from p2pdiloco.errors import clean, json_line

Style = Literal["text", "json", "tui"]
OWNERS_LOGGERS = "p2pdiloco.daemon.control", "p2pdiloco.daemon.rest"
OWNERS_EVENTS = "rest", "progress"
"""Loggers and events of what the machine's owner wishes, others are not told; a line of progress says why it
rests, too."""


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


def complaint_line(sentence: str, hint: str, details: Sequence[str] = ()) -> str:
    """Word the sentence with which a command ends, as the last line of a JSON log. `details`: as of a
    `UserError`."""
    fields = {"hint": hint, "details": list(details)}
    return JsonFormatter().format(_record(logging.ERROR, sentence, "error", fields))


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
