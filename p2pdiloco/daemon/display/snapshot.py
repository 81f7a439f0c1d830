"""Snapshots and reports of a node: for the live view, log lines, and `status` over the wire.

Plain values only, encodable as msgpack and JSON. A `StatusReport` may come from a stranger, so its texts and
sequences are bounded and its decoding is strict. The largest ordinary report (1024 fragments, 64 peers) stays
below the 256 KiB of a control message. Unknown numbers are None (never NaN), so that JSON readers need no
special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from p2pdiloco.core.api.config import Going
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.fork_choice import Grounds
from p2pdiloco.daemon.display.bounds import (
    MAX_LOSS,
    HexDigest,
    Line,
    Natural,
    Row,
    Seconds,
    Share,
    Text,
    Words,
)
from p2pdiloco.daemon.display.own_rows import MAX_EXCLUDED_ROWS, ExcludedRow, RestRow, TransferRow
from p2pdiloco.daemon.display.series import Events, Points
from p2pdiloco.errors import RemoteError, encoded

MAX_PEER_ROWS = 64
MAX_FRAGMENT_ROWS = 1024
MAX_RECENT_LINES = 20
MAX_LOSS_HISTORY = 120
MAX_REFUSAL_REASONS = 32
MAX_BULK_COUNTERS = 32
MAX_REPORT_BYTES = 256 * 1024

NodeState = Literal["joining", "waiting", "catching up", "training", "idle", "paused", "ended", "leaving"]
"""State of a node. Paused and ended is the run; idle is this node alone, by the wish of its machine's owner
(`RestRow`)."""
SETTLED = ("training", "idle", "paused", "ended", "leaving")
"""States of a full member, whose answer is as good as any; beside others, more are asked."""


class PeerRow(Row, frozen=True, kw_only=True):
    """Row of one member of the run, as this node knows it."""

    peer: Text
    name: Text = ""
    inner_step: Natural = 0
    tokens_per_s: float = 0.0
    tokens_total: Natural = 0
    last_seen_s: Seconds | None = None
    """Seconds since its last message; None: it was never heard directly (known from the DHT only)."""
    confirmed: bool = False
    """True: it holds versions that peers confirm."""
    votes: bool = True
    """True: it can save a vote, as it says. A member that cannot, because its disk is full, has none."""
    learning: bool = True
    offices: Natural = 0
    """Number of fragments whose syncer it is."""
    loss: float | None = None
    """Training loss, as it says; None: it said none, or is a stranger, whose word does not count."""
    reach: Words = ""
    """Reach of the member, as it says: "direct", "relayed" or "outbound only"; empty: not known."""
    thin: bool = False
    """True: its uplink carries less than an office asks, as it says."""
    behind_versions: Natural = 0
    """Versions of one fragment by which its head is behind ours, of the fragment where that is most."""
    in_last_merge: bool = False
    """True: work of it is in the newest version that came here."""
    merged_age_s: Seconds | None = None
    """Seconds since a version with work of it came here; None: none did since this node started."""
    weighs: Share | None = None
    """Weight of its work beside as much of a usual member's, 0 to 1, the mean over fragments
    (docs/protocol/weights.md, section 5); None: nothing of it is merged."""
    expelled: LossFinding | None = None
    """Finding of this node's loss audits for which it refuses its work (docs/protocol/loss-audits.md)."""


class FragmentRow(Row, frozen=True, kw_only=True):
    """Row of one fragment: its head, and what goes on around it."""

    index: Natural
    number: Natural
    """Version number of the head."""
    digest: HexDigest = ""
    term: Natural = 0
    syncer: Text = ""
    """Peer id of our leaf group's syncer; empty: nobody is known to be in office."""
    tokens: Natural = 0
    """Cumulative tokens merged into the head."""
    state: Words = "idle"
    """State of its round: "idle", "collecting 2/3", "grace 0.8 s", "merging", "electing", ..."""
    pending: Words = ""
    """State of our own contribution: "sent", "re-sending", "encoding"; empty: none is pending."""
    epoch: Natural = 0
    """Epoch of the groups; it grows when they rotate."""
    groups: Natural = 1
    """Leaf groups that make the next version; 1: all members are in one."""
    levels: Natural = 1
    """Levels of groups: leaf groups, groups of their syncers, and so on up to the one at the top."""
    group: Natural = 0
    """Index of our leaf group."""
    root: Text = ""
    """Peer id of the member that made the newest version, as syncer of the topmost group."""
    level: Natural | None = None
    """Highest level of groups on which this node is a syncer, 0 for leaves; None: it is none."""


