"""A run that comes to its end: learners stop, nodes say so, save, and go on giving."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from daemon_kit import Neighbourhood, QuickMember, Rogue, short_run, until

from p2pdiloco.core.api.config import Amendment, Going
from p2pdiloco.daemon import admission, course, wire
from p2pdiloco.daemon.papers import Notice, signed
from p2pdiloco.daemon.wire import GiveNotice
from p2pdiloco.errors import RemoteError
from p2pdiloco.identity import Identity
from p2pdiloco.learner import channel as ch


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
        results = tmp_path / "results"
        often = {"result_dir": results, "result_every": "1000merges"}
        one = await around.member("one", genesis=True, **often)
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
            await until(lambda m=member: ch.Save in map(type, m.learner.commands), "its moments are saved")
        await until(lambda: caplog.text.count("all is merged and saved") == 2, "both save")
        assert [path.name[-17:-12] for path in results.iterdir()] == [f"{one.compute.vault.merges:05d}"]
        for fragment in range(4):
            saved = f"fragments/{fragment:03d}/checkpoint-{one.number(fragment)}.safetensors"
            assert (one.store.folder / saved).exists()
        await around.end(two, orderly=True)
        two = await around.member("two", trained=False)  # who comes when it is over does not begin
        await until(lambda: two.report.state == "ended", "the end")
        assert two.learner.begun_with.rests == "ended"
        # What somebody still had is merged: nothing is lost at an end.
        await around.round(one, two)


async def give(rogue: Rogue, member: QuickMember, notice: Notice) -> bytes:
    query = wire.QUERY + wire.encode(GiveNotice(notice))
    return await rogue.transport.send(member.transport.peer_id, query, 2.0)


async def test_what_an_owner_changes_holds_for_all_at_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "FIRST_ROUND_S", 0.2)
    owner, first, second = Identity.generate(), 3 * 256, 7 * 256
    async with Neighbourhood(tmp_path) as around:
        around.run = short_run(tmp_path, 1 << 20, owner=owner)
        one = await around.member("one", genesis=True)
        two, gone = await around.member("two"), await around.member("gone")
        await train(around, one, two, gone)
        await around.end(gone, orderly=True)
        rogue = await around.rogue()

        def notice(sequence: int, *amendments: Amendment) -> Notice:
            return signed(Notice(around.run.id, sequence, amendments=amendments), owner)

        slower = Amendment(1, first, rate_factor=0.5)
        pause = Amendment(2, second, 0, 0.5, Going.PAUSE, "to repair a link")
        forged = msgspec.structs.replace(notice(9, pause), sequence=10)
        with pytest.raises(RemoteError, match="notice-signature"):
            await give(rogue, one, forged)
        await give(rogue, one, notice(2, slower, pause))
        for member in (one, two):  # from one to the other
            told = member.learner
            await until(lambda at=told: at.course.amendments == (slower, pause), "their word")
            assert member.learner.course.rests == "no"
            assert member.report.status(0.0).course.message == "to repair a link"
        await give(rogue, two, notice(1))  # an older one
        for _ in range(2):
            await train(around, one, two)
        for member in (one, two):
            await until(lambda m=member: m.report.state == "paused", "the pause")
            assert member.course.tokens == second
            assert member.report.status(0.0).course.rate_factor == 0.5
        gone = await around.member("gone", trained=False)  # who was away hears of it by who is here
        await until(lambda: gone.report.state == "paused", "the pause, there too")
        assert gone.learner.course.amendments == (slower, pause)
        await around.end(gone, orderly=True)
        await give(rogue, two, notice(3, slower, Amendment(3, second, rate_factor=0.5)))
        for member in (one, two):
            await until(lambda m=member: m.report.state == "training", "that it goes on")
        gone = await around.member("gone")  # its own notice says otherwise, to begin with
        await train(around, one, two, gone)
        for fragment in range(4):
            await until(
                lambda f=fragment: one.head(f) == two.head(f) == gone.head(f) is not None, "equal heads"
            )


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
