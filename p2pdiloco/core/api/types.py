"""Values of the protocol: versions, contributions, votes, stamps, with their one encoding.

All are immutable and hashable, and each has one canonical msgpack encoding. Peers are named by their libp2p
peer id (base58 text), fragments by their index. Digests are 32 raw bytes: SHA-256 of headers,
`p2pdiloco.hashing` of payloads and states. Field order is wire format: append only, and raise `WIRE_VERSION`
on any change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.util import direct_members

PeerId = Annotated[str, Meta(min_length=1, max_length=80)]
GroupId = Annotated[str, Meta(min_length=1, max_length=64)]
RunId = Annotated[str, Meta(min_length=1, max_length=64)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Ticket = int
"""Name of a buffer that only the environment (daemon or simulator) can open. The core never looks inside."""

MAX_CONTRIBUTORS = 16384
MAX_VOTES = 512
"""Limit of votes in a certificate: more than any group has members that vote."""
MAX_FRAGMENTS = 1024
MAX_VOUCHED = 512
"""Limit of members for which an owner vouches."""
MAX_PEERS = 4096
"""Limit of the peers with a seat in a table of watermarks, of those without, of those that a node knows, and
of those of which it holds papers of one kind."""
WHOLE_RUN: GroupId = "all"
"""Name of the one group that exists while the run fits into one (`core.api.versions.Plan`)."""

_encoder = msgspec.msgpack.Encoder()


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that crosses the wire: positional msgpack arrays, strictly validated."""

    def named(self) -> bytes:
        """Encode what digests and signatures of it cover: all of it, as a rule."""
        return _encoder.encode(self)


class Head(Wire, frozen=True):
    """Short name of a version of one fragment, with what it weighs."""

    number: Count
    digest: Digest
    """Digest of the version's header. It names the whole history, because a header names its parent."""
    tokens: Count
    """Cumulative tokens merged into the chain."""
    term: Count

    @property
    def weight(self) -> tuple[int, int, bytes]:
        """Order of chains: tokens, then term, then digest, more or higher first (docs/protocol/belief.md)."""
        return (self.tokens, self.term, self.digest)


class Seat(Wire, frozen=True):
    """Seat of one peer in a chain: its right to decide (docs/protocol/seats.md)."""

    place: Count
    """Place among all that the chain ever had, from 1; 0: it never had one, and what ended is kept so that no
    older paper begins it."""
    since: Count = 0
    """Version whose table had a seat of this peer first."""
    key: Annotated[str, Meta(max_length=80)] = ""
    """Key of the invite by which it came; empty: the owner's word, or the run file."""
    word: Count = 0
    """Number of the owner's newest word on it; 0: there is none."""
    ended: Count = 0
    """Version that ended it; 0: it stands."""
    turn: Count = 0
    """Number of what seats said of it, or what a lie or the end of its invite did, since that word."""
    again: Count = 0
    """Version that gave it once more, after an end; 0: none did."""

    @property
    def begun(self) -> int:
        """Version that gave it last."""
        return max(self.since, self.again)


class Stamp(Wire, order=True, frozen=True):
    """Number of a contribution that orders those of one learner: a restart has a higher incarnation."""

    incarnation: Count
    sequence: Count


NEVER = Stamp(0, 0)
"""Stamp of a learner of which nothing has been merged."""
FULL_TRUST, LEAST_TRUST = 64, 1
"""Most and least trust weight (`core.api.versions.Mean`): parts of a contribution's weight that count."""


class MergeLimits(Wire, frozen=True):
    """Limits of one contribution's part in a merge (`core.chain.Scale`)."""

    most_tokens: Count
    """Tokens that it weighs at most."""
    longest: float
    """Length to which it is cut."""
    of_median: float = 0.0
    """Multiple of the usual length among the contributions that are added up together, to which it is cut as
    well; 0: it is not."""

    @property
    def longest_update(self) -> float:
        """Limit of an update's length: of one learner's work, or of what earlier updates left out besides."""
        return 2.0 * self.longest

    @property
    def absurd(self) -> float:
        """Length above which it is no work, and is refused."""
        return ABSURD * self.longest

    def near(self, other: MergeLimits) -> bool:
        """Tell whether both can be of one chain, some versions apart."""
        mine, theirs = (self.most_tokens, self.longest), (other.most_tokens, other.longest)
        return all(a == b or b / NEAR <= a <= NEAR * b for a, b in zip(mine, theirs, strict=True))


