"""Source of views on a bootstrap, which is no member: members of its runs are asked now and then.

Whoever answers may be wrong, or lie. So several are asked, and the one in the middle, by merged tokens, is
believed: one liar among three is not. What the page shows of the past is kept in the run's folder, for when
those that were there from the start are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.daemon.display.snapshot import SETTLED, StatusReport
from p2pdiloco.daemon.display.timeline import Timeline, load_timeline, sane, save_timeline
from p2pdiloco.daemon.history import AskedCredits
from p2pdiloco.daemon.network.discovery import ask_status, listed_members
from p2pdiloco.daemon.run_files.known_runs import PublishedRun
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.release import VERSION
from p2pdiloco.web.joining import join_view
from p2pdiloco.web.making import clock_shift_s, credit_views, public_view
from p2pdiloco.web.view import MAX_RUNS, LinkView, OwnView, PublicView, RunChoice, RunView
from p2pdiloco.web.words import NodeWord, Pulse

logger = logging.getLogger(__name__)
EVERY_S, SELDOM_S = 5.0, 60.0
"""Pauses between two rounds of questions: while somebody looks, and while nobody does."""
LOOKED_AT_S = 30.0
"""Time for which somebody who looked still counts."""
MOST_ASKED, ENOUGH = 8, 3
OLD_S = 60.0
"""Age of an answer from which on nothing is known of a run that is looked at."""
SAVE_EVERY_S = 600.0


class WatchedRun:
    """Knowledge of one run."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.report: StatusReport | None = None
        self.credits = AskedCredits()
        self.asked_at_s = 0.0

    def take(self, report: StatusReport, now_s: float) -> None:
        """Take in an answer."""
        self.report, self.asked_at_s = report, now_s
        shift_s = clock_shift_s(report, now_s)
        points = [replace(point, at_s=point.at_s + shift_s) for point in report.curve]
        marks = [replace(event, at_s=event.at_s + shift_s) for event in report.marks]
        self.timeline.learn(
            # One beyond the run's own tokens would keep out, for ever, what others tell of later.
            [point for point in points if sane(point, now_s) and point.tokens <= report.course.tokens],
            [mark for mark in marks if mark.at_s <= now_s + 1],
        )


class AskedSource:
    """Source of a bootstrap's views."""

    def __init__(
        self,
        transport: Transport,
        runs: Callable[[], Sequence[PublishedRun]],
        data_dir: Path,
    ) -> None:
        """`runs`: those that are served."""
        self._transport, self._runs, self._data_dir = transport, runs, data_dir
        self._watched: dict[str, WatchedRun] = {}
        self._looked_s = -LOOKED_AT_S
        self._wanted = asyncio.Event()

    def view(self, run: str) -> RunView | None:
        """Make the view."""
        runs = list(self._runs())
        chosen = next((known for known in runs if not run or known.id == run), None)
        if chosen is None and run:
            return None
        if time.monotonic() - self._looked_s > LOOKED_AT_S:
            self._wanted.set()
        self._looked_s = time.monotonic()
        sent, received = self._transport.payload_bytes()
        own = OwnView(
            state=NodeWord.SERVING,
            peer=self._transport.peer_id,
            link=LinkView(sent_bytes=sent, received_bytes=received),
        )
        choices = tuple(RunChoice(run_id=known.id, run_name=known.name) for known in runs[:MAX_RUNS])
        public = self._public(chosen) if chosen is not None else None
        return RunView(
            role="bootstrap", version=VERSION, public=public, own=own, runs=choices if len(runs) > 1 else ()
        )

    def _public(self, run: PublishedRun) -> PublicView:
        now_s, known = time.time(), self._watched.get(run.id)
        join, owner = join_view(run, self._transport.addresses()), run.signed.owner
        if known is None or known.report is None:
            return PublicView(
                run_name=run.name, run_id=run.id, owner=owner, made_at_s=round(now_s, 1), join=join
            )
        timeline = known.timeline
        report = replace(
            known.report, curve=timeline.curve.points, marks=timeline.marks.events, clock_s=known.asked_at_s
        )
        credits = credit_views(known.credits.answer)
        view = public_view(report, known.asked_at_s, owner, timeline.since_s, join, credits)
        is_old = now_s - known.asked_at_s > OLD_S
        return replace(view, made_at_s=round(now_s, 1), pulse=Pulse.UNKNOWN if is_old else view.pulse)

    async def watch(self) -> None:
        """Ask, for ever."""
        saved_s = time.monotonic()
        try:
            while True:
                for run in self._runs():
                    try:
                        await self._ask(run)
                    except Exception:
                        logger.exception("the web page cannot show %s", run.name)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    self._save()
                is_looked_at = time.monotonic() - self._looked_s < LOOKED_AT_S
                self._wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S if is_looked_at else SELDOM_S):
                        await self._wanted.wait()
        finally:
            self._save()

    async def _ask(self, run: PublishedRun) -> None:
        """Ask members of a run until enough have answered."""
        answers: list[StatusReport] = []
        try:
            members = await listed_members(self._transport, run.id)
        except (RemoteError, TransportError) as error:
            logger.debug("members of %s cannot be looked up: %s", run.name, error)
            return
        # Any of them: in the order of the list, whoever says that it started last would always be asked.
        for peer, addresses in random.sample(list(members.items()), min(MOST_ASKED, len(members))):
            try:
                await self._transport.connect(peer, addresses)
                answer, _ = await ask_status(self._transport, peer, run.id)
            except (RemoteError, TransportError) as error:
                logger.debug("%s does not say how %s is doing: %s", peer, run.name, error)
                continue
            answers.append(answer)
            if len(answers) >= ENOUGH:
                break
        if answers:
            self._of(run).take(middle(answers), time.time())
            here = set(self._transport.connected())
            asked = [peer for peer in members if peer in here]
            await self._of(run).credits.look(self._transport, run.id, asked)

    def _of(self, run: PublishedRun) -> WatchedRun:
        known = self._watched.get(run.id)
        if known is None:
            known = self._watched[run.id] = WatchedRun(load_timeline(run_folder(self._data_dir, run.id)))
        return known

    def _save(self) -> None:
        for run, known in self._watched.items():
            save_timeline(run_folder(self._data_dir, run), known.timeline)


def middle(answers: Sequence[StatusReport]) -> StatusReport:
    """Choose the answer in the middle, by merged tokens, of the settled members' if there are any."""
    settled = [answer for answer in answers if answer.state in SETTLED] or list(answers)
    return sorted(settled, key=lambda answer: answer.course.tokens)[len(settled) // 2]
