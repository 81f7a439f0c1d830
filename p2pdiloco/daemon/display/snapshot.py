"""Snapshots and reports of a node: for the live view, log lines, and `status` over the wire; and their
wording.

Plain values only, encodable as msgpack and JSON. A `StatusReport` may come from a stranger, so its texts and
sequences are bounded and its decoding is strict. The largest ordinary report (1024 fragments, 64 peers) stays
below the 256 KiB of a control message. Unknown numbers are None (never NaN), so that JSON readers need no
special case.

The functions at the end word numbers, names and times for people, made safe: names and reasons come from
peers.
"""

from __future__ import annotations

import datetime
import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, field, msgpack
from msgspec.structs import replace
from rich.cells import cell_len, set_cell_size

from p2pdiloco.core.api.config import Going
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.distrust import Excluded
from p2pdiloco.core.fork_choice import Grounds
from p2pdiloco.daemon.display.timeline import (
    MAX_LOSS,
    Events,
    HexDigest,
    Line,
    Natural,
    Points,
    Row,
    Seconds,
    Share,
    Text,
    Words,
)
from p2pdiloco.errors import RemoteError, clean, encoded
from p2pdiloco.util import DAMAGE, Frozen

MAX_PEER_ROWS = 64
MAX_FRAGMENT_ROWS = 1024
MAX_RECENT_LINES = 20
MAX_LOSS_HISTORY = 120
MAX_REFUSAL_REASONS = 32
MAX_BULK_COUNTERS = 32
MAX_PROPOSED = 5
ENOUGH_SEATS = 5
"""Seats of an open run below which its owner is asked for more."""


MAX_EXCLUDED_ROWS = 32
MAX_REPORT_BYTES = 256 * 1024

NodeState = Literal["joining", "waiting", "catching up", "training", "idle", "paused", "ended", "leaving"]
"""State of a node. Paused and ended is the run; idle is this node alone, by the wish of its machine's owner
(`PauseRow`)."""
SETTLED = ("training", "idle", "paused", "ended", "leaving")
"""States of a full member, whose answer is as good as any; beside others, more are asked."""


class PauseReason(enum.Enum):
    """Reason why this node's learner rests: a closed list of what its machine's owner may want.

    The first that holds, in this order, is the one that is said.
    """

    FINISHING = "finishing"
    """Wish to leave, `p2pdiloco finish`: what was made is handed over, then the node leaves."""
    PAUSED = "paused"
    """Wish to rest, `p2pdiloco pause`."""
    TRANSFER = "transfer"
    """Budget, `--max-transfer`: this month's bytes are used up. The node leaves, and comes back by itself."""
    HOURS = "hours"
    """Schedule, `--hours`: it is outside of them."""
    BATTERY = "battery"
    """Battery, `--not-on-battery`: there is no mains power."""
    IN_USE = "in-use"
    """Use, `--when-idle`: somebody, or another program, uses the machine."""
    TEMPERATURE = "temperature"
    """Bound, `--max-temperature`: GPU or CPU are hotter."""
    POWER = "power"
    """Bound, `--max-power`: the GPU draws more."""

    @property
    def is_at_once(self) -> bool:
        """True: it begins and ends as it is said, by a person or a clock."""
        return self in _AT_ONCE

    @property
    def leaves(self) -> bool:
        """True: the node leaves its run for it, when all is handed over."""
        return self is PauseReason.FINISHING or self is PauseReason.TRANSFER


_AT_ONCE = frozenset({PauseReason.FINISHING, PauseReason.PAUSED, PauseReason.TRANSFER, PauseReason.HOURS})


class Finding(Frozen):
    """Finding of one source: why the learner is to rest now."""

    reason: PauseReason
    words: str
    """Words for people: "on battery", "the GPU is hotter than 80 °C"."""
    ends: str
    """Words on what ends it, for people: "mains power is back"."""
    since: float = 0.0
    """Time since which it is so, in seconds since 1970; 0: since it was found first."""


