"""The owner's wishes on a real member: rests, hand-overs, budgets, limits that change."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from daemon_kit import Neighbourhood, QuickMember, at_once, until
from deadlines import within_s

from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.budgets import LinkCapacity
from p2pdiloco.daemon.display.logs import OWNERS_LOGGERS, Audience
from p2pdiloco.daemon.display.snapshot import Proposed
from p2pdiloco.daemon.display.terminal import log_line
from p2pdiloco.daemon.owner import control, wishes
from p2pdiloco.daemon.owner.control import HAND_OVER_AT_MOST_S, NodeControls, owned
from p2pdiloco.daemon.owner.own_member import OwnMember
from p2pdiloco.daemon.owner.pauses import OwnersMachine
from p2pdiloco.daemon.owner.wishes import FILE
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.learner import channel as ch
from p2pdiloco.web.sources import StartingSource
from p2pdiloco.web.view import Control, NodeCondition


class FakeMember:
    """A membership that does what it is told."""

    def __init__(self) -> None:
        self.wish = ch.SpareMachine()
        self.link = LinkCapacity(0, 0)
        self.handed_over = False
        self.carried = (0, 0)
        self.notes: list[str] = []

    def names(self) -> tuple[str, str, str]:
        return "peer", "ada", "run"

    def state(self) -> str:
        return "training"

    def recent(self) -> tuple[str, ...]:
        return ()

    def has_handed_over(self) -> bool:
        return self.handed_over

    def follow(self, wish: ch.SpareMachine) -> None:
        self.wish = wish

    def permit(self, link: LinkCapacity) -> None:
        self.link = link

    def carried_bytes(self) -> tuple[int, int]:
        return self.carried

    def hand_over_bytes(self) -> int:
        return 1000

    def note(self, words: str, reason: str) -> None:
        self.notes.append(reason)

    def proposed(self) -> Proposed:
        return ()

    async def give(self, peer: str) -> str:
        raise NotImplementedError

    def say(self, run: str, peer: str, seated: str, replaces: str) -> str:
        raise NotImplementedError


class Owner:
    """Controls of a node with a membership, and clocks that the test moves."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.plugged = True
        self.wall = 1_800_000_000.0
        self.stop = asyncio.Event()
        given = NodeSettings(data_dir=folder, **settings)
        machine = OwnersMachine(lambda: self.plugged, SimpleNamespace(), begin=at_once)  # type: ignore[arg-type]
        self.controls = NodeControls(given, self.stop, machine, lambda: self.wall)
        self.now = 0.0
        self.controls._now = lambda: self.now  # type: ignore[method-assign]
        self.reins = FakeMember()

    def after(self, seconds: int) -> str:
        for _ in range(seconds):
            self.now, self.wall = self.now + 1, self.wall + 1
            self.controls.look()
        row = self.controls.pause_row()
        return row.reason.value if row is not None else ""


async def test_a_pause_is_handed_over_holds_over_a_restart_and_ends(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.controls.attach(owner.reins)
    assert owner.after(2) == "" and not owner.reins.wish.rests
    assert (await owner.controls.pause()).startswith("paused: what was made is handed over")
    assert owner.reins.wish.rests and owner.reins.notes == ["paused"]
    assert not owner.controls.state().rest.handed_over  # type: ignore[union-attr]
    owner.reins.handed_over = True
    assert owner.after(1) == "paused" and owner.controls.state().rest.handed_over  # type: ignore[union-attr]
    assert "already" in await owner.controls.pause()
    assert not owner.controls.away.is_set() and not owner.stop.is_set(), "it stays a member"
    await owner.controls.close()

    again = Owner(tmp_path)
    again.wall += 3600
    again.controls.attach(again.reins)
    assert again.reins.wish.rests, "before its learner starts"
    assert again.controls.pause_row().since == owner.wall - 1, "since it was asked for"  # type: ignore[union-attr]
    assert await again.controls.resume() == "resumed: the learner goes on"
    assert not again.reins.wish.rests and again.reins.notes == ["paused", "no"]
    assert await again.controls.resume() == "not paused: nothing to do"


async def test_a_resume_does_not_outrule_what_else_keeps_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path, not_on_battery=True)
    owner.controls.attach(owner.reins)
    owner.plugged = False
    assert owner.after(20) == "battery"
    await owner.controls.pause()
    assert owner.after(1) == "paused"
    assert (await owner.controls.resume()).startswith("resumed, but idle: on battery since ")
    assert owner.reins.wish.rests


