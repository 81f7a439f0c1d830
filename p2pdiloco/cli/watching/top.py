"""`p2pdiloco top`: a visit of a run that goes on until somebody has seen enough."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from msgspec import structs
from rich.console import Console

from p2pdiloco.cli.status import Search, local_addresses, visiting
from p2pdiloco.cli.visitor import visit
from p2pdiloco.cli.watching.asking import AskedMembers
from p2pdiloco.cli.watching.happenings import Happenings
from p2pdiloco.cli.watching.picture import SwarmPicture, picture_of
from p2pdiloco.cli.watching.swarm_view import Chosen, ListOrder, SwarmView, page_rows, plain_line
from p2pdiloco.config.settings import TopSettings
from p2pdiloco.daemon.display import logs
from p2pdiloco.daemon.display.snapshot import duration
from p2pdiloco.daemon.display.terminal import Keys, LiveView, Move, suspend, told_apart
from p2pdiloco.daemon.run_files.known_runs import peers_of
from p2pdiloco.errors import clean, invariant

PERIOD_S = 0.25
OLD_S = 8.0
"""Age of the newest answer from which on it is said that nobody answers."""


def run(settings: TopSettings) -> int:
    """Show the swarm until told to stop. Returns the exit status.

    Raises:
        UserError: as `cli.status.run`.
    """
    if not settings.join:
        settings = structs.replace(settings, join=local_addresses(settings.data_dir))
    logging.getLogger().setLevel(logging.ERROR)  # what a peer did wrong here is not worth a line
    lives = sys.stdout.isatty() and not Console().is_dumb_terminal
    if lives:
        logs.install()  # a terminal that takes nothing must not keep us from ending
    try:
        visit(_top(settings, _live if lives else _plain))
    except BrokenPipeError:  # whoever read has seen enough
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 0


class Watch:
    """Watch over a swarm: its newest picture, and what happened."""

    def __init__(self, witnesses: AskedMembers, now: Callable[[], float]) -> None:
        self._witnesses, self._now = witnesses, now
        self._happenings = Happenings(now())
        self._last: SwarmPicture | None = None

    def look(self) -> tuple[SwarmPicture, list[str]]:
        """Take a picture; list what is new since the last look."""
        now = self._now()
        picture = picture_of(self._witnesses.answers, now)
        if picture is None:  # nobody has answered for long: what was seen last, with its age
            invariant(self._last is not None, "a watch without an answer")
            assert self._last is not None
            return self._happenings.told(self._last, now), []
        new = self._happenings.add(picture, self._witnesses.silent, now)
        self._last = picture
        return self._happenings.told(picture, now), new

    @staticmethod
    def silence(picture: SwarmPicture) -> str:
        """Word that nobody answers any more; empty: somebody does."""
        if picture.age_s <= OLD_S:
            return ""
        return f"nobody has answered for {duration(picture.age_s)}: looking for members"


Show = Callable[[Watch, TopSettings], Coroutine[None, None, None]]


async def _top(settings: TopSettings, show: Show) -> None:
    search = Search(settings.run, peers_of(settings.join))
    async with visiting(settings.join, search, settings.timeout_s) as (transport, report):
        witnesses = AskedMembers(search, report.run_id, time.monotonic)
        witnesses.take(report)
        watching = asyncio.create_task(witnesses.watch(transport))
        try:
            await show(Watch(witnesses, time.monotonic), settings)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def _plain(watch: Watch, settings: TopSettings) -> None:
    """Write a line now and then, and what happens at once."""
    told_s = -1e18
    while True:
        picture, new = watch.look()
        lines = list(new)
        if time.monotonic() - told_s >= settings.every_s:
            told_s = time.monotonic()
            lines.append(watch.silence(picture) or plain_line(picture))
        clock = time.strftime("%H:%M:%S")
        for line in lines:
            print(clean(f"{clock} {line}"), flush=True)
        await asyncio.sleep(PERIOD_S)


async def _live(watch: Watch, _settings: TopSettings) -> None:
    """Draw, and obey keys, until one of them says to leave."""
    loop = asyncio.get_running_loop()
    console = Console()
    view, keys = LiveView(console, draw=lambda chosen, explained: SwarmView(chosen, explained)), Keys()
    chosen = Chosen(watch.look()[0])
    view.start()
    keys.start()
    loop.add_signal_handler(signal.SIGTSTP, suspend, view, keys)
    try:
        while True:
            picture, _ = watch.look()
            chosen = structs.replace(chosen, picture=picture, silence=watch.silence(picture))
            for key in told_apart(keys.pressed()):
                if key in ("q", "Q"):
                    return
                if key == "?":
                    view.explain()
                chosen = obeyed(chosen, key, *console.size)
            view.update(chosen)
            await asyncio.sleep(PERIOD_S)
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)
        keys.stop()
        view.stop()


def obeyed(chosen: Chosen, key: Move | str, width: int, height: int) -> Chosen:
    """Do what a key says to the list of members."""
    if isinstance(key, Move):
        page = page_rows(chosen.picture, width, height)
        return structs.replace(chosen, first=key.moved(chosen.first, page, len(chosen.picture.members)))
    if key in ("s", "S"):
        return structs.replace(chosen, order=ListOrder.next(chosen.order), first=0)
    return chosen
