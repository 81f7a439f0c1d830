"""What the system tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from system_kit import Swarm


@pytest.fixture
def swept_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """For commands that start a swarm of their own (demo, chaos): finds every process that they started, by
    its environment; none may be left, and no temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with Swarm(tmp_path) as made:
        yield made
        assert list(made._mine()) == []
    assert list((tmp_path / "tmp").glob("p2pdiloco*")) == [], "temporary folders are left"
