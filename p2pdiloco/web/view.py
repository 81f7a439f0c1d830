"""View of a run: everything that the web page shows, as plain values, and how it is made of members' reports.

`PublicView` anybody may see; a bootstrap's `--web-public` and `p2pdiloco board` show nothing else. `OwnView`
is for the owner of the machine. Times are seconds since 1970 (`_at_s`), so that a view changes only when
something happens, and the page counts ages itself, from `made_at_s`. Unknown numbers are None. Texts may come
from strangers: whoever draws them escapes them. The closed lists come first: what a node, a member or a run
can be. A value is the word that is shown and encoded; `str` explains it. docs/topics/web.md has the same
lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field, structs

from p2pdiloco.core.api.reasons import LossFinding, Reason
from p2pdiloco.core.api.types import MAX_FRAGMENTS
from p2pdiloco.daemon.display.snapshot import (
    MAX_EXCLUDED_ROWS,
    MAX_PEER_ROWS,
    MAX_RECENT_LINES,
    CourseRow,
    DataRow,
    ExcludedRow,
    FragmentRow,
    NewestRow,
    PeerRow,
    Proposed,
    StatusReport,
    sane_loss,
)
from p2pdiloco.daemon.display.timeline import (
    ABOUT_PEERS,
    MAX_AGE_S,
    MAX_MARKS,
    MAX_POINTS,
    Line,
    LossPoint,
    Natural,
    OwnWork,
    PastEvent,
    Row,
    Text,
    Words,
    sane,
)
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, link_of
from p2pdiloco.daemon.wire import CreditLine, CreditsAnswer
from p2pdiloco.errors import ConfigError, encoded
from p2pdiloco.util import direct_members

# Closed lists.


@direct_members
class NodeCondition(Reason):
    """State of this node in one word."""

    JOINING = "joining", "looks for its run and for whom to join through"
    WAITING = "waiting", "no member of the run answers yet"
    CATCHING_UP = "catching-up", "copies what the others hold"
    TRAINING = "training", "makes inner steps and contributes"
    IDLE = "idle", "a full member that makes no steps: its machine's owner, or a limit of theirs, wants it so"
    AWAY = "away", "has left its run for now: the month's transfer is used up. It comes back by itself"
    PAUSED = "paused", "the run's owner has paused the run"
    ENDED = "ended", "the run is over; this node gives its result to whoever asks"
    LEAVING = "leaving", "finishes what is in flight, saves, and ends"
    SERVING = "serving", "a bootstrap: lists runs and helps peers to meet, trains nothing"


@direct_members
class Pulse(Reason):
    """Pulse of a run: whether versions come."""

    NEW = "new", "nothing is merged yet"
    ALIVE = "alive", "versions come as they should"
    LATE = "late", "the newest version is older than is usual here"
    STILL = "still", "no version has come for long, though learners train"
    PAUSED = "paused", "the run's owner has paused it"
    ENDED = "ended", "the run is over"
    UNKNOWN = "unknown", "no member of the run answers"


@direct_members
class MemberCondition(Reason):
    """State of a member as others see it."""

    HERE = "here", "trains and keeps up"
    BEHIND = "behind", "is a member, but something keeps it from contributing as it should"
    RESTING = "resting", "a full member that makes no inner steps now"
    SILENT = "silent", "was not heard of lately"


@direct_members
class BehindReason(Reason):
    """Reason for which a member is behind."""

    NONE = "", "nothing is wrong"
    SILENT = "silent", "no message came from it for longer than members are waited for"
    CATCHING_UP = "catching-up", "it copies the run's state and has no confirmed versions yet"
    OLD_VERSIONS = "old-versions", "it holds versions older than the newest"
    NOT_MERGED = "not-merged", "it trains, but its work was in none of the last merges"
    NO_DISK = "no-disk", "its disk takes nothing, so it has no vote"
    THIN_UPLINK = "thin-uplink", "its uplink carries less than an office asks"
    NOT_TRAINING = "not-training", "no learner runs there"
    DISAGREES = "disagrees", "its work goes where no other's goes, so it weighs less than half"
    EXPELLED = "expelled", "this node's loss audits have shown that its work does harm, or nothing"


@direct_members
class MarkKind(Reason):
    """Kind of a mark on the time axis."""

    JOIN = "join", "a member came"
    LEAVE = "leave", "a member said good-bye"
    SILENT = "silent", "a member went silent: it died, or its network did"
    ELECTION = "election", "members elect a syncer"
    OFFICE = "office", "a syncer took office, or laid it down"
    SUSPICION = "suspicion", "a syncer is not counted on any more, or left work out"
    FORK = "fork", "two histories met, and one gave way"
    EXCLUDED = "excluded", "a member is shown to have lied, and has lost its place for good"
    COURSE = "course", "the run's owner changed something, or the run rests or ends"
    FAULT = "fault", "something went wrong on this node: its learner, its link, its disk, its p2p process"


@direct_members
class Control(Reason):
    """Deed that the owner of the machine can do from the page."""

    PAUSE = "pause", "make no more steps until told to resume; what is done is handed over first"
    RESUME = "resume", "make steps again"
    FINISH = "finish", "hand over what is done, then leave"
    LIMITS = "limits", "change what this node may use"
    SEAT = "seat", "give a seat to a member that is proposed, as the run's owner"


MAX_CREDITS = 256
MAX_RUNS = 64
MAX_REASONS = 32
MAX_SVG = 32 * 1024


class LossCurve(Row, frozen=True, kw_only=True):
    """Held-out loss of the result over time and tokens, oldest first; the three lists are of one length."""

    at_s: Annotated[tuple[float, ...], Meta(max_length=MAX_POINTS)] = ()
    tokens: Annotated[tuple[Natural, ...], Meta(max_length=MAX_POINTS)] = ()
    """Tokens merged by then, the mean over fragments."""
    loss: Annotated[tuple[float, ...], Meta(max_length=MAX_POINTS)] = ()


class Forecast(Row, frozen=True, kw_only=True):
    """Forecast of the curve up to the end of the schedule: a power law through its later half."""

    tokens: Annotated[tuple[Natural, ...], Meta(max_length=MAX_POINTS)] = ()
    at_s: Annotated[tuple[float | None, ...], Meta(max_length=MAX_POINTS)] = ()
    """Times at which so many tokens will be merged, at the present pace; None: not known."""
    loss: Annotated[tuple[float, ...], Meta(max_length=MAX_POINTS)] = ()
    low: Annotated[tuple[float, ...], Meta(max_length=MAX_POINTS)] = ()
    """Lower bound: the forecast less twice the scatter of the points around the fit."""
    high: Annotated[tuple[float, ...], Meta(max_length=MAX_POINTS)] = ()


class ProgressView(CourseRow, frozen=True, kw_only=True):
    """Progress of the run: its course, and what the page adds."""

    ends_at_s: float | None = None
    """Time of the schedule's end at the present pace; None: not known, or past."""
    versions: Natural = 0
    """Versions of all fragments together."""
    tokens_per_s: float | None = None
    """Tokens that all members together train on a second, as they say."""


