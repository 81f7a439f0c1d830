"""Sources of views: a node's own, a bootstrap's, and before either is there the first word.

`Views` asks its source when somebody looks. `NodeSource` shows a node's own snapshot and what it remembers.
`AskedSource` is for a bootstrap, which is no member: members of its runs are asked now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.daemon.budgets import LinkCapacity
from p2pdiloco.daemon.display.snapshot import SETTLED, NodeSnapshot, PeerRow, StatusReport, status_of
from p2pdiloco.daemon.display.timeline import Timeline, load_timeline, sane, save_timeline
from p2pdiloco.daemon.history import AskedCredits
from p2pdiloco.daemon.network.discovery import ask_status, listed_members
from p2pdiloco.daemon.owner.control import ControlState, OwnerControls
from p2pdiloco.daemon.run_files.known_runs import PublishedRun
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.release import VERSION
from p2pdiloco.web.view import (
    MAX_RUNS,
    Control,
    LinkView,
    NodeCondition,
    OwnView,
    PublicView,
    Pulse,
    RunChoice,
    RunView,
    clock_shift_s,
    credit_views,
    join_view,
    public_view,
)

if TYPE_CHECKING:
    from p2pdiloco.daemon.member import Member

FRESH_S = 1.0
"""Age up to which a view is given to the next one who asks."""


class Source(Protocol):
    """Source of views."""

    def view(self, run: str) -> RunView | None:
        """Make the whole view of a run, given by its id, or of the first if that is empty; None: it is not
        known here."""


def offered_controls(state: ControlState | None) -> tuple[Control, ...]:
    """List what the page may offer to the owner; None: there are no controls."""
    if state is None:
        return ()
    return (Control.RESUME if state.paused else Control.PAUSE, Control.FINISH, Control.LIMITS)


def limits_by_name(state: ControlState | None) -> dict[str, str]:
    """List the limits by name."""
    return {row.name: row.value for row in state.limits} if state is not None else {}


@dataclass
class StartingSource:
    """Source of a program that has no run yet."""

    _role: str
    _name: str
    _peer: str
    _controls: OwnerControls | None = None

    def view(self, run: str) -> RunView | None:
        """Say that it is joining, or away for its owner's sake."""
        known = self._controls.state() if self._controls is not None else None
        own = OwnView(
            state=NodeCondition(known.state) if known is not None else NodeCondition.JOINING,
            rest=known.rest.words if known is not None and known.rest is not None else "",
            me=PeerRow(peer=self._peer, name=self._name),
            controls=offered_controls(known),
            limits=limits_by_name(known),
        )
        return None if run else RunView(role=self._role, version=VERSION, own=own)


class Views:
    """Views for all who ask: nothing is made twice within a second, and nothing if nobody asks."""

    def __init__(self, source: Source, now: Callable[[], float] = time.monotonic) -> None:
        self._source, self._now = source, now
        self._kept: dict[str, tuple[float, RunView, RunView]] = {}
        self.controls: OwnerControls | None = None
        """Controls of the node; None: it has none (yet)."""

    def enter(self, source: Source, controls: OwnerControls | None = None) -> None:
        """Show another source from now on."""
        self._source, self.controls = source, controls
        self._kept.clear()

    def view(self, run: str, is_owner: bool) -> RunView | None:
        """Give the view of a run, without what is the owner's to see if need be."""
        kept = self._kept.get(run)
        if kept is None or self._now() >= kept[0] + FRESH_S:
            view = self._source.view(run)
            if view is None:  # what anybody may ask for is not remembered
                return None
            public = RunView(role=view.role, version=view.version, public=view.public, runs=view.runs)
            kept = self._kept[run] = self._now(), view, public
        return kept[1] if is_owner else kept[2]


# A node.

RATE_OVER_S = 4.0
"""Time over which a rate is taken at least."""


class NodeSource:
    """Source of a node's view."""

    def __init__(self, member: Member, controls: OwnerControls | None = None) -> None:
        """`controls`: those that its page may offer."""
        self._member, self._controls = member, controls
        loop = asyncio.get_running_loop()
        self._rates = LinkRates(loop.time)
        self._monotonic = loop.time

    def view(self, run: str) -> RunView | None:
        """Make the view."""
        member = self._member
        if run and run != member.run.id:
            return None
        now_s = time.time()
        snapshot = member.report.snapshot(self._monotonic())
        timeline = member.diary.timeline
        told = member.keeper.answer(0) if member.keeper is not None else None
        public = public_view(
            status_of(snapshot),
            now_s,
            owner=member.run.signed.owner,
            since_s=timeline.since_s,
            join=join_view(member.run, member.peer.transport.addresses()),
            credits=credit_views(told, snapshot.answered_by),
            at_s=timeline.version_at_s,
        )
        own = own_view(snapshot, timeline, member.meters.link, self._rates, self._controls)
        return RunView(role="node", version=VERSION, public=public, own=own)


