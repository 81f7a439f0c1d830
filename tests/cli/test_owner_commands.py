"""`p2pdiloco run amend`: what an owner's wish becomes, and when it holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from click.testing import CliRunner
from daemon_kit import served_runs

from p2pdiloco.cli import owner_notice, status_command
from p2pdiloco.cli.group import cli
from p2pdiloco.cli.options import RunPlace
from p2pdiloco.cli.owner_notice import (
    LEAD_SHARE,
    AmendmentWish,
    InviteEnd,
    PeerChange,
    ReachedPeers,
    RunPosition,
    amendment,
)
from p2pdiloco.config.manifest import EndSection
from p2pdiloco.config.presets import MICRO, for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.core.api.config import Amendment, Going, amended, in_force
from p2pdiloco.core.api.types import Seat, Vouch
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import PeerRow, StatusReport
from p2pdiloco.daemon.notice import Notice, with_word
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, WaysIn, change_ways
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import render_toml

STOPS = msgspec.structs.replace(MICRO, end=EndSection())
END = STOPS.inner.schedule_tokens
MIDDLE = RunPosition(END // 2, END, 10.0, rests=False)
OVER = RunPosition(END + 100, END, 0.0, rests=True)


def test_it_holds_about_a_minute_ahead_and_says_all_that_held_before() -> None:
    first = amendment((), AmendmentWish(rate_factor=0.5, message="slower"), STOPS, MIDDLE)
    assert first == Amendment(1, MIDDLE.tokens + 600, 0, 0.5, Going.TRAIN, "slower")
    second = amendment(
        (first,), AmendmentWish(schedule_tokens=2 * END, at_tokens=MIDDLE.tokens + 9), STOPS, MIDDLE
    )
    assert second == Amendment(2, MIDDLE.tokens + 9, 2 * END, 0.5, Going.TRAIN, "slower")
    assert amendment((second,), AmendmentWish(message=""), STOPS, MIDDLE).message == ""


def test_it_holds_before_the_run_is_over() -> None:
    late = RunPosition(END - 5, END, 10.0, rests=False)
    assert amendment((), AmendmentWish(schedule_tokens=2 * END), STOPS, late).from_tokens == END
    assert amendment((), AmendmentWish(schedule_tokens=2 * END), MICRO, late).from_tokens == END + 595
    # It is over: no token comes any more.
    assert amendment((), AmendmentWish(schedule_tokens=2 * END), STOPS, OVER).from_tokens == OVER.tokens


def test_what_is_still_to_come_does_not_come_before_its_time() -> None:
    pause = amendment((), AmendmentWish(going=Going.PAUSE, at_tokens=END - 1), STOPS, MIDDLE)
    assert amendment((pause,), AmendmentWish(rate_factor=2.0), STOPS, MIDDLE) == Amendment(
        2, END - 1, 0, 2.0, Going.PAUSE
    )


@pytest.mark.parametrize("going", [Going.PAUSE, Going.END])
def test_a_pause_and_an_end_wait_for_nothing_that_is_still_to_come(going: Going) -> None:
    known = (Amendment(1, 0, 0, 0.5), Amendment(2, END - 1, 3 * END, 0.1))
    made = amendment(known, AmendmentWish(going=going), STOPS, MIDDLE)
    assert made == Amendment(3, MIDDLE.tokens + 600, 0, 0.5, going)
    assert amended(known, made) == (known[0], made), "what was to come is taken back"


def test_no_member_s_word_moves_it_far_ahead() -> None:
    for pace in (1e6, 1e17, float("inf")):
        place = RunPosition(MIDDLE.tokens, END, pace, rests=False)
        for manifest in (STOPS, MICRO):
            made = amendment((), AmendmentWish(going=Going.PAUSE), manifest, place)
            assert made.from_tokens == MIDDLE.tokens + END // LEAD_SHARE
    beyond = RunPosition(1 << 63, END, 0.0, rests=False)
    with pytest.raises(UserError, match="no amendment can say that"):
        amendment((), AmendmentWish(going=Going.PAUSE), MICRO, beyond)


@pytest.mark.parametrize("pause_at", [MIDDLE.tokens - 700, MIDDLE.tokens + 1])
def test_going_on_takes_a_pause_back_at_once(pause_at: int) -> None:
    known = (Amendment(1, pause_at, going=Going.PAUSE),)
    known = amended(known, amendment(known, AmendmentWish(going=Going.TRAIN), STOPS, MIDDLE))
    for tokens in (pause_at, MIDDLE.tokens, END):
        held = in_force(known, tokens)
        assert held is None or held.going is Going.TRAIN


@pytest.mark.parametrize(
    ("wish", "place", "words"),
    [
        (AmendmentWish(), MIDDLE, "nothing to change"),
        (AmendmentWish(at_tokens=1), MIDDLE, "nothing to change"),
        (AmendmentWish(rate_factor=0.0), MIDDLE, "from 0.001 to 1000"),
        (AmendmentWish(rate_factor=float("nan")), MIDDLE, "from 0.001 to 1000"),
        (AmendmentWish(message="x" * 241), MIDDLE, "has 241 characters"),
        (AmendmentWish(going=Going.PAUSE, at_tokens=5), MIDDLE, "cannot hold from 5 on"),
        (AmendmentWish(schedule_tokens=9 * END, at_tokens=2 * END), OVER, "never comes to"),
        (AmendmentWish(schedule_tokens=STOPS.inner.warmup_tokens), MIDDLE, "before the warm-up"),
        (AmendmentWish(schedule_tokens=END // 2), MIDDLE, "is over"),
        (AmendmentWish(going=Going.TRAIN), OVER, "is over"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wish: AmendmentWish, place: RunPosition, words: str) -> None:
    with pytest.raises(UserError, match=words):
        wish.check()
        amendment((), wish, STOPS, place)


def test_ways_to_go_exclude_each_other(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["run", "amend", "any", "--pause", "--end", "--data-dir", str(tmp_path)])
    assert done.exit_code and "exclude each other" in str(done.exception)


def test_a_seat_is_given_or_ended(tmp_path: Path) -> None:
    peer, folder = Identity.generate().peer_id, ("--data-dir", str(tmp_path))
    both = CliRunner().invoke(cli, ["seat", "any", peer, "--end", "--replace", peer, *folder])
    assert both.exit_code and "exclude each other" in str(both.exception)
    none = CliRunner().invoke(cli, ["seat", "any", peer, "--replace", "bob", *folder])
    assert none.exit_code and '"bob" is not the id of a peer' in str(none.exception)


# Invites that end, lost seats, and who has one.

OLD, NEW, BEN, KEY = (Identity.from_seed(bytes([i]) * 32).peer_id for i in range(10, 14))


def seat_line(peer: str, name: str, silent_s: int | None, **seat: Any) -> wire.SeatLine:
    return wire.SeatLine(peer, name, Seat(1, **seat), silent_s)


STANDS = wire.Stands(
    (),
    (
        seat_line(OLD, "ben", 3 * 3600, key=KEY, since=2),
        seat_line(BEN, "eve", None, key=KEY, word=3, since=5),
        seat_line(NEW, "ada", 0),
    ),
)


def test_a_key_that_cannot_be_read_is_named_before_a_seats_word_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of a seat cannot be taken back, and is not what its owner meant."""

    def unreadable(*_asked: object) -> None:
        raise StorageError("the identity file is corrupt")

    monkeypatch.setattr(Ownership, "find", unreadable)
    monkeypatch.setattr("p2pdiloco.cli.owner_commands._is_said_by_node", lambda *asked: True)
    done = CliRunner().invoke(cli, ["seat", "any", BEN, "--yes", "--data-dir", str(tmp_path)])
    assert done.exit_code and "the identity file is corrupt" in str(done.exception)