class NewestRow(Row, frozen=True, kw_only=True):
    """Row of the version that came last, of whatever fragment."""

    fragment: Natural
    number: Natural
    age_s: Seconds
    """Seconds since it came here."""
    contributors: Natural = 0
    """Number of members whose work is in it."""
    usual_s: float | None = None
    """Usual time between two versions; None: not known."""


class DataRow(Row, frozen=True, kw_only=True):
    """Progress of a node in the data that it reads (docs/topics/data.md)."""

    epoch: Natural = 0
    """Epoch of the data; the first one is 0."""
    shards: Natural = 0
    """Number of shards into which the data of an epoch is cut."""
    begun: Natural = 0
    """Shards of this epoch that were begun: by this node or, as far as it knows, by others that read the
    same."""
    tokens: Natural = 0
    """Tokens that this node has trained on, in all epochs."""


class CourseRow(Row, frozen=True, kw_only=True):
    """Row of how far the run is (`daemon.learner.course`)."""

    tokens: Natural = 0
    """Tokens merged, the mean over fragments."""
    schedule_tokens: Natural = 0
    """Length of the schedule that is in force."""
    left_s: float | None = None
    """Time to the end of the schedule, at the pace of the last ten minutes; None: not known."""
    rests: Literal["no", "paused", "ended"] = "no"
    amendment: Natural = 0
    """Number of the owner's newest amendment; 0: there is none."""
    amendment_from_tokens: Natural = 0
    """Tokens from which on that holds."""
    amendment_schedule_tokens: Natural = 0
    """Length that it gives the schedule; 0: the manifest's."""
    amendment_rate_factor: float = 1.0
    amendment_going: Going = Going.TRAIN
    rate_factor: float = 1.0
    """Factor of the inner learning rate that is in force."""
    message: Line = ""
    """Message of the run's owner."""