class NewestView(Row, frozen=True, kw_only=True):
    """Newest version of any fragment."""

    fragment: Natural = 0
    number: Natural = 0
    at_s: float | None = None
    """Time at which it came here; None: before this node started."""
    usual_s: float | None = None
    """Usual time between two versions of this run; None: not known."""
    contributors: Natural = 0
    """Number of members whose work is in it."""


class MemberView(PeerRow, frozen=True, kw_only=True):
    """Member of the run: its row, and how it stands. Times stand in place of ages."""

    state: MemberCondition = MemberCondition.HERE
    why: BehindReason = BehindReason.NONE
    """Reason of `behind` and `silent`; of others perhaps what is not ideal."""
    merged_at_s: float | None = None
    """Time at which the newest version with work of it came here; None: not known."""
    seen_at_s: float | None = None
    """Time of its last message; None: never heard directly."""
    is_me: bool = False
    """True: the node whose view this is."""


class StripView(FragmentRow, frozen=True, kw_only=True):
    """Fragment in the strip: its head and its syncer."""

    syncer_name: Text = ""
    at_s: float | None = None
    """Time at which its head came here; None: not known."""


class Mark(Row, frozen=True, kw_only=True):
    """Mark on the time axis: a fault, an election, somebody who came or went."""

    at_s: float
    kind: MarkKind
    words: Line = ""
    peer: Text = ""
    name: Text = ""
    fragment: Natural | None = None
    times: Natural = 1
    """Number of such events that this mark stands for: marks of one kind that are close are one."""


class CreditView(Row, frozen=True, kw_only=True):
    """Credit of one learner: what of its work is merged, by the signed labels in versions."""

    peer: Text
    name: Text = ""
    tokens: Natural = 0
    steps: Natural = 0
    contributions: Natural = 0
    first_at_s: float | None = None
    last_at_s: float | None = None