@pytest.fixture
def owned(tmp_path: Path) -> Ownership:
    return Ownership(tmp_path, "ab" * 32, Identity.from_seed(bytes(32)))


def test_a_closed_invite_leaves_its_seats(owned: Ownership) -> None:
    before = owned.publish(with_word(Notice(owned.run, 1), BEN, True))
    closed = InviteEnd.of(owned, KEY, True, leaves=True).make(before, ReachedPeers())
    made = owned.publish(closed, before.sequence)
    said = [(word.peer, word.number, word.seated, word.replaces) for word in made.seats]
    assert said == [(BEN, 1, True, ""), (KEY, 2, False, KEY)] and not made.revoked


def test_a_revoked_invite_ends_alone(owned: Ownership) -> None:
    made = InviteEnd.of(owned, KEY, True).make(Notice(owned.run, 1), ReachedPeers())
    assert made.revoked == (KEY,) and [(w.peer, w.replaces) for w in made.seats] == [(KEY, "")]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("seated", [False, True])
def test_a_members_id_is_no_invite(owned: Ownership, leaves: bool, seated: bool) -> None:
    notice = with_word(Notice(owned.run, 1), BEN, True) if seated else Notice(owned.run, 1)
    reached = ReachedPeers() if seated else ReachedPeers([], {BEN: "ben"})
    ending = InviteEnd.of(owned, BEN, True, leaves)
    with pytest.raises(UserError, match="a member, and no invite"):
        ending.make(notice, reached)
    with pytest.raises(UserError, match="a member, and no invite"):
        asyncio.run(ending.agree(notice, reached))


