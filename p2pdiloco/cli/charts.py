"""`p2pdiloco log-to`: carries a node's figures from its event log to TensorBoard, W&B or Trackio.

`Points` makes points of events: figures, their names, at how many tokens (docs/topics/watching.md).
`Charts` are the libraries to which points go; each is imported when it is wanted. `carry` does it all, so
that each point arrives once at most: `PlaceFile` keeps what was read, and for which charts. The place is
written before the points are handed over, so a reader that is killed just then leaves a second or so out, and
draws nothing twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec import field
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import Files, storage_error
from p2pdiloco.adapters.event_reader import EventReader, LogPlace
from p2pdiloco.config.settings import Target
from p2pdiloco.errors import UserError, first_line, install_hint
from p2pdiloco.util import Frozen, Say, Values, read_note

MOST_TOKENS = 1 << 62
PROGRESS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "tokens_per_s": "train/tokens_per_s",
    "step_time_s": "train/step_time_s",
    "longest_gap_s": "train/longest_gap_s",
    "inner_step": "node/inner_step",
    "tokens_total": "node/tokens",
    "deferred_copies": "node/deferred_copies",
    "pushed_bytes": "node/pushed_bytes",
    "updates_given_bytes": "node/updates_given_bytes",
    "updates_passed_on_bytes": "node/updates_passed_on_bytes",
}
"""Figure of an event `progress` -> name of its chart."""
COUNTED = {
    "election": "run/elections",
    "suspicion": "run/suspicions",
    "silent": "run/silent",
    "refusal": "run/refusals",
    "fork": "run/forks",
}
CONTRIBUTIONS = {"attempts": "node/merged", "syncer": "node/refused", "lost": "node/given_up"}
"""Field that only one outcome of a contribution has -> name of the chart in which that is counted."""
VERSIONS = ("publish", "apply", "catchup")


class Point(Frozen):
    """Values at one number of tokens."""

    tokens: int
    t: float
    """Unix time."""
    values: dict[str, float]


class LogTally(Frozen):
    """Memory of what was read so far, which goes with the place: the next reader counts on from it."""

    tokens: int = 0
    """Tokens that the run has consumed, as the learner last said: where all that follows is drawn."""
    counts: dict[str, int] = field(default_factory=dict)
    version: int = 0


class Points:
    """Maker of points out of events, in their order."""

    def __init__(self, tally: LogTally | None = None) -> None:
        """`tally`: of an earlier reader."""
        self.tally = tally or LogTally()
        """What is known of the log so far."""

    def of(self, event: Values) -> Point | None:
        """Take an event; None: there is nothing to draw."""
        kind, values = event["kind"], {}
        if kind == "progress":
            tokens = _number(event.get("run_tokens"))
            if tokens is not None and 0 <= tokens <= MOST_TOKENS:
                self.tally = replace(self.tally, tokens=int(tokens))
            values = _numbers(event, PROGRESS)
        elif kind == "evaluation":
            values = _evaluation(event)
        elif kind == "merge":
            values = _numbers(event, {"contributors": "run/contributors", "live": "run/live"})
        elif kind in VERSIONS:
            values = self._version(event)
        elif kind == "link":
            values = _numbers(
                event, {key: f"node/{key}" for key in ("upload_bits_per_s", "download_bits_per_s")}
            )
        elif kind in COUNTED:
            values = self._count(COUNTED[kind])
        elif kind == "contribution":
            name = next((name for field, name in CONTRIBUTIONS.items() if field in event), "")
            values = self._count(name) if name else {}
        if not values:
            return None
        t = _number(event.get("t"))
        return Point(self.tally.tokens, time.time() if t is None else t, values)

    def _count(self, name: str) -> dict[str, float]:
        number = self.tally.counts.get(name, 0) + 1
        self.tally = replace(self.tally, counts=self.tally.counts | {name: number})
        return {name: number}

    def _version(self, event: Values) -> dict[str, float]:
        """Draw the newest version of any fragment, when there is a newer one."""
        number = _number(event.get("number"))
        if number is None or number <= self.tally.version:
            return {}
        self.tally = replace(self.tally, version=int(number))
        return {"run/newest_version": number}


def _evaluation(event: Values) -> dict[str, float]:
    metrics = event.get("metrics")
    found = (metrics if isinstance(metrics, dict) else {}) | {"loss": event.get("loss")}
    return _numbers(found, {name: f"eval/{name}" for name in found})


def _numbers(event: Values, names: Mapping[str, str]) -> dict[str, float]:
    """What is a number of these keys, by the names that charts have for them."""
    return {name: found for key, name in names.items() if (found := _number(event.get(key))) is not None}


def _number(value: object) -> float | None:
    """Take a finite number; None: there is none (a loss that is no number is null)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


# Chart libraries.

TOKENS = "tokens"
"""Name of the axis along which everything is drawn."""


class ChartPlace(Frozen):
    """Destination of the points of a node."""

    folder: Path
    """Folder of tensorboard's files; of what wandb keeps here."""
    project: str
    name: str
    """Name of the run there."""
    id: str = ""
    """Id of the run there, by which it is gone on with; wandb's only."""


