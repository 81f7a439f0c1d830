"""Wire of daemons: headers of bulk streams, queries, DHT records.

A control payload starts with one byte: a core message or a query. Bulk streams start with one of the tagged
headers below. Everything is strict, positional msgpack with bounded fields.

Listed in docs/reference/wire.md, section 2.
"""

from __future__ import annotations

from typing import Annotated, dataclass_transform

from msgspec import Meta, field, msgpack

from p2pdiloco.config.manifest import Name
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.messages import encode as encode_message
from p2pdiloco.core.api.papers import Admission, Grant
from p2pdiloco.core.api.reasons import AdmissionFault, ProbeRefusal, PullRefusal, Verdict
from p2pdiloco.core.api.types import (
    MAX_FRAGMENTS,
    MAX_PEERS,
    Count,
    Digest,
    Head,
    PeerId,
    RunId,
    Seat,
    Signature,
    SignedContribution,
    Vouch,
    Watermark,
    Wire,
)
from p2pdiloco.core.api.versions import SignedPartial, SignedVersion
from p2pdiloco.credits import LATEST_S
from p2pdiloco.daemon.notice import Notice
from p2pdiloco.errors import RemoteError
from p2pdiloco.learner.channel import MAX_EPOCH, MAX_SHARDS
from p2pdiloco.ports import Refusal
from p2pdiloco.util import DAMAGE, T


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Tagged(Wire, frozen=True, tag=True):
    """Base of what is told apart by its class's name in front."""


MAX_OTHERS = 32


class ShowAdmission(Tagged):
    """Paper that the asker has to show, and the sequence of the notice that it knows (0: of none)."""

    run: RunId
    admission: Admission | None
    notice: Count


class AdmissionShown(Tagged):
    """Answer to `ShowAdmission`; what follows `fault` is of the one who answers."""

    fault: AdmissionFault | None
    """Reason why the asker is not admitted; None: it is."""
    admission: Admission | None
    notice: Count
    others: Annotated[tuple[Admission, ...], Meta(max_length=MAX_OTHERS)]
    """Admissions that it has seen, the newest ones; for those whom it admits."""
    proof: Evidence | None = None
    """Evidence for which the asker is excluded."""


class MayJoin(Tagged):
    """Question whether a peer would be admitted with a grant."""

    run: RunId
    peer: PeerId
    grant: Grant | None


class JoinAnswer(Tagged):
    """Answer to `MayJoin` and to `ShowPass`."""

    fault: AdmissionFault | None


class NoticeQuery(Tagged):
    """Question for the notice of a run's owner, if its sequence is above this one."""

    run: RunId
    above: Count


class NoticeAnswer(Tagged):
    """Answer to `NoticeQuery`, and to `GiveNotice`: the notice if it is newer than the asker's."""

    notice: Notice | None


class GiveNotice(Tagged):
    """Notice for whoever has an older one."""

    notice: Notice


class ShowPass(Tagged):
    """Paper with which a visitor, no member, may read: a member's, the owner's or an invite's key lets it.

    It is no admission: it makes nobody a member, and takes none of an invite's uses.
    """

    run: RunId
    peer: PeerId
    """Visitor that it is made out to."""
    by: PeerId
    """Peer id of the key that signs."""
    grant: Grant | None
    """Grant of an invite's key; None: a member or the owner signs."""
    signature: Signature = b""


AdmissionQuery = ShowAdmission | MayJoin | NoticeQuery | GiveNotice | ShowPass


KEEPS_NONE = "keeps-no-history"
"""Reason of whoever is asked for credits, and keeps no history."""
MAX_ROWS = 500
"""Rows of one answer: with the longest names about 180 KiB."""
Time = Annotated[int, Meta(ge=0, le=LATEST_S)]


class PullHistory(Tagged):
    """Request for that very version's record, its parent's, and so on: as many as a page has.

    The answer is the records alone (`credits`), the newest first.
    """

    run: RunId
    fragment: Count
    number: Count
    digest: Digest


class CreditsQuery(Tagged):
    """Question who did how much of a run, of whoever keeps its history."""

    run: RunId
    offset: Count = 0
    """Rows to leave out: the answer has `MAX_ROWS` at most."""


