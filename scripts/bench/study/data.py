"""Data, read once for the many swarms of a study."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from p2pdiloco.learner.samples import SampleStream
from p2pdiloco.tasks.task import Data, Task
from study.glyphs import glyphs

_data: dict[bytes, Data] = {}


def data_of(task: Task) -> Data:
    """The task's embedded data, or the images that are drawn here; read once for all runs of one shape."""
    manifest = task.manifest
    key = msgspec.msgpack.encode((manifest.run.task, manifest.data, manifest.model), order="sorted")
    if key not in _data:
        _data.clear()
        _data[key] = task.load_data(str(glyphs()) if manifest.data.source == "files" else None)
    return _data[key]


def acquainted(streams: Mapping[str, SampleStream]) -> None:
    """Let readers in one process know of each other, by name, so that they divide the data."""
    for stream in streams.values():
        stream.share(msgspec.structs.replace(stream.shared, readers=tuple(streams)))
