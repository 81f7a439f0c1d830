"""A run that comes to its end: learners stop, nodes say so, save, and go on giving."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from daemon_kit import Neighbourhood, QuickMember, short_run, until

from p2pdiloco.daemon.learner import course


async def train(around: Neighbourhood, *members: QuickMember) -> None:
    """Every fragment is merged once by everybody."""
    for fragment in range(4):
        await around.round(*members, fragment=fragment)


async def test_a_run_that_is_over_stops_learners_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(course, "SETTLE_S", 0.1)
    async with Neighbourhood(tmp_path) as around:
        around.run = short_run(tmp_path, 4 * 256)
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await train(around, one, two)
        assert one.report.status(0.0).course.rests == "no"
        await train(around, one, two)
        for member in (one, two):
            await until(lambda m=member: m.report.state == "ended", "the end")
            assert member.learner.course.rests == "ended"
            assert "the run has ended" in member.records("course")[-1]["reason"]
            status = member.report.status(0.0)
            assert (status.state, status.course.rests, status.course.tokens) == ("ended", "ended", 4 * 256)
            assert status.members[0].confirmed
        await until(lambda: caplog.text.count("all is merged and saved") == 2, "both save")
        for fragment in range(4):
            saved = f"fragments/{fragment:03d}/checkpoint-{one.number(fragment)}.safetensors"
            assert (one.store.folder / saved).exists()
        await around.end(two, orderly=True)
        two = await around.member("two", trained=False)  # who comes when it is over does not begin
        await until(lambda: two.report.state == "ended", "the end")
        assert two.learner.course.rests == "ended"
        # What somebody still had is merged: nothing is lost at an end.
        await around.round(one, two)


async def test_a_run_goes_on_where_its_manifest_says_so(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path) as around:
        around.run = short_run(tmp_path, 4 * 256, "go-on")
        one = await around.member("one", genesis=True)
        for _ in range(5):
            await train(around, one)
        await until(lambda: one.records("course"), "that is said")
        assert "at the floor" in one.records("course")[0]["reason"]
        assert one.learner.course.rests == "no"
        assert one.report.state == "training"