class JoinView(Row, frozen=True, kw_only=True):
    """Ways to join the run."""

    line: Annotated[str, Meta(max_length=2048)] = ""
    """Command that joins; empty: not known."""
    link: Annotated[str, Meta(max_length=2048)] = ""
    """Link as one string, which the QR carries."""
    qr_svg: Annotated[str, Meta(max_length=MAX_SVG)] = ""
    """SVG of the QR, ours alone, so it may be put into a page as it is; empty: none."""


class PublicView(Row, frozen=True, kw_only=True):
    """View of a run that anybody may see."""

    run_name: Text
    run_id: Text
    owner: Text = ""
    told_by: Text = ""
    """Peer id of the node whose view this is."""
    told_by_name: Text = ""
    made_at_s: float
    """Time of this view, by the clock of whoever made it: ages are counted from here."""
    since_s: float | None = None
    """Time since which whoever made it watches; before it, curves and marks may have gaps."""
    pulse: Pulse = Pulse.UNKNOWN
    newest: NewestView = NewestView()
    progress: ProgressView = ProgressView()
    heldout_loss: float | None = None
    """Newest loss of the result on held-out data, nats per token."""
    heldout_at_s: float | None = None
    heldout_by: Text = ""
    training_loss: float | None = None
    """Mean training loss of the members that said one."""
    curve: LossCurve = LossCurve()
    forecast: Forecast | None = None
    """None: too little is known for one."""
    members: Annotated[tuple[MemberView, ...], Meta(max_length=MAX_PEER_ROWS + 1)] = ()
    """Members, the one whose view this is first; then as they work: here, behind, resting, silent."""
    members_total: Natural = 0
    excluded: Annotated[tuple[ExcludedRow, ...], Meta(max_length=MAX_EXCLUDED_ROWS)] = ()
    """Peers that are shown to have lied, as whose view this is knows."""
    fragments: Annotated[tuple[StripView, ...], Meta(max_length=MAX_FRAGMENTS)] = ()
    marks: Annotated[tuple[Mark, ...], Meta(max_length=MAX_MARKS)] = ()
    """Marks of the time axis, oldest first."""
    data: DataRow | None = None
    """Data that was read, as the node whose view this is knows; None: not known."""
    credits: Annotated[tuple[CreditView, ...], Meta(max_length=MAX_CREDITS)] = ()
    """Credits, the most tokens first."""
    join: JoinView = JoinView()


class LinkView(Row, frozen=True, kw_only=True):
    """Link of this node and what it carries."""

    reach: Words = ""
    up_bits_per_s: float | None = None
    """Rate at which payload goes out just now; None: not measured yet."""
    down_bits_per_s: float | None = None
    known_up_bits_per_s: float | None = None
    """Rate that the link carries, as far as it was measured or is permitted; None: not known."""
    known_down_bits_per_s: float | None = None
    sent_bytes: Natural = 0
    received_bytes: Natural = 0
    carried: Annotated[dict[Text, Natural], Meta(max_length=MAX_REASONS)] = field(default_factory=dict)
    """Counters of what was carried, by kind (`Transfers.counters`), such as "pushed_bytes"."""
    words: Line = ""
    """Sentence about a link that does not keep up; empty: it does."""
    router: Line = ""
    """Words on what the router answered when it was asked to forward a port; empty: nothing."""


class OwnView(Row, frozen=True, kw_only=True):
    """View of this node that only the owner of the machine sees."""

    state: NodeCondition
    doubt: Line = ""
    """Reason to doubt what it has, as in `StatusReport`."""
    rest: Line = ""
    """Reason why it makes no steps, such as "idle: on battery since 14:02"; empty: nothing keeps it."""
    me: PeerRow = PeerRow(peer="")
    """This node as a member."""
    device: Text = ""
    step_time_s: float | None = None
    work: OwnWork = field(default_factory=OwnWork)
    """Contributions of this node since it started."""
    waiting: Natural = 0
    """Contributions, one per fragment, that are made and not merged yet."""
    link: LinkView = LinkView()
    refusals: Annotated[dict[Text, Natural], Meta(max_length=MAX_REASONS)] = field(default_factory=dict)
    """Counts of what peers did wrong, by reason."""
    expelled: dict[LossFinding, Natural] = field(default_factory=dict)
    """Numbers of members whose work this node refuses, by what its loss audits have shown."""
    recent: Annotated[tuple[Line, ...], Meta(max_length=MAX_RECENT_LINES)] = ()
    """Decisions made last, newest last."""
    controls: tuple[Control, ...] = ()
    """Deeds that the page may offer: POST /control/WORD."""
    limits: dict[Text, Text] = field(default_factory=dict)
    """Limits in force, by the flag's name without dashes, as a person writes them; empty text: none."""
    proposed: Proposed = ()
    """Seats that wait for the word of the run's owner, where its key is here: the page may offer `seat`."""


