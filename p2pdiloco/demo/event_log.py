"""Reader of nodes' event logs (docs/reference/events.md): typed records, of a growing or a whole file.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from p2pdiloco.adapters.data_dir import ROTATED_SUFFIX

NO_FRAGMENT = -1
HEAD_KINDS = ("publish", "apply", "catchup")
"""Kinds of line that name the version which became the node's head, if they have a digest."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an event log. A field that lines of its kind do not carry has its default."""

    node: str = ""
    """Name of the node whose log it is, given by the reader."""
    mono: float
    kind: str
    reason: str = ""
    about: int | None = msgspec.field(default=None, name="fragment")
    number: int = -1
    digest: str = ""
    term: int = 0
    tokens: int = 0
    syncer: str = ""
    group: int | str = ""
    """Name of a group; in lines of kind `groups`, the number of the node's leaf group."""
    contributors: int = 0
    live: int = 0
    stamp: int = 0
    contributions: int = 0
    attempts: int = 0
    lost: bool = False
    inner_step: int = 0
    tokens_total: int = 0
    tokens_per_s: float | None = None
    step_time_s: float = 0.0
    longest_gap_s: float = 0.0
    longest_aside_s: float = 0.0
    cpu_s: float = 0.0
    loss: float | None = None
    metrics: dict[str, float] = {}
    pushed_bytes: int = 0
    updates_given_bytes: int = 0
    updates_passed_on_bytes: int = 0
    device: str = ""
    code: int | None = None
    every: int = 1
    peer: str = ""

    @property
    def fragment(self) -> int:
        """Fragment that the line is about; NO_FRAGMENT: none."""
        return NO_FRAGMENT if self.about is None else self.about

    @property
    def version(self) -> tuple[int, int]:
        """(fragment, number) of the version that the line names."""
        return self.fragment, self.number

    def is_head(self) -> bool:
        """Tell whether the node's head became this version."""
        return self.kind in HEAD_KINDS and bool(self.digest)

    def is_made(self) -> bool:
        """Tell whether the node made and published this version."""
        return self.kind == "publish" and bool(self.digest)

    def is_merge(self) -> bool:
        """Tell whether the node, as syncer, closed a round with these contributors."""
        return self.kind == "merge" and self.contributors > 0

    def is_merged(self) -> bool:
        """Tell whether a contribution of the node was merged."""
        return self.kind == "contribution" and self.reason == "merged"


class Tail:
    """Complete lines that a growing log has gained. A rotation loses none; torn lines are left out."""

    def __init__(self, path: Path, node: str = "", offset: int = 0) -> None:
        """`node`: name that the lines are to carry. `offset`: bytes of the file to leave out."""
        self._path = path
        self._node = node
        self._offset = offset
        self._rest = b""

    def lines(self) -> list[Line]:
        """Return the lines completed since the last call.

        Raises:
            msgspec.ValidationError: a line is not of our format.
        """
        if not self._path.exists():
            return []
        data = b""
        if self._path.stat().st_size < self._offset:
            data, self._offset = self._read(_rotated(self._path)), 0
        data += self._read(self._path)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return _decoded(whole, self._node)

    def _read(self, path: Path) -> bytes:
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            self._offset = file.tell()
        return data


def read_log(path: Path, node: str = "") -> list[Line]:
    """Read all complete lines of a log, its rotated part first."""
    parts = [part.read_bytes() for part in (_rotated(path), path) if part.exists()]
    return _decoded(b"".join(parts).split(b"\n")[:-1], node)


def of_kind(lines: Iterable[Line], *kinds: str) -> list[Line]:
    """Pick the lines of these kinds."""
    return [line for line in lines if line.kind in kinds]


def _rotated(path: Path) -> Path:
    return path.with_name(path.name + ROTATED_SUFFIX)


def _decoded(lines: Iterable[bytes], node: str) -> list[Line]:
    """Decode the lines; one that a crash tore is no JSON, and is left out."""
    found = []
    for line in lines:
        try:
            found.append(msgspec.structs.replace(_DECODER.decode(line), node=node))
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found


_DECODER = msgspec.json.Decoder(Line)
