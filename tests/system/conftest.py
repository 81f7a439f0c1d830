"""What the system tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import within_s
from system_kit import EXIT_S, LAUNCHERS, Swarm

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """What follows elsewhere may look at the children of its process."""
    result = yield
    if nextitem is None or HERE not in nextitem.path.parents:
        LAUNCHERS.end(within_s(EXIT_S))
    return result


@pytest.fixture
def swept_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """For commands that start a swarm of their own (demo, chaos): finds every process that they started, by
    its environment; none may be left, and no temporary folder."""
    with tempfile.TemporaryDirectory(prefix="t") as short:  # there are sockets in it
        monkeypatch.setenv("TMPDIR", short)
        with Swarm(tmp_path) as made:
            yield made
            assert list(made.processes()) == []
        assert list(Path(short).glob("p2pdiloco*")) == [], "temporary folders are left"


@pytest.fixture
def visited_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """For commands that only ask (status, plan --join): none may leave its folder behind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with Swarm(tmp_path) as made:
        yield made
        assert list((tmp_path / "tmp").glob("p2pdiloco*")) == [], "the visitor's folder is left"
