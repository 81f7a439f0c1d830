"""Values of the protocol: versions, contributions, votes, stamps, with their one encoding.

All are immutable and hashable, and each has one canonical msgpack encoding. Peers are named by their libp2p
peer id (base58 text), fragments by their index. Digests are 32 raw bytes: SHA-256 of headers,
`p2pdiloco.hashing` of payloads and states. Field order is wire format: append only, and raise `WIRE_VERSION`
on any change.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.core.api.plausible import plausible_work

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
MAX_WATERMARKS = 16384
WHOLE_RUN: GroupId = "all"
"""Name of the one group that exists while the run fits into one (`core.api.grouping`)."""

_encoder = msgspec.msgpack.Encoder()


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that crosses the wire: positional msgpack arrays, strictly validated."""


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
        """Order of chains: more tokens, then higher term, then digest (docs/protocol/forks.md, section 2)."""
        return (self.tokens, self.term, self.digest)


class Stamp(Wire, order=True, frozen=True):
    """Number of a contribution that orders those of one learner: a restart has a higher incarnation."""

    incarnation: Count
    sequence: Count


NEVER = Stamp(0, 0)
"""Stamp of a learner of which nothing has been merged."""


class MergeLimits(Wire, frozen=True):
    """Limits of one contribution's part in a merge (`core.chain.scale`)."""

    most_tokens: Count
    """Tokens that it weighs at most."""
    longest: float
    """Length to which it is cut."""

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


class Contributor(Wire, frozen=True):
    """Part of one learner in a merge."""

    learner: PeerId
    stamp: Stamp
    tokens: Count
    inner_steps: Count
    after: Stamp = NEVER
    """Stamp after which it comes: that of its learner in the chain which the merge goes on with."""
    payload_digest: Digest = bytes(32)
    signature: Signature = b""
    """The learner's, of its `WorkLabel`."""

    def work(self, run: str, fragment: int) -> WorkLabel:
        """Make what its learner signs."""
        done = self.tokens, self.inner_steps
        return WorkLabel(run, fragment, self.learner, self.stamp, self.after, *done, self.payload_digest)


class Watermark(Wire, frozen=True):
    """Mark of one learner in a chain: its newest merged contribution, and its record as a member."""

    learner: PeerId
    stamp: Stamp
    number: Count
    """Version that has its newest contribution."""
    first: Count = 0
    """Version since which it has had a mark without a break."""
    merges: Count = 1
    """Versions since then that have a contribution of it."""
    voter: Count = 0
    """Version since which it votes; 0: it does not yet (`core.chain.watermarks`)."""


def table_digest(table: tuple[Watermark, ...]) -> bytes:
    """Compute SHA-256 of a table of watermarks in canonical order."""
    return hashlib.sha256(_encoder.encode(table)).digest()


EMPTY_TABLE = table_digest(())


class VersionHeader(Wire, frozen=True):
    """Description of a version: parent, what was merged, and the digests of update and resulting state."""

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
    """Digest of (number, Theta, outer momentum) after the outer step; see `tensors.digest`."""
    update_digest: Digest
    update_bytes: Count
    codec: Annotated[str, Meta(max_length=16)]
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_CONTRIBUTORS)]
    epoch: Count = 0
    """Epoch of the grouping under which the *next* version is made; grows by one when the groups rotate."""
    groups: Annotated[int, Meta(ge=1, le=MAX_CONTRIBUTORS)] = 1
    """Number of groups into which the members fall for the next version; 1: all are in one
    (`core.api.grouping`)."""
    table: Digest = EMPTY_TABLE
    """Digest of the table of watermarks after this version (`table_digest`): nobody can forge it beside a
    state."""
    unit: Count = 0
    """Tokens of a usual contribution (`core.chain.scale`); 0: H inner steps'."""
    norm: float = 0.0
    """Length (L2) of the outer update, as its syncer found it; of version 0, its own, about."""
    reach: float = 0.0
    """Length of a usual update; 0: not known, and nothing is cut."""

    def digest(self) -> bytes:
        """Compute SHA-256 of the canonical encoding."""
        if len(self.contributors) < LONG:
            return hashlib.sha256(_encoder.encode(self)).digest()
        return _facts(self).digest

    def longest_steps(self) -> int:
        """Find the inner steps of its longest contribution; 0 for version 0."""
        if len(self.contributors) < LONG:
            return max((part.inner_steps for part in self.contributors), default=0)
        return _facts(self).longest_steps

    def plausible(self, tokens_per_step: int, period: int) -> bool:
        """Tell whether every contributor can have trained so much in so many inner steps
        (`plausible_work`)."""
        if len(self.contributors) < LONG:
            return _all_plausible(self.contributors, tokens_per_step, period)
        return _facts(self).plausible(tokens_per_step, period)

    def head(self) -> Head:
        """Make the short name of this version."""
        return Head(self.number, self.digest(), self.tokens, self.term)


class Vouch(Wire, frozen=True):
    """Word of a run's owner that a version is in the run's history, and who knows that history."""

    fragment: Count
    number: Count
    digest: Digest
    members: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_VOUCHED)] = ()
    """Members that had worked by then; each is named for one fragment only."""


