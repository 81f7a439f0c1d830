"""View of a run: everything that the web page shows, as plain values.

`PublicView` anybody may see; a bootstrap's `--web-public` and `p2pdiloco board` show nothing else.
`OwnView` is for the owner of the machine. Times are seconds since 1970 (`_at_s`), so that a view changes only
when something happens, and the page counts ages itself, from `made_at_s`. Unknown numbers are None. Texts may
come from strangers: whoever draws them escapes them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.api.types import MAX_FRAGMENTS
from p2pdiloco.daemon.display.snapshot import MAX_EXCLUDED_ROWS, MAX_PEER_ROWS, MAX_RECENT_LINES, ExcludedRow
from p2pdiloco.daemon.display.timeline import MAX_MARKS, MAX_POINTS, Line, Natural, Row, Text, Words
from p2pdiloco.errors import encoded
from p2pdiloco.web.words import Control, MarkKind, MemberWord, NodeWord, Pulse, Why

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


class ProgressView(Row, frozen=True, kw_only=True):
    """Progress of the run."""

    tokens: Natural = 0
    """Tokens merged, the mean over fragments."""
    schedule_tokens: Natural = 0
    """Length of the schedule; 0: not known."""
    ends_at_s: float | None = None
    """Time of the schedule's end at the present pace; None: not known, or past."""
    versions: Natural = 0
    """Versions of all fragments together."""
    tokens_per_s: float | None = None
    """Tokens that all members together train on a second, as they say."""
    amendment: Natural = 0
    """Number of the owner's newest amendment; 0: none."""
    amendment_from_tokens: Natural = 0
    amendment_does: Line = ""
    """Words on what it does from then on; empty: nothing to learners."""
    rate_factor: float = 1.0
    message: Line = ""
    """Message of the run's owner."""


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


class MemberView(Row, frozen=True, kw_only=True):
    """Member of the run."""

    peer: Text
    name: Text = ""
    state: MemberWord = MemberWord.HERE
    why: Why = Why.NONE
    """Reason of `behind` and `silent`; of others perhaps what is not ideal."""
    behind_versions: Natural = 0
    """Versions of one fragment by which it is behind the newest, at most over the fragments."""
    in_last_merge: bool = False
    """True: its work is in the newest version."""
    merged_at_s: float | None = None
    """Time at which the newest version with work of it came here; None: not known."""
    seen_at_s: float | None = None
    """Time of its last message; None: never heard directly."""
    tokens_per_s: float = 0.0
    tokens_total: Natural = 0
    inner_step: Natural = 0
    loss: float | None = None
    reach: Words = ""
    """Reach: "direct", "relayed", "outbound only", or empty for not known."""
    offices: Natural = 0
    """Number of fragments whose syncer it is."""
    weighs: float | None = None
    """Weight of its work beside as much of a usual member's, 0 to 1; None: nothing of it is merged."""
    is_me: bool = False
    """True: the node whose view this is."""


class StripView(Row, frozen=True, kw_only=True):
    """Fragment in the strip: its head and its syncer."""

    index: Natural
    number: Natural = 0
    digest: Words = ""
    tokens: Natural = 0
    syncer: Text = ""
    """Peer id; empty: nobody is known to be in office."""
    syncer_name: Text = ""
    state: Words = "idle"
    """Words for what goes on around it, as in the live view."""
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


class DataView(Row, frozen=True, kw_only=True):
    """Data read."""

    epoch: Natural = 0
    shards: Natural = 0
    begun: Natural = 0


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
    data: DataView | None = None
    """Data that was read, as the node whose view this is knows; None: not known."""
    credits: Annotated[tuple[CreditView, ...], Meta(max_length=MAX_CREDITS)] = ()
    """Credits, the most tokens first."""
    join: JoinView = JoinView()


class ContributionsView(Row, frozen=True, kw_only=True):
    """Contributions of this node since it started."""

    merged: Natural = 0
    merged_tokens: Natural = 0
    merged_at_s: float | None = None
    """Time of the last one that was merged."""
    waiting: Natural = 0
    """Contributions, one per fragment, that are made and not merged yet."""
    refused: Annotated[dict[Text, Natural], Meta(max_length=MAX_REASONS)] = field(default_factory=dict)
    """Refusals by the syncer's reason. Most are for a moment, and the same work is offered again."""
    given_up: Natural = 0
    """Contributions given up for good."""


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


class OwnView(Row, frozen=True, kw_only=True):
    """View of this node that only the owner of the machine sees."""

    state: NodeWord
    rest: Line = ""
    """Reason why it makes no steps, such as "idle: on battery since 14:02"; empty: nothing keeps it."""
    peer: Text = ""
    name: Text = ""
    device: Text = ""
    inner_step: Natural = 0
    tokens_per_s: float = 0.0
    tokens_total: Natural = 0
    step_time_s: float | None = None
    loss: float | None = None
    contributions: ContributionsView = ContributionsView()
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
