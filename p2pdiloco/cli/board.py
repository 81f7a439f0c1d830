"""`p2pdiloco board`: the public page of a run as files that any web server carries."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files, try_folder
from p2pdiloco.cli.status_command import NoNodes, Unreachable, at_home, run_of, visit
from p2pdiloco.cli.top import AskedMembers, HeardReport, asked_members
from p2pdiloco.config.settings import BoardSettings
from p2pdiloco.config.values import expanded, parse_every
from p2pdiloco.daemon.display.snapshot import StatusReport
from p2pdiloco.daemon.history import AskedCredits
from p2pdiloco.daemon.run_files.known_runs import peers_of
from p2pdiloco.daemon.wire import CreditsAnswer
from p2pdiloco.errors import ConfigError, StorageError, UserError, clean, install_hint, invariant
from p2pdiloco.ports import Transport
from p2pdiloco.release import VERSION
from p2pdiloco.web.sources import middle_report
from p2pdiloco.web.view import JoinView, RunView, credit_views, encode_view, join_view, public_view

LEAST_EVERY_S, MOST_EVERY_S = 2.0, 86400.0
SELDOM_S = 300.0
"""Time between two looks of a page whose board was written once: perhaps it is written again."""
LOST_S, ROUNDS = 60.0, 3
"""Age of the newest answer, and number of rounds without one, after which the run is looked for anew."""


def run(settings: BoardSettings) -> int:
    """Write the board once, or again and again until told to stop. Returns the exit status.

    Raises:
        UserError: as `status_command.run`; or a package is not installed.
        StorageError: the folder cannot be written.
        ConfigError: `--every` is no time.
    """
    every_s = every_of(settings.every)
    settings = at_home(settings)
    try_folder(expanded(settings.out), "--out")
    board = Board(expanded(settings.out), every_s)
    visit(_keep(settings, board, every_s))
    return 0


def every_of(text: str) -> float:
    """Read `--every`; 0: once. Raises: ConfigError."""
    if not text:
        return 0.0
    seconds = 0.0
    with contextlib.suppress(ConfigError):
        seconds, _ = parse_every(text, "--every")
    if not LEAST_EVERY_S <= seconds <= MOST_EVERY_S:
        raise ConfigError(f"--every {text} is no time from 2s to 24h", "such as --every 30s")
    return seconds


class Board:
    """Folder with the page of a run. Each file is replaced whole, the page itself last."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """Prepare to write. Raises: UserError (a package is missing)."""
        try:
            from p2pdiloco.web.page import STATIC, Page
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("p2pdiloco"):
                raise
            raise UserError(f"the board needs the package {error.name}", install_hint("web")) from error
        self._folder, self._every_s, self._files = folder, every_s or SELDOM_S, Files()
        self._page, self._static = Page(), STATIC
        self.written = 0
        """Number of times that it was written."""

    def write(self, view: RunView) -> None:
        """Write it. Raises: StorageError (what was there before is there still)."""
        static = self._folder / "static"
        self._files.make_folder(static, private=False)  # a web server of another user's reads it
        for path in sorted(self._static.iterdir()):
            self._save(static / path.name, path.read_bytes())
        self._save(self._folder / "view.json", encode_view(view))
        self._save(self._folder / "index.html", self._page.html(view, "poll", self._every_s).encode())
        self.written += 1

    def _save(self, path: Path, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if path.stat().st_size == len(data) and path.read_bytes() == data:
                return
        self._files.save(path, [data], durable=False)


async def _keep(settings: BoardSettings, board: Board, every_s: float) -> None:
    """Write, and go on as long as is wanted. A run that was found once is looked for again, however long."""
    said = ""
    while True:
        try:
            async with asked_members(settings) as (transport, asked):
                join, credits = await _join(transport, asked, settings), AskedCredits()
                if not every_s:
                    await credits.look(transport, _report(asked).run_id, [*asked.answers])
                    board.write(view_of([*asked.answers.values()], time.monotonic(), join, credits.answer))
                    return
                said = ""
                async with asked.watched(transport):
                    await _watch(transport, asked, board, every_s, join)
            why = "nobody answers any more"
        except (Unreachable, NoNodes) as error:
            if not board.written:
                raise
            why = str(error)
        if why != said:
            _say(f"{why}: the files stay as they are, and say their age; looking on")
            said = why
        await asyncio.sleep(every_s)


async def _watch(
    transport: Transport, asked: AskedMembers, board: Board, every_s: float, join: JoinView
) -> None:
    """Write again and again, until nobody has answered for long."""
    faulty, credits = False, AskedCredits()
    while True:
        await credits.look(transport, _report(asked).run_id, [*asked.answers])
        now = time.monotonic()
        newest_s = max(heard.at_s for heard in asked.answers.values())
        if now - newest_s > max(LOST_S, ROUNDS * every_s):
            return
        try:
            board.write(view_of(list(asked.answers.values()), now, join, credits.answer))
            faulty = False
        except StorageError as error:
            if not board.written:
                raise
            if not faulty:
                _say(f"{error}; the files stay as they are, and are tried again")
            faulty = True
        await asyncio.sleep(every_s)


def _report(asked: AskedMembers) -> StatusReport:
    """Take the first answer."""
    return next(iter(asked.answers.values())).report


def view_of(
    heard: Sequence[HeardReport], now: float, join: JoinView, credits: CreditsAnswer | None = None
) -> RunView:
    """Make the view of the one in the middle of the answers that are about as new as the newest."""
    invariant(bool(heard), "a board without an answer")
    newest_s = max(one.at_s for one in heard)
    fresh = [one for one in heard if newest_s - one.at_s <= LOST_S / 4]
    report = middle_report([one.report for one in fresh])
    chosen = next(one for one in fresh if one.report is report)
    at_s = time.time() - (now - chosen.at_s)
    public = public_view(chosen.report, at_s, join=join, credits=credit_views(credits))
    return RunView(role="board", version=VERSION, public=public)


async def _join(transport: Transport, asked: AskedMembers, settings: BoardSettings) -> JoinView:
    """Make the line with which others join: a run link, where the manifest is to be had."""
    report = _report(asked)
    with contextlib.suppress(UserError):
        return join_view(await run_of(transport, report, peers_of(settings.join)), settings.join)
    return JoinView(line=f"p2pdiloco node --join {settings.join[0]} --run {report.run_id}")


def _say(sentence: str) -> None:
    print(clean(f"{time.strftime('%H:%M:%S')} {sentence}"), file=sys.stderr, flush=True)