class NodeSnapshot(Row, frozen=True, kw_only=True):
    """Everything that the live view of one node shows, taken by the daemon a few times a second."""

    name: Text
    peer: Text
    run_name: Text
    run_id: Text
    state: NodeState
    device: Text = ""
    inner_step: Natural = 0
    loss: float | None = None
    loss_history: Annotated[tuple[float, ...], Meta(max_length=MAX_LOSS_HISTORY)] = ()
    """Training losses, oldest first, evenly thinned."""
    heldout_loss: float | None = None
    """Loss of the global parameters Theta on held-out text, nats per token; None: not evaluated yet."""
    heldout_by: Text = ""
    """Peer id of the member that measured it."""
    heldout_age_s: Seconds | None = None
    """Seconds since it was measured, or heard of."""
    learner_age_s: float | None = None
    """Seconds since the learner last said how it is doing; None: it never did."""
    tokens_per_s: float = 0.0
    tokens_total: Natural = 0
    """Tokens trained by this node."""
    data: DataRow | None = None
    """Progress in the data; None: no learner of ours reads any (yet)."""
    step_time_s: float | None = None
    copied_share: float | None = None
    """Part of the run's state that is here, while some of it is copied from peers, 0 to 1; else None."""
    peers: Annotated[tuple[PeerRow, ...], Meta(max_length=MAX_PEER_ROWS)] = ()
    """Other members, without this node."""
    peers_total: Natural = 0
    """Number of other members, with those beyond `peers`' bound."""
    fragments: Annotated[tuple[FragmentRow, ...], Meta(max_length=MAX_FRAGMENT_ROWS)] = ()
    """Rows of the fragments, by index."""
    run_tokens: Natural = 0
    """Tokens merged, the mean over fragments, as in `CourseRow`."""
    run_versions: Natural = 0
    refusals: Annotated[dict[Text, Natural], Meta(max_length=MAX_REFUSAL_REASONS)] = field(
        default_factory=dict
    )
    """Counts of what peers did wrong, by reason."""
    recent: Annotated[tuple[Line, ...], Meta(max_length=MAX_RECENT_LINES)] = ()
    """Decisions made last, with their reasons, newest last."""
    bytes_sent: Natural = 0
    bytes_received: Natural = 0
    bulk: Annotated[dict[Text, Natural], Meta(max_length=MAX_BULK_COUNTERS)] = field(default_factory=dict)
    """Counters of bulk transfers (`Transfers.counters`)."""
    reach: Words = ""
    """Reach of this node, as in `PeerRow`."""
    thin: bool = False
    """True: the uplink of this node carries less than an office asks, as in `PeerRow`."""
    votes: bool = True
    """True: this node can save a vote, as in `PeerRow`."""
    link: Line = ""
    """Reason why the link does not keep up, and what is done about it; empty: it keeps up."""
    course: CourseRow = CourseRow()
    """Progress of the run."""
    start: Grounds | None = None
    """Grounds on which this node took what it began with; None: it came with that, or started the run."""
    rest: RestRow | None = None
    """Reason why the learner rests by the wish of its machine's owner; None: it does not."""
    transfer: TransferRow | None = None
    """Bytes of this month; None: they are not counted (yet)."""
    excluded: Annotated[tuple[ExcludedRow, ...], Meta(max_length=MAX_EXCLUDED_ROWS)] = ()
    """Peers of which this node has a proof that they lied."""
    in_last_merge: bool = False
    merged_age_s: Seconds | None = None
    weighs: Share | None = None
    """Part of this node in the last merges, as in `PeerRow`."""
    newest: NewestRow | None = None
    """Version that came last; None: none did since this node started."""
    curve: Points = ()
    """Held-out loss over tokens, as far as this node was there."""
    marks: Events = ()
    """Faults, elections, and members that came and went."""
    clock_s: Seconds = 0.0
    """Seconds since 1970 by this node's clock."""


class StatusReport(Row, frozen=True, kw_only=True):
    """Answer to `status`: the run as one node sees it."""

    run_name: Text
    run_id: Text
    answered_by: Text
    """Peer id of the node whose view this is."""
    state: NodeState
    members: Annotated[tuple[PeerRow, ...], Meta(max_length=MAX_PEER_ROWS + 1)] = ()
    """Members, the answering node first."""
    members_total: Natural = 0
    fragments: Annotated[tuple[FragmentRow, ...], Meta(max_length=MAX_FRAGMENT_ROWS)] = ()
    run_tokens: Natural = 0
    """Tokens merged, the mean over fragments, as in `CourseRow`."""
    run_versions: Natural = 0
    loss: float | None = None
    """Mean training loss over the members that reported one."""
    heldout_loss: float | None = None
    heldout_by: Text = ""
    """Peer id of the member that measured it: the newest loss of all members' that the answering node
    knows of."""
    refusals: Annotated[dict[Text, Natural], Meta(max_length=MAX_REFUSAL_REASONS)] = field(
        default_factory=dict
    )
    recent: Annotated[tuple[Line, ...], Meta(max_length=MAX_RECENT_LINES)] = ()
    link: Line = ""
    """Reason why the answering node's link does not keep up, as in `NodeSnapshot`."""
    data: DataRow | None = None
    """Progress of the answering node in its data, as in `NodeSnapshot`."""
    bulk: Annotated[dict[Text, Natural], Meta(max_length=MAX_BULK_COUNTERS)] = field(default_factory=dict)
    """Counters of the answering node's transfers, as in `NodeSnapshot`."""
    course: CourseRow = CourseRow()
    """Progress of the run, for the answering node."""
    start: Grounds | None = None
    """Grounds of the answering node, as in `NodeSnapshot`."""
    heldout_age_s: Seconds | None = None
    """Seconds since the held-out loss was measured, or heard of."""
    rest: RestRow | None = None
    """Rest of the answering node, as in `NodeSnapshot`; empty on the wire: only its owner may know."""
    transfer: TransferRow | None = None
    """Bytes of the answering node, as in `NodeSnapshot`; empty on the wire, too."""
    newest: NewestRow | None = None
    curve: Points = ()
    marks: Events = ()
    """Version that came last, curve and marks, as in `NodeSnapshot`; their times are by that node's clock."""
    clock_s: Seconds = 0.0
    """Seconds since 1970 by the answering node's clock."""
    excluded: Annotated[tuple[ExcludedRow, ...], Meta(max_length=MAX_EXCLUDED_ROWS)] = ()
    """Peers that the answering node excludes."""