class PauseRow(Row, kw_only=True):
    """Row of why this node's learner rests, by the wish of its machine's owner (`daemon.owner.pauses`)."""

    reason: PauseReason
    since: float = 0.0
    """Seconds since 1970, by the node's clock."""
    words: Line = ""
    """Words for one line: "idle: on battery since 14:02, until mains power is back"."""
    ends: Line = ""
    """Words on what ends it."""
    handed_over: bool = False
    """True: all that was made is merged."""


class TransferRow(Row, kw_only=True):
    """Row of the bytes that this node moved in a calendar month, over all its lives
    (docs/topics/limits.md)."""

    month: Words = ""
    """Month as "2026-11", by the node's clock."""
    sent_bytes: Natural = 0
    received_bytes: Natural = 0
    budget_bytes: Natural = 0
    """Bytes both ways that its owner permits; 0: no bound."""


class ExcludedRow(Row, kw_only=True):
    """Row of a peer that is shown to have lied (docs/protocol/proofs.md)."""

    peer: Text
    name: Text = ""
    reason: Line = ""
    """Words on what it did."""


class PeerRow(Row, kw_only=True):
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
    seated: bool = False
    """True: it has a seat, by which it votes and merges (docs/protocol/seats.md)."""


class ProposedSeat(Row, kw_only=True):
    """Member without a seat to which the run's owner could give one."""

    peer: Text
    name: Text = ""


Proposed = Annotated[tuple[ProposedSeat, ...], Meta(max_length=MAX_PROPOSED)]


class FragmentRow(Row, kw_only=True):
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
    final: Natural = 0
    """Newest version that two thirds of the seats have attested, and then the next milestone on top of it."""


class NewestRow(Row, kw_only=True):
    """Row of the version that came last, of whatever fragment."""

    fragment: Natural
    number: Natural
    age_s: Seconds
    """Seconds since it came here."""
    contributors: Natural = 0
    """Number of members whose work is in it."""
    usual_s: float | None = None
    """Usual time between two versions; None: not known."""


class DataRow(Row, kw_only=True):
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


class CourseRow(Row, kw_only=True):
    """Row of how far the run is (`daemon.course`)."""

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
    seats: Natural | None = None
    """Number of seats of an open run, in the fragment that has the fewest; None: it is not open."""
    absent: Natural = 0
    """Number of seats that attested nothing for half of the run, in which nothing became final."""


