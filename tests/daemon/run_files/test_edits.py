"""An edited run.toml makes another run, and whoever serves it is told before."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from daemon_kit import served_runs

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon import start
from p2pdiloco.daemon.run_files.known_runs import saved_runs
from p2pdiloco.daemon.run_files.served_runs import changed_keys, words_of_edits
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import render_toml

FIRST = for_run("micro", "mine")


def longer(manifest: Manifest, factor: int) -> Manifest:
    inner = manifest.inner
    inner = msgspec.structs.replace(inner, schedule_tokens=factor * inner.schedule_tokens, learning_rate=1e-3)
    return msgspec.structs.replace(manifest, inner=inner)


async def test_who_serves_an_edited_file_is_told_that_it_is_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file, data_dir = tmp_path / "run.toml", tmp_path / "data"
    data_dir.mkdir()

    async def serve(manifest: Manifest) -> None:
        caplog.clear()
        file.write_text(render_toml(manifest))
        await served_runs(data_dir, file)

    await serve(FIRST)
    first = next(iter(saved_runs(data_dir)))
    assert "another run" not in caplog.text
    await serve(longer(FIRST, 2))
    assert f"another run than mine {first[:12]}" in caplog.text
    assert "inner.learning_rate, inner.schedule_tokens differ" in caplog.text
    assert f"p2pdiloco run amend {first[:12]}" in caplog.text
    assert len(saved_runs(data_dir)) == 2
    await serve(FIRST)  # the file as it was is the first run again
    await serve(for_run("micro", "another"))
    assert "another run" not in caplog.text
    owner = Identity.load_or_create(data_dir / "owner.key").peer_id
    assert words_of_edits(longer(FIRST, 3), data_dir, owner)
    assert not words_of_edits(longer(FIRST, 3), data_dir, Identity.generate().peer_id)
    await start._own_run(data_dir, file, longer(FIRST, 3), mock.Mock(), ())  # --run-file of a node
    assert "another run than mine" in caplog.text


def test_keys_are_named_as_in_the_file() -> None:
    other = msgspec.structs.replace(FIRST, model=FIRST.model | {"width": 64})
    assert changed_keys(FIRST, other) == ["model.width"]
    assert changed_keys(FIRST, FIRST) == []