class RunChoice(Row, frozen=True, kw_only=True):
    """Run that is served beside this one; `/?run=ID` shows it."""

    run_id: Text
    run_name: Text


class RunView(Row, frozen=True, kw_only=True):
    """Everything that the page shows."""

    role: Words
    """Program that serves it: "node", "bootstrap", or "board" for static files."""
    version: Words
    """Release of the program."""
    public: PublicView | None = None
    """None: no run is known yet."""
    own: OwnView | None = None
    """None: for whoever may see the public part only."""
    runs: Annotated[tuple[RunChoice, ...], Meta(max_length=MAX_RUNS)] = ()
    """Runs that this program serves, if there are several."""


_encoder = msgspec.json.Encoder()


def encode_view(view: RunView) -> bytes:
    """Encode as JSON, as `/view` gives it."""
    return encoded(view, _encoder)


# Members: who is here, who is behind, and why.

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
CONDITION_ORDER = (
    MemberCondition.HERE,
    MemberCondition.BEHIND,
    MemberCondition.RESTING,
    MemberCondition.SILENT,
)


def member_views(
    rows: Iterable[PeerRow], now_s: float, usual_s: float | None, fragments: int, me: str
) -> tuple[MemberView, ...]:
    """Make the members' views: `me` first, then as they work. `usual_s`: between two versions of a run with
    so many fragments."""
    patience_s = max(LEAST_PATIENCE_S, PATIENCE * (usual_s or 0.0) * max(1, fragments))
    views = [_member_view(row, now_s, patience_s, row.peer == me) for row in rows]
    return tuple(sorted(views, key=lambda view: (not view.is_me, CONDITION_ORDER.index(view.state))))


def _member_view(row: PeerRow, now_s: float, patience_s: float, is_me: bool) -> MemberView:
    state, why = condition_of(row, patience_s)
    shown = structs.replace(
        row,
        last_seen_s=None,
        merged_age_s=None,
        tokens_per_s=round(row.tokens_per_s, 1),
        loss=sane_loss(row.loss),
    )
    return MemberView(
        **structs.asdict(shown),
        state=state,
        why=why,
        merged_at_s=_since(row.merged_age_s, now_s),
        seen_at_s=_since(row.last_seen_s, now_s),
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
            state=MemberCondition.SILENT,
            why=BehindReason.SILENT,
            seen_at_s=float(round(event.at_s + shift_s)),
        )
        for event in last.values()
        if event.kind == MarkKind.SILENT.value and now_s - event.at_s - shift_s < SHOWN_SILENT_S
    )


def condition_of(row: PeerRow, patience_s: float) -> tuple[MemberCondition, BehindReason]:
    """Find how a member stands, and why. The first reason counts: each explains those that follow."""
    if row.last_seen_s is None or row.last_seen_s >= SILENT_S:
        return MemberCondition.SILENT, BehindReason.SILENT
    if not row.confirmed:
        return MemberCondition.BEHIND, BehindReason.CATCHING_UP
    if not row.votes:
        return MemberCondition.BEHIND, BehindReason.NO_DISK
    if not row.learning:
        return MemberCondition.RESTING, BehindReason.NOT_TRAINING
    if row.behind_versions >= BEHIND_VERSIONS:
        return MemberCondition.BEHIND, BehindReason.THIN_UPLINK if row.thin else BehindReason.OLD_VERSIONS
    if row.expelled is not None:
        return MemberCondition.BEHIND, BehindReason.EXPELLED
    if row.merged_age_s is not None and row.merged_age_s > patience_s:
        return MemberCondition.BEHIND, BehindReason.THIN_UPLINK if row.thin else BehindReason.NOT_MERGED
    if row.weighs is not None and row.weighs < DISAGREES_BELOW:
        return MemberCondition.HERE, BehindReason.DISAGREES
    return MemberCondition.HERE, BehindReason.THIN_UPLINK if row.thin else BehindReason.NONE


def _since(age_s: float | None, now_s: float) -> float | None:
    """Compute the time of something, to the second: what is a little younger is nothing new."""
    return None if age_s is None else float(round(now_s - age_s))


# The public view, of a member's report, whether that is our own or another's.

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
        data=report.data,
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
    return any(member.state in (MemberCondition.HERE, MemberCondition.BEHIND) for member in members)


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
    course = structs.asdict(structs.replace(report.course, left_s=None))
    rates = [m.tokens_per_s for m in members if m.state in (MemberCondition.HERE, MemberCondition.BEHIND)]
    rate = sum(value for value in rates if math.isfinite(value) and value >= 0)
    return ProgressView(
        **course,
        ends_at_s=ends_at_s,
        versions=report.run_versions,
        tokens_per_s=round(rate, 1) if rates else None,
    )


