"""Seats that a run's owner gives at a node of its own: who is proposed, where, and what a click does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from daemon_kit import Neighbourhood, QuickMember, short_run, until
from msgspec.structs import replace
from web_kit import Served, served

from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.core.distrust import Cause
from p2pdiloco.daemon import report
from p2pdiloco.daemon.display.snapshot import ProposedSeat, decode_status, encode_status
from p2pdiloco.daemon.notice import Notice, with_word
from p2pdiloco.daemon.owner.control import NodeControls
from p2pdiloco.daemon.owner.own_member import OwnMember
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.daemon.wire import GiveNotice
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.web.sources import NodeSource


def me(member: QuickMember) -> str:
    return member.core.shared.me


@contextlib.asynccontextmanager
async def owned(folder: Path) -> AsyncIterator[Neighbourhood]:
    """An open run whose owner's key is in the folder of `one`, which has the only seat."""
    around = Neighbourhood(folder)
    (folder / "one").mkdir(exist_ok=True)
    owner = Identity.load_or_create(folder / "one" / "owner.key")
    around.run = short_run(folder, 1 << 40, "go-on", owner)
    async with around:
        yield around


def controls_of(member: QuickMember) -> NodeControls:
    controls = NodeControls(member.settings, asyncio.Event())
    controls.attach(OwnMember(member))
    return controls


def proposed(controls: NodeControls) -> list[str]:
    return [seat.peer for seat in controls.state().proposed]


async def working(condition: Callable[[], bool], *members: QuickMember) -> None:
    """Let these contribute on and on, until that holds: work without a seat waits for a seat's."""

    def look() -> bool:
        for member in members:
            if 0 not in member.learner.slot_in_use:
                member.learner.contribute(0)
        return condition()

    await until(look, "what work is to bring")


def worded(member: QuickMember) -> list[str]:
    """Peers of which the notice that a member knows has a word."""
    notice = member.membership.register.notice
    return [word.peer for word in notice.seats] if notice is not None else []


@contextlib.asynccontextmanager
async def page_of(member: QuickMember, controls: NodeControls) -> AsyncIterator[Served]:
    async with served(member.settings.data_dir) as page:
        page.views.enter(NodeSource(member, controls), controls)
        yield page


async def test_a_click_of_the_owner_gives_a_seat_that_is_in_the_table_after_a_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, signing = Ownership.publish, set[int]()

    def noted(owned: Ownership, notice: Notice, newest: int = 0) -> Notice:
        signing.add(threading.get_ident())
        return publish(owned, notice, newest)

    monkeypatch.setattr(Ownership, "publish", noted)
    async with owned(tmp_path) as around:
        one, two = await around.member("one", genesis=True), await around.member("two")
        controls, others = controls_of(one), controls_of(two)
        assert proposed(controls) == [], "nothing of it is merged yet"
        await working(lambda: proposed(controls) == [me(two)], one, two)
        assert proposed(others) == [], "the key is elsewhere"
        async with page_of(one, controls) as page:
            html = (await page.ask("/")).body.decode()
            assert f'name="peer" value="{me(two)}"' in html and "1 new seat waits for your word" in html
            assert "1 seat: while none of them is here" in html
            body = f"peer={me(two)}".encode()
            answer = await page.ask("/control/seat", "POST", body, accept="application/json")
            assert answer.status == 200 and answer.json()["words"].startswith(f"{me(two)} has a seat")
            again = await page.ask("/control/seat", "POST", body, accept="application/json")
            assert again.status == 400 and "waits for no seat" in again.json()["words"], "it is given"
        assert signing.isdisjoint({threading.get_ident()}) and len(signing) == 1, (
            "the disk is waited for there"
        )
        assert worded(one) == [me(two)] and proposed(controls) == []
        await until(lambda: worded(two) == [me(two)], "the notice to be passed on")

        def seated() -> bool:
            return all(me(two) in member.chain_of(0).marks.seats for member in (one, two))

        await working(seated, one, two)
        await controls.close()
        await others.close()


async def test_two_clicks_at_once_are_two_words_and_the_newest_notice_goes_on(tmp_path: Path) -> None:
    async with owned(tmp_path) as around:
        one = await around.member("one", genesis=True)
        two, three = await around.member("two"), await around.member("three")
        controls = controls_of(one)
        await working(lambda: len(proposed(controls)) == 2, one, two, three)
        key = Ownership.find(around.run.id, one.settings.data_dir)
        key.publish(replace(Notice(around.run.id, 1), banned=("elsewhere",)), 6)
        said = await asyncio.gather(controls.seat(me(two)), controls.seat(me(three)))
        assert all("has a seat" in words for words in said)
        notice = one.membership.register.notice
        assert notice is not None and notice.banned == ("elsewhere",) and notice.sequence == 9
        assert {word.peer for word in notice.seats} == {me(two), me(three)} and key.notice == notice
        assert len({word.number for word in notice.seats}) == 2
        await controls.close()


async def test_proposed_is_who_merged_first_but_nobody_whom_the_owner_or_loss_audits_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owned(tmp_path) as around:
        one, two = await around.member("one", genesis=True), await around.member("two")
        controls = controls_of(one)
        await working(lambda: proposed(controls) == [me(two)], one, two)
        three = await around.member("three")
        await working(lambda: len(proposed(controls)) == 2, one, two, three)
        assert proposed(controls) == [me(two), me(three)]
        with monkeypatch.context() as patch:
            patch.setattr(report, "MAX_PROPOSED", 1)
            assert proposed(controls) == [me(two)]
        one.core.shared.distrust.add(me(two), Cause.USELESS, 0.0)
        assert proposed(controls) == [me(three)]

        told = one.report.status(0.0)
        assert told.proposed == () and told.course.seats == 1
        lie = replace(told, proposed=(ProposedSeat(peer="liar"),))
        assert decode_status(encode_status(lie)).proposed == (), "it is not for others to say"

        key = one.settings.data_dir / "owner.key"
        key.rename(key.with_name("safe"))
        with pytest.raises(UserError, match="with its owner's key"):
            await controls.seat(me(three))
        key.with_name("safe").rename(key)
        refused = with_word(Notice(around.run.id, 1), me(three), False)
        notice = Ownership.find(around.run.id, one.settings.data_dir).publish(refused)
        one.membership.gate.answer(me(one), GiveNotice(notice))
        await until(lambda: proposed(controls) == [], "the word to be heard of")
        await controls.close()


async def test_a_node_without_a_run_gives_no_seat(tmp_path: Path) -> None:
    controls = NodeControls(NodeSettings(data_dir=tmp_path), asyncio.Event())
    with pytest.raises(UserError, match="in no run"):
        await controls.seat("peer")
    await controls.close()