class StatusReport(Row, kw_only=True):
    """Answer to `status`: the run as one node sees it."""

    run_name: Text
    run_id: Text
    answered_by: Text
    """Peer id of the node whose view this is."""
    state: NodeState
    members: Annotated[tuple[PeerRow, ...], Meta(max_length=MAX_PEER_ROWS + 1)] = ()
    """Members, the answering node first."""
    members_total: Natural = 0
    """Number of members, with those beyond `members`' bound."""
    fragments: Annotated[tuple[FragmentRow, ...], Meta(max_length=MAX_FRAGMENT_ROWS)] = ()
    """Rows of the fragments, by index."""
    run_tokens: Natural = 0
    """Tokens merged, the mean over fragments, as in `CourseRow`."""
    run_versions: Natural = 0
    loss: float | None = None
    """Mean training loss over the members that reported one."""
    heldout_loss: float | None = None
    """Newest loss of the global parameters Theta on held-out text, nats per token, of all members' that the
    answering node knows of; None: not evaluated yet."""
    heldout_by: Text = ""
    """Peer id of the member that measured it."""
    refusals: Annotated[dict[Text, Natural], Meta(max_length=MAX_REFUSAL_REASONS)] = field(
        default_factory=dict
    )
    """Counts of what peers did wrong, by reason."""
    recent: Annotated[tuple[Line, ...], Meta(max_length=MAX_RECENT_LINES)] = ()
    """Decisions made last, with their reasons, newest last."""
    doubt: Line = ""
    """Reason to doubt that what the answering node has is what all will have; empty: there is none."""
    link: Line = ""
    """Reason why the answering node's link does not keep up, and what is done about it; empty: it does."""
    router: Line = ""
    """Words on what the router answered when it was asked to forward a port; empty: nothing."""
    data: DataRow | None = None
    """Progress of the answering node in its data; None: no learner of its reads any (yet)."""
    bulk: Annotated[dict[Text, Natural], Meta(max_length=MAX_BULK_COUNTERS)] = field(default_factory=dict)
    """Counters of the answering node's transfers (`Transfers.counters`)."""
    course: CourseRow = CourseRow()
    """Progress of the run, for the answering node."""
    start: Grounds | None = None
    """Grounds on which the answering node took what it began with; None: it came with that, or started the
    run."""
    heldout_age_s: Seconds | None = None
    """Seconds since the held-out loss was measured, or heard of."""
    rest: PauseRow | None = None
    """Reason why the answering node's learner rests by the wish of its machine's owner; None: it does not.
    Empty on the wire: only its owner may know."""
    transfer: TransferRow | None = None
    """Bytes of this month; None: they are not counted (yet); empty on the wire, too."""
    newest: NewestRow | None = None
    """Version that came last; None: none did since the answering node started."""
    curve: Points = ()
    """Held-out loss over tokens, as far as the answering node was there."""
    marks: Events = ()
    """Faults, elections, and members that came and went; times are by that node's clock."""
    clock_s: Seconds = 0.0
    """Seconds since 1970 by the answering node's clock."""
    excluded: Annotated[tuple[ExcludedRow, ...], Meta(max_length=MAX_EXCLUDED_ROWS)] = ()
    """Peers of which the answering node has a proof that they lied."""
    proposed: Proposed = ()
    """Seats that wait for the word of the run's owner; empty on the wire, as `rest`."""


class NodeSnapshot(StatusReport, kw_only=True):
    """Everything that a node shows on its own machine, taken a few times a second."""

    device: Text = ""
    loss_history: Annotated[tuple[float, ...], Meta(max_length=MAX_LOSS_HISTORY)] = ()
    """Training losses of this node, oldest first, evenly thinned."""
    learner_age_s: float | None = None
    """Seconds since the learner last said how it is doing; None: it never did."""
    step_time_s: float | None = None
    copied_share: float | None = None
    """Part of the run's state that is here, while some of it is copied from peers, 0 to 1; else None."""
    bytes_sent: Natural = 0
    bytes_received: Natural = 0

    @property
    def me(self) -> PeerRow:
        """Row of this node."""
        return self.members[0]

    @property
    def peers(self) -> tuple[PeerRow, ...]:
        """Rows of the other members."""
        return self.members[1:]

    @property
    def peers_total(self) -> int:
        """Number of other members, with those that have no row."""
        return max(self.members_total, len(self.members)) - 1


def status_of(snapshot: NodeSnapshot) -> StatusReport:
    """Make the status report that a node gives of its run."""
    return StatusReport(**{name: getattr(snapshot, name) for name in StatusReport.__struct_fields__})


def mean_loss(members: Iterable[PeerRow]) -> float | None:
    """Compute the mean training loss over those that reported one; None: nobody did."""
    losses = [loss for member in members if (loss := sane_loss(member.loss)) is not None]
    return sum(losses) / len(losses) if losses else None


def sane_loss(loss: float | None) -> float | None:
    """Return what is said to be a loss, or None if it is not finite, or can be none."""
    return loss if loss is not None and abs(loss) <= MAX_LOSS else None


def offices_of(fragments: Iterable[FragmentRow], peer: str) -> list[int]:
    """List the indices of the fragments whose syncer that peer is."""
    return [row.index for row in fragments if row.syncer == peer]


def excluded_rows(excluded: Excluded, name_of: Callable[[str], str]) -> tuple[ExcludedRow, ...]:
    """Make the rows of those who were found out last."""
    pairs = list(zip(excluded.peers, excluded.proofs, strict=True))[-MAX_EXCLUDED_ROWS:]
    return tuple(ExcludedRow(peer=peer, name=name_of(peer), reason=proof.words()) for peer, proof in pairs)