def _strip(row: FragmentRow, names: dict[str, str], at_s: dict[int, float]) -> StripView:
    came_s = at_s.get(row.index)
    return StripView(
        **structs.asdict(row),
        syncer_name=names.get(row.syncer, ""),
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


# Forecast of the held-out loss: a + b · tokens^-c through the later half of what was measured.

LEAST_POINTS = 8
STEPS = 32
EXPONENTS = tuple(step / 20 for step in range(2, 25))
SCATTERS = 2.0


class PowerLaw(Struct, frozen=True):
    """Power law through points."""

    floor: float
    factor: float
    exponent: float
    scatter: float
    """Root of the mean squared distance from the points."""

    def at(self, tokens: float) -> float:
        """Compute the loss at so many tokens."""
        return self.floor + self.factor * float(tokens**-self.exponent)


@lru_cache(maxsize=16)
def fit_power_law(points: tuple[LossPoint, ...]) -> PowerLaw | None:
    """Fit the later half of the points, by tokens; None: they are too few, or do not fall."""
    known = [point for point in points if point.tokens > 0]
    if len(known) < LEAST_POINTS:
        return None
    later = [point for point in known if point.tokens >= known[-1].tokens / 2]
    used = later if len(later) >= LEAST_POINTS else known[-LEAST_POINTS:]
    fits = [found for exponent in EXPONENTS if (found := _line(used, exponent)) is not None]
    return min(fits, key=lambda found: found.scatter, default=None)


def _line(points: Sequence[LossPoint], exponent: float) -> PowerLaw | None:
    xs, ys = [point.tokens**-exponent for point in points], [point.loss for point in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    floor = mean_y - slope * mean_x
    if slope <= 0 or floor < 0:
        return None
    squares = sum((floor + slope * x - y) ** 2 for x, y in zip(xs, ys, strict=True))
    return PowerLaw(floor, slope, exponent, math.sqrt(squares / len(xs)))


def forecast(
    points: tuple[LossPoint, ...], tokens: int, schedule_tokens: int, now_s: float, ends_at_s: float | None
) -> Forecast | None:
    """Forecast the curve from the last point to the end of the schedule; None: nothing is left, or known.

    A cosine schedule ends lower than the power law says, so this is a cautious guess; the page calls it a
    forecast, with its scatter around it.
    """
    found = fit_power_law(points)
    if found is None or schedule_tokens <= max(tokens, points[-1].tokens):
        return None
    first = points[-1].tokens
    ahead = [first + (schedule_tokens - first) * step // STEPS for step in range(STEPS + 1)]
    expected = [found.at(token) for token in ahead]
    # The fit need not go through the newest point, but what is drawn does: the step fades out.
    step = points[-1].loss - expected[0]
    loss = [value + step * (1 - place / STEPS) for place, value in enumerate(expected)]
    band = SCATTERS * found.scatter
    left = schedule_tokens - tokens
    pace_s = None if ends_at_s is None else (ends_at_s - now_s) / left
    return Forecast(
        tokens=tuple(ahead),
        at_s=tuple(None if pace_s is None else round(now_s + (t - tokens) * pace_s, 1) for t in ahead),
        loss=tuple(round(value, 5) for value in loss),
        low=tuple(round(value - band, 5) for value in loss),
        high=tuple(round(value + band, 5) for value in loss),
    )


# Ways to join: a command, a link, and its QR.


def join_view(run: PublishedRun, addresses: Sequence[str]) -> JoinView:
    """Make it of the addresses of whoever shows the page; of a run that is not open nobody joins by these."""
    if not addresses or run.manifest.admission.mode != "open":
        return JoinView()
    try:
        link = link_of(run, addresses)
    except ConfigError:  # addresses that no link can hold
        return JoinView(line=f"p2pdiloco node --join {addresses[0]} --run {run.id}")
    return JoinView(line=f"p2pdiloco node {link}", link=link, qr_svg=qr_svg(link))


@lru_cache(maxsize=64)
def qr_svg(text: str) -> str:
    """Draw a QR; empty: the text is too long for one, or the package is not installed."""
    try:
        import segno
    except ModuleNotFoundError:  # a bootstrap needs few packages
        return ""
    try:
        drawn = segno.make(text, error="l", micro=False).svg_inline(omitsize=True, border=2)
    except segno.DataOverflowError:
        return ""
    return drawn if len(drawn) <= MAX_SVG else ""
