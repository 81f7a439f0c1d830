"""`p2pdiloco board`: files that are whole at any moment, and stay when nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from page_looks import Looks
from page_scene import scene, with_public

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.cli import board as boards
from p2pdiloco.cli.board import Board, every_of, run, view_of
from p2pdiloco.cli.status_command import Unreachable
from p2pdiloco.cli.top import AskedMembers, HeardReport
from p2pdiloco.config.settings import BoardSettings
from p2pdiloco.daemon.display.snapshot import CourseRow, FragmentRow, PeerRow, StatusReport
from p2pdiloco.errors import ConfigError, RemoteError, StorageError
from p2pdiloco.web.view import JoinView

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWEcnp3mdr86DAFqXiDnMPUVLnrnkV1iEjgs7iy1sqASGB"
RUN = "ab" * 32


def report(peer: str = "anna", tokens: int = 1000, state: Any = "training") -> StatusReport:
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
        monkeypatch.setattr(boards, "visiting", self.visiting)
        monkeypatch.setattr(boards, "visit", asyncio.run)
        monkeypatch.setattr(boards.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(boards.asyncio, "sleep", self.sleep)
        monkeypatch.setattr(AskedMembers, "watch", self.watch)

    async def send(self, *_: object) -> bytes:
        raise RemoteError("keeps-no-history")

    @contextlib.asynccontextmanager
    async def visiting(self, *_: object) -> AsyncIterator[tuple[World, StatusReport]]:
        if not self.visits:
            raise KeyboardInterrupt
        if isinstance(found := self.visits.pop(0), Exception):
            raise found
        yield self, found

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
    world.visits = [report()]
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
    world.visits = [report(tokens=1000), lost, lost, report(tokens=2000), lost]
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
    world.visits = [report()]
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
    world.visits = [report()]
    with pytest.raises(KeyboardInterrupt):
        run(BoardSettings(join=(ADDRESS,), out=tmp_path, every="10s"))
    assert len(saved) > 4 and capsys.readouterr().err.count("the disk is full") == 1


def test_the_answer_in_the_middle_counts_of_those_that_are_new() -> None:
    def heard(tokens: int, age_s: float = 0.0, state: str = "training") -> HeardReport:
        return HeardReport(report(tokens=tokens, state=state), 500.0 - age_s)

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