def newest_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Cut the lines to the newest, and each to what a snapshot may carry."""
    return tuple(line[:240] for line in lines[-MAX_RECENT_LINES:])


_encoder = msgpack.Encoder()
_decoder = msgpack.Decoder(StatusReport)


def encode_status(report: StatusReport) -> bytes:
    """Encode as msgpack for the wire, below `MAX_REPORT_BYTES` for 1024 fragments and 64 peers.

    With so many fragments it is without what has been, and without who made their versions.
    """
    rows = tuple(replace(row, root="") for row in report.fragments)
    for shortened in ({}, {"curve": (), "marks": ()}, {"fragments": rows}):
        report = replace(report, **shortened)
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
        # What waits for an owner's word is not for others to say.
        return replace(_decoder.decode(data), proposed=())
    except DAMAGE as error:
        raise RemoteError("bad-status", str(error)[:200]) from error


SPARKS = "▁▂▃▄▅▆▇█"


def fit(text: str, cells: int) -> str:
    """Fit a text, cleaned, into exactly `cells` columns of a terminal; a longer one is cut with an
    ellipsis."""
    text = clean(text)
    if cell_len(text) > cells:
        text = set_cell_size(text, max(0, cells - 1)) + "…"
    return set_cell_size(text, cells)


def folded(text: str, cells: int) -> list[str]:
    """Fold a cleaned text into lines of at most so many columns, between words where that can be."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= cells:
            lines[-1] = longer
            continue
        if lines[-1].strip():
            lines.append("")
        while cell_len(word) > cells:
            head = set_cell_size(word, cells)
            lines[-1] = head
            lines.append("")
            word = word[len(head.rstrip()) or 1 :]
        lines[-1] = word
    return lines


def clock_text(at: float, now: float | None = None) -> str:
    """Word a time for people: "14:02" within the last half a day, else with the day."""
    when = datetime.datetime.fromtimestamp(at)
    today = datetime.datetime.now() if now is None else datetime.datetime.fromtimestamp(now)
    near = abs((today - when).total_seconds()) < 12 * 3600
    return when.strftime("%H:%M" if near else "%Y-%m-%d %H:%M")


def short_peer(peer: str) -> str:
    """Shorten a peer id to its end: all beginnings are alike."""
    return clean(peer[-6:])


def count(number: float | None) -> str:
    """Word a number with three significant digits: "950", "15.2k", "3.4M"; "-" for unknown."""
    if number is None or not math.isfinite(number):
        return "-"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * scale:
            return (
                f"{number / scale:.3g}{unit}" if abs(number) < 1000 * scale else f"{number / scale:.0f}{unit}"
            )
    return f"{number:.0f}"