NO_LIMITS = MergeLimits(1 << 62, math.inf)
ABSURD = 512
"""Least multiple of the longest length at which a contribution is refused, not cut."""
NEAR = 16
"""Factor by which the limits of a chain do not change while a partial merge is under way."""


class Milestone(Wire, frozen=True):
    """Version of a chain that its seats attest (`core.finality`)."""

    number: Count
    digest: Digest


class Attestation(Wire, frozen=True):
    """Word of a seat, in a label of its work, that it stands on both: a vote for a link of Casper FFG."""

    source: Milestone
    """Highest justified milestone of the chain when the target was made."""
    target: Milestone


GENESIS = Milestone(0, bytes(32))
"""Version 0, which is justified and final in every chain of a run."""


class Finality(Wire, frozen=True):
    """Milestones of a chain and how far its seats have attested them, as its versions carry it."""

    target: Milestone = GENESIS
    """Newest milestone, below the version that says so."""
    source: Milestone = GENESIS
    """Highest justified milestone when the target was made."""
    justified: bool = False
    """True: so is the target by now."""
    final: Milestone = GENESIS
    before: Count = 0
    """Number of the final version before that."""


NOT_FINAL = Finality()


class WorkLabel(Wire, frozen=True):
    """Label of a contribution as its learner signs it, over `signed_bytes("work", label)`. The signature goes
    into partial merges and versions: nobody can name another as the learner, or change what it says."""

    run: RunId
    fragment: Count
    learner: PeerId
    stamp: Stamp
    after: Stamp
    tokens: Count
    inner_steps: Count
    payload_digest: Digest
    attestation: Attestation | None = None
    """Its word on milestones (`core.finality`): once for each, if it has a seat."""


UNMEASURED = -128
"""Score of a contribution in a round that is too small to tell how far anybody agrees with the others."""
UNCLEAR = -127
"""Score of a contribution in a round that is large enough, and in which most do not agree at all."""
NOTHING = -126
"""Score of a contribution that is nothing: zeros, or next to them. It has no trust, in whatever round."""
USUAL_SCORE, LEAST_SCORE, MOST_SCORE = 64, -64, 80
"""Score of a usual contribution, and the ends of scores: nobody can save up trust for later."""


class Contributor(Wire, frozen=True):
    """Part of one learner in a merge. What follows its signature is the word of the syncer that measured
    it."""

    learner: PeerId
    stamp: Stamp
    tokens: Count
    inner_steps: Count
    after: Stamp = NEVER
    """Stamp after which it comes: that of its learner in the chain which the merge goes on with."""
    payload_digest: Digest = bytes(32)
    attestation: Attestation | None = None
    signature: Signature = b""
    """The learner's, of its `WorkLabel`."""
    trust: Annotated[int, Meta(ge=LEAST_TRUST, le=FULL_TRUST)] = FULL_TRUST
    """Trust weight with which it was merged."""
    length: float = 0.0
    """Length (L2) before it was cut; 0: none, or not known."""
    score: Annotated[int, Meta(ge=UNMEASURED, le=127)] = UNMEASURED
    """Agreement with the others of its round (`tensors.merge`)."""
    votes: bool = False
    """True: its learner has a seat, by the table of watermarks that its syncer had. Where enough of a round
    do, they say what is usual (`core.api.versions.references`)."""

    def work(self, run: str, fragment: int) -> WorkLabel:
        """Make what its learner signs."""
        return WorkLabel(
            run,
            fragment,
            self.learner,
            self.stamp,
            self.after,
            self.tokens,
            self.inner_steps,
            self.payload_digest,
            self.attestation,
        )


class Watermark(Wire, frozen=True):
    """Mark of one peer in a chain: its newest merged contribution, its record as a learner, and its seat."""

    learner: PeerId
    stamp: Stamp
    number: Count
    """Version that has its newest contribution."""
    first: Count = 0
    """Version since which it has had a mark without a break."""
    merges: Count = 1
    """Versions since then that have a contribution of it; 0: it only has a seat."""
    seat: Seat | None = None
    """None: it has never had one."""
    agreement: Annotated[int, Meta(ge=-(1 << 20), le=1 << 20)] = 0
    """Slow mean of how far its contributions agree with the others' (`core.api.versions.Mean`)."""
    last: Annotated[bytes, Meta(max_length=8)] = b""
    """First bytes of the digest of its newest contribution's payload, by which copies of it are known
    (`core.chain.earned`); empty: not known."""
    attested: Count = 0
    """Number of the newest target of this chain that it attested."""


def table_digest(table: tuple[Watermark, ...]) -> bytes:
    """Compute SHA-256 of a table of watermarks in canonical order."""
    return hashlib.sha256(_encoder.encode(table)).digest()


