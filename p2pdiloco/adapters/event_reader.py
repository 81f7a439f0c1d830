"""Reader of a node's event log (docs/reference/events.md): as it grows, over its renaming, from the place
where an earlier reader stopped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import IO

import msgspec

from p2pdiloco.adapters.data_dir import ROTATED_SUFFIX, storage_errors
from p2pdiloco.util import DAMAGE, Frozen, Values

CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 18
"""Longest line that is one: a longer one is passed over, as one that does not parse."""
MARK_BYTES = 128
"""Beginning of a file by which it is known again: its first line has the time at which it was begun."""


class LogPlace(Frozen):
    """Place up to which an event log was read."""

    mark: str = ""
    """Digest of the file's beginning; empty: nothing was read yet."""
    mark_bytes: int = 0
    offset: int = 0


class EventReader:
    """Reader of the lines of an event log, those of the file before it too.

    A last line without an end is left for the next time: its writer is at it, or a crash tore it, and then
    the next start of the node ends it.
    """

    def __init__(self, path: Path, place: LogPlace | None = None) -> None:
        """`place`: what an earlier reader stopped at."""
        self._path = path
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._rest = b""
        self._too_long = False
        self._wanted = place or LogPlace()
        self.skipped = 0
        """Lines that are no events: torn, or not ours."""
        self.is_lost = False
        """True: the file in which an earlier reader stopped is gone, so lines of it may be missing."""

    def place(self) -> LogPlace:
        """Tell where the next line begins."""
        if self._file is None:
            return self._wanted
        begun = os.pread(self._file.fileno(), MARK_BYTES, 0)
        return LogPlace(_digest(begun), len(begun), self._offset)

    def events(self, most: float = inf) -> list[Values]:
        """Read the next events, so many at most; none: all that is there has been read.

        Raises: StorageError.
        """
        found: list[Values] = []
        with storage_errors("read", self._path):
            for line in self._lines():
                event = _event(line)
                if event is None:
                    self.skipped += bool(line.strip())
                else:
                    found.append(event)
                if len(found) >= most:
                    break
        return found

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self) -> Iterator[bytes]:
        if self._file is None and not self._begin():
            return
        while True:
            while (end := self._rest.find(b"\n")) >= 0:
                line, self._rest = self._rest[:end], self._rest[end + 1 :]
                self._offset += end + 1
                if self._too_long:
                    self._too_long, self.skipped = False, self.skipped + 1
                else:
                    yield line
            if len(self._rest) > MAX_LINE_BYTES:
                self._offset += len(self._rest)
                self._rest, self._too_long = b"", True
            assert self._file is not None
            more = self._file.read(CHUNK_BYTES)
            if not more and not self._go_on():
                return
            self._rest += more

    def _begin(self) -> bool:
        """Open the file in which to go on. False: there is none yet."""
        before = self._path.with_name(self._path.name + ROTATED_SUFFIX)
        if not self._wanted.mark:
            return self._open(before) or self._open(self._path)
        for path in (self._path, before):
            if self._open(path):
                if self._is_wanted():
                    self._seek(self._wanted.offset)
                    return True
                self.close()
        self.is_lost = True
        return self._open(before) or self._open(self._path)

    def _open(self, path: Path) -> bool:
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        self._seek(0)
        return True

    def _seek(self, offset: int) -> None:
        assert self._file is not None
        self._file.seek(offset)
        self._offset, self._rest, self._too_long = offset, b"", False

    def _is_wanted(self) -> bool:
        assert self._file is not None
        begun = os.pread(self._file.fileno(), self._wanted.mark_bytes, 0)
        return _digest(begun) == self._wanted.mark and len(begun) == self._wanted.mark_bytes

    def _go_on(self) -> bool:
        """Go on with the next file, if ours has been renamed and read to its end; or from its beginning, if
        somebody emptied it."""
        assert self._file is not None
        ours = os.fstat(self._file.fileno())
        if ours.st_size < self._offset:
            self._seek(0)
            return ours.st_size > 0
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        if now.st_ino == ours.st_ino and now.st_dev == ours.st_dev:
            return False
        # What was written between our last read and the renaming.
        more = self._file.read(CHUNK_BYTES)
        if more:
            self._rest += more
            return True
        self.skipped += bool(self._rest)
        self.close()
        return self._open(self._path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _event(line: bytes) -> Values | None:
    try:
        found = msgspec.json.decode(line)
    except DAMAGE:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None
