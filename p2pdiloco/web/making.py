"""Making of the public view of a run: of a member's report, whether that is our own or another's."""

from __future__ import annotations

import math

from p2pdiloco.daemon.display.snapshot import (
    MAX_PEER_ROWS,
    FragmentRow,
    NewestRow,
    StatusReport,
    amendment_text,
    sane_loss,
)
from p2pdiloco.daemon.display.timeline import MAX_AGE_S, sane
from p2pdiloco.daemon.wire import CreditLine, CreditsAnswer
from p2pdiloco.web.forecast import forecast
from p2pdiloco.web.people import member_views, silent_views
from p2pdiloco.web.view import (
    MAX_CREDITS,
    CreditView,
    DataView,
    JoinView,
    LossCurve,
    Mark,
    MemberView,
    NewestView,
    ProgressView,
    PublicView,
    StripView,
)
from p2pdiloco.web.words import MarkKind, MemberWord, Pulse

LATE, STILL = 6.0, 30.0
"""Usual times between two versions after which the newest is late, and after which the run stands still."""
LEAST_LATE_S, LEAST_STILL_S = 60.0, 600.0
SAME_CLOCK_S = 5.0
"""Difference up to which a clock is ours, and the message was under way."""


def public_view(
    report: StatusReport,
    now_s: float,
    owner: str = "",
    since_s: float | None = None,
    join: JoinView | None = None,
    credits: tuple[CreditView, ...] = (),
    at_s: dict[int, float] | None = None,
) -> PublicView:
    """Make the view. `since_s`: time since which the run is watched; `at_s`: when each fragment's head came;
    None: not known."""
    course, newest = report.course, report.newest
    names = {row.peer: row.name for row in report.members}
    usual_s = newest.usual_s if newest is not None else None
    shift_s = clock_shift_s(report, now_s)
    members = member_views(report.members, now_s, usual_s, len(report.fragments), report.answered_by)
    known = {m.peer for m in members} | {row.peer for row in report.excluded}
    members = (*members, *silent_views(report.marks, known, shift_s, now_s))
    points = tuple(p for p in report.curve if sane(p, now_s - shift_s))
    left_s = course.left_s or 0.0
    ends_at_s = round(now_s + left_s, -1) if 0 < left_s < MAX_AGE_S else None
    return PublicView(
        run_name=report.run_name,
        run_id=report.run_id,
        owner=owner,
        told_by=report.answered_by,
        told_by_name=names.get(report.answered_by, ""),
        made_at_s=round(now_s, 1),
        since_s=since_s,
        pulse=pulse_of(report, members),
        newest=_newest_view(newest, report.fragments, now_s),
        progress=_progress(report, members, ends_at_s),
        heldout_loss=sane_loss(report.heldout_loss),
        heldout_at_s=None if report.heldout_age_s is None else float(round(now_s - report.heldout_age_s)),
        heldout_by=report.heldout_by,
        training_loss=sane_loss(report.loss),
        curve=LossCurve(
            at_s=tuple(round(point.at_s + shift_s, 1) for point in points),
            tokens=tuple(point.tokens for point in points),
            loss=tuple(round(point.loss, 5) for point in points),
        ),
        forecast=forecast(points, course.tokens, course.schedule_tokens, now_s, ends_at_s),
        members=members[: MAX_PEER_ROWS + 1],
        members_total=max(report.members_total, len(members)),
        excluded=report.excluded,
        fragments=tuple(_strip(row, names, at_s or {}) for row in report.fragments),
        marks=_marks(report, names, shift_s, now_s),
        data=_data(report),
        credits=credits,
        join=join or JoinView(),
    )


def clock_shift_s(report: StatusReport, now_s: float) -> float:
    """Compute what makes times by the clock of whoever reports times by ours."""
    shift_s = now_s - report.clock_s
    return shift_s if abs(shift_s) > SAME_CLOCK_S else 0.0


