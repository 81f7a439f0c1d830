"""Store of a run's history on a disk, append-only: `<data_dir>/runs/<run id, 16>/history/<fragment>/`.

    <n>.log              records as they come, up to `SEGMENT_BYTES`; a torn end is cut off at the next start
    <n>-<low>-<high>.z   a full one, compressed; versions `low` to `high` are in it

All branches that were taken are there. Which versions count follows from a head: its parent, that one's
parent, and so on (`line`). A look reads the segments that have the numbers in question, no others.
Synchronous, and to be called from one thread.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from p2pdiloco.adapters.disk.files import TEMP_SUFFIX, Files, storage_error
from p2pdiloco.bounded import BoundedDict
from p2pdiloco.credits.records import HistoryRecord, framed, frames

SEGMENT_BYTES = 512 * 1024
MAX_OPEN = 4
"""Segments whose records are in memory."""
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
"""Limit of what a compressed segment unfolds to."""
Records = dict[tuple[int, bytes], HistoryRecord]
"""Records by number and digest."""
_NAME = re.compile(r"([0-9]{8})(?:-([0-9]{1,19})-([0-9]{1,19})\.z|\.log)")


class Segment(Struct, frozen=True):
    """File of records."""

    path: Path
    low: int
    high: int


class VersionLine(Struct, frozen=True):
    """Unbroken line of versions that ends in a head."""

    digests: tuple[bytes, ...]
    """Digests of its versions, oldest first."""
    first: int
    """Number of the oldest one; 1: it is whole."""
    wanted: bytes
    """Digest of the version before that, which is not here; of a whole one, that of version 0."""

    @property
    def is_whole(self) -> bool:
        """True: nothing is missing before it."""
        return self.first == 1


class _Open:
    """Segment of a fragment that is written to."""

    def __init__(self, index: int) -> None:
        self.index, self.size, self.low, self.high = index, 0, 0, 0

    def grow(self, number: int, size: int) -> None:
        """Count a record."""
        self.low = number if not self.size else min(self.low, number)
        self.high = max(self.high, number)
        self.size += size


class HistoryStore:
    """Store of the history of one run."""

    def __init__(self, folder: Path, files: Files | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._files = files or Files()
        self._segment_bytes = segment_bytes
        self._segments: dict[int, list[Segment]] = {}
        self._open: dict[int, _Open] = {}
        self._read: BoundedDict[Path, Records] = BoundedDict(MAX_OPEN)

    # --- writing -------------------------------------------------------------------------------------

    def append(self, record: HistoryRecord) -> None:
        """Add a record. It survives the process; a power cut may take the newest ones.

        Raises:
            StorageError: it is not saved; what was there is as it was.
        """
        header = record.version.header
        fragment, content = header.fragment, framed(record)
        current = self._opened(fragment)
        path = self._log(fragment, current.index)
        try:
            with path.open("r+b" if current.size else "wb", buffering=0) as file:
                file.seek(current.size)
                file.truncate()  # what an append that failed has left
                self._files.write(file, content)
        except OSError as error:
            raise storage_error(error, "save", path) from error
        current.grow(header.number, len(content))
        self._read.pop(path, None)
        if current.size >= self._segment_bytes:
            self._seal(fragment, current)

    def _seal(self, fragment: int, current: _Open) -> None:
        """Compress a full segment, and begin another."""
        log = self._log(fragment, current.index)
        name = f"{current.index:08d}-{current.low}-{current.high}.z"
        sealed = Segment(log.with_name(name), current.low, current.high)
        self._files.save(sealed.path, [zlib.compress(self._files.read(log), 6)], durable=True)
        self._segments[fragment].append(sealed)
        self._open[fragment] = _Open(current.index + 1)
        self._files.delete(log)

    # --- reading -------------------------------------------------------------------------------------

    def find(self, fragment: int, number: int, digest: bytes) -> HistoryRecord | None:
        """Find the record of that very version. Raises: StorageError."""
        current = self._opened(fragment)
        if current.size and current.low <= number <= current.high:
            found = self._content(self._log(fragment, current.index)).get((number, digest))
            if found is not None:
                return found
        for segment in reversed(self._segments[fragment]):
            if segment.low <= number <= segment.high:
                found = self._content(segment.path).get((number, digest))
                if found is not None:
                    return found
        return None

    def down(self, fragment: int, number: int, digest: bytes) -> Iterator[HistoryRecord]:
        """Read that version, its parent, and so on, as far as they are here; version 0 is never among them.

        Raises: StorageError.
        """
        while number > 0:
            record = self.find(fragment, number, digest)
            if record is None:
                return
            yield record
            number, digest = number - 1, record.version.header.parent

    def line(self, fragment: int, number: int, digest: bytes) -> VersionLine:
        """Find what is here of the chain with that head. Raises: StorageError."""
        digests: list[bytes] = []
        wanted = digest
        for record in self.down(fragment, number, digest):
            digests.append(wanted)
            wanted = record.version.header.parent
        digests.reverse()
        return VersionLine(tuple(digests), number - len(digests) + 1, wanted)

    def along(self, fragment: int, line: VersionLine) -> Iterator[HistoryRecord]:
        """Read the records of a line, oldest first. Raises: StorageError."""
        for number, digest in enumerate(line.digests, line.first):
            record = self.find(fragment, number, digest)
            if record is None:
                return  # it was deleted meanwhile
            yield record

    # --- files ---------------------------------------------------------------------------------------

    def _log(self, fragment: int, index: int) -> Path:
        return self._folder / f"{fragment:04d}" / f"{index:08d}.log"

    def _opened(self, fragment: int) -> _Open:
        """Look what is there of a fragment, the first time, and cut off what a crash has torn."""
        if fragment in self._open:
            return self._open[fragment]
        folder = self._folder / f"{fragment:04d}"
        self._files.make_folder(folder)
        there = self._files.list_folder(folder)
        for path in there:
            if path.name.endswith(TEMP_SUFFIX):
                self._files.delete(path)  # the crash came while it was compressed
        named = [(path, _NAME.fullmatch(path.name)) for path in there]
        sealed = {int(m[1]): Segment(p, int(m[2]), int(m[3])) for p, m in named if m and m[2]}
        logs = {int(m[1]): path for path, m in named if m and not m[2]}
        self._segments[fragment] = [segment for _, segment in sorted(sealed.items())]
        current = _Open(max((*sealed, -1)) + 1)
        for index, path in sorted(logs.items()):
            if index in sealed:
                self._files.delete(path)  # the crash came after it was compressed
                continue
            current = _Open(index)
            for end, record in frames(self._files.read(path)):
                current.grow(record.version.header.number, end - current.size)
        self._open[fragment] = current
        return current

    def _content(self, path: Path) -> Records:
        """Read the records of a segment by digest; of a damaged one, those before the damage."""
        known = self._read.get(path)
        if known is not None:
            return known
        content = self._files.read(path)
        if path.suffix == ".z":
            content = _unfolded(content)
        headers = ((record.version.header, record) for _, record in frames(content))
        found = {(header.number, header.digest()): record for header, record in headers}
        self._read[path] = found
        return found


def _unfolded(content: bytes) -> bytes:
    """Decompress a segment as far as it is sound."""
    unfolding = zlib.decompressobj()
    try:
        return unfolding.decompress(content, MAX_SEGMENT_BYTES)
    except zlib.error:
        return b""