def status_of(snapshot: NodeSnapshot) -> StatusReport:
    """Make the status report that a node gives of its run: itself as the first member, then its peers."""
    me = PeerRow(
        peer=snapshot.peer,
        name=snapshot.name,
        inner_step=snapshot.inner_step,
        tokens_per_s=snapshot.tokens_per_s,
        tokens_total=snapshot.tokens_total,
        last_seen_s=0.0,
        confirmed=snapshot.state in SETTLED,
        votes=snapshot.votes,
        learning=snapshot.state == "training",
        offices=len(offices_of(snapshot)),
        loss=snapshot.loss,
        reach=snapshot.reach,
        thin=snapshot.thin,
        in_last_merge=snapshot.in_last_merge,
        merged_age_s=snapshot.merged_age_s,
        weighs=snapshot.weighs,
    )
    members = (me, *snapshot.peers)
    losses = [loss for member in members if (loss := sane_loss(member.loss)) is not None]
    return StatusReport(
        run_name=snapshot.run_name,
        run_id=snapshot.run_id,
        answered_by=snapshot.peer,
        state=snapshot.state,
        members=members,
        members_total=max(snapshot.peers_total, len(snapshot.peers)) + 1,
        fragments=snapshot.fragments,
        run_tokens=snapshot.run_tokens,
        run_versions=snapshot.run_versions,
        loss=sum(losses) / len(losses) if losses else None,
        heldout_loss=snapshot.heldout_loss,
        heldout_by=snapshot.heldout_by,
        heldout_age_s=snapshot.heldout_age_s,
        refusals=snapshot.refusals,
        recent=snapshot.recent,
        link=snapshot.link,
        data=snapshot.data,
        bulk=snapshot.bulk,
        course=snapshot.course,
        start=snapshot.start,
        rest=snapshot.rest,
        transfer=snapshot.transfer,
        newest=snapshot.newest,
        curve=snapshot.curve,
        marks=snapshot.marks,
        clock_s=snapshot.clock_s,
        excluded=snapshot.excluded,
    )


def sane_loss(loss: float | None) -> float | None:
    """Return what is said to be a loss, or None if it is not finite, or can be none."""
    return loss if loss is not None and abs(loss) <= MAX_LOSS else None


def offices_of(snapshot: NodeSnapshot) -> list[int]:
    """List the indices of the fragments whose syncer this node is."""
    return [row.index for row in snapshot.fragments if row.syncer == snapshot.peer]


def newest_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Cut the lines to the newest, and each to what a snapshot may carry."""
    return tuple(line[:240] for line in lines[-MAX_RECENT_LINES:])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StatusReport)


def encode_status(report: StatusReport) -> bytes:
    """Encode as msgpack for the wire, below `MAX_REPORT_BYTES` for 1024 fragments and 64 peers.

    With so many fragments it is without what has been, and without who made their versions.
    """
    rows = tuple(msgspec.structs.replace(row, root="") for row in report.fragments)
    for shortened in ({}, {"curve": (), "marks": ()}, {"fragments": rows}):
        report = msgspec.structs.replace(report, **shortened)
        data = encoded(report, _encoder)
        if len(data) <= MAX_REPORT_BYTES:
            break
    return data


def decode_status(data: bytes) -> StatusReport:
    """Decode what `encode_status` made, strictly.

    Raises:
        RemoteError: "bad-status", for anything else than a legal report.
    """
    if len(data) > MAX_REPORT_BYTES:
        raise RemoteError("bad-status", f"{len(data)} bytes")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteError("bad-status", str(error)[:200]) from error
