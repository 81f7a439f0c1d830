"""Chart libraries to which points go. Each is imported when it is wanted; none is needed otherwise."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from msgspec import Struct

from p2pdiloco.cli.logto.points import Point
from p2pdiloco.errors import UserError, first_line, install_hint

Target = Literal["tensorboard", "wandb", "trackio"]
TARGETS: tuple[Target, ...] = get_args(Target)
TOKENS = "tokens"
"""Name of the axis along which everything is drawn."""


class Where(Struct, frozen=True):
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

    def __init__(self, where: Where) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(where.folder / where.name))

    def write(self, points: Sequence[Point]) -> None:
        """See `Charts`."""
        for point in points:
            values = [
                self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=point.t, step=point.tokens, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """See `Charts`."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in the folder, for `wandb sync`."""

    def __init__(self, where: Where) -> None:
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
        """See `Charts`."""
        for point in points:
            self._run.log({**point.values, TOKENS: point.tokens, "_timestamp": point.t})

    def close(self) -> None:
        """See `Charts`."""
        self._run.finish()


class Trackio:
    """A run of Trackio, on this machine or in a Space of Hugging Face (`TRACKIO_SPACE_ID`)."""

    def __init__(self, where: Where) -> None:
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
        """See `Charts`."""
        for point in points:
            self._run.log(dict(point.values), step=point.tokens)

    def close(self) -> None:
        """See `Charts`."""
        self._run.finish()


KINDS: dict[Target, Callable[[Where], Charts]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def open_charts(target: Target, where: Where) -> Charts:
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


def new_id() -> str:
    """Draw the id of a new run."""
    return secrets.token_hex(4)


def written(target: Target, charts: Charts, work: Callable[[Charts], Any]) -> None:
    """Do something with charts. Raises: UserError (whatever the library raises)."""
    try:
        work(charts)
    except Exception as error:
        raise UserError(f"{target} does not take points: {first_line(error)}", HINTS[target]) from error
