"""Log lines of a process: text or JSON on stderr, or the "latest" lines of the live view.

Further values go into `extra={"fields": {...}}`. Text may hold what peers said, so control characters
never reach the terminal.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Literal, TextIO

from p2pdiloco.daemon.display.outlet import outlet_of, words_of_loss
from p2pdiloco.daemon.display.snapshot import MAX_RECENT_LINES, newest_lines
from p2pdiloco.printable import clean, json_line

Style = Literal["text", "json", "tui"]
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
    """Formatter of one JSON object a line: time (ISO 8601, UTC), level, logger, message, fields, perhaps
    exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": level_name(record),
            "logger": record.name,
            "message": record.getMessage(),
            "fields": getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_line(entry)


class TextFormatter(logging.Formatter):
    """Formatter of lines like `12:34:56 warning  message  key=value`; the level is left out where it is
    info."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{level_name(record)}  "
        fields: dict[str, object] = getattr(record, "fields", {})
        values = "".join(f"  {key}={value}" for key, value in fields.items())
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = clean(f"{time} {level}{record.getMessage()}{values}")
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line = "\n".join([line, *(clean(part) for part in trace.splitlines())])
        return line


class RecentLines(logging.Handler):
    """Handler that keeps the newest messages for the live view's "latest" lines."""

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._lines: deque[str] = deque(maxlen=MAX_RECENT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message; called by logging, from any thread."""
        self.add(record.getMessage())

    def add(self, line: str) -> None:
        """Keep a line that is not a log message (a decision of the core, for example)."""
        self._lines.append(line)

    def lines(self) -> tuple[str, ...]:
        """List the lines, newest last, as a snapshot carries them."""
        return newest_lines(list(self._lines))


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
    root = logging.getLogger()
    root.handlers[:] = handlers or [logging.NullHandler()]
    root.setLevel(logging.WARNING)
    logging.getLogger("p2pdiloco").setLevel(level)


def _loss(lines: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "p2pdiloco",
            "levelno": logging.WARNING,
            "msg": words_of_loss(lines),
            "fields": {"lines": lines},
        }
    )
