"""Seats in `status` and `top`: what too few of them mean, and whose wait for the word of who looks."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import within_s
from msgspec.structs import replace
from rich.console import Console

from p2pdiloco.cli import status_command, top
from p2pdiloco.cli.status_command import Search, render_status, with_owners_rows
from p2pdiloco.cli.top import AskedMembers, plain_line, swarm_lines
from p2pdiloco.daemon.display.snapshot import CourseRow, ProposedSeat, StatusReport
from p2pdiloco.daemon.owner.control import ControlState

WAITING = tuple(ProposedSeat(peer=f"12D3KooW{name:x>44}", name=name) for name in ("anna", ""))
WORDS = f"2 new seats wait for your word: anna …xxanna, - …xxxxxx (p2pdiloco seat test {WAITING[0].peer})"
OWN = ControlState(peer="me", proposed=WAITING)


def report(**more: Any) -> StatusReport:
    return StatusReport(run_name="test", run_id="ab" * 32, answered_by="me", state="training", **more)


def text_of(told: StatusReport) -> str:
    written = StringIO()
    Console(file=written, width=1000).print(render_status(told))
    return written.getvalue()


def test_status_says_whose_seats_wait_and_what_few_seats_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_command, "state_here", lambda path: OWN)
    told = with_owners_rows(report(course=CourseRow(seats=2)), Path("folder"))
    assert told.proposed == WAITING and WORDS in text_of(told)
    few = "2 seats: while none of them is here nothing is merged, and one that is here alone decides"
    assert few in text_of(told) and "p2pdiloco seat test PEER" in text_of(told)
    others = with_owners_rows(replace(report(course=CourseRow(seats=5)), answered_by="you"), Path("folder"))
    assert others.proposed == () and "seat" not in text_of(others)
    one = text_of(replace(told, proposed=WAITING[:1]))
    assert "1 new seat waits for your word: anna …xxanna (" in one


async def test_top_says_it_of_the_node_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(_transport: object, peer: str, _run: str) -> tuple[StatusReport, int]:
        return replace(report(), answered_by=peer), 100

    async def connect(*_: object) -> None:
        pass

    monkeypatch.setattr(top, "ask_status", answers)
    asked = AskedMembers(
        Search("test", ["me"]), "ab" * 32, lambda: 0.0, lambda r: replace(r, proposed=WAITING)
    )
    asked._known["you"] = top._KnownMember()
    transport: Any = SimpleNamespace(connect=connect)
    async with asyncio.timeout(within_s(10)):
        await asked._ask(transport, "you")
        picture = top.picture_of(asked.answers, 0.0)
        assert not picture.waiting
        await asked._ask(transport, "me")
    picture = top.picture_of(asked.answers, 0.0)
    assert picture.waiting == WORDS and WORDS in plain_line(picture)
    lines = [line.plain for line in swarm_lines(top.ViewChoice(picture), 300, 40)]
    assert any(WORDS in line for line in lines)