def pulse_of(report: StatusReport, members: tuple[MemberView, ...]) -> Pulse:
    """Find how a run is."""
    rests, newest = report.course.rests, report.newest
    if rests != "no":
        return Pulse.ENDED if rests == "ended" else Pulse.PAUSED
    if report.run_versions == 0:
        return Pulse.NEW
    if newest is None:
        return Pulse.ALIVE  # none came since whoever tells it started
    usual_s = newest.usual_s or 0.0
    if newest.age_s > max(LEAST_STILL_S, STILL * usual_s) and _anybody_trains(members):
        return Pulse.STILL
    return Pulse.LATE if newest.age_s > max(LEAST_LATE_S, LATE * usual_s) else Pulse.ALIVE


def _anybody_trains(members: tuple[MemberView, ...]) -> bool:
    return any(member.state in (MemberWord.HERE, MemberWord.BEHIND) for member in members)


def _newest_view(newest: NewestRow | None, rows: tuple[FragmentRow, ...], now_s: float) -> NewestView:
    if newest is None:  # which fragment's it was is not known, but how far they are
        return NewestView(number=max((row.number for row in rows), default=0))
    return NewestView(
        fragment=newest.fragment,
        number=newest.number,
        at_s=round(now_s - newest.age_s, 1),
        usual_s=newest.usual_s,
        contributors=newest.contributors,
    )


def _progress(report: StatusReport, members: tuple[MemberView, ...], ends_at_s: float | None) -> ProgressView:
    course = report.course
    rates = [m.tokens_per_s for m in members if m.state in (MemberWord.HERE, MemberWord.BEHIND)]
    rate = sum(value for value in rates if math.isfinite(value) and value >= 0)
    return ProgressView(
        tokens=course.tokens,
        schedule_tokens=course.schedule_tokens,
        ends_at_s=ends_at_s,
        versions=report.run_versions,
        tokens_per_s=round(rate, 1) if rates else None,
        amendment=course.amendment,
        amendment_from_tokens=course.amendment_from_tokens,
        amendment_does=amendment_text(course),
        rate_factor=course.rate_factor,
        message=course.message,
    )


def _strip(row: FragmentRow, names: dict[str, str], at_s: dict[int, float]) -> StripView:
    came_s = at_s.get(row.index)
    return StripView(
        index=row.index,
        number=row.number,
        digest=row.digest,
        tokens=row.tokens,
        syncer=row.syncer,
        syncer_name=names.get(row.syncer, ""),
        state=row.state,
        at_s=None if came_s is None else round(came_s, 1),
    )


def _marks(report: StatusReport, names: dict[str, str], shift_s: float, now_s: float) -> tuple[Mark, ...]:
    kinds = {kind.value: kind for kind in MarkKind}
    return tuple(
        Mark(
            at_s=round(event.at_s + shift_s, 1),
            kind=kinds[event.kind],
            words=event.words,
            peer=event.peer,
            name=names.get(event.peer, "") or event.name,
            fragment=event.fragment,
            times=event.times,
        )
        for event in report.marks
        if event.kind in kinds and event.at_s + shift_s <= now_s + 1
    )


def _data(report: StatusReport) -> DataView | None:
    data = report.data
    return None if data is None else DataView(epoch=data.epoch, shards=data.shards, begun=data.begun)


def credit_views(answer: CreditsAnswer | None, own: str = "") -> tuple[CreditView, ...]:
    """Make the rows of a keeper's answer; none of nobody's. `own`: a peer whose row is there in any case."""
    if answer is None:
        return ()
    lines = sorted(answer.rows, key=lambda line: (-line.fragment_tokens, line.peer))
    shown = lines[:MAX_CREDITS]
    mine = [line for line in lines[MAX_CREDITS:] if line.peer == own]
    if mine:
        shown = [*shown[:-1], *mine]
    return tuple(_credit_view(line, answer.fragments) for line in shown)


def _credit_view(line: CreditLine, fragments: int) -> CreditView:
    return CreditView(
        peer=line.peer,
        name=line.name,
        tokens=line.fragment_tokens // fragments,
        steps=line.inner_steps,
        contributions=line.contributions,
        first_at_s=float(line.first_s) or None,
        last_at_s=float(line.last_s) or None,
    )