EMPTY_TABLE = table_digest(())


class HeaderStart(Wire, frozen=True):
    """First fields of a version's header, long and short: what it is, and of whom."""

    run: RunId
    group: GroupId
    fragment: Count
    number: Count
    parent: Digest
    """Digest of the parent's header; for version 0, the digest of the run id."""
    term: Count
    syncer: PeerId
    """Member that made the version; for version 0, the run id."""
    tokens: Count
    state_digest: Digest
    """Digest of (number, Theta, outer momentum) after the outer step; `tensors.codecs.state_digest`."""
    update_digest: Digest
    update_bytes: Count
    codec: Annotated[str, Meta(max_length=16)]


class ShortHeader(HeaderStart, frozen=True):
    """Version header with the Merkle roots of contributors and partials in their place: it names the version,
    and is what its syncer signs. So a lie about one of thousands of contributors is shown in a few hundred
    bytes (docs/protocol/proofs.md, section 1)."""

    contributors: Digest
    """Merkle root over the encoded contributors, in their order (`core.api.types.merkle_root`)."""
    epoch: Count
    groups: Annotated[int, Meta(ge=1, le=MAX_CONTRIBUTORS)]
    table: Digest
    unit: Count
    norm: float
    reach: float
    limits: MergeLimits
    partials: Digest
    """Merkle root over the encoded partials, in their order."""
    repairs: Digest | None = None
    finality: Finality = NOT_FINAL

    def digest(self) -> bytes:
        """Compute SHA-256 of the canonical encoding: the digest of the version."""
        return hashlib.sha256(self.named()).digest()


class Vouch(Wire, frozen=True):
    """Word of a run's owner that a version is in the run's history, and who knows that history."""

    fragment: Count
    number: Count
    digest: Digest
    members: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_VOUCHED)] = ()
    """Members that had worked by then; each is named for one fragment only."""


class ContributionHeader(Wire, frozen=True):
    """Label of an encoded pseudo-gradient (docs/protocol/rounds.md, section 1)."""

    run: RunId
    group: GroupId
    fragment: Count
    learner: PeerId
    stamp: Stamp
    after: Stamp
    """Stamp of the learner's last merged contribution that its base contains. The syncer admits only if its
    chain agrees: so no step is merged twice, even when an acknowledgement or an update was lost."""
    base_number: Count
    base_digest: Digest
    tokens: Count
    inner_steps: Count
    payload_digest: Digest
    payload_bytes: Count
    codec: Annotated[str, Meta(max_length=16)]
    due: bool
    """True: the learner's schedule asked for it; false: it answers a closing call."""
    attestation: Attestation | None = None


class SignedContribution(Wire, frozen=True):
    """Contribution header with its learner's signature of the `WorkLabel` in it. The rest is the word of the
    learner that is connected."""

    header: ContributionHeader
    signature: Signature

    def contributor(self) -> Contributor:
        """Make its part in a merge."""
        h = self.header
        return Contributor(
            h.learner,
            h.stamp,
            h.tokens,
            h.inner_steps,
            h.after,
            h.payload_digest,
            h.attestation,
            self.signature,
        )


class VoteBody(Wire, frozen=True):
    """Content of a vote: in this term of this fragment, this candidate, on this branch."""

    run: RunId
    group: GroupId
    fragment: Count
    term: Count
    candidate: PeerId
    voter: PeerId
    base_number: Count
    """Number of the candidate's head: it is elected to go on from there, and on no other branch."""
    base_digest: Digest

    @property
    def base(self) -> tuple[int, bytes]:
        """Number and digest of that head."""
        return self.base_number, self.base_digest


class Vote(Wire, frozen=True):
    """Vote signed by its voter over `signed_bytes("vote", body)`."""

    body: VoteBody
    signature: Signature


class Certificate(Wire, frozen=True):
    """Proof that a syncer is in office: a majority's votes for (group, fragment, term), all for going on from
    one head."""

    group: GroupId
    fragment: Count
    term: Count
    syncer: PeerId
    votes: Annotated[tuple[Vote, ...], Meta(max_length=MAX_VOTES)]

    @property
    def base(self) -> tuple[int, bytes]:
        """Number and digest of the head of the syncer when it stood, by its own vote, without which it is
        none: the term ends `term_versions` later."""
        own = next((vote.body for vote in self.votes if vote.body.voter == self.syncer), None)
        return own.base if own else (0, b"")