LONG = 32
"""Number of contributors from which on it pays to remember what follows from a header."""
_REMEMBERED_HEADERS = 64


def _all_plausible(contributors: tuple[Contributor, ...], tokens_per_step: int, period: int) -> bool:
    return all(
        plausible_work(part.tokens, part.inner_steps, tokens_per_step, period) for part in contributors
    )


class _Facts:
    """Answers about a long header, which are asked for again and again.

    In a large run a header names thousands of learners, and in the simulator thousands of nodes hold the same
    one. Remembered for the object, never for its value.
    """

    __slots__ = ("_plausible", "digest", "header", "longest_steps", "signed")

    def __init__(self, header: VersionHeader) -> None:
        encoded = _encoder.encode(header)
        self.header = header
        self.digest = hashlib.sha256(encoded).digest()
        self.signed = _DOMAIN + b"version\0" + encoded
        self.longest_steps = max(part.inner_steps for part in header.contributors)
        self._plausible: tuple[tuple[int, int], bool] | None = None

    def plausible(self, tokens_per_step: int, period: int) -> bool:
        """Tell whether all its contributors' work is plausible; a run has one step and one H."""
        asked = tokens_per_step, period
        if self._plausible is None or self._plausible[0] != asked:
            self._plausible = asked, _all_plausible(self.header.contributors, *asked)
        return self._plausible[1]


_remembered: dict[int, _Facts] = {}
"""Facts by the header's identity, which no other object has while the header is kept here."""
_DOMAIN = b"p2pdiloco/1/"


def _facts(header: VersionHeader) -> _Facts:
    found = _remembered.get(id(header))
    if found is None:
        while len(_remembered) >= _REMEMBERED_HEADERS:
            _remembered.pop(next(iter(_remembered)), None)
        found = _remembered[id(header)] = _Facts(header)
    return found


class SignedVersion(Wire, frozen=True):
    """Version header with its syncer's signature over `signed_bytes("version", header)`."""

    header: VersionHeader
    signature: Signature


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


class SignedContribution(Wire, frozen=True):
    """Contribution header with its learner's signature of the `WorkLabel` in it. The rest is the word of the
    learner that is connected."""

    header: ContributionHeader
    signature: Signature

    def contributor(self) -> Contributor:
        """Make its part in a merge."""
        h = self.header
        done = h.tokens, h.inner_steps
        return Contributor(h.learner, h.stamp, *done, h.after, h.payload_digest, self.signature)


class PartialHeader(Wire, frozen=True):
    """Label of a group's partial merge, on its way to the syncer of the group above (docs/protocol/groups.md,
    section 3)."""

    run: RunId
    group: GroupId
    """Group whose contributions were merged."""
    fragment: Count
    syncer: PeerId
    """Syncer of that group; the author."""
    number: Count
    """Number of the head upon which the next version is to be made, for all that the author knows."""
    digest: Digest
    parts: Annotated[tuple[Contributor, ...], Meta(min_length=1, max_length=MAX_CONTRIBUTORS)]
    due: bool
    """True: the group's round began with what was due, or something in it was; a round may start with it."""
    payload_digest: Digest
    payload_bytes: Count
    limits: MergeLimits = NO_LIMITS
    """Limits by which the contributions were weighed and cut: those of the head at that time."""


class SignedPartial(Wire, frozen=True):
    """Header of a partial merge, signed by its author over `signed_bytes("partial", header)`."""

    header: PartialHeader
    signature: Signature


SignedOffer = SignedContribution | SignedPartial
"""Offer to a syncer: a learner's work, or the sums of a whole group's."""


class VoteBody(Wire, frozen=True):
    """Content of a vote: in this term of this fragment, this candidate."""

    run: RunId
    group: GroupId
    fragment: Count
    term: Count
    candidate: PeerId
    voter: PeerId


class Vote(Wire, frozen=True):
    """Vote signed by its voter over `signed_bytes("vote", body)`."""

    body: VoteBody
    signature: Signature


class Certificate(Wire, frozen=True):
    """Proof that a syncer is in office: a majority's votes for (group, fragment, term)."""

    group: GroupId
    fragment: Count
    term: Count
    syncer: PeerId
    start_number: Count
    """Head number of the syncer when it was elected: the term ends `term_versions` later."""
    votes: Annotated[tuple[Vote, ...], Meta(max_length=MAX_VOTES)]


def signed_bytes(domain: str, value: Wire) -> bytes:
    """Make the bytes that a signature covers: a domain separator and the canonical encoding."""
    if domain == "version" and isinstance(value, VersionHeader) and len(value.contributors) >= LONG:
        return _facts(value).signed
    return _DOMAIN + domain.encode() + b"\0" + _encoder.encode(value)


class Crypto(Protocol):
    """Signing, injected so that the core stays free of keys and the simulator free of Ed25519."""

    def sign(self, message: bytes) -> bytes:
        """Sign the message with our key."""

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Tell whether that peer signed the message. False, never an exception, for anything malformed."""