async def test_ending_an_invite_says_whom_it_concerns(
    owned: Ownership, capsys: pytest.CaptureFixture[str]
) -> None:
    for leaves, said in ((False, "their seats end"), (True, "its members stay")):
        await InviteEnd.of(owned, KEY, True, leaves).agree(Notice(owned.run, 1), ReachedPeers())
        assert said in capsys.readouterr().err


def test_what_is_signed_while_a_question_waits_stays(
    owned: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # a command's loop has nothing else to do

    @contextlib.asynccontextmanager
    async def nobody(*_asked: object) -> AsyncIterator[None]:
        yield

    async def meanwhile(notice: Notice, _reached: ReachedPeers) -> None:
        owned.publish(msgspec.structs.replace(notice, banned=(NEW,)))

    async def reached(*_asked: object) -> ReachedPeers:
        return ReachedPeers()

    monkeypatch.setattr(owner_notice, "visitor", nobody)
    monkeypatch.setattr(owner_notice, "reach_members", reached)
    given = owner_notice._give(owned, (), lambda notice, _: with_word(notice, BEN, True), meanwhile, "")
    made, _ = asyncio.run(given)
    assert made.sequence == 2 and made.banned == (NEW,) and [word.peer for word in made.seats] == [BEN]


def change(word: str, **lost: str) -> PeerChange:
    return PeerChange("seat", "", word, True, False, True, lost=lost)


async def test_the_seat_of_a_lost_node_of_the_same_name_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notice, reached = Notice("ab" * 32, 1), ReachedPeers([], {NEW: "ben"})
    asked = change(NEW, ben=OLD)
    await asked.agree(notice, reached)
    assert f"p2pdiloco seat abababababab {NEW} --replace {OLD}\n" in capsys.readouterr().err
    assert asked.make(notice, reached).seats[0].replaces == ""
    answers: list[str] = []

    async def agrees(question: str) -> bool:
        answers.append(question)
        return True

    monkeypatch.setattr(owner_notice, "at_terminal", lambda: True)
    monkeypatch.setattr(owner_notice, "ask_terminal", agrees)
    await asked.agree(notice, reached)
    assert asked.make(notice, reached).seats[0].replaces == OLD and len(answers) == 2
    capsys.readouterr()
    for others in ({"eve": OLD}, {"ben": NEW}):
        await change(NEW, **others).agree(notice, reached)
        assert "--replace" not in capsys.readouterr().err


def test_lost_is_whoever_was_silent_for_a_minute_and_no_other_of_that_name_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ownership, "find", lambda *_: None)
    monkeypatch.setattr(owner_notice, "own_stands", lambda *_: STANDS)
    assert owner_notice.lost_seats(RunPlace("any", (), None)) == {"ben": OLD, "eve": BEN}
    both = msgspec.structs.replace(STANDS, seats=(*STANDS.seats, seat_line(KEY, "ben", 1)))
    monkeypatch.setattr(owner_notice, "own_stands", lambda *_: both)
    assert owner_notice.lost_seats(RunPlace("any", (), None)) == {"eve": BEN}

    def nobody(*_: Any) -> None:
        raise UserError("nobody is reached")

    monkeypatch.setattr(owner_notice, "own_stands", nobody)
    assert owner_notice.lost_seats(RunPlace("any", (), None)) == {}


