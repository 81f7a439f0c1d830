"""Views: one encoding, bounded, public and own part apart."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import http.server
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace
from page_looks import Looks
from page_scene import peer, scene, with_own, with_public

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.cli import board as boards
from p2pdiloco.cli.board import Board, every_of, run, view_of
from p2pdiloco.cli.status_command import Search, Unreachable
from p2pdiloco.cli.top import AskedMembers, HeardReport
from p2pdiloco.config.settings import BoardSettings
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import LinkCapacity
from p2pdiloco.daemon.display.snapshot import (
    SETTLED,
    CourseRow,
    ExcludedRow,
    FragmentRow,
    NewestRow,
    NodeSnapshot,
    NodeState,
    PeerRow,
    ProposedSeat,
    StatusReport,
    decode_status,
    encode_status,
)
from p2pdiloco.daemon.display.timeline import MAX_POINTS, LossPoint, PastEvent, Timeline
from p2pdiloco.daemon.history import EVERY_S, AskedCredits, believed
from p2pdiloco.daemon.wire import MAX_ROWS, CreditLine, CreditsAnswer, CreditsQuery
from p2pdiloco.errors import ConfigError, PeerUnreachable, RemoteError, StorageError
from p2pdiloco.web import live
from p2pdiloco.web.page import MEMBER_SHAPES, PARTS, REASON_TEXTS, TONES, Page
from p2pdiloco.web.sources import LinkRates, WatchedRun, middle_report, own_view
from p2pdiloco.web.view import (
    MAX_CREDITS,
    BehindReason,
    Control,
    JoinView,
    MarkKind,
    MemberCondition,
    NewestView,
    NodeCondition,
    ProgressView,
    PublicView,
    Pulse,
    RunView,
    condition_of,
    credit_views,
    encode_view,
    fit_power_law,
    forecast,
    join_view,
    public_view,
)


def test_a_view_is_the_same_after_its_journey() -> None:
    assert msgspec.json.decode(encode_view(scene()), type=RunView) == scene()


def test_the_public_part_says_nothing_of_the_machine() -> None:
    shown = json.loads(encode_view(scene(own=False)))
    assert shown["own"] is None
    assert "limits" not in json.dumps(shown["public"]) and "device" not in json.dumps(shown["public"])


def test_the_longest_curve_is_bounded() -> None:
    view = json.loads(encode_view(scene()))
    view["public"]["curve"]["loss"] = [1.0] * (MAX_POINTS + 1)
    try:
        msgspec.json.decode(json.dumps(view), type=RunView)
    except msgspec.ValidationError as error:
        assert "length" in str(error)
    else:
        raise AssertionError("taken")


def test_every_word_is_one_word_and_is_explained() -> None:
    for words in (Control, MarkKind, MemberCondition, NodeCondition, Pulse, BehindReason):
        for word in words:
            assert " " not in word.value and " " in str(word)


def test_the_document_lists_all_words_and_no_others() -> None:
    text = (Path(__file__).parents[2] / "docs" / "topics" / "web.md").read_text()
    tables = [table for table in text.partition("## Words")[2].partition("## The past")[0].split("\n\n")[1:]]
    tables = [table for table in tables if table.startswith("| word")]
    for words, table in zip(
        (NodeCondition, Pulse, MemberCondition, BehindReason, MarkKind, Control), tables, strict=True
    ):
        rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()[2:]]
        assert rows == [(f"`{word.value or '-'}`", str(word)) for word in words]


# Views made of reports: who is behind and why, the pulse, the forecast, strangers' clocks and numbers.

NOW_S = 1_800_000_000.0


def row(**fields: Any) -> PeerRow:
    kept: dict[str, Any] = {"peer": "ben", "last_seen_s": 1.0, "confirmed": True}
    return PeerRow(**(kept | fields))


def report(more: tuple[PeerRow, ...] = (), **fields: Any) -> StatusReport:
    made = StatusReport(
        answered_by="ann",
        members=(row(peer="ann", name="ann", last_seen_s=0.0),),
        members_total=1,
        run_name="test",
        run_id="ab" * 32,
        state="training",
        fragments=tuple(FragmentRow(index=index, number=3) for index in range(4)),
        run_versions=12,
        clock_s=NOW_S,
    )
    state = fields.get("state", made.state)
    me = replace(made.members[0], confirmed=state in SETTLED, learning=state == "training")
    return replace(made, members=(me, *more), **fields)


@pytest.mark.parametrize(
    ("fields", "state", "why"),
    [
        ({}, MemberCondition.HERE, BehindReason.NONE),
        ({"last_seen_s": None}, MemberCondition.SILENT, BehindReason.SILENT),
        ({"last_seen_s": 16.0, "confirmed": False}, MemberCondition.SILENT, BehindReason.SILENT),
        ({"confirmed": False, "behind_versions": 9}, MemberCondition.BEHIND, BehindReason.CATCHING_UP),
        ({"votes": False}, MemberCondition.BEHIND, BehindReason.NO_DISK),
        ({"learning": False}, MemberCondition.RESTING, BehindReason.NOT_TRAINING),
        ({"behind_versions": 1}, MemberCondition.HERE, BehindReason.NONE),
        ({"behind_versions": 2}, MemberCondition.BEHIND, BehindReason.OLD_VERSIONS),
        ({"behind_versions": 2, "thin": True}, MemberCondition.BEHIND, BehindReason.THIN_UPLINK),
        ({"merged_age_s": 61.0}, MemberCondition.BEHIND, BehindReason.NOT_MERGED),
        ({"expelled": LossFinding.HARM, "merged_age_s": 61.0}, MemberCondition.BEHIND, BehindReason.EXPELLED),
        ({"thin": True}, MemberCondition.HERE, BehindReason.THIN_UPLINK),
        ({"weighs": 0.5}, MemberCondition.HERE, BehindReason.NONE),
        ({"weighs": 0.2, "thin": True}, MemberCondition.HERE, BehindReason.DISAGREES),
    ],
)
def test_who_is_behind_and_why(fields: dict[str, Any], state: MemberCondition, why: BehindReason) -> None:
    assert condition_of(row(**fields), patience_s=60.0) == (state, why)


@pytest.mark.parametrize(
    ("fields", "pulse"),
    [
        ({"run_versions": 0}, Pulse.NEW),
        ({}, Pulse.ALIVE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=59.0)}, Pulse.ALIVE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=61.0)}, Pulse.LATE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=61.0, usual_s=30.0)}, Pulse.ALIVE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=601.0)}, Pulse.STILL),
        ({"newest": NewestRow(fragment=0, number=3, age_s=601.0), "state": "idle"}, Pulse.LATE),
        ({"course": CourseRow(rests="paused")}, Pulse.PAUSED),
        ({"course": CourseRow(rests="ended")}, Pulse.ENDED),
    ],
)
def test_the_pulse_of_a_run(fields: dict[str, Any], pulse: Pulse) -> None:
    assert public_view(report(**fields), NOW_S).pulse is pulse


def test_who_is_excluded_is_told_once_and_not_as_silent_too() -> None:
    liar = ExcludedRow(peer="dan", name="Dan", reason="it voted twice")
    marks = (PastEvent(NOW_S - 90, "silent", "died", "dan", None, 1, "Dan"),)
    view = public_view(report(marks=marks, excluded=(liar,)), NOW_S)
    assert view.excluded == (liar,) and [member.peer for member in view.members] == ["ann"]


def test_whom_loss_audits_of_this_node_expelled_is_counted_by_what_they_have_shown() -> None:
    rows = (row(expelled=LossFinding.HARM), row(expelled=LossFinding.HARM), row())
    snapshot = NodeSnapshot(
        answered_by="ann", members=(row(peer="ann"), *rows), run_name="", run_id="", state="training"
    )
    view = own_view(snapshot, Timeline(), LinkCapacity(math.inf, math.inf), LinkRates(lambda: 0.0), None)
    assert view.expelled == {LossFinding.HARM: 2}


def test_a_member_that_died_is_shown_for_a_while_and_one_that_left_is_not() -> None:
    marks = (
        PastEvent(NOW_S - 90, "silent", "died", "dan", None, 1, "Dan"),
        PastEvent(NOW_S - 80, "silent", "died", "eve"),
        PastEvent(NOW_S - 70, "join", "heard of", "eve"),
        PastEvent(NOW_S - 2000, "silent", "died", "old"),
        PastEvent(NOW_S - 60, "leave", "good-bye", "fay"),
    )
    view = public_view(report(marks=marks), NOW_S)
    assert [(m.peer, m.name, m.state) for m in view.members] == [
        ("ann", "ann", MemberCondition.HERE),
        ("dan", "Dan", MemberCondition.SILENT),
    ]
    assert view.members[0].is_me and view.members_total == 2


def test_times_of_another_clock_are_ours_and_what_cannot_be_is_left_out() -> None:
    theirs_s = NOW_S - 86_400.0
    curve = (
        LossPoint(theirs_s - 50, 1000, 3.0),
        LossPoint(theirs_s + 9e6, 2000, 2.9),
        LossPoint(theirs_s - 10, 3000, float("nan")),
    )
    marks = (PastEvent(theirs_s - 5, "silent", "", "dan"), PastEvent(theirs_s, "nonsense", ""))
    view = public_view(report(clock_s=theirs_s, curve=curve, marks=marks), NOW_S)
    assert view.curve.at_s == (NOW_S - 50,) and view.curve.tokens == (1000,)
    assert [(mark.kind, mark.at_s) for mark in view.marks] == [(MarkKind.SILENT, NOW_S - 5)]


def test_a_forecast_goes_through_the_newest_point_to_the_end_of_the_schedule() -> None:
    points = tuple(LossPoint(float(n), 1000 * n, 2.0 + 30.0 * (1000 * n) ** -0.5) for n in range(1, 60))
    found = fit_power_law(points)
    assert found is not None and abs(found.exponent - 0.5) < 0.01 and abs(found.floor - 2.0) < 0.01
    ahead = forecast(points, 60_000, 200_000, NOW_S, NOW_S + 1400.0)
    assert ahead is not None and ahead.tokens[0] == 59_000 and ahead.tokens[-1] == 200_000
    assert (
        abs(ahead.loss[0] - points[-1].loss) < 1e-4 and abs(ahead.loss[-1] - (2 + 30 * 200_000**-0.5)) < 0.01
    )
    assert ahead.at_s[-1] == NOW_S + 1400.0
    assert all(low <= loss <= high for low, loss, high in zip(ahead.low, ahead.loss, ahead.high, strict=True))


@pytest.mark.parametrize("left_s", [None, 0.0, -1.0, math.nan, math.inf, 1e300])
def test_an_end_that_cannot_be_is_not_known(left_s: float | None) -> None:
    """The script of a page with an infinite time would draw no curve: JSON has none."""
    assert public_view(report(course=CourseRow(left_s=left_s)), NOW_S).progress.ends_at_s is None
    ends = public_view(report(course=CourseRow(left_s=1000.0)), NOW_S).progress
    assert ends.ends_at_s == NOW_S + 1000


def test_there_is_no_forecast_of_what_is_over_too_short_or_rises() -> None:
    points = tuple(LossPoint(float(n), 1000 * n, 2.0 + 30.0 * (1000 * n) ** -0.5) for n in range(1, 60))
    assert forecast(points, 60_000, 50_000, NOW_S, None) is None
    assert forecast(points[:5], 6_000, 50_000, NOW_S, None) is None
    assert forecast((), 6_000, 50_000, NOW_S, None) is None
    assert fit_power_law(tuple(LossPoint(float(n), 1000 * n, 2.0 + n) for n in range(1, 60))) is None
    assert fit_power_law(tuple(LossPoint(0.0, 1000, 2.0) for _ in range(60))) is None


def test_rates_are_between_two_looks_that_are_not_too_close() -> None:
    now = [0.0]
    rates = LinkRates(lambda: now[0])
    told = []
    for now[0], sent, received in ((0.0, 0, 0), (1.0, 10**9, 0), (4.0, 4000, 400), (5.0, 10**9, 10**9)):
        told.append(rates.of(sent, received))
    assert told == [(None, None), (None, None), (8000, 800), (8000, 800)]


def test_addresses_that_no_link_can_hold_are_a_line_all_the_same() -> None:
    owner = "12D3KooWEcnp3mdr86DAFqXiDnMPUVLnrnkV1iEjgs7iy1sqASGB"
    admission = SimpleNamespace(mode="open")
    manifest = SimpleNamespace(admission=admission)
    run: Any = SimpleNamespace(
        id="ab" * 32, name="test", signed=SimpleNamespace(owner=owner), manifest=manifest
    )
    told = f"/ip4/192.0.2.1/tcp/1/p2p/{owner}"
    assert join_view(run, [told]).line.startswith("p2pdiloco node p2pdiloco:")
    assert join_view(run, ["/dnsaddr/a b"]).line == f"p2pdiloco node --join /dnsaddr/a b --run {run.id}"
    admission.mode = "invite"
    assert join_view(run, [told]) == JoinView()


def test_one_liar_among_three_is_not_believed() -> None:
    honest = [report(course=CourseRow(tokens=tokens)) for tokens in (1000, 1010)]
    for lie in (0, 1 << 60):
        assert middle_report([*honest, report(course=CourseRow(tokens=lie))]).course.tokens in (1000, 1010)
    newcomer = report(course=CourseRow(tokens=5), state="joining")
    assert middle_report([newcomer, honest[0]]) is honest[0] and middle_report([newcomer]) is newcomer


@pytest.mark.parametrize("age", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize(
    "fields",
    [
        lambda age: {"more": (row(last_seen_s=age),)},
        lambda age: {"more": (row(merged_age_s=age),)},
        lambda age: {"heldout_age_s": age},
        lambda age: {"newest": NewestRow(fragment=0, number=3, age_s=age)},
        lambda age: {"clock_s": age},
        lambda age: {"curve": (LossPoint(age, 5, 3.0),)},
        lambda age: {"marks": (PastEvent(age, "silent", "", "ben"),)},
    ],
)
def test_a_time_that_is_none_comes_with_no_report(fields: Any, age: float) -> None:
    with pytest.raises(RemoteError):
        decode_status(encode_status(report(**fields(age))))


def test_a_lie_about_what_is_to_come_keeps_nothing_out() -> None:
    run = WatchedRun(Timeline(now_s=lambda: NOW_S))
    course = CourseRow(tokens=1000)
    run.take(report(course=course, curve=(LossPoint(NOW_S, 1, 9.0), LossPoint(NOW_S, 1 << 61, 0.1))), NOW_S)
    run.take(report(course=course, curve=(LossPoint(NOW_S, 1, 4.0), LossPoint(NOW_S, 900, 3.0))), NOW_S)
    assert [point.tokens for point in run.timeline.curve.points] == [1, 900]


# `p2pdiloco board`: files that are whole at any moment, and stay when nobody answers.

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWEcnp3mdr86DAFqXiDnMPUVLnrnkV1iEjgs7iy1sqASGB"
RUN = "ab" * 32


def board_report(peer: str = "anna", tokens: int = 1000, state: Any = "training") -> StatusReport:
    """What a member says."""
    return StatusReport(
        run_name="small",
        run_id=RUN,
        answered_by=peer,
        state=state,
        members=(PeerRow(peer=peer, name=peer, last_seen_s=0.0, confirmed=True),),
        members_total=1,
        fragments=(FragmentRow(index=0, number=3, tokens=tokens),),
        run_tokens=tokens,
        run_versions=3,
        course=CourseRow(tokens=tokens, schedule_tokens=5000),
        clock_s=time.time(),
    )


class World:
    """A run that can be visited, or not; time passes when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.visits: list[StatusReport | Exception] = []
        """What comes of each visit; after the last, whoever visits is told to stop."""
        self.now = 1000.0
        monkeypatch.setattr("p2pdiloco.cli.top.visiting", self.visiting)
        monkeypatch.setattr(boards, "visit", asyncio.run)
        monkeypatch.setattr(boards.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(boards.asyncio, "sleep", self.sleep)
        monkeypatch.setattr(AskedMembers, "watch", self.watch)

    async def send(self, *_: object) -> bytes:
        raise RemoteError("keeps-no-history")

    @contextlib.asynccontextmanager
    async def visiting(self, *_: object) -> AsyncIterator[tuple[World, Search, StatusReport]]:
        if not self.visits:
            raise KeyboardInterrupt
        if isinstance(found := self.visits.pop(0), Exception):
            raise found
        yield self, Search("", []), found

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def watch(self, *_: object) -> None:
        """Nobody says more than once."""

    async def pull(self, *_: object) -> None:
        raise RemoteError("unknown-run", "not here")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_it_is_written_once(world: World, tmp_path: Path) -> None:
    out = tmp_path / "www" / "run"
    world.visits = [board_report()]
    assert run(BoardSettings(join=(ADDRESS,), out=out)) == 0
    files = files_in(out)
    assert set(files) >= {"index.html", "view.json", "static/page.js", "static/page.css", "static/uplot.js"}
    assert (out / "static").stat().st_mode & 0o055 == 0o055, "a web server is another user"
    view = json.loads(files["view.json"])
    assert view["role"] == "board" and view["public"]["run_name"] == "small" and not view.get("own")
    page = files["index.html"].decode()
    assert 'data-live="poll"' in page and "<form" not in page
    assert f"p2pdiloco node --join {ADDRESS} --run {RUN}" in page


def test_the_files_stay_while_nobody_answers_and_that_is_said_once(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Unreachable("none of the peers could be reached within 20 s", "check the addresses")
    world.visits = [board_report(tokens=1000), lost, lost, board_report(tokens=2000), lost]
    with pytest.raises(KeyboardInterrupt):
        run(BoardSettings(join=(ADDRESS,), out=tmp_path, every="30s"))
    assert json.loads((tmp_path / "view.json").read_text())["public"]["progress"]["tokens"] == 2000
    said = capsys.readouterr().err
    assert said.count("nobody answers any more: the files stay as they are") == 2
    assert said.count("could be reached within 20 s: the files stay as they are") == 2
    assert "Traceback" not in said


@pytest.mark.parametrize("every", ["", "30s"])
def test_a_first_visit_that_fails_is_the_persons_to_mend(world: World, tmp_path: Path, every: str) -> None:
    (tmp_path / "index.html").write_text("as it was")
    world.visits = [Unreachable("nobody", "")]
    with pytest.raises(Unreachable):
        run(BoardSettings(join=(ADDRESS,), out=tmp_path, every=every))
    assert files_in(tmp_path) == {"index.html": b"as it was"}


def test_a_folder_that_cannot_be_written_is_said_before_anybody_is_asked(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    world.visits = [board_report()]
    with pytest.raises(StorageError, match=r"--out .* cannot be written"):
        run(BoardSettings(join=(ADDRESS,), out=tmp_path / "file"))
    assert world.visits


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[str] = []
    save = Files.save

    def full_after_the_first(self: Files, path: Path, chunks: Any, **how: Any) -> None:
        if path.name == "view.json":
            saved.append(path.name)
            if len(saved) in (2, 3):
                raise StorageError("the disk is full")
        save(self, path, chunks, **how)

    monkeypatch.setattr(Files, "save", full_after_the_first)
    world.visits = [board_report()]
    with pytest.raises(KeyboardInterrupt):
        run(BoardSettings(join=(ADDRESS,), out=tmp_path, every="10s"))
    assert len(saved) > 4 and capsys.readouterr().err.count("the disk is full") == 1


def test_the_answer_in_the_middle_counts_of_those_that_are_new() -> None:
    def heard(tokens: int, age_s: float = 0.0, state: str = "training") -> HeardReport:
        return HeardReport(board_report(tokens=tokens, state=state), 500.0 - age_s)

    def tokens(*those: HeardReport) -> int:
        public = view_of(those, 500.0, JoinView()).public
        assert public is not None
        return public.progress.tokens

    assert tokens(heard(1000), heard(1010), heard(10**9)) == 1010
    assert tokens(heard(1000), heard(900, age_s=90)) == 1000
    assert tokens(heard(1000), heard(5, state="catching up"), heard(7, state="joining")) == 1000


@pytest.mark.parametrize("text, seconds", [("", 0.0), ("30s", 30.0), ("5min", 300.0), ("1h", 3600.0)])
def test_every_is_a_time(text: str, seconds: float) -> None:
    assert every_of(text) == seconds


@pytest.mark.parametrize("text", ["1s", "10merges", "soon", "48h", "0s"])
def test_every_is_no_other_thing(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time from 2s to 24h"):
        every_of(text)


@pytest.fixture
def carried(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and its address at a web server that knows nothing of us."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

    folder = tmp_path / "sub" / "run"
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/sub/run/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.process
def test_any_web_server_carries_it_and_the_page_looks_again(carried: tuple[Path, str], looks: Looks) -> None:
    folder, url = carried
    board = Board(folder, every_s=2.0)
    view = replace(scene(time.time(), own=False), role="board")
    board.write(view)
    page = looks.at(url)
    page.until("document.getElementById('stream').className === 'stream live'")
    assert page.text("#stream").startswith("as of")
    assert page.until("document.querySelector('#plot canvas')") is None
    static = (folder / "static" / "page.js").stat().st_mtime_ns
    board.write(with_public(view, run_name="renamed", made_at_s=time.time()))
    page.until("document.querySelector('h1').innerText === 'renamed'", "the new file")
    assert (folder / "static" / "page.js").stat().st_mtime_ns == static  # not written in vain
    board.write(with_public(view, made_at_s=time.time() - 500))
    page.until("document.getElementById('stream').className === 'stream old'", "its age")
    assert "8 min ago" in page.text("#stream")


# Credits on the page: in order, bounded, with the node's own; of several keepers the one in the middle.


def told(*tokens: int, fragments: int = 4, first_s: int = 1_800_000_000) -> CreditsAnswer:
    times = first_s, first_s and first_s + 60
    rows = tuple(
        CreditLine(f"p{n:03}", f"name {n}", amount * fragments, amount, 7, 8, *times)
        for n, amount in enumerate(tokens)
    )
    return CreditsAnswer(fragments, fragments * sum(tokens), 0, 0, len(rows), (), (), bytes(32), rows)


def test_rows_are_bounded_and_the_own_one_is_there() -> None:
    rows = credit_views(told(*range(1, MAX_ROWS + 1)), "p003")
    assert len(rows) == MAX_CREDITS and rows[-1].peer == "p003" and rows[-1].tokens == 4
    assert [row.tokens for row in rows[:-1]] == list(range(MAX_ROWS, MAX_ROWS - MAX_CREDITS + 1, -1))
    assert rows[0].first_at_s == 1_800_000_000.0 and rows[0].steps == 7 and rows[0].contributions == 8
    (old,) = credit_views(told(5, first_s=0))
    assert old.first_at_s is None and old.last_at_s is None
    assert credit_views(None) == ()


def test_who_alone_says_that_it_knows_all_is_not_believed() -> None:
    late = replace(told(20), before_fragment_tokens=8)
    assert believed({"a": late, "liar": told(10**9), "b": late}) != "liar"
    ahead = replace(told(21), before_fragment_tokens=40)
    assert believed({"ahead": ahead, "whole": told(20)}) == "whole"


class Keepers:
    """Transport to members, some of which keep the history."""

    def __init__(self, **answers: CreditsAnswer | Exception) -> None:
        self.answers, self.asked = answers, 0

    async def send(self, peer: str, data: bytes, _timeout_s: float) -> bytes:
        self.asked += 1
        assert wire.decode(data[1:], wire.Query) == CreditsQuery("run")  # type: ignore[arg-type]
        answer = self.answers[peer]
        if isinstance(answer, Exception):
            raise answer
        return wire.encode(answer)


async def test_of_several_keepers_the_one_in_the_middle_is_believed_now_and_then() -> None:
    now = [1000.0]
    members: Any = Keepers(
        a=told(10), b=told(10**9), c=told(11), d=RemoteError("keeps-no-history"), e=PeerUnreachable("gone")
    )
    credits = AskedCredits(lambda: now[0])
    await credits.look(members, "run", list("abcde"))
    assert [row.tokens for row in credit_views(credits.answer)] == [11] and members.asked == 5
    await credits.look(members, "run", list("abcde"))
    assert members.asked == 5
    now[0] += EVERY_S
    await credits.look(members, "run", ["d"])
    assert members.asked == 6 and credits.answer is not None, (
        "what was told stays, when those who know are gone"
    )


# The page explains its words, and has a look for each; it is a page whatever is known.


@pytest.mark.parametrize("kind", [Pulse, MemberCondition, BehindReason, NodeCondition, MarkKind])
def test_every_word_is_explained_on_the_page(kind: type[Pulse]) -> None:
    page = html.unescape(Page().html(scene(time.time())))
    for word in kind:
        if word.value:
            assert f"<dt>{word.value}</dt><dd>{word}</dd>" in page


def test_every_state_of_a_node_is_a_word() -> None:
    assert {state.replace(" ", "-") for state in get_args(NodeState)} < {word.value for word in NodeCondition}


def test_every_word_has_a_look() -> None:
    assert set(MEMBER_SHAPES) == set(MemberCondition) and set(TONES) == {*MemberCondition, *Pulse}
    assert set(REASON_TEXTS) == set(BehindReason) - {BehindReason.NONE}


@pytest.mark.parametrize("pulse", Pulse)
def test_the_first_sentence_is_one_in_every_state(pulse: Pulse) -> None:
    for newest in (
        NewestView(),
        NewestView(fragment=1, number=7, at_s=time.time() - 300, usual_s=20, contributors=2),
    ):
        page = Page().html(with_public(scene(time.time()), pulse=pulse, newest=newest))
        lede = page.split('<p class="lede')[1].split("</p>")[0]
        assert lede.count("<strong>") == 1 and "None" not in lede


def test_a_view_of_which_nothing_is_known_yet_is_a_page() -> None:
    now_s = time.time()
    bare = PublicView(run_name="new", run_id="ab" * 32, made_at_s=now_s)
    for view in (
        RunView(role="bootstrap", version="1"),
        RunView(role="node", version="1", own=replace(scene(now_s).own, controls=(), limits={})),
        RunView(role="board", version="1", public=bare),
    ):
        page = Page().html(view)
        assert page.count("<h1>") == 1 and ">None" not in page and "<form" not in page
        assert set(Page().parts(view).html) == set(PARTS)


def test_the_page_says_who_is_excluded_and_whose_work_weighs_little() -> None:
    run = scene(time.time()).public
    assert run is not None
    first = replace(run.members[1], why=BehindReason.DISAGREES, weighs=0.123)
    liar = ExcludedRow(peer="12D3liar", name="<b>eve", reason="it voted twice <here>")
    page = Page().html(with_public(scene(time.time()), members=(run.members[0], first), excluded=(liar,)))
    assert "disagrees with the others</span>, weighs 12 %" in page
    assert "is excluded: <bdi>it voted twice &lt;here&gt;</bdi>" in page and "&lt;b&gt;eve" in page


def test_seats_that_wait_for_the_owners_word_are_shown_to_it_alone() -> None:
    both = ProposedSeat(peer=peer(5), name="<b>eve"), ProposedSeat(peer=peer(6))
    view = with_own(scene(time.time()), proposed=both)
    page = Page().html(view)
    assert "2 new seats wait for your word: &lt;b&gt;eve …000005, - …000006" in page
    assert f"(p2pdiloco seat library-of-small-things {peer(5)})" in page
    assert page.count('action="control/seat"') == 2 and "<b>eve" not in page
    for seat in both:
        assert f"</bdi>, {seat.peer}, votes and merges from then on" in page, "the whole id is shown"
        assert f'<input type="hidden" name="peer" value="{seat.peer}">' in page
    assert "control/seat" not in Page().html(replace(view, own=None))
    assert "control/seat" not in Page().html(scene(time.time()))


@pytest.mark.parametrize(
    ("seats", "words"),
    [(None, ""), (5, ""), (4, "4 seats: while none of them is here"), (1, "1 seat: while")],
)
def test_an_open_run_of_few_seats_says_so_to_everybody(seats: int | None, words: str) -> None:
    course = replace(report().course, seats=seats)
    public = public_view(replace(report(), run_name="few", course=course), NOW_S)
    page = Page().html(RunView(role="board", version="1", public=public))
    assert ("seats: while" in page or "seat: while" in page) == bool(words) and words in page
    assert ("at least 5 to people whom it trusts: p2pdiloco seat few PEER" in page) == bool(words)


@pytest.mark.parametrize("absent", [0, 3])
def test_the_owner_hears_of_seats_that_attest_nothing_while_nothing_becomes_final(absent: int) -> None:
    public = public_view(replace(report(), run_name="old", course=CourseRow(absent=absent)), NOW_S)
    page = Page().html(RunView(role="board", version="1", public=public))
    assert ("3 seats attested nothing for half of the run" in page) == bool(absent)
    assert ("p2pdiloco seat old --end PEER" in page) == bool(absent)


def test_a_part_changes_only_when_something_happens() -> None:
    now_s = time.time()
    page = Page()
    before, later = page.parts(scene(now_s)), page.parts(with_public(scene(now_s), made_at_s=now_s + 3))
    assert later.since(before) == {}
    changed = with_public(scene(now_s), progress=ProgressView(tokens=1, schedule_tokens=2))
    assert set(page.parts(changed).since(before)) == {"head", "figures"}
    assert b"\n" not in page.update(scene(now_s))


async def test_who_watches_is_let_go_when_the_view_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.001)
    views = [scene(time.time())]
    channel = live.ViewChannel(views.pop, Page())  # the second look fails
    events = [event async for event in channel.watch()]
    assert events[0] == live.FIRST and events[1].startswith(b"data: ") and len(events) == 2
    assert channel.watchers == 0
    with pytest.raises(IndexError):  # and whoever comes now is not shown the last one as live
        await anext(channel.watch())


async def test_who_watches_gets_the_parts_that_changed_since_it_took_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.001)
    now_s = time.time()
    looks = asyncio.Queue[RunView]()
    shown = [scene(now_s)]

    def look() -> RunView:
        if not looks.empty():
            shown[0] = looks.get_nowait()
        return shown[0]

    async def parts(events: AsyncIterator[bytes]) -> set[str]:
        while not (event := await anext(events)).startswith(b"data: "):
            pass
        return set(json.loads(event.removeprefix(b"data: "))["parts"])

    channel = live.ViewChannel(look, Page())
    quick, slow = channel.watch(), channel.watch()
    assert await parts(quick) == await parts(slow) == set(PARTS)
    looks.put_nowait(with_public(scene(now_s), progress=ProgressView(tokens=1, schedule_tokens=2)))
    assert await parts(quick) == {"head", "figures"}
    looks.put_nowait(
        with_public(scene(now_s), progress=ProgressView(tokens=1, schedule_tokens=2), members=())
    )
    assert await parts(quick) >= {"members"} and looks.empty()
    assert await parts(slow) >= {"head", "figures", "members"}, "two changes, one event"
    assert await parts(channel.watch()) == set(PARTS)
    channel.close()
