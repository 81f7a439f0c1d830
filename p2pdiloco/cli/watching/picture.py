"""Picture of a swarm, put together from what several members say of it.

What a member says of itself counts before what others say of it, and newer before older. Who is expelled by
one that was asked is said to be. Anybody can claim to be a member: of three or more that say how far a
fragment is, the one that claims most is not believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median_high

from msgspec import Struct, structs

from p2pdiloco.cli.watching.asking import HeardReport
from p2pdiloco.daemon.display.snapshot import (
    CourseRow,
    FragmentRow,
    NodeState,
    PeerRow,
    StatusReport,
    sane_loss,
)

KEEP_S = 20.0
"""Age from which an answer says nothing of others any more."""
MOST_HISTORY = 120


class MemberRow(Struct, frozen=True):
    """Row of one member."""

    row: PeerRow
    age_s: float | None
    """Seconds since anybody heard of it; None: nobody ever did directly."""
    state: NodeState | None = None
    """State by its own word; None: it was not asked."""
    behind: int | None = None
    """Versions that it is behind, of all fragments together; None: it was not asked."""


class SwarmPicture(Struct, frozen=True, kw_only=True):
    """Picture of a run at one moment."""

    run_name: str
    run_id: str
    members: tuple[MemberRow, ...] = ()
    """Members, those that worked most first."""
    members_total: int = 0
    fragments: tuple[FragmentRow, ...] = ()
    run_tokens: int = 0
    run_versions: int = 0
    loss: float | None = None
    heldout_loss: float | None = None
    heldout_age_s: float | None = None
    course: CourseRow = CourseRow()
    asked: tuple[str, ...] = ()
    """Peers whose answers these are."""
    age_s: float = 0.0
    """Age of the newest answer."""
    loss_history: tuple[float, ...] = ()
    merged_age_s: float | None = None
    """Time since the newest version came, as far as it was watched; None: none came yet."""
    watched_s: float = 0.0
    happened: tuple[str, ...] = ()
    """Sentences on what happened, oldest first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the members that are shown train on in a second."""
        return sum(member.row.tokens_per_s for member in self.members)


def picture_of(answers: Mapping[str, HeardReport], now: float) -> SwarmPicture | None:
    """Put answers together. None: there are none."""
    ordered = sorted(answers.values(), key=lambda answer: -answer.at_s)
    if not ordered:
        return None
    fresh = [answer for answer in ordered if now - answer.at_s <= KEEP_S] or ordered[:1]
    reports = [answer.report for answer in fresh]
    fragments = _fragments(reports)
    members = _members(fresh, fragments, now)
    losses = [loss for m in members if m.row.confirmed and (loss := sane_loss(m.row.loss)) is not None]
    measured = [r for r in reports if r.heldout_loss is not None]
    heldout = min(measured, key=lambda r: r.heldout_age_s or 0.0, default=None)
    first = reports[0]
    return SwarmPicture(
        run_name=first.run_name,
        run_id=first.run_id,
        members=members,
        members_total=max(len(members), median_high(report.members_total for report in reports)),
        fragments=fragments,
        run_tokens=sum(row.tokens for row in fragments) // max(1, len(fragments)),
        run_versions=sum(row.number for row in fragments),
        loss=fmean(losses) if losses else None,
        heldout_loss=heldout.heldout_loss if heldout else None,
        heldout_age_s=heldout.heldout_age_s if heldout else None,
        course=first.course,
        asked=tuple(report.answered_by for report in reports),
        age_s=now - fresh[0].at_s,
    )


def _fragments(reports: Sequence[StatusReport]) -> tuple[FragmentRow, ...]:
    rows: dict[int, list[tuple[FragmentRow, StatusReport]]] = {}
    for report in reports:
        for row in report.fragments:
            rows.setdefault(row.index, []).append((row, report))
    return tuple(_fragment(rows[index]) for index in sorted(rows))


def _fragment(rows: Sequence[tuple[FragmentRow, StatusReport]]) -> FragmentRow:
    """Choose the newest, but not what one of three claims alone; a round is as its syncer says."""
    ordered = sorted(rows, key=lambda pair: (-pair[0].tokens, -pair[0].number))
    row = ordered[1 if len(ordered) >= 3 else 0][0]
    own = next((other for other, report in rows if report.answered_by == row.syncer), None)
    state = own.state if own is not None and own.syncer == row.syncer else row.state
    return structs.replace(row, state=state, pending="")


def _members(
    answers: Sequence[HeardReport], fragments: Sequence[FragmentRow], now: float
) -> tuple[MemberRow, ...]:
    heads = {row.index: row.number for row in fragments}
    found: dict[str, MemberRow] = {}
    for answer in answers:
        age = now - answer.at_s
        for row in answer.report.members:
            if row.peer == answer.report.answered_by:
                continue
            seen = None if row.last_seen_s is None else row.last_seen_s + age
            other = found.get(row.peer)
            if other is None or _older(other.age_s) > _older(seen):
                found[row.peer] = MemberRow(row, seen)
    for answer in answers:
        report, age = answer.report, now - answer.at_s
        own = next((row for row in report.members if row.peer == report.answered_by), None)
        if own is not None:
            lag = [max(0, heads.get(row.index, 0) - row.number) for row in report.fragments]
            heard = found.get(own.peer)
            seen = min(age, _older(heard.age_s)) if heard is not None else age
            found[own.peer] = MemberRow(own, seen, report.state, sum(lag))
    for row in (row for answer in answers for row in answer.report.members if row.expelled is not None):
        whole = found[row.peer]
        found[row.peer] = structs.replace(whole, row=structs.replace(whole.row, expelled=row.expelled))
    return tuple(sorted(found.values(), key=lambda m: (-m.row.tokens_total, m.row.peer)))


def _older(age_s: float | None) -> float:
    return float("inf") if age_s is None else age_s