class CreditLine(Wire, frozen=True):
    """Work of one learner, as a keeper has added it up."""

    peer: PeerId
    name: Annotated[str, Meta(max_length=63)]
    """Name by which it called itself last, for all that the keeper knows."""
    fragment_tokens: Count
    """Tokens, the sum over fragments."""
    claimed_tokens: Count
    """Tokens by its labels, the mean over fragments."""
    inner_steps: Count
    """Inner steps, the mean over fragments."""
    contributions: Count
    first_s: Time
    last_s: Time


class CreditsAnswer(Tagged):
    """Answer to `CreditsQuery`."""

    fragments: Annotated[int, Meta(ge=1, le=MAX_FRAGMENTS)]
    fragment_tokens: Count
    before_fragment_tokens: Count
    uncredited_fragment_tokens: Count
    learners: Count
    missing: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_FRAGMENTS)]
    """Fragments whose history begins later, and the first version that is known."""
    doubts: Annotated[tuple[tuple[Annotated[str, Meta(max_length=80)], Count], ...], Meta(max_length=16)]
    tips: Digest
    """Digest of all heads together: equal ones have equal answers."""
    rows: Annotated[tuple[CreditLine, ...], Meta(max_length=MAX_ROWS)]


MESSAGE, QUERY = b"m", b"q"
MAX_RUNS = 64
MAX_PROBE_BYTES = 8 * 1024 * 1024
"""Bytes in each direction of all that one measurement of a link moves."""
MAX_NAMED = 8
"""Number of peers in an `Elsewhere`."""
VISIBLE_PATTERN = r"^[!-~]+\Z"
"""ASCII without blanks: ids that a person may be shown in a list."""
MAX_PORTS = 4
Port = Annotated[int, Meta(ge=1, le=65535)]
Ip = Annotated[str, Meta(max_length=45)]
Probed = Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)]


class PushContribution(Tagged):
    """Header of a contribution's stream."""

    signed: SignedContribution


class PushPartial(Tagged):
    """Header of the stream of a group's partial merge. Names every contribution: up to about 2 MiB."""

    signed: SignedPartial


class Answer(Tagged):
    """Word of the receiver on a contribution or a partial merge, before or after its payload."""

    verdict: Verdict
    head: Head | None


class PullUpdate(Tagged):
    """Request for a version's outer update."""

    run: RunId
    fragment: Count
    number: Count
    have_bytes: Count = 0
    """Bytes of the payload with the digest `have` that are here already, from a stream that was cut."""
    have: Annotated[bytes, Meta(max_length=64)] = b""
    version: Annotated[bytes, Meta(max_length=64)] = b""
    """Digest of the version; not empty: a holder named you. Only that version, and a part of the update
    will do."""
    relays: bool = False
    """True: whoever asks can give it to others."""
    insist: bool = False
    """True: those who were named did not deliver."""


class PullState(Tagged):
    """Request for a fragment's newest state, at least this version."""

    run: RunId
    fragment: Count
    number: Count
    have_bytes: Count = 0
    """Bytes that are here already, as in `PullUpdate`; `have` is the state's digest."""
    have: Annotated[bytes, Meta(max_length=64)] = b""
    most_bytes: Count = 0
    """Bytes to give at most; 0: all the rest."""
    exact: bool = False
    """True: nothing but the rest of `have` will do."""


class PullContribution(Tagged):
    """Request for the payload of a contribution, to merge it again (`daemon.bulk.merge_audits`). It comes
    without a header."""

    run: RunId
    fragment: Count
    payload_digest: Digest


class PullManifest(Tagged):
    """Request for the signed manifest of a run."""

    run: RunId


class PullInitial(Tagged):
    """Request for the parameters that version 0 of a run is, from this byte on
    (`daemon.run_files.shared_files`)."""

    run: RunId
    offset: Count = 0
    whole: bool = False
    """Wish for names and shapes too, the file as it is: who has no task cannot know them."""


class InitialHeader(Tagged):
    """Header of the stream of version 0: fp32 little-endian, in the order of the model's parameters."""

    offset: Count