@direct_members
class Reach(IntEnum):
    """Ways in which others can reach a member, as it found out by asking peers, and says in its heartbeats.
    Wire format: append only.

    Rules: docs/protocol/links.md, section 1.
    """

    UNKNOWN = 0
    """Reachable or not: peers have not told it yet."""
    DIRECT = 1
    """Others can dial it."""
    RELAYED = 2
    """Reachable only through a relay, or over connections that it made itself."""
    OUTBOUND = 3
    """Reachable only over connections that it made itself."""


REACH_WORDS = {
    Reach.UNKNOWN: "",
    Reach.DIRECT: "direct",
    Reach.RELAYED: "relayed",
    Reach.OUTBOUND: "outbound only",
}
"""Texts for people."""
_DOMAIN = b"p2pdiloco/1/"


Verify = Callable[[PeerId, bytes, bytes], bool]
"""Check of (signer, message, signature), as `Crypto.verify`."""


def signed_bytes(domain: str, value: Wire) -> bytes:
    """Make the bytes that a signature covers: a domain separator and the canonical encoding."""
    return _DOMAIN + domain.encode() + b"\0" + value.named()


class Crypto(Protocol):
    """Signing, injected so that the core stays free of keys and the simulator free of Ed25519."""

    def sign(self, message: bytes) -> bytes:
        """Sign the message with our key."""

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Tell whether that peer signed the message. False, never an exception, for anything malformed."""


MAX_INNER_STEPS = 1 << 32
"""Limit of inner steps between two merges: no learner makes more. Bounds what one lie can add to token
counts."""
MAX_WEIGHT = 1 << 62
"""Limit of a contribution's weight, tokens^2 / inner steps: two thousand million tokens in one inner step.
With `tensors.merge.MIN_LENGTH` it keeps every sum of a merge inside fp32's range."""
MOST_PERIODS = 1 << 20
"""Limit of a contribution's inner steps as a multiple of H: years of absence."""


def can_be_weighed(tokens: int, inner_steps: int) -> bool:
    """Tell whether a merge can weigh so many tokens in so many inner steps."""
    return tokens > 0 and 0 < inner_steps <= MAX_INNER_STEPS and tokens * tokens <= MAX_WEIGHT * inner_steps


def weight_of(tokens: int, inner_steps: int, most_tokens: int, trust: int) -> float:
    """Compute the weight of a contribution, tokens^2 / inner steps. Of the tokens at most `most_tokens`
    weigh, and of that the share that its learner is trusted with."""
    return min(tokens, most_tokens) * tokens / inner_steps * (trust / FULL_TRUST)


def plausible_work(tokens: int, inner_steps: int, tokens_per_step: int, period: int) -> bool:
    """Tell whether a learner can have trained so many tokens in so many inner steps, and a merge can weigh
    them: what it raises at would cost a whole round. `period`: H."""
    possible = tokens <= inner_steps * tokens_per_step and inner_steps <= MOST_PERIODS * period
    return possible and can_be_weighed(tokens, inner_steps)


MerklePath = tuple[tuple[bool, bytes], ...]
"""Way from an entry to the root: (True if the sibling is on the left, the sibling's digest), from below."""
EMPTY_ROOT = hashlib.sha256(b"").digest()


def merkle_root(entries: Sequence[bytes]) -> bytes:
    """Compute the root of a Merkle tree over these entries, in this order: one digest for all of them.

    As in RFC 6962: entries and inner nodes are hashed in domains of their own, so that neither can pass for
    the other. An odd node at the end of a row goes up as it is.
    """
    row = [_leaf(entry) for entry in entries]
    while len(row) > 1:
        row = _above(row)
    return row[0] if row else EMPTY_ROOT


def merkle_path(entries: Sequence[bytes], index: int) -> MerklePath:
    """Find the way from entry `index` to the root."""
    row, at, found = [_leaf(entry) for entry in entries], index, []
    while len(row) > 1:
        sibling = at ^ 1
        if sibling < len(row):
            found.append((sibling < at, row[sibling]))
        row, at = _above(row), at // 2
    return tuple(found)


def merkle_root_of(entry: bytes, way: MerklePath) -> bytes:
    """Compute the root that a tree has in which `entry` lies at the end of this way."""
    digest = _leaf(entry)
    for on_left, sibling in way:
        digest = _node(sibling, digest) if on_left else _node(digest, sibling)
    return digest


def _above(row: list[bytes]) -> list[bytes]:
    pairs = [_node(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]
    return pairs + row[len(row) - len(row) % 2 :]


def _leaf(entry: bytes) -> bytes:
    return hashlib.sha256(b"\0" + entry).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()