def counted(number: int, noun: str) -> str:
    """Word so many of something: "1 member", "2 members"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def size(number_bytes: float) -> str:
    """Word a number of bytes: "120 B", "1.2 MB"."""
    text = count(number_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1:].isalpha() else f"{text} B"


def duration(seconds: float | None) -> str:
    """Word a time: "62 ms", "1.3 s", "4 min", "2.5 h"; "-" for unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def loss_text(loss: float | None, digits: int = 2) -> str:
    """Word a loss: "2.31"; "-" for unknown, the word itself for a loss that blew up ("nan", "inf")."""
    return "-" if loss is None else f"{loss:.{digits}f}"


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Word numbers as ranges, "0-3,7": at most `most` ranges, then an ellipsis; "-" for none."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in found[:most]]
    return (",".join(texts) + (",…" if len(found) > most else "")) or "-"


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw the last `cells` values as block characters, low to high; those that are not finite are left
    out."""
    finite = [value for value in values if math.isfinite(value)][-cells:] if cells > 0 else []
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in finite)


_GOING_WORDS = {Going.TRAIN: "", Going.PAUSE: "the run pauses", Going.END: "the run ends"}


def percent(row: CourseRow) -> str:
    """Word the share of the schedule that is merged: "37.2 %". It is 100 only at the end."""
    share = row.tokens / max(1, row.schedule_tokens)
    return f"{math.floor(1000 * share) / 10:.1f} %"


def progress_text(row: CourseRow) -> str:
    """Word how far the run is: "37.2 % of 153k tokens, 2.5 h left", "ended at 100.3 % of 153k tokens"."""
    text = f"{percent(row)} of {count(row.schedule_tokens)} tokens"
    if row.rests != "no":
        return f"{row.rests} at {text}"
    if row.tokens >= row.schedule_tokens:
        return f"{text}, past the schedule"
    return text if row.left_s is None else f"{text}, {duration(row.left_s)} left"


def owner_text(row: CourseRow) -> str:
    """Word what the run's owner changed, and says; empty: nothing."""
    words = []
    ahead, stays = row.amendment_from_tokens > row.tokens, row.rate_factor == row.amendment_rate_factor
    if row.amendment:
        holds = f"will hold from {count(row.amendment_from_tokens)} tokens on" if ahead else "holds"
        does = amendment_text(row)
        words.append(f"amendment {row.amendment} {holds}" + (f": {does}" if does else ""))
    if row.rate_factor != 1 and (ahead or not stays):
        words.append(
            f"learning rate times {row.rate_factor:g}" + (" until then" if ahead and not stays else "")
        )
    if row.message:
        words.append(f"the owner says: {clean(row.message)}")
    return "; ".join(words)


def amendment_text(row: CourseRow) -> str:
    """Word what the owner's newest amendment does from its number of tokens on: "the run ends"; a learning
    rate that already holds is left out."""
    words = [_GOING_WORDS[row.amendment_going]]
    if row.amendment_schedule_tokens:
        words.append(f"a schedule of {count(row.amendment_schedule_tokens)} tokens")
    before = row.rate_factor if row.amendment_from_tokens > row.tokens else 1.0
    if row.amendment_rate_factor != before:
        words.append(f"learning rate times {row.amendment_rate_factor:g}")
    return ", ".join(filter(None, words))


def few_seats_text(course: CourseRow, run: str) -> str:
    """Word what it means that an open run has so few seats, or that so many attest nothing, and what to do;
    empty: there are enough."""
    command, words = f"p2pdiloco seat {clean(run)}", []
    if course.seats is not None and course.seats < ENOUGH_SEATS:
        words.append(
            f"{counted(course.seats, 'seat')}: while none of them is here nothing is merged, and one that is "
            f"here alone decides everything; the run's owner should give at least {ENOUGH_SEATS} to people "
            f"whom it trusts: {command} PEER"
        )
    if course.absent:
        words.append(
            f"{counted(course.absent, 'seat')} attested nothing for half of the run, in which nothing became "
            f"final; the run's owner can end those that left for good: {command} --end PEER"
        )
    return "; ".join(words)


def proposed_text(proposed: Sequence[ProposedSeat], run: str) -> str:
    """Word which seats wait for the word of the run's owner, and the command for the first; empty: none."""
    if not proposed:
        return ""
    names = ", ".join(f"{clean(seat.name) or '-'} …{short_peer(seat.peer)}" for seat in proposed)
    wait = "wait" if len(proposed) > 1 else "waits"
    command = f"p2pdiloco seat {clean(run)} {clean(proposed[0].peer)}"
    return f"{counted(len(proposed), 'new seat')} {wait} for your word: {names} ({command})"


def copied_text(share: float | None) -> str:
    """Word how much of the state is here, while it is copied: "state 37 %"; empty: it is not."""
    return "" if share is None else f"state {math.floor(100 * share)} %"


def transfer_text(row: TransferRow) -> str:
    """Word the bytes that a node moved this month: "transfer in 2026-11: 1.2 GB sent, 3.4 GB received, of
    200 GB"."""
    text = f"transfer in {clean(row.month)}: {size(row.sent_bytes)} sent, {size(row.received_bytes)} received"
    return f"{text}, of {size(row.budget_bytes)}" if row.budget_bytes else text
