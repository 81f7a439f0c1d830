"""Start from a disk with absurd numbers: set aside, then the older checkpoint, or version 0."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from daemon_kit import signed_run

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.types import Stamp, Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.payloads import UpdateLog
from p2pdiloco.daemon.run_files.run import Run, core_config, fresh_vault, genesis_versions
from p2pdiloco.daemon.run_files.saved_state import Found, restore
from p2pdiloco.tensors.vault import Vault

USUAL = Stamp(1, 1)


class Disk:
    """A node's folder, with checkpoints of the first fragment."""

    def __init__(self, folder: Path) -> None:
        self.run: Run = signed_run(folder)
        self.vault: Vault = fresh_vault(self.run.manifest)[1]
        self.config: CoreConfig = core_config(self.run, genesis_versions(self.run, self.vault), Timing())
        self.store = RunStore(folder, self.run.id)

    def save(self, number: int, size: float = 0.01, stamp: Stamp = USUAL, **odd: object) -> None:
        """A checkpoint whose parameters are of this size; its digest is right, if there can be one."""
        parts = [np.full(self.run.layouts[0].numel, each, dtype="<f4") for each in (size, 0.0)]
        judge = fresh_vault(self.run.manifest)[1]
        judge._first_lengths._known[0] = math.inf
        digest = bytes(32)
        if math.isfinite(size):
            digest = judge.load_spare(0, number, *(part.data.cast("B") for part in parts))
        header = self.config.genesis_versions[0].header
        header = msgspec.structs.replace(header, number=number, state_digest=digest, **odd)
        self.store.save_checkpoint(SignedVersion(header, b""), (Watermark("p", stamp, 1),), *parts)

    def start(self) -> Found:
        return restore(self.config, self.store, self.vault, UpdateLog(1))


ABSURD: list[dict[str, object]] = [
    {"size": math.nan},
    {"size": math.inf},
    {"size": 1e9},
    {"tokens": 1 << 62},
    {"unit": 1 << 62},
    {"stamp": Stamp(1 << 62, 1)},
]


@pytest.mark.parametrize("odd", ABSURD, ids=str)
def test_an_absurd_state_is_set_aside_for_the_older_one(tmp_path: Path, odd: dict[str, object]) -> None:
    disk = Disk(tmp_path)
    disk.save(3)
    disk.save(5, **odd)  # type: ignore[arg-type]
    found = disk.start()
    assert found.restored.fragments[0].log[-1].header.number == 3 == disk.vault.version(0)
    (problem,) = found.problems
    assert "checkpoint-5.safetensors" in problem and "set aside" in problem


def test_where_no_state_is_sound_there_is_version_0(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.save(3, size=math.nan)
    disk.save(5, size=1e9)
    found = disk.start()
    assert found.restored.fragments[0].log[-1].header.number == 0 == disk.vault.version(0)
    assert not found.restored.saved and len(found.problems) == 2
