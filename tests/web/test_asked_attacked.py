"""A bootstrap's page among members that lie: who is asked, and what it outlives."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import within_s
from test_making import NOW_S, report

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.daemon.display.snapshot import encode_status
from p2pdiloco.daemon.display.timeline import LossPoint, load_timeline
from p2pdiloco.daemon.network.discovery import ask_status
from p2pdiloco.errors import RemoteError
from p2pdiloco.web import sources
from p2pdiloco.web.sources import AskedSource
from p2pdiloco.web.view import Pulse


class Run:
    id, name = "ab" * 32, "test"


class Near:
    """Transport to whom it does not matter."""

    async def connect(self, peer: str, addresses: Any) -> None: ...


async def test_any_members_are_asked_and_a_bug_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    enough = asyncio.Event()

    async def listed_members(*_: Any) -> dict[str, tuple[str, ...]]:
        return {f"p{number}": () for number in range(100)}

    async def ask_status(_: Any, peer: str, run: str) -> Any:
        asked.append(peer)
        if len(asked) > 80:
            enough.set()
        if len(asked) > 40:
            raise RemoteError("busy")
        return report(), 1

    def take(*_: Any) -> None:
        raise OverflowError("a bug")

    monkeypatch.setattr(sources, "listed_members", listed_members)
    monkeypatch.setattr(sources, "ask_status", ask_status)
    monkeypatch.setattr(sources.WatchedRun, "take", take)
    monkeypatch.setattr(sources, "EVERY_S", 0.0)
    monkeypatch.setattr(sources, "SELDOM_S", 0.0)
    source = AskedSource(Near(), lambda: [Run()], tmp_path)  # type: ignore[arg-type, list-item]
    watching = asyncio.create_task(source.watch())
    either = [watching, asyncio.create_task(enough.wait())]
    await asyncio.wait_for(asyncio.wait(either, return_when="FIRST_COMPLETED"), within_s(10))
    assert not watching.done()
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert len(set(asked)) > sources.MOST_ASKED, "not always those that are listed first"


async def test_what_was_told_gets_old_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Member(Near):
        peer_id = "here"

        def payload_bytes(self) -> tuple[int, int]:
            return 0, 0

        def addresses(self) -> list[str]:
            return []

        def connected(self) -> list[str]:
            return []

    async def listed_members(*_: Any) -> dict[str, tuple[str, ...]]:
        return {"ann": ()}

    told = asyncio.Event()

    async def ask_status(_: Any, peer: str, run: str) -> Any:
        if told.is_set():
            await asyncio.Event().wait()
        told.set()
        return report(curve=(LossPoint(NOW_S, 0, 3.0),)), 1

    monkeypatch.setattr(sources, "listed_members", listed_members)
    monkeypatch.setattr(sources, "ask_status", ask_status)
    monkeypatch.setattr(sources, "EVERY_S", 0.0)
    monkeypatch.setattr(sources, "SELDOM_S", 0.0)
    monkeypatch.setattr(sources.time, "time", lambda: NOW_S)
    run: Any = SimpleNamespace(id=Run.id, name="test", signed=SimpleNamespace(owner="ann"))
    source = AskedSource(Member(), lambda: [run], tmp_path)  # type: ignore[arg-type]

    def pulse() -> Pulse:
        view = source.view("")
        assert view is not None and view.public is not None
        return view.public.pulse

    run_folder(tmp_path, Run.id).mkdir(parents=True)
    assert pulse() is Pulse.UNKNOWN
    watching = asyncio.create_task(source.watch())
    await asyncio.wait_for(told.wait(), within_s(10))
    assert pulse() is Pulse.ALIVE
    monkeypatch.setattr(sources.time, "time", lambda: NOW_S + sources.OLD_S + 1)
    assert pulse() is Pulse.UNKNOWN
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert load_timeline(run_folder(tmp_path, Run.id)).curve.points == (LossPoint(NOW_S, 0, 3.0),)


async def test_nobody_answers_in_the_name_of_another() -> None:
    class Liar(Near):
        async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
            return encode_status(report())

    assert (await ask_status(Liar(), "ann", Run.id))[0].answered_by == "ann"  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match="in the name of another"):
        await ask_status(Liar(), "ben", Run.id)  # type: ignore[arg-type]
