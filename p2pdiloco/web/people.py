"""Members on the page: who is here, who is behind, and why."""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.daemon.display.snapshot import PeerRow, sane_loss
from p2pdiloco.daemon.display.timeline import ABOUT_PEERS, PastEvent
from p2pdiloco.web.view import MemberView
from p2pdiloco.web.words import MarkKind, MemberWord, Why

SILENT_S = 15.0
"""Silence after which a member is silent here: after `Timing.member_ttl_s` the others do without it."""
BEHIND_VERSIONS = 2
"""Versions by which somebody is behind: by one, everybody is at times."""
PATIENCE = 8.0
"""Usual times between two versions after which whoever trains should have been in one."""
LEAST_PATIENCE_S = 60.0
SHOWN_SILENT_S = 900.0
"""Time for which a member that went silent is shown, once nobody lists it any more."""
DISAGREES_BELOW = 0.45
"""Weight of a member's work, beside a usual one's, below which it is said to disagree; a newcomer begins with
half."""
ORDER = (MemberWord.HERE, MemberWord.BEHIND, MemberWord.RESTING, MemberWord.SILENT)


def member_views(
    rows: Iterable[PeerRow], now_s: float, usual_s: float | None, fragments: int, me: str
) -> tuple[MemberView, ...]:
    """Make the members' views: `me` first, then as they work. `usual_s`: between two versions of a run with
    so many fragments."""
    patience_s = max(LEAST_PATIENCE_S, PATIENCE * (usual_s or 0.0) * max(1, fragments))
    views = [_member_view(row, now_s, patience_s, row.peer == me) for row in rows]
    return tuple(sorted(views, key=lambda view: (not view.is_me, ORDER.index(view.state))))


def _member_view(row: PeerRow, now_s: float, patience_s: float, is_me: bool) -> MemberView:
    state, why = standing(row, patience_s)
    return MemberView(
        peer=row.peer,
        name=row.name,
        state=state,
        why=why,
        behind_versions=row.behind_versions,
        in_last_merge=row.in_last_merge,
        merged_at_s=_since(row.merged_age_s, now_s),
        seen_at_s=_since(row.last_seen_s, now_s),
        tokens_per_s=round(row.tokens_per_s, 1),
        tokens_total=row.tokens_total,
        inner_step=row.inner_step,
        loss=sane_loss(row.loss),
        reach=row.reach,
        offices=row.offices,
        weighs=row.weighs,
        is_me=is_me,
    )


def silent_views(
    marks: Iterable[PastEvent], present: set[str], shift_s: float, now_s: float
) -> tuple[MemberView, ...]:
    """Make views of those that went silent lately and are listed no more: a death is to be seen.
    `shift_s`: from the marks' clock to ours."""
    last = {event.peer: event for event in marks if event.kind in ABOUT_PEERS and event.peer not in present}
    return tuple(
        MemberView(
            peer=event.peer,
            name=event.name,
            state=MemberWord.SILENT,
            why=Why.SILENT,
            seen_at_s=float(round(event.at_s + shift_s)),
        )
        for event in last.values()
        if event.kind == MarkKind.SILENT.value and now_s - event.at_s - shift_s < SHOWN_SILENT_S
    )


def standing(row: PeerRow, patience_s: float) -> tuple[MemberWord, Why]:
    """Find how a member stands, and why. The first reason counts: each explains those that follow."""
    if row.last_seen_s is None or row.last_seen_s >= SILENT_S:
        return MemberWord.SILENT, Why.SILENT
    if not row.confirmed:
        return MemberWord.BEHIND, Why.CATCHING_UP
    if not row.votes:
        return MemberWord.BEHIND, Why.NO_DISK
    if not row.learning:
        return MemberWord.RESTING, Why.NOT_TRAINING
    if row.behind_versions >= BEHIND_VERSIONS:
        return MemberWord.BEHIND, Why.THIN_UPLINK if row.thin else Why.OLD_VERSIONS
    if row.expelled is not None:
        return MemberWord.BEHIND, Why.EXPELLED
    if row.merged_age_s is not None and row.merged_age_s > patience_s:
        return MemberWord.BEHIND, Why.THIN_UPLINK if row.thin else Why.NOT_MERGED
    if row.weighs is not None and row.weighs < DISAGREES_BELOW:
        return MemberWord.HERE, Why.DISAGREES
    return MemberWord.HERE, Why.THIN_UPLINK if row.thin else Why.NONE


def _since(age_s: float | None, now_s: float) -> float | None:
    """Compute the time of something, to the second: what is a little younger is nothing new."""
    return None if age_s is None else float(round(now_s - age_s))
