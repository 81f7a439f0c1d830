"""`p2pdiloco top`: whom it asks, what it makes of several answers, and what fits a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from asking_kit import RUN, Network
from deadlines import within_s
from msgspec import structs
from rich.cells import cell_len
from rich.console import Console

from p2pdiloco.cli import top
from p2pdiloco.cli.status_command import Search
from p2pdiloco.cli.top import (
    ORDERS,
    AskedMembers,
    Happenings,
    HeardReport,
    SwarmPicture,
    SwarmView,
    ViewChoice,
    after_key,
    page_rows,
    picture_of,
    plain_line,
    silence_text,
    swarm_lines,
)
from p2pdiloco.config.settings import TopSettings
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon.budgets import LISTING_S, REPORT_BYTES
from p2pdiloco.daemon.display.snapshot import CourseRow, FragmentRow, PeerRow, StatusReport, encode_status
from p2pdiloco.daemon.display.terminal import Move, told_apart
from p2pdiloco.errors import PeerUnreachable
from p2pdiloco_lab.memory_net import MemoryTransport

HOSTILE = "\x1b[2Jevil\u202e\r\n"


def report(
    by: str, others: tuple[PeerRow, ...] = (), numbers: tuple[int, ...] = (5,), **more: Any
) -> StatusReport:
    me = PeerRow(
        peer=by, name=by, tokens_total=10, tokens_per_s=100.0, last_seen_s=0.0, confirmed=True, loss=2.0
    )
    rows = tuple(
        FragmentRow(index=i, number=n, tokens=100 * n, syncer=more.get("syncer", by))
        for i, n in enumerate(numbers)
    )
    fields = {key: value for key, value in more.items() if key != "syncer"}
    return StatusReport(
        run_name="test",
        run_id=RUN,
        answered_by=by,
        members=(me, *others),
        members_total=1 + len(others),
        fragments=rows,
        **{"state": "training", **fields},
    )


def other(peer: str, seen_s: float | None = 0.5, **more: Any) -> PeerRow:
    return PeerRow(peer=peer, name=peer, last_seen_s=seen_s, **{"confirmed": True, **more})


def seen(*reports: StatusReport, now: float = 100.0, ages: tuple[float, ...] = ()) -> SwarmPicture:
    given = ages or (0.0,) * len(reports)
    return picture_of(
        {r.answered_by: HeardReport(r, now - a) for r, a in zip(reports, given, strict=True)}, now
    )


# --- the picture ---------------------------------------------------------------------------------


def test_a_members_own_word_counts_before_others_and_newer_before_older() -> None:
    picture = seen(
        report("a", (other("b", 0.2, tokens_per_s=1.0), other("c", 9.0, inner_step=1))),
        report("b", (other("c", 1.0, inner_step=2), other("d", None))),
        ages=(1.0, 3.0),
    )
    by = {member.peer: member for member in picture.members}
    assert by["b"].tokens_per_s == 100.0 and by["b"].last_seen_s == pytest.approx(1.2)
    assert by["c"].inner_step == 2 and by["c"].last_seen_s == pytest.approx(4.0)
    assert by["d"].last_seen_s is None and by["c"].state is None
    assert picture.members_total == 4 and picture.age_s == pytest.approx(1.0)


def test_whom_one_that_was_asked_expels_is_seen_whatever_it_says_itself() -> None:
    expels = report("a", (other("b", 5.0, expelled=LossFinding.HARM),))
    for knows_nothing in (report("b"), report("c", (other("b"),))):
        picture = seen(expels, knows_nothing)
        assert [m.peer for m in picture.members if m.expelled is LossFinding.HARM] == ["b"]
        assert "b expelled (harm)" in plain_line(picture)


def test_who_is_behind_is_said_and_what_one_of_three_claims_alone_is_not_believed() -> None:
    picture = seen(
        report("a", numbers=(7, 7)), report("b", numbers=(7, 4)), report("liar", numbers=(1000, 7))
    )
    assert [row.number for row in picture.fragments] == [7, 7]
    assert {m.peer: m.behind for m in picture.members} == {"a": 0, "b": 3, "liar": 0}
    assert picture.run_versions == 14


def test_what_is_old_says_nothing_of_others_unless_nothing_else_is_there() -> None:
    old, new = report("old", (other("gone"),)), report("new")
    assert {m.peer for m in seen(old, new, ages=(60.0, 1.0)).members} == {"new"}
    assert {m.peer for m in seen(old, ages=(60.0,)).members} == {"old", "gone"}


# --- what happens --------------------------------------------------------------------------------


def test_what_changes_is_told_once() -> None:
    names = Happenings(0.0)
    first = report("a", (other("b"), other("c", confirmed=False)), numbers=(5, 5, 5), syncer="b")
    assert names.add(seen(first), {}, 1.0) == []
    later = report("a", (other("b", 8.0), other("d")), numbers=(6, 5, 5), syncer="")
    told = names.add(seen(later), {"b": "not reached"}, 2.0)
    assert told == [
        "b is silent, for 8.0 s",
        "d is here",
        "c is gone",
        "fragments 0-2: the office of b is open, an election is due",
        "b does not answer us: not reached",
    ]
    assert names.add(seen(later), {"b": "not reached"}, 3.0) == []
    course = CourseRow(rests="paused", message="back soon")
    after = report("a", (other("b"), other("d")), numbers=(6, 5, 5), syncer="d", course=course)
    assert names.add(seen(after, report("b")), {}, 4.0)[:4] == [
        "b is heard again",
        "fragments 0-2: d was elected syncer",
        "the run is paused",
        "the owner says: back soon",
    ]
    idle = structs.replace(after, state="idle")
    assert names.add(seen(idle), {}, 4.0) == ["a: idle"]
    picture = names.told(seen(after), 9.0)
    assert picture.merged_age_s == 7.0 and picture.watched_s == 9.0 and len(picture.happened) >= 9


# --- the terminal --------------------------------------------------------------------------------


def crowd(count: int, fragments: int = 24) -> SwarmPicture:
    others = tuple(
        other(
            f"12D3KooWpeer{i:06d}",
            0.1 * i,
            tokens_total=0,
            tokens_per_s=15_200.0,
            reach="outbound only" if i % 3 else "direct",
            offices=i % 2,
        )
        for i in range(1, count)
    )
    course = CourseRow(tokens=10, schedule_tokens=1000, left_s=900.0, message=HOSTILE)
    made = seen(report("first", others, tuple(range(5, 5 + fragments)), course=course, heldout_loss=2.0))
    return structs.replace(made, happened=tuple(f"12:00:{i:02d} {HOSTILE} happened" for i in range(50)))


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (200, 50), (30, 8), (10, 3)])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_the_view_fits(size: tuple[int, int], count: int) -> None:
    width, height = size
    for fragments in (0, 4, 500):
        chosen = ViewChoice(crowd(count, fragments), silence="nobody has answered for 9.0 s")
        for explained in (False, True):
            out = StringIO()
            Console(file=out, width=width, height=height).print(SwarmView(chosen, explained))
            lines = out.getvalue().rstrip("\n").split("\n")
            assert len(lines) < height or height < 3
            assert all(cell_len(line) <= width and line.isprintable() for line in lines), lines


def test_what_matters_is_on_the_smallest_terminal() -> None:
    text = "\n".join(line.plain for line in swarm_lines(ViewChoice(crowd(30)), 60, 20))
    for words in (
        "run test",
        "1.0 % of 1k tokens",
        "tokens/s",
        "loss 2.000",
        "members (30",
        "fragments (24)",
        "events",
    ):
        assert words in text, words
    assert text.count("tok/s") >= 6 and "first" in text and "happened" in text


def test_the_list_moves_and_is_sorted_as_a_person_says() -> None:
    chosen = ViewChoice(crowd(60))
    page = page_rows(chosen.picture, 80, 24)
    shown = [line.plain for line in swarm_lines(chosen, 80, 24) if "tok/s" in line.plain]
    assert len(shown) == page and shown[0].startswith("a first")
    chosen = after_key(chosen, Move.PAGE_DOWN, 80, 24)
    assert chosen.first == page
    assert after_key(after_key(chosen, Move.DOWN, 80, 24), Move.UP, 80, 24).first == page
    end = after_key(chosen, Move.END, 80, 24)
    assert f"{60 - page + 1}-60 shown" in "\n".join(line.plain for line in swarm_lines(end, 80, 24))
    assert (
        after_key(end, Move.PAGE_DOWN, 80, 24).first == end.first
        and after_key(end, Move.HOME, 80, 24).first == 0
    )
    chosen = after_key(end, "s", 80, 24)
    assert chosen.order == "trouble first" and chosen.first == 0
    first = min(chosen.picture.members, key=ORDERS[chosen.order])
    assert first.last_seen_s == pytest.approx(5.1), "who is silent comes first"
    assert after_key(chosen, "x", 80, 24) is chosen
    orders = {after_key(structs.replace(chosen, order=order), "s", 80, 24).order for order in ORDERS}
    assert orders == set(ORDERS)


def test_keys_are_told_apart() -> None:
    assert told_apart("q\x1b[A\x1b[6~x\x1b[1;5C\x1bOB\x1b") == ["q", Move.UP, Move.PAGE_DOWN, "x", Move.DOWN]


def test_a_line_says_who_is_not_well() -> None:
    text = plain_line(
        seen(report("a", (other("b", 12.0), other("c", reach="outbound only"))), report("d", numbers=(3,)))
    )
    assert "members 4" in text and "not well: " in text
    assert "b silent 12.0 s" in text and "c outbound only" in text and "d 2 behind" in text


# --- who is asked --------------------------------------------------------------------------------


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    for name, value in {"TICK_S": 0.001, "LEAST_S": 0.01, "LOOK_AGAIN_S": 0.05, "DOUBT_S": 30.0}.items():
        monkeypatch.setattr(top, name, value)
    async with contextlib.aclosing(Network()) as made:
        yield made


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(within_s(20)):
        while not holds():  # noqa: ASYNC110  (what it waits for sets no event)
            await asyncio.sleep(0.005)


async def test_several_are_asked_and_others_when_those_die(network: Network) -> None:
    peers = [await network.add() for _ in range(6)]
    visitor, loop = await network.visitor(), asyncio.get_running_loop()
    asked = AskedMembers(Search("", []), RUN, loop.time)
    asked.take(report(peers[0]))
    watching = asyncio.create_task(asked.watch(visitor))
    try:
        await until(lambda: len(asked.answers) == top.WITNESSES)
        for peer in list(asked.answers)[:3]:
            network.hub.kill(peer)
        await until(lambda: len(asked.answers) == 6 and len(asked.silent) == 3)
        left = set(asked.answers) - set(asked.silent)
        before = {peer: asked.answers[peer].at_s for peer in left}
        await until(lambda: all(asked.answers[peer].at_s > before[peer] for peer in left))
        for peer in left:
            network.hub.kill(peer)
        await until(lambda: len(asked.silent) == 6)
        newcomer = await network.add()
        await until(lambda: newcomer in asked.answers)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def test_who_failed_is_asked_after_others_and_the_list_is_looked_at_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(_peer: str, _addresses: tuple[str, ...]) -> None:
        raise PeerUnreachable("gone")

    now = 0.0
    monkeypatch.setattr(top, "WITNESSES", 1)
    asked = AskedMembers(Search("", ["failed", "other"]), RUN, lambda: now)
    asked._known["failed"].addresses = ("/ip4/203.0.113.1/tcp/1",)
    asked._look_s = top.LOOK_AGAIN_S
    await asked._ask(SimpleNamespace(connect=connect), "failed")  # type: ignore[arg-type]
    assert asked._look_s == top.LOOK_SOON_S
    now = top.MOST_DOUBT_S
    assert asked._due() == ["other"]


async def test_who_does_not_answer_is_left_alone_for_longer_and_longer() -> None:
    now, dialled = 0.0, []

    async def connect(peer: str, _addresses: tuple[str, ...]) -> None:
        dialled.append(now)
        raise PeerUnreachable("gone")

    asked = AskedMembers(Search("", ["a"]), RUN, lambda: now)
    asked._known["a"].addresses = ("/ip4/203.0.113.1/tcp/1",)
    while now < 100.0:
        for peer in asked._due():
            await asked._ask(SimpleNamespace(connect=connect), peer)  # type: ignore[arg-type]
        now += 0.25
    pauses = [round(b - a) for a, b in itertools.pairwise(dialled)]
    assert pauses == [4, 8, 16, 32], dialled


def test_nobody_is_asked_more_than_its_budget_for_strangers_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    asked = AskedMembers(Search("", []), RUN, lambda: now)
    size = len(
        encode_status(report("a", tuple(other(f"12D3KooWpeer{i:06d}") for i in range(64)), tuple(range(900))))
    )
    given = 0
    while now < 2 * LISTING_S:
        if "a" in asked._due() or not given:
            asked.take(report("a"), size)
            given += size
        now += 0.25
    assert REPORT_BYTES * 0.4 < given / 2 <= REPORT_BYTES


async def test_lines_are_written_where_there_is_no_terminal_until_nobody_reads(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = await network.add()
    visitor = await network.visitor()

    @contextlib.asynccontextmanager
    async def joined(_join: tuple[str, ...]) -> AsyncIterator[MemoryTransport]:
        yield visitor

    monkeypatch.setattr("p2pdiloco.cli.status_command.visitor", joined)
    monkeypatch.setattr(top, "PERIOD_S", 0.001)
    written: list[str] = []

    def write(text: str, flush: bool = False) -> None:
        written.append(text)
        if len(written) == 3:
            raise BrokenPipeError

    monkeypatch.setattr("builtins.print", write)
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"
    with pytest.raises(BrokenPipeError):
        await top._top(TopSettings(join=(address,), every_s=0.0), top._plain)
    assert all("run test  members 1" in line for line in written)


async def test_that_nobody_answers_any_more_is_said_with_what_was_seen_last() -> None:
    now = 0.0
    asked = AskedMembers(Search("", []), RUN, lambda: now)
    asked.take(report("a"))
    happenings = Happenings(now)
    assert silence_text(happenings.look(asked, now)[0]) == ""
    now = 90.0
    picture, _ = happenings.look(asked, now)
    assert picture.members and silence_text(picture) == "nobody has answered for 90.0 s: looking for members"
