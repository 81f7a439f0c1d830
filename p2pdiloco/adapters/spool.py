"""Scratch on the disk (`Spool`) for payloads that arrive and find no place in memory."""

from __future__ import annotations

import asyncio
import bisect
import logging
import os
import tempfile
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco.adapters.data_dir import DISK_BLOCK_BYTES, storage_error, storage_errors
from p2pdiloco.errors import StorageError, invariant

logger = logging.getLogger(__name__)

SPOOL_BYTES = 16 << 30
"""Most bytes that the file may have."""
SPOOL_SPARE_BYTES = 256 << 20
"""Bytes of the disk that stay free for what must be durable."""


@dataclass
class Scratch:
    """Room for one payload; given back when nobody refers to it any more. A `tensors.merge.Stored`."""

    _spool: Spool
    _start: int
    nbytes: int

    async def write(self, offset: int, data: memoryview) -> None:
        """Write a piece. Raises: StorageError."""
        invariant(offset + len(data) <= self.nbytes, "a piece beyond a payload's end")
        await self._spool.write(self._start + offset, data)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from this offset on, from any thread. Raises: StorageError."""
        invariant(offset + len(into) <= self.nbytes, "read beyond a payload's end")
        self._spool.read(self._start + offset, into)


@dataclass
class Spool:
    """Scratch file for payloads that arrive and find no place in memory, and who has which part of it.

    One unlinked file of the data folder: of use to the running process only, gone with it however it ends.
    Payloads lie in it one beside the other; what is given back is used again, and the end of the file goes
    back to the disk. All but `read` and what the garbage collector calls is for the event loop's thread.

    Raises:
        StorageError: the folder takes no file.
    """

    _folder: Path
    most_bytes: int = SPOOL_BYTES
    """Bytes that the file may have at most."""
    spare_bytes: int = SPOOL_SPARE_BYTES
    """Bytes of the disk that stay free."""

    def __post_init__(self) -> None:
        with storage_errors("write in", self._folder):
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - `close` closes it
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._taken: list[tuple[int, int]] = []
        """Places, (start, end), of all parts, in order."""
        self._returned: deque[tuple[int, int]] = deque()
        """Parts of them that nobody refers to any more."""
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes on the disk for payloads."""
        self._collect()
        return sum(end - start for start, end in self._taken)

    def fits(self, size: int) -> bool:
        """Tell whether a payload of this size may come now, beside what was promised to others and is not
        written yet."""
        self._collect()
        end = max(self._end(), self._place(size) + size)
        if end > self.most_bytes:
            return False
        try:
            disk = os.fstatvfs(self._file.fileno())
            unwritten = max(0, end - DISK_BLOCK_BYTES * os.fstat(self._file.fileno()).st_blocks)
        except OSError as error:
            logger.warning("%s", storage_error(error, "write in", self._folder))
            return False
        return disk.f_bavail * disk.f_frsize >= unwritten + self.spare_bytes

    def take(self, size: int) -> Scratch:
        """Take room for a payload that `fits`."""
        self._collect()
        start = self._place(size)
        bisect.insort(self._taken, (start, start + size))
        scratch = Scratch(self, start, size)
        weakref.finalize(scratch, self._give_back, start, start + size).atexit = False
        return scratch

    def _place(self, size: int) -> int:
        """The first gap of that size, or the end."""
        free = 0
        for start, end in self._taken:
            if start - free >= size:
                return free
            free = end
        return free

    def _give_back(self, start: int, end: int) -> None:
        # The garbage collector calls this in any thread, at any time: even inside an executor's `submit`,
        # which holds locks that every other `submit` waits for. So it is only noted.
        self._returned.append((start, end))

    def _collect(self) -> None:
        before = self._end()
        while self._returned:
            self._taken.remove(self._returned.popleft())
        if self._end() < before and not self._closed:
            # In the writer's thread, behind all that was written: whoever takes this part next writes later.
            asyncio.get_running_loop().run_in_executor(self._writer, self._shorten, self._end())

    def _end(self) -> int:
        return self._taken[-1][1] if self._taken else 0

    def _shorten(self, size: int) -> None:
        try:
            os.ftruncate(self._file.fileno(), size)
        except OSError as error:
            logger.warning("%s", storage_error(error, "shorten a file in", self._folder))

    async def write(self, at: int, data: memoryview) -> None:
        """Write a piece at this place, in a thread: a disk may take its time. Raises: StorageError."""
        self._collect()
        error = await asyncio.get_running_loop().run_in_executor(self._writer, self._write, at, data)
        if error is not None:
            raise storage_error(error, "write in", self._folder)

    def _write(self, at: int, data: memoryview) -> OSError | None:
        """Write in the thread; returns the error. Raised in the thread, it would keep alive whoever waits for
        it there."""
        try:
            while data.nbytes:
                done = self._put(at, data)
                at, data = at + done, data[done:]
        except OSError as error:
            return error.with_traceback(None)
        return None

    def _put(self, at: int, data: memoryview) -> int:
        return os.pwrite(self._file.fileno(), data, at)

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` from this place on. Raises: StorageError."""
        with storage_errors("read in", self._folder):
            while into.nbytes:
                done = os.preadv(self._file.fileno(), [into], at)
                if not done:
                    raise StorageError(f"a scratch file in {self._folder} is shorter than it was")
                at, into = at + done, into[done:]

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._writer.shutdown(wait=True)
        self._file.close()