def test_members_lists_seats_with_their_papers_and_then_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (
        PeerRow(peer=NEW, name="ada", last_seen_s=0.0),
        PeerRow(peer=KEY, name="joe\x1b", last_seen_s=4.0),
    )
    report = StatusReport(
        answered_by=NEW,
        run_name="ours",
        run_id="ab" * 32,
        state="training",
        members=others,
        members_total=99,
    )

    async def standing(*_: Any) -> tuple[StatusReport, wire.Stands]:
        return report, STANDS

    monkeypatch.setattr(status_command, "_standing", standing)
    monkeypatch.setattr(Ownership, "find", lambda *_: Mock(names={KEY: "friends"}))
    done = CliRunner().invoke(cli, ["members", "ours", "--join", address(NEW)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "seats (3):",
        f"ben          {OLD}  since version 2, by invite friends, seen 3.0 h ago",
        f"eve          {BEN}  since version 5, by invite friends and the owner's word, "
        "not seen by the node asked",
        f"ada          {NEW}  since version 0, by the run file, seen 0 ms ago",
        "without a seat (1 and 97 more):",
        f"joe·         {KEY}  seen 4.0 s ago",
    ]


# Which node an owner vouches by: one of the owner's own, or one that the owner names.

BOOTSTRAP, OWN, STRANGER = (Identity.from_seed(bytes([i]) * 32).peer_id for i in range(3))
VOUCHES = (Vouch(0, 3, b"\1" * 32, (OWN,)),)


def address(peer: str) -> str:
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedRun:
    """A bootstrap in the folder "boot" has signed it; its owner's node and a stranger train it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "run.toml").write_text(render_toml(for_run("micro", "test", 0)))
    (run,) = await served_runs(tmp_path / "boot", tmp_path / "run.toml")
    change_ways(tmp_path / "boot", WaysIn.reached_at, [address(BOOTSTRAP)])

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
    monkeypatch.setattr(owner_notice, "publish", lambda place, *_: runs.append(place.run))
    return runs


def start_own_node(run: PublishedRun) -> None:
    """Leave what the owner's node leaves in its usual folder."""
    folder = NodeSettings().data_dir.expanduser()
    (folder / "runs" / run.id[:16]).mkdir(parents=True)
    change_ways(folder, WaysIn.reached_at, [address(OWN)])


def test_the_node_of_the_usual_folder_is_the_owner_s_also_beside_a_bootstrap_s(
    tmp_path: Path, run: PublishedRun, published: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start_own_node(run)
    owner_notice.vouch_for(RunPlace("test", (), tmp_path / "boot"))
    assert published == ["test"] and "fragment 0: version 3" in capsys.readouterr().out


def test_a_stranger_is_named_and_not_vouched_for(
    tmp_path: Path, run: PublishedRun, published: list[str]
) -> None:
    with pytest.raises(UserError, match="no node of yours that has trained") as caught:
        owner_notice.vouch_for(RunPlace("test", (), tmp_path / "boot"))
    assert caught.value.hint == "name the node whose state you trust: --join ADDRESS"
    assert list(caught.value.details) == [f"eve· is at {address(STRANGER)}"]
    assert not published
    owner_notice.vouch_for(RunPlace("test", (address(STRANGER),), tmp_path / "boot"))
    assert published == ["test"], "the owner has named it"