class LinkRates:
    """Rates of what counters say, between two looks at them that are not too close."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before: tuple[float, int, int] | None = None
        self._rates: tuple[float | None, float | None] = (None, None)

    def of(self, sent_bytes: int, received_bytes: int) -> tuple[float | None, float | None]:
        """Compute bits a second, up and down; None: nothing is known yet."""
        now, before = self._now(), self._before
        if before is None or now - before[0] >= RATE_OVER_S:
            self._before = now, sent_bytes, received_bytes
            if before is not None:
                passed_s = now - before[0]
                up, down = sent_bytes - before[1], received_bytes - before[2]
                self._rates = round(8 * up / passed_s), round(8 * down / passed_s)
        return self._rates


def own_view(
    snapshot: NodeSnapshot,
    timeline: Timeline,
    link: LinkCapacity,
    rates: LinkRates,
    controls: OwnerControls | None,
) -> OwnView:
    """Make what only the owner of the machine sees."""
    state = controls.state() if controls is not None else None
    return OwnView(
        state=NodeCondition(snapshot.state.replace(" ", "-")),
        doubt=snapshot.doubt,
        rest=snapshot.rest.words if snapshot.rest is not None else "",
        me=replace(snapshot.me, tokens_per_s=round(snapshot.me.tokens_per_s, 1)),
        device=snapshot.device,
        step_time_s=snapshot.step_time_s,
        work=replace(timeline.own, refused=timeline.own.refused.copy()),
        waiting=sum(bool(row.pending) for row in snapshot.fragments),
        link=_link_view(snapshot, link, rates),
        refusals=snapshot.refusals,
        expelled=Counter(row.expelled for row in snapshot.peers if row.expelled is not None),
        recent=snapshot.recent,
        controls=offered_controls(state),
        limits=limits_by_name(state),
        proposed=state.proposed if state is not None else (),
    )


def _link_view(snapshot: NodeSnapshot, link: LinkCapacity, rates: LinkRates) -> LinkView:
    up, down = rates.of(snapshot.bytes_sent, snapshot.bytes_received)
    return LinkView(
        reach=snapshot.me.reach,
        up_bits_per_s=up,
        down_bits_per_s=down,
        known_up_bits_per_s=_known(link.upload_bits_per_s),
        known_down_bits_per_s=_known(link.download_bits_per_s),
        sent_bytes=snapshot.bytes_sent,
        received_bytes=snapshot.bytes_received,
        carried=snapshot.bulk,
        words=snapshot.link,
        router=snapshot.router,
    )


def _known(bits_per_s: float) -> float | None:
    return round(bits_per_s) if math.isfinite(bits_per_s) else None


# A bootstrap.

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
    """Source of a bootstrap's views.

    A member that answers may be wrong, or lie. So several are asked, those first that the run file gives a
    seat, and of these the one in the middle, by merged tokens, is believed: one liar among three is not. What
    the page shows of the past is kept in the run's folder, for when those that were there from the start are
    gone.
    """

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
            state=NodeCondition.SERVING,
            me=PeerRow(peer=self._transport.peer_id),
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
        # In the order of the list, whoever says that it started last would always be asked.
        asked, seats = random.sample(list(members.items()), len(members)), run.manifest.admission.seats
        for peer, addresses in sorted(asked, key=lambda item: item[0] not in seats)[:MOST_ASKED]:
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
            named = [answer for answer in answers if answer.answered_by in seats]
            self._of(run).take(middle_report(named or answers), time.time())
            here = set(self._transport.connected())
            await self._of(run).credits.look(self._transport, run.id, [p for p in members if p in here])

    def _of(self, run: PublishedRun) -> WatchedRun:
        known = self._watched.get(run.id)
        if known is None:
            known = self._watched[run.id] = WatchedRun(load_timeline(run_folder(self._data_dir, run.id)))
        return known

    def _save(self) -> None:
        for run, known in self._watched.items():
            save_timeline(run_folder(self._data_dir, run), known.timeline)


def middle_report(answers: Sequence[StatusReport]) -> StatusReport:
    """Choose the answer in the middle, by merged tokens, of the settled members' if there are any."""
    settled = [answer for answer in answers if answer.state in SETTLED] or list(answers)
    return sorted(settled, key=lambda answer: answer.course.tokens)[len(settled) // 2]
