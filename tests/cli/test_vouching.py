"""Which node an owner vouches by: one of the owner's own, or one that the owner names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import served_runs

from p2pdiloco.cli import owner_notice
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, save_own_addresses
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import render_toml

BOOTSTRAP, OWN, STRANGER = (Identity.from_seed(bytes([i]) * 32).peer_id for i in range(3))
VOUCHES = (Vouch(0, 3, b"\1" * 32, (OWN,)),)


def address(peer: str) -> str:
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedRun:
    """A bootstrap in the folder "boot" has signed it; its owner's node and a stranger train it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "boot").mkdir()
    (tmp_path / "run.toml").write_text(render_toml(for_run("micro", "test", 0)))
    (run,) = await served_runs(tmp_path / "boot", tmp_path / "run.toml")
    save_own_addresses(tmp_path / "boot", [address(BOOTSTRAP)])

    @contextlib.asynccontextmanager
    async def visitor(_: Any) -> AsyncIterator[None]:
        yield None

    async def ask(_transport: Any, peer: str, *_: Any) -> wire.Stands | None:
        return wire.Stands(VOUCHES) if peer in (OWN, STRANGER) else None

    async def presences(*_: Any) -> dict[str, wire.Presence]:
        return {STRANGER: wire.Presence(1, 1, "eve\x1b", ("nonsense", "/ip4/127.0.0.1/tcp/4001"))}

    for name, fake in (("visitor", visitor), ("ask", ask), ("presences", presences)):
        monkeypatch.setattr(owner_notice, name, fake)
    return run


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    runs: list[str] = []
    monkeypatch.setattr(owner_notice, "publish", lambda run, *_: runs.append(run))
    return runs


def start_own_node(run: PublishedRun) -> None:
    """Leave what the owner's node leaves in its usual folder."""
    folder = NodeSettings().data_dir.expanduser()
    (folder / "runs" / run.id[:16]).mkdir(parents=True)
    save_own_addresses(folder, [address(OWN)])


def test_the_node_of_the_usual_folder_is_the_owner_s_also_beside_a_bootstrap_s(
    tmp_path: Path, run: PublishedRun, published: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start_own_node(run)
    owner_notice.vouch_for("test", (), tmp_path / "boot")
    assert published == ["test"] and "fragment 0: version 3" in capsys.readouterr().out


def test_a_stranger_is_named_and_not_vouched_for(
    tmp_path: Path, run: PublishedRun, published: list[str]
) -> None:
    with pytest.raises(UserError, match="no node of yours that has trained") as caught:
        owner_notice.vouch_for("test", (), tmp_path / "boot")
    assert caught.value.hint == "name the node whose state you trust: --join ADDRESS"
    assert list(caught.value.details) == [f"eve· is at {address(STRANGER)}"]
    assert not published
    owner_notice.vouch_for("test", (address(STRANGER),), tmp_path / "boot")
    assert published == ["test"], "the owner has named it"