async def test_finish_waits_for_the_hand_over_and_not_for_ever(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.controls.attach(owner.reins)
    assert "within 120 s" in owner.controls.finish()
    assert owner.after(int(HAND_OVER_AT_MOST_S) - 2) == "finishing" and not owner.stop.is_set()
    assert (await owner.controls.resume()).startswith("resumed")
    assert owner.after(int(HAND_OVER_AT_MOST_S)) == "" and not owner.stop.is_set(), "taken back"
    owner.controls.finish()
    owner.reins.handed_over = True
    owner.after(1)
    assert owner.stop.is_set()
    with pytest.raises(UserError, match="leaves already"):
        await owner.controls.resume()
    other = Owner(tmp_path)
    other.controls.attach(other.reins)
    other.controls.finish()
    assert other.after(int(HAND_OVER_AT_MOST_S) + 2) and other.stop.is_set(), "it waited long enough"
    nobody = Owner(tmp_path)
    assert nobody.controls.finish().endswith("leaving now") and nobody.stop.is_set()


async def test_a_budget_that_is_used_up_sends_it_away_until_the_month_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("p2pdiloco.daemon.program.tell_ready", lambda: told.append("ready"))
    monkeypatch.setattr("p2pdiloco.daemon.program.tell_status", told.append)
    owner = Owner(tmp_path, max_transfer="100kB/month")
    owner.controls.attach(owner.reins)
    owner.reins.carried = (50_000, 29_000)
    assert owner.after(1) == "" and "are used" not in caplog.text
    owner.reins.carried = (50_000, 31_000)
    assert (
        owner.after(1) == ""
        and caplog.text.count("81 kB of the 100 kB of transfer for 2027-01 are used") == 1
    )
    owner.reins.carried = (60_000, 39_500)  # 1000 are left for handing over
    assert owner.after(1) == "transfer" and owner.reins.wish.rests and not owner.controls.away.is_set()
    owner.reins.handed_over = True
    owner.after(1)
    assert owner.controls.away.is_set() and not owner.stop.is_set()
    owner.reins.carried = (60_100, 39_500)  # what goes with its leaving counts
    owner.controls.detach()
    assert caplog.text.count("of transfer for 2027-01 are used") == 1
    assert owner.controls.state().state == "away"
    own = StartingSource("node", "ada", "peer", owner.controls).view("").own
    assert own.state is NodeCondition.AWAY and "100 kB of transfer are used up" in own.rest, (
        "on its page, too"
    )
    assert own.controls == (Control.PAUSE, Control.FINISH, Control.LIMITS), "it may be raised there"
    assert own.limits["max-transfer"] == "100kB/month"
    waiting = asyncio.ensure_future(owner.controls.may_join())
    await asyncio.sleep(0)
    owner.after(10)
    await asyncio.sleep(0)
    assert not waiting.done()
    row = owner.controls.transfer_row()
    assert (row.sent_bytes, row.received_bytes, row.budget_bytes) == (60_100, 39_500, 100_000)
    assert told[0] == "ready" and told[1].startswith(
        "idle: this month's 100 kB of transfer are used up since"
    )
    owner.wall += 31 * 86400
    owner.now += 31 * 86400
    owner.after(1)
    assert await waiting and not owner.controls.away.is_set()
    assert owner.controls.transfer_row().sent_bytes == 0


async def test_a_budget_that_is_raised_calls_it_back(tmp_path: Path) -> None:
    owner = Owner(tmp_path, max_transfer="100kB/month")
    owner.controls.attach(owner.reins)
    owner.reins.carried, owner.reins.handed_over = (100_000, 0), True
    owner.after(2)
    owner.controls.detach()
    waiting = asyncio.ensure_future(owner.controls.may_join())
    await asyncio.sleep(0)
    said = await owner.controls.limits({"max-transfer": "1GB/month"})
    assert "a start with --max-transfer 100kB/month wins over it" in said
    assert await asyncio.wait_for(waiting, within_s(1.0))
    owner.reins.carried = (50, 0)  # another transport's, which counts from nothing
    owner.controls.attach(owner.reins)
    await owner.controls.close()
    again = Owner(tmp_path, max_transfer="100kB/month")
    assert again.controls.transfer_row().sent_bytes == 100_050
    waiting = asyncio.ensure_future(again.controls.may_join())
    await asyncio.sleep(0)
    assert not waiting.done() and again.controls.away.is_set(), "a flag of this start wins, it does not begin"
    waiting.cancel()


async def test_a_session_ends_with_its_budget(tmp_path: Path) -> None:
    owner = Owner(tmp_path, max_transfer="100kB/month", learner_socket=tmp_path / "s")
    owner.controls.attach(owner.reins)
    owner.reins.carried, owner.reins.handed_over = (100_000, 0), True
    owner.after(2)
    assert owner.stop.is_set() and not owner.controls.away.is_set()
    await owner.controls.close()
    again = Owner(tmp_path, max_transfer="100kB/month", learner_socket=tmp_path / "s")
    with pytest.raises(UserError, match="this month's transfer is used up"):
        await again.controls.may_join()


async def test_limits_hold_at_once_and_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path, max_download="50Mbit")
    owner.controls.attach(owner.reins)
    assert owner.reins.link == LinkCapacity(float("inf"), 50e6)
    said = await owner.controls.limits({"max-upload": "5Mbit", "min-step-s": "0.5", "max-download": "none"})
    assert owner.reins.link == LinkCapacity(5e6, float("inf")) and owner.reins.wish.min_step_s == 0.5
    assert "max-upload is 5Mbit now (kept for later starts)" in said
    with pytest.raises(ConfigError):
        await owner.controls.limits({"hours": "22-7", "max-upload": "fast"})
    assert {r.name: r.comes_from for r in owner.controls.state().limits if r.value} == {
        "max-upload": "limits",
        "min-step-s": "limits",
    }
    caplog.set_level("INFO")
    again = Owner(tmp_path, max_upload="20Mbit")
    assert "--max-upload 20Mbit, given at this start, wins over 5Mbit" in caplog.text
    assert "limits kept from before hold: --max-download, --min-step-s" in caplog.text
    settings = again.controls.settings()
    assert (settings.max_upload, settings.max_download, settings.min_step_s) == ("20Mbit", "", 0.5)
    kept = json.loads((tmp_path / FILE).read_text())
    assert kept["limits"]["max_upload"] == "5Mbit", "a flag is for this start only"


