"""Book of the bytes that this node moved, by calendar month, over all its lives: `DATA_DIR/transfer.json`.

What stands on the disk is ahead of what was counted: a life that ends without a word (SIGKILL, a power cut)
is charged up to `AHEAD_BYTES`, or what moves in five seconds if that is more, too much. It is charged too
little only if what moves while a write takes place is more than what it was ahead by. An orderly end writes
what was counted. Writes take place beside the event loop, one at a time.

Whose clock is set back, or was ahead in an earlier life, gets no second budget: what stands under later
months counts for the present one, too.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.daemon.apart import begun
from p2pdiloco.errors import StorageError
from p2pdiloco.util import read_note

logger = logging.getLogger(__name__)
FILE = "transfer.json"
AHEAD_BYTES = 16 << 20
AHEAD_LOOKS = 5
"""Looks at the rate of the last one that the disk is ahead."""
WRITE_LOOKS = 2
"""Looks at that rate for which the disk must still be ahead: the next write begins so long before."""
MONTHS = 36
Amount = Annotated[int, Meta(ge=0, le=1 << 62)]
JUMP_S = 3600.0
"""Difference between the clock of the day and the one that is never set, above which the former was set."""


class Counts(Struct, frozen=True):
    """Bytes of one month."""

    sent: Amount = 0
    received: Amount = 0

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.sent + self.received

    def plus(self, sent: int, received: int) -> Counts:
        """Add bytes."""
        return Counts(self.sent + max(0, sent), self.received + max(0, received))


Kept = dict[str, Counts] | None
"""Content of the file; None: it could not be written."""
Write = Callable[[], Kept]


class BookFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    months: dict[str, Counts] = {}
    """Counts by month, "2026-11"."""


_decoder = msgspec.json.Decoder(BookFile)


def month_of(wall: float) -> str:
    """Name the month of a time, by this machine's clock."""
    return datetime.datetime.fromtimestamp(wall).strftime("%Y-%m")


def month_ends(wall: float) -> str:
    """Word when the next month begins: "2026-12-01 00:00"."""
    day = datetime.datetime.fromtimestamp(wall).replace(day=1) + datetime.timedelta(days=32)
    return day.strftime("%Y-%m-01 00:00")


class TransferBook:
    """Book of one data folder."""

    def __init__(self, data_dir: Path, begin: Callable[[Write], Future[Kept]] = begun) -> None:
        """`begin`: begins a write; of the event loop's thread nobody can wait for a disk."""
        self._begin = begin
        self._writing: Future[Kept] | None = None
        self._path = data_dir / FILE
        known = read_note(self._path, _decoder.decode, logger.warning)
        self._months = dict(known.months) if known is not None else {}
        self._written = self._months.copy()
        self._seen = (0, 0)
        self._month = ""
        self._this_life = Counts()
        self._clocks: tuple[float, float] | None = None
        self._complained = False

    def month(self, wall: float) -> Counts:
        """Count this month's bytes, with those of months that are still to come by this clock."""
        present = month_of(wall)
        found = [counts for month, counts in self._months.items() if month >= present]
        return Counts(sum(c.sent for c in found), sum(c.received for c in found))

    def begin(self) -> None:
        """Count from nothing: a transport began."""
        self._seen = (0, 0)

    def look(self, carried: tuple[int, int], now: float, wall: float) -> None:
        """Take in how many bytes the transport has moved, (out, in); write when the disk is not ahead."""
        before, self._seen = self._seen, carried
        sent, received = (max(0, new - old) for new, old in zip(carried, before, strict=True))
        month = month_of(wall)
        if self._was_set(now, wall) and month != self._month:
            # What this life moved in a month that never was counts for the one that it is.
            sent, received = sent + self._this_life.sent, received + self._this_life.received
            self._this_life = Counts()
        self._month = month
        self._this_life = self._this_life.plus(sent, received)
        self._months[month] = counts = self._months.get(month, Counts()).plus(sent, received)
        self._take_up()
        if self._writing is not None:
            return
        written = self._written.get(month, Counts())
        soon = counts.plus(WRITE_LOOKS * sent, WRITE_LOOKS * received)
        if soon.sent > written.sent or soon.received > written.received:
            ahead = max(AHEAD_BYTES, AHEAD_LOOKS * (sent + received))
            self._writing = self._begin(partial(self._write, {**self._months, month: _ahead(counts, ahead)}))
            self._take_up()

    def close(self) -> None:
        """Write what was counted: an orderly end. It waits for the disk."""
        if self._writing is not None:
            self._writing.result()
            self._take_up()
        if self._months != self._written:
            self._note(self._write(self._months))

    def _was_set(self, now: float, wall: float) -> bool:
        """Tell whether the clock of the day was set since the last look."""
        before, self._clocks = self._clocks, (now, wall)
        return before is not None and abs((wall - before[1]) - (now - before[0])) > JUMP_S

    def _take_up(self) -> None:
        """Take up what came of a write, if it is done."""
        if self._writing is not None and self._writing.done():
            self._note(self._writing.result())
            self._writing = None

    def _note(self, kept: Kept) -> None:
        if kept is not None:
            self._written = kept
        self._complained = kept is None

    def _write(self, months: dict[str, Counts]) -> Kept:
        kept = dict(sorted(months.items())[-MONTHS:])
        try:
            Files().save(self._path, [msgspec.json.encode(BookFile(kept))], durable=True)
        except StorageError as error:
            if not self._complained:
                logger.warning("the bytes of this month are not kept over a restart: %s", error)
            return None
        return kept


def _ahead(counts: Counts, by: int) -> Counts:
    """Charge so much ahead, about in the proportion of both ways."""
    share = counts.sent / counts.total if counts.total else 0.5
    sent = round(by * min(0.875, max(0.125, share)))
    return counts.plus(sent, by - sent)