class Charts(Protocol):
    """Charts that are open."""

    def write(self, points: Sequence[Point]) -> None:
        """Hand points over, and have them written as far as the library lets us."""

    def close(self) -> None:
        """End in order: all is written."""


class TensorBoard:
    """Files of TensorBoard, written by its own writer, which needs neither TensorFlow nor torch."""

    def __init__(self, where: ChartPlace) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(where.folder / where.name))

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [
                self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=point.t, step=point.tokens, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in the folder, for `wandb sync`."""

    def __init__(self, where: ChartPlace) -> None:
        import wandb

        where.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=where.project,
            id=where.id,
            name=where.name,
            dir=str(where.folder),
            resume="allow",
            # What this process prints and takes is not the learner's.
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        # Not wandb's own step: what comes late, or after a chain that was lost, would be dropped by that.
        self._run.define_metric(TOKENS, hidden=True)
        self._run.define_metric("*", step_metric=TOKENS)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, TOKENS: point.tokens, "_timestamp": point.t})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, on this machine or in a Space of Hugging Face (`TRACKIO_SPACE_ID`)."""

    def __init__(self, where: ChartPlace) -> None:
        import trackio

        self._run = trackio.init(
            project=where.project,
            name=where.name,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.tokens)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[Target, Callable[[ChartPlace], Charts]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def open_charts(target: Target, where: ChartPlace) -> Charts:
    """Open charts. Raises: UserError (not installed, no account, no place)."""
    try:
        return KINDS[target](where)
    except ModuleNotFoundError as error:
        raise UserError(f"{target} is not installed here ({error})", install_hint(target)) from error
    except OSError as error:
        raise UserError(
            f"the charts in {where.folder} cannot be written: {error.strerror}", "choose another --out"
        ) from error
    except Exception as error:
        raise UserError(f"{target} does not open a run: {first_line(error)}", HINTS[target]) from error


HINTS: dict[Target, str] = {
    "tensorboard": "choose another --out",
    "wandb": "wandb login, or without an account: WANDB_MODE=offline",
    "trackio": "see what TRACKIO_SPACE_ID and TRACKIO_SERVER_URL are set to, and --project",
}


@contextmanager
def guarded(target: Target) -> Iterator[None]:
    """Do something with charts. Raises: UserError (whatever the library raises)."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{target} does not take points: {first_line(error)}", HINTS[target]) from error


# From the log to the charts.

EVENTS_AT_ONCE = 500
PERIOD_S = 1.0
"""Pause between two looks at a log that is followed."""


class PlaceNote(Frozen, forbid_unknown_fields=True):
    """Content of a place file."""

    place: LogPlace
    tally: LogTally
    id: str
    """Id of the run in the charts, and its name there."""
    name: str


class PlaceFile:
    """File of the place up to which a log was carried to certain charts, and the lock of who carries."""

    def __init__(self, data_dir: Path, target: Target, where: ChartPlace) -> None:
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

    def load(self, tell: Say) -> PlaceNote | None:
        """Load what was noted last; None: nothing."""
        return read_note(self._path, lambda content: msgspec.json.decode(content, type=PlaceNote), tell)

    def save(self, noted: PlaceNote) -> None:
        """Note something. Raises: StorageError."""
        Files().save(self._path, [msgspec.json.encode(noted)], durable=False, private=True)

    def close(self) -> None:
        """Let others carry."""
        os.close(self._lock)


class CarriedCount(NamedTuple):
    """Count of what was carried."""

    events: int
    points: int
    skipped: int


def carry(
    data_dir: Path,
    target: Target,
    where: ChartPlace,
    *,
    follows: bool,
    again: bool,
    stop: threading.Event,
    say: Say,
) -> CarriedCount:
    """Carry what is in the log and was not carried yet; with `follows` on and on, until `stop` is set.

    `again`: from the beginning, into a run of its own.

    Raises: UserError, StorageError.
    """
    file = PlaceFile(data_dir, target, where)
    try:
        noted = None if again else file.load(say)
        if noted is None:
            run = secrets.token_hex(4)
            noted = PlaceNote(LogPlace(), LogTally(), run, f"{where.name}-{run}" if again else where.name)
        reader = EventReader(data_dir / "events.jsonl", noted.place)
        charts = open_charts(target, replace(where, id=noted.id, name=noted.name))
        made, drawn, read = Points(noted.tally), 0, 0
        try:
            while not stop.is_set():
                events = reader.events(EVENTS_AT_ONCE)
                if events:
                    points = [point for event in events if (point := made.of(event)) is not None]
                    file.save(replace(noted, place=reader.place(), tally=made.tally))
                    with guarded(target):
                        charts.write(points)
                    drawn, read = drawn + len(points), read + len(events)
                elif not follows or stop.wait(PERIOD_S):
                    break
        finally:
            reader.close()
            with guarded(target):
                charts.close()
        if reader.is_lost:
            say("the log was renamed twice since the last time: lines between are missing in the charts")
        return CarriedCount(read, drawn, reader.skipped)
    finally:
        file.close()
