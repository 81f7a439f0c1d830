"""Diary of a node for people and scripts: one JSON object a line (schema: docs/reference/events.md)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from p2pdiloco.adapters.disk.files import is_full, storage_error
from p2pdiloco.errors import json_line
from p2pdiloco.util import clear_folder_at

FieldValue = str | int | float | bool | dict[str, float] | None
MAX_TEXT = 500
"""Characters of one text value; a peer's words are in here."""
OWN_KEYS = frozenset({"t", "mono", "kind", "fragment", "reason"})
ROTATED_SUFFIX = ".1"


class EventsLog:
    """Appends lines, each with one system call, so that a reader and a crash see whole lines.

    At `max_bytes` the file becomes `<name>.1` (replacing an older one): at most twice that is on disk.
    A line that cannot be written is dropped and counted in `dropped`: a diary never stops a node.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int = 64 << 20,
        *,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """
        Raises:
            StorageError: the file cannot be opened (a full disk is no reason: lines are dropped then).
        """
        self.path = path
        self.max_bytes = max_bytes
        self.dropped = 0
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._write = write
        self._descriptor: int | None = None
        self._bytes = 0
        self._torn = False
        try:
            self._open()
        except OSError as error:
            if not is_full(error):
                raise storage_error(error, "open", path) from error

    def write(
        self,
        kind: str,
        fragment: int | None = None,
        reason: str = "",
        fields: Iterable[tuple[str, FieldValue]] = (),
    ) -> None:
        """Append one line. Never raises for the disk's sake."""
        entry: dict[str, FieldValue] = {
            "t": round(self._wall_s(), 6),
            "mono": round(self._monotonic_s(), 6),
            "kind": kind,
            "fragment": fragment,
            "reason": reason[:MAX_TEXT],
        }
        for key, value in fields:
            name = f"{key}_" if key in OWN_KEYS else key
            entry[name] = value[:MAX_TEXT] if isinstance(value, str) else value
        try:
            self._append(json_line(entry).encode() + b"\n")
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._bytes and self._bytes + len(line) > self.max_bytes:
            self.close()
            self.path.replace(self.path.with_name(self.path.name + ROTATED_SUFFIX))
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        content = b"\n" + line if self._torn else line
        written = self._write(self._descriptor, content)
        self._bytes += written
        if written:
            self._torn = content[written - 1 : written] != b"\n"
        if written < len(content):
            # The disk became full in mid-line. Not retried: the line is lost, the next one starts afresh.
            self.dropped += 1

    def _open(self) -> None:
        clear_folder_at(self.path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        with contextlib.suppress(OSError):  # not ours
            os.fchmod(self._descriptor, 0o600)  # of earlier versions
        self._bytes = os.fstat(self._descriptor).st_size
        self._torn = bool(self._bytes) and os.pread(self._descriptor, 1, self._bytes - 1) != b"\n"