async def test_a_limit_that_nothing_tells_of_is_refused_while_it_runs(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.plugged = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="does not tell whether it is on battery"):
        await owner.controls.limits({"not-on-battery": "yes"})
    with pytest.raises(ConfigError, match="does not tell whether it is on battery"):
        NodeControls(
            NodeSettings(data_dir=tmp_path, not_on_battery=True), owner.stop, OwnersMachine(lambda: None)
        )
    assert await owner.controls.limits({}) == "nothing to change"


@pytest.mark.parametrize(
    "content", [b"", b'{"limits": 3}', b'{"paused_since": 1e300}', b'{"paused_since": 1e12}']
)
async def test_a_damaged_file_of_wishes_is_set_aside(tmp_path: Path, content: bytes) -> None:
    if content:
        (tmp_path / FILE).write_bytes(content)
    else:
        (tmp_path / FILE).mkdir()
    owner = Owner(tmp_path)
    assert (await owner.controls.pause()).startswith("paused") and (tmp_path / f"{FILE}.corrupt").exists()


@pytest.mark.process
async def test_a_mistake_in_the_watch_of_wishes_is_a_bug_and_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the node would train on battery for ever, and nobody would know."""
    found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.set_result(context))
    async with owned(NodeSettings(data_dir=tmp_path), asyncio.Event()) as controls:
        monkeypatch.setattr(controls, "look", lambda: 1 / 0)
        assert (await asyncio.wait_for(found, within_s(5.0)))["bug"]


def _says(member: QuickMember, handed_over: bool) -> None:
    """Let the learner say whether it rests with all merged."""
    status = ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0, handed_over=handed_over)
    member.learner._on_event(status)


async def test_who_rests_keeps_no_round_and_leaves_offices_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "p2pdiloco")
    async with Neighbourhood(tmp_path, seats=("one", "two")) as around:
        one = await around.member("one", genesis=True)
        two = await around.member("two")
        await around.round(one, two)
        controls = NodeControls(two.settings, asyncio.Event())
        two.report.owned_by(controls)
        logging.getLogger("p2pdiloco").addHandler(two.diary._recent)
        controls.attach(OwnMember(two))
        await controls.pause()
        assert two.learner.wish.rests and two.report.shown_state == "idle"
        two.learner.contribute(0)  # what it had
        await until(lambda: one.chain_of(0).marks.stamp(two.core.shared.me).sequence == 2, "its work merged")
        _says(two, True)
        await until(lambda: not two.core.shared.learning, "its core to know")
        controls.look()
        said = {"event": "progress", "fields": {}}
        logging.getLogger("p2pdiloco").info("%s", log_line(two.report.snapshot(0.0)), extra=said)
        snapshot = two.report.snapshot(0.0)
        assert snapshot.state == "idle" and snapshot.rest is not None and snapshot.rest.handed_over
        assert [e["why"] for e in two.records("rest")] == ["paused"]
        assert snapshot.transfer is not None and any("paused" in line for line in snapshot.recent)
        told = msgspec.to_builtins(two.report.status(0.0, Audience.MEMBERS))
        assert told["state"] == "idle" and told["rest"] is told["transfer"] is None, "others hear no reason"
        assert told["recent"] and "paused" not in str(told["recent"])
        assert controls.state().recent == snapshot.recent, "its owner does"
        logging.getLogger("p2pdiloco").removeHandler(two.diary._recent)
        await around.round(one)  # alone: nobody waits for the other
        await until(lambda: two.head() == one.head(), "it to follow")
        evaluated = two.learner.commands.count(ch.Evaluate())
        assert await two.learner_link.questions.evaluate() is None, "the machine is its owner's"
        assert two.learner.commands.count(ch.Evaluate()) == evaluated
        two.link_teller.judge()
        await until(lambda: two.core.shared.uplink.bits_per_s == 0, "offices to be others'")
        await controls.resume()
        _says(two, False)
        await until(lambda: two.core.shared.learning, "it to train")
        assert two.report.shown_state == "training" and not two.learner.wish.rests
        two.link_teller.judge()
        await until(lambda: two.core.shared.uplink.bits_per_s > 0, "its uplink to count")
        await around.round(one, two)
        await controls.limits({"max-upload": "5Mbit"})
        assert two.meters.limits.upload_bits_per_s == 5e6
        assert msgspec.json.encode(controls.state())
        await controls.close()


@pytest.mark.parametrize("module", [control, wishes], ids=lambda module: module.__name__.rpartition(".")[2])
def test_loggers_of_the_owner_are_known_as_such(module: ModuleType) -> None:
    assert module.logger.name.startswith(OWNERS_LOGGERS)