class PullTokenizer(Tagged):
    """Request for the tokenizer file of a run (`daemon.run_files.shared_files`)."""

    run: RunId


class PullProbe(Tagged):
    """Request for so many bytes of nothing, by which a link is measured (`daemon.network.reach`)."""

    size_bytes: Probed


class PushProbe(Tagged):
    """Header of so many bytes to take and forget, by which a link is measured."""

    size_bytes: Probed


class UpdateHeader(Tagged):
    """Header of an outer update's stream."""

    version: SignedVersion
    offset: Count = 0
    """Offset at which the payload begins: what comes before is with the asker."""
    total: Count = 0
    """Size of the whole update; 0: no part. More than offset and payload: this is a part, the rest is
    still on its way to whoever serves it."""
    waited_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0
    """Time for which it was not there yet to be served: that says nothing about the way to whoever serves
    it."""


class StateHeader(Tagged):
    """Header of a stream of a state, or of a piece of it: Theta, then outer momentum, fp32 little-endian."""

    version: SignedVersion
    watermarks: Annotated[tuple[Watermark, ...], Meta(max_length=3 * MAX_PEERS)]
    offset: Count = 0


class Refused(Tagged):
    """Refusal of a pull, with its reason."""

    reason: PullRefusal


class ProbeRefused(Tagged):
    """Refusal to measure a link, either way."""

    reason: ProbeRefusal
    again_s: Annotated[int, Meta(ge=0, le=600)]
    """Time after which it is worth while to ask again."""


class Elsewhere(Tagged):
    """Answer to a pull of an update that is not served here: these peers have it, or are getting it."""

    version: Digest
    """Digest of the version whose update it is."""
    patience_ms: Annotated[int, Meta(ge=0, le=600_000)]
    """Time after which the asker comes back and insists, if all of it is not there."""
    peers: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_NAMED)]


MAX_NAME = 63
PeerName = Annotated[str, Meta(max_length=MAX_NAME)]
MAX_BEARERS = 8
"""Number of peers that are named as bearers of one name."""
MAX_SEATS = 256


class RunsQuery(Tagged):
    """Question which runs a peer knows."""


class StatusQuery(Tagged):
    """Question how a run is doing."""

    run: RunId


class NameQuery(Tagged):
    """Question who of a run was called so lately."""

    run: RunId
    name: PeerName


class NameAnswer(Tagged):
    """Answer to `NameQuery`."""

    peers: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_BEARERS)]


class ReachQuery(Tagged):
    """Question whether a peer can dial the asker at these ports, where it sees the asker."""

    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=MAX_PORTS)]


class ReachAnswer(Tagged):
    """Answer to `ReachQuery`."""

    reached: Annotated[tuple[tuple[Ip, Port], ...], Meta(max_length=MAX_PORTS * MAX_PORTS)]
    """Places at which the asker proved to be itself."""


UdpAddress = Annotated[str, Meta(max_length=80, pattern=r"^/ip4/[0-9.]+/udp/[0-9]+/quic-v1\Z")]


class Punch(Tagged):
    """Wish for a direct line to a peer, through both ends' NATs. A hidden node sends it to a bootstrap, which
    passes it on to that peer, with the addresses at which it sees the hidden node."""

    peer: PeerId
    addresses: Annotated[tuple[UdpAddress, ...], Meta(max_length=MAX_PORTS)]


class PunchAnswer(Tagged):
    """Answer to `Punch`: where the peer is seen, which has heard of the wish, and dials now."""

    addresses: Annotated[tuple[UdpAddress, ...], Meta(max_length=MAX_PORTS)]


class RunSummary(Wire, frozen=True):
    """Run as it is listed."""

    run: Annotated[str, Meta(pattern=VISIBLE_PATTERN, max_length=64)]
    name: Name
    owner: Annotated[str, Meta(pattern=VISIBLE_PATTERN, max_length=80)]


class RunList(Tagged):
    """Answer to `RunsQuery`; also the record on the DHT."""

    runs: Annotated[tuple[RunSummary, ...], Meta(max_length=MAX_RUNS)]


