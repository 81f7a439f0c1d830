"""Carrying points from an event log to charts, so that each arrives once at most.

A place file beside the log has what was read, and for which charts. It is written before the points are
handed over: a reader that is killed just then leaves a second or so out, and never draws anything twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from p2pdiloco.adapters.data_dir import Files, storage_error
from p2pdiloco.cli.logto.charts import Charts, Target, Where, new_id, open_charts, written
from p2pdiloco.cli.logto.points import LogTally, Points
from p2pdiloco.cli.logto.reading import EventReader, LogPlace
from p2pdiloco.errors import UserError
from p2pdiloco.util import read_note

EVENTS_AT_ONCE = 500
PERIOD_S = 1.0
"""Pause between two looks at a log that is followed."""


class Noted(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a place file."""

    place: LogPlace
    tally: LogTally
    id: str
    """Id of the run in the charts, and its name there."""
    name: str


class PlaceFile:
    """File of the place up to which a log was carried to certain charts, and the lock of who carries."""

    def __init__(self, data_dir: Path, target: Target, where: Where) -> None:
        """Raises: UserError (another process carries the same), StorageError."""
        there = f"{where.folder.absolute()}\0{where.project}\0{where.name}"
        digest = hashlib.sha256(there.encode(errors="surrogateescape")).hexdigest()[:8]
        self._path = data_dir / f"log-to-{target}-{digest}.json"
        lock = self._path.with_suffix(".lock")
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UserError(
                f"another process carries the events in {data_dir} to these charts already",
                "end that one first, or name others with --name, --project or --out",
            ) from error
        except OSError as error:
            raise storage_error(error, "open", lock) from error

    def load(self, tell: Callable[[str], None]) -> Noted | None:
        """Load what was noted last; None: nothing."""
        return read_note(self._path, lambda content: msgspec.json.decode(content, type=Noted), tell)

    def save(self, noted: Noted) -> None:
        """Note something. Raises: StorageError."""
        Files().save(self._path, [msgspec.json.encode(noted)], durable=False, private=True)

    def close(self) -> None:
        """Let others carry."""
        os.close(self._lock)


class Carried(Struct):
    """Count of what was carried."""

    events: int = 0
    points: int = 0
    skipped: int = 0


def carry(
    data_dir: Path,
    target: Target,
    where: Where,
    *,
    follows: bool,
    again: bool,
    stop: threading.Event,
    say: Callable[[str], None],
    open_with: Callable[[Target, Where], Charts] = open_charts,
) -> Carried:
    """Carry what is in the log and was not carried yet; with `follows` on and on, until `stop` is set.

    `again`: from the beginning, into a run of its own.

    Raises: UserError, StorageError.
    """
    file = PlaceFile(data_dir, target, where)
    try:
        noted = None if again else file.load(say)
        if noted is None:
            run = new_id()
            noted = Noted(LogPlace(), LogTally(), run, f"{where.name}-{run}" if again else where.name)
        reader = EventReader(data_dir / "events.jsonl", noted.place)
        charts = open_with(target, structs.replace(where, id=noted.id, name=noted.name))
        carrier = _Carrier(target, file, reader, charts, noted)
        try:
            carrier.carry(follows, stop)
        finally:
            reader.close()
            written(target, charts, lambda open_ones: open_ones.close())
        if reader.is_lost:
            say("the log was renamed twice since the last time: lines between are missing in the charts")
        return carrier.carried
    finally:
        file.close()


class _Carrier:
    """Carries the points of one log to one place."""

    def __init__(
        self, target: Target, file: PlaceFile, reader: EventReader, charts: Charts, noted: Noted
    ) -> None:
        self._target, self._file, self._noted = target, file, noted
        self._reader, self._points, self._charts = reader, Points(noted.tally), charts
        self.carried = Carried()

    def carry(self, follows: bool, stop: threading.Event) -> None:
        """Carry all that is there; with `follows` what comes, too."""
        while True:
            while self._some():
                if stop.is_set():
                    return
            if not follows or stop.wait(PERIOD_S):
                return

    def _some(self) -> bool:
        """Carry some events. False: there are none."""
        events = self._reader.events(EVENTS_AT_ONCE)
        self.carried.skipped = self._reader.skipped
        if not events:
            return False
        points = [point for event in events if (point := self._points.of(event)) is not None]
        self.carried.events += len(events)
        self.carried.points += len(points)
        place, tally = self._reader.place(), self._points.tally
        self._file.save(structs.replace(self._noted, place=place, tally=tally))
        written(self._target, self._charts, lambda charts: charts.write(points))
        return True