class HeldoutLoss(Wire, frozen=True):
    """Held-out loss of the global parameters that a member has measured."""

    merges: Count
    """Number of versions of all fragments together that the parameters were made of, at most."""
    loss: Annotated[float, Meta(ge=-1e30, le=1e30)]
    tokens: Count
    """Number of held-out tokens that it is a mean over."""


class Presence(Tagged):
    """Record of a member on the DHT, under its run's key."""

    wire_version: Count
    incarnation: Count
    name: PeerName
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=16)]
    dialable: bool = True
    """True: others can dial it. False: they need not try for long, it dials them."""
    heldout: HeldoutLoss | None = None
    """Newest held-out loss that it has measured itself."""
    keeps_history: bool = False
    """True: it keeps the run's history, and tells credits (`daemon.history`)."""


class Reading(Tagged):
    """Record of a member on the DHT of what of the run's data is begun (`learner.samples`)."""

    data: Annotated[str, Meta(max_length=64)]
    epoch: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
    taken: Annotated[bytes, Meta(max_length=MAX_SHARDS // 8)]


Push = PushContribution | PushPartial
Bulk = PullUpdate | PullState | PullContribution
"""Pulls that members serve."""
Pull = Bulk | PullManifest | PullInitial | PullTokenizer | PullProbe | PullHistory
OpenPull = PullManifest | PullInitial | PullTokenizer | PullProbe | PullHistory
"""Pulls of whoever is no member yet."""
ReaderPull = OpenPull | PullState
"""Pulls of a visitor with a pass."""


class StandsQuery(Tagged):
    """Question on which versions a member of this run stands."""

    run: RunId


class SeatLine(Wire, frozen=True):
    """Peer whose seat stands."""

    peer: PeerId
    name: PeerName
    seat: Seat
    """Seat in the first fragment that has it."""
    silent_s: Count | None
    """Seconds since it was heard; None: it was not heard in this life of whoever answers."""


class Stands(Tagged):
    """Answer to `StandsQuery`, as an owner may vouch for it: the newest version of every fragment that has
    one above 0, and who had worked by then."""

    versions: Annotated[tuple[Vouch, ...], Meta(max_length=MAX_FRAGMENTS)]
    seats: Annotated[tuple[SeatLine, ...], Meta(max_length=MAX_SEATS)] = ()
    """Seats that stand in any fragment, by place: those by invites are among the first."""


Query = RunsQuery | StatusQuery | NameQuery | StandsQuery | ReachQuery | Punch | AdmissionQuery | CreditsQuery
_encoder = msgpack.Encoder()


def encode(value: Wire) -> bytes:
    """Encode a header, query or record for the wire."""
    return _encoder.encode(value)


def decode(data: bytes, expected: type[T]) -> T:
    """Decode one of the types above (or a union of them), strictly.

    Raises:
        RemoteError: "garbage".
    """
    try:
        return msgpack.decode(data, type=expected)
    except DAMAGE as error:
        raise RemoteError("garbage", str(error)[:120]) from error


def members_key(run: str) -> str:
    """Return the DHT key of a run's presence records."""
    return f"p2pdiloco/{run}/members"


def reading_key(run: str) -> str:
    """Return the DHT key of what the members of a run read."""
    return f"p2pdiloco/{run}/reading"


RUNS_KEY = "p2pdiloco/runs"
"""DHT key of the list of runs; every member and bootstrap has a record under it."""


def message(run: str, content: Message) -> bytes:
    """Encode a core message as a control payload."""
    return MESSAGE + encode_message(run, content)


def refuse(reason: PullRefusal) -> Refusal:
    """Encode the refusal of a pull."""
    return Refusal(encode(Refused(reason)))


class PullRefused(RemoteError):
    """Error: a peer did not give what it was asked for."""

    def __init__(self, why: PullRefusal) -> None:
        super().__init__(why.value)
        self.why = why


def refused(answer: Refusal) -> PullRefused:
    """Make the error that a refusal of a pull stands for. Raises: RemoteError ("garbage")."""
    return PullRefused(decode(answer.answer, Refused).reason)
