"""Reasons for refusals and failures: codes, texts for people, and what follows from each.

Codes may cross the wire. Code compares members and asks their properties, never texts. An unknown code in a
message or an answer is garbage, as any other value that its schema lacks: nothing of it reaches the core.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Self

from p2pdiloco.util import direct_members


class Reason(Enum):
    """Base of the reasons. The value is the code; `str` is the text for people, as events.jsonl has it."""

    text: str

    def __new__(cls, code: str, text: str = "") -> Self:
        """Make a reason that has no more to it; without a text its code is the text."""
        self = object.__new__(cls)
        self._value_, self.text = code, text or code
        return self

    def __str__(self) -> str:
        return self.text


@direct_members
class Then(Enum):
    """Next step of an offer's sender after the receiver's word on it."""

    WAIT = auto()
    """Wait: a version that contains it is due."""
    WAIT_LONGER = auto()
    """Wait for company: it is not in this round."""
    RETRY = auto()
    """Offer it again after a pause."""
    RELABEL = auto()
    """Offer the same again, measured against the newest version."""
    DOUBT = auto()
    """Offer it again, and the second time doubt that this peer is in office at all."""
    GIVE_UP = auto()
    """Give it up, unless it was damaged on the way: nobody will ever take it."""


@direct_members
class Verdict(Reason):
    """Word of the receiver on an offered contribution or partial merge."""

    then: Then
    counted: bool
    """True: it is the sender's fault, and recorded as a refusal."""

    def __new__(cls, code: str, then: Then = Then.RETRY, counted: bool = False) -> Verdict:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.then, self.counted = then, counted
        return self

    @property
    def taken(self) -> bool:
        """True: the receiver has it."""
        return self.then in (Then.WAIT, Then.WAIT_LONGER)

    IN_ROUND = "in-round", Then.WAIT
    HELD = "held", Then.WAIT_LONGER
    ALREADY_HELD = "already-held", Then.WAIT_LONGER
    # What time mends.
    NOT_SYNCER = "not-syncer", Then.DOUBT
    STALE_BASE = "stale-base", Then.RELABEL
    UNKNOWN_BASE = "unknown-base", Then.RELABEL
    BEHIND = "behind"
    """Receiver that lacks what comes before it."""
    OVERLAP = "overlap"
    """Receiver that has a part of it already."""
    ALREADY_MERGED = "already-merged"
    IN_TRANSFER = "in-transfer"
    CHAIN_MOVED = "chain-moved"
    CLOSING = "closing"
    FULL = "full"
    OTHER_EPOCH = "other-epoch"
    NOT_HEARD_OF = "not-heard-of"
    UNKNOWN_TRANSFER = "unknown-transfer"
    NOT_READY = "not-ready"
    """Receiver that is no member of a run yet."""
    BUSY = "busy"
    NO_MEMORY = "out-of-memory-budget"
    EXCLUDED = "excluded", Then.DOUBT
    """Sender that is shown to have lied, for all that the receiver knows."""
    EXPELLED = "expelled", Then.RETRY, True
    """Sender whose work does harm, or nothing, as the receiver's loss audits have shown."""
    CUT = "cut"
    """Broken stream: the sender hears nothing."""
    # What is wrong with the label.
    UNKNOWN_FRAGMENT = "unknown-fragment", Then.RETRY, True
    OTHER_RUN = "other-run", Then.RETRY, True
    OTHER_GROUP = "other-group", Then.RETRY, True
    FALSE_LEARNER = "false-learner", Then.RETRY, True
    FALSE_SYNCER = "false-syncer", Then.RETRY, True
    REPEATED_LEARNER = "repeated-learner", Then.RETRY, True
    FALSE_STAMP = "false-stamp", Then.RETRY, True
    FALSE_PARTIALS = "false-partials", Then.RETRY, True
    """Partial merge that cannot be made of those that it names."""
    BAD_SIGNATURE = "bad-signature", Then.GIVE_UP, True
    WRONG_CODEC = "wrong-codec", Then.GIVE_UP, True
    WRONG_SIZE = "wrong-size", Then.GIVE_UP, True
    IMPLAUSIBLE_TOKENS = "implausible-tokens", Then.GIVE_UP, True
    COPY = "copy", Then.GIVE_UP, True
    """Contribution with the payload of somebody's newest one, its own perhaps."""
    # What is wrong with the payload.
    WRONG_DIGEST = "wrong-digest", Then.RETRY, True
    WRONG_COUNT = "wrong-count", Then.RETRY, True
    WRONG_WEIGHT = "wrong-weight", Then.RETRY, True
    IMPLAUSIBLE_WEIGHT = "implausible-weight", Then.RETRY, True
    NON_FINITE = "non-finite", Then.GIVE_UP, True
    OUT_OF_RANGE = "out-of-range", Then.GIVE_UP, True
    DAMAGED = "damaged", Then.GIVE_UP
    """Payload that is not any more what came, by our own memory or disk: no peer hears that. A peer's comes
    once more; our own is lost."""


@direct_members
class FetchFailure(Reason):
    """Reasons for which a holder did not give an update or a state."""

    innocent: bool
    """True: an honest holder may fail so, for reasons of the network or because time went on."""

    def __new__(cls, code: str, innocent: bool = True) -> FetchFailure:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.innocent = innocent
        return self

    UNREACHABLE = "unreachable"
    NOT_READY = "not-ready"
    CUT = "cut"
    SLOW = "slow"
    """Holder that takes much longer than is usual, where another one has something, too."""
    BUSY = "busy"
    GONE = "gone"
    """Version that is no longer in the holder's log."""
    BEHIND = "behind"
    LATER = "later", False
    """Version that is still on its way to the holder itself."""
    FALSE = "false", False
    """Any other fault of the holder's answer."""


@direct_members
class PullRefusal(Reason):
    """Word of a peer that does not give what it was asked for."""

    failure: FetchFailure
    """Failure that it is to the core, where an update or a state was asked for."""

    def __new__(cls, code: str, failure: FetchFailure = FetchFailure.FALSE) -> PullRefusal:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.failure = failure
        return self

    NOT_READY = "not-ready", FetchFailure.NOT_READY
    """Peer that is no member of a run, or has nothing yet that others may have."""
    BUSY = "busy", FetchFailure.BUSY
    GONE = "gone", FetchFailure.GONE
    BEHIND = "behind", FetchFailure.BEHIND
    LATER = "later", FetchFailure.LATER
    OTHER_RUN = "other-run"
    UNKNOWN_RUN = "unknown-run"
    UNKNOWN_FRAGMENT = "unknown-fragment"
    NOT_HERE = "not-here"
    BEYOND_THE_END = "beyond-the-end"
    NOT_A_MEMBER = "not-a-member"


@direct_members
class ProbeRefusal(Reason):
    """Word of a peer that does not measure a link with us now."""

    BUSY = "probe-busy", "measures a link for somebody else just now"
    TOO_OFTEN = "probe-too-often", "has measured this link just now"
    TOO_MUCH = "probe-too-much", "has sent and taken enough for one measurement"


@direct_members
class Unheard(Reason):
    """Reasons for which a peer does not even look at what it is asked; any other word of its transport is
    about a fault of what it got."""

    failure: FetchFailure

    def __new__(cls, code: str, text: str, failure: FetchFailure) -> Unheard:
        self = object.__new__(cls)
        self._value_, self.text, self.failure = code, text, failure
        return self

    BUSY = "busy", "has too many requests just now", FetchFailure.BUSY
    NOT_READY = "not-ready", "is not ready yet", FetchFailure.NOT_READY
    NOT_ADMITTED = "not-admitted", "was not shown that we are a member", FetchFailure.NOT_READY
    BANNED = "banned", "knows that the run's owner has banned us", FetchFailure.NOT_READY
    EXCLUDED = "excluded", "has a proof that we lied", FetchFailure.NOT_READY


@direct_members
class VersionFault(Reason):
    """Reasons for which a fetched version does not become this node's."""

    forked: bool
    """True: it does not continue our chain for us, so the whole state is to be copied."""
    innocent: bool
    """True: the holder did nothing wrong."""

    def __new__(cls, code: str, forked: bool = False, innocent: bool = False) -> VersionFault:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.forked, self.innocent = forked, innocent
        return self

    CHAIN_MOVED = "chain-moved", False, True
    BEHIND = "behind", False, True
    PARENT_DIFFERS = "parent-differs", True, True
    UNELECTED = "unelected", True, False
    """Version of a syncer that does not show that it holds the office."""
    OTHER_HOLDER = "other-holder", True, True
    """Version of a syncer that was elected, where this node counts on another, or hears others."""
    DIGEST_DIFFERS = "digest-differs", True, True
    """Outer step that has another result here than the header states, perhaps by a fault of ours."""
    FALSE_STATE = "false-state"
    """Version whose header states another state than its update makes of ours."""
    WRONG_FRAGMENT = "wrong-fragment"
    SIGNATURE = "version-signature"
    FALSE_PLAN = "false-plan"
    FALSE_TOKENS = "false-tokens"
    UNSUPPORTED = "unsupported", False, True
    """Version on which too few of those stand who decide, perhaps as yet, to copy a state of it."""
    SEATLESS = "seatless"
    """Version without the work of any seat."""
    FALSE_PAPERS = "false-papers"
    """Papers that nobody signed, that change nothing, or that do not begin a term."""
    FALSE_TABLE = "false-table"
    """Watermarks other than follow from its parent's, or than its header commits to."""
    FALSE_FINALITY = "false-finality"
    """Version whose milestones are not what follows from its parent and its contributors."""
    FALSE_SCALE = "false-scale"
    """Version whose unit or reach is not what follows from its parent."""
    OUT_OF_SCALE = "out-of-scale"
    """Version with numbers that no chain can have, an update that is too long, or one not as stated."""
    FALSE_TRUST = "false-trust"
    """Version whose trust weights do not follow from its parent, or whose measurements cannot be."""
    FALSE_STAMP = "false-stamp"
    FALSE_PARTIALS = "false-partials"
    """Version that cannot be made of the partial merges that it names, one for each group."""
    FALSE_LABEL = "false-label"
    """Version that names a contribution which its learner did not sign."""
    IMPLAUSIBLE_TOKENS = "implausible-tokens"
    FALSE_REPAIR = "false-repair"
    """Version that repairs one which is repaired already, is too old or is none of the chain's; or where
    nothing is audited."""


@direct_members
class VoteRefusal(Reason):
    """Reasons for which a member does not vote for a candidate."""

    soft: bool
    """True: the voter will know more in a moment, and is asked again in the same term."""

    def __new__(cls, code: str, text: str, soft: bool = False) -> VoteRefusal:
        self = object.__new__(cls)
        self._value_, self.text, self.soft = code, text, soft
        return self

    OTHER_EPOCH = "other-epoch", "other epoch", True
    NOT_HEARD_OF = "not-heard-of", "not heard of yet", True
    NO_DISK = "no-disk", "our disk takes no votes"
    CATCHING_UP = "catching-up", "we are catching up ourselves"
    NOT_CONFIRMED = "not-confirmed", "not a confirmed member"
    NO_VOTER = "no-voter", "does not vote here itself, by our chain", True
    FAR_AHEAD = "far-ahead", "that term is far ahead of ours"
    CERTIFIED = "certified", "that term, or a later one, is certified already"
    VOTE_GIVEN = "vote-given", "our vote of that term, or of a later one, is given"
    SAVING = "saving", "our last votes are still being saved"
    LIGHTER = "lighter", "our chain is heavier"
    COUNTED_ON = "counted-on", "the syncer in office is alive"
    NOT_PROVEN = "not-proven", "by our chain that term is not over", True
    DISTRUSTED = "distrusted", "it gave something false or useless, or not what it merged, or left us out"
    OUT_OF_TURN = "out-of-turn", "it made nothing of the office, or had it lately, and others stand", True


@direct_members
class Basis(Reason):
    """Grounds on which a node that began with nothing believed what it took, the weakest last."""

    VOUCHED = "vouched", "what the owner vouched for"
    JOINED = "joined", "what a peer of the join line stands on"
    MOST = "most", "what most members stand on"

    @property
    def rank(self) -> int:
        """Place of it, the strongest first."""
        return list(Basis).index(self)


@direct_members
class Suspicion(Reason):
    """Reasons for which a member does not count on a syncer that is alive."""

    NO_VERSION = "no-version", "no version in time"
    """Syncer that holds a contribution, or a partial merge, and makes no version of it."""
    NOT_IN_OFFICE = "not-in-office", "the syncer says that it is not in office"
    RESTARTED = "restarted", "the syncer was restarted"


@direct_members
class AuditOutcome(Reason):
    """Outcomes of making a merge again."""

    SAME = "same", "it is the merge of what it names"
    DIFFERENT = "different", "it is not the merge of what it names"
    MISSING = "missing", "not all that it names could be had"
    UNABLE = "unable", "this machine does not calculate as all others do"


@direct_members
class CastOutWhy(Reason):
    """Causes of what a node is cast out for, if it meant no harm; the text says what its person can do."""

    TWO_LIVES = (
        "two-lives",
        "a copy of its data folder runs, or an old backup of it was restored: begin anew with an empty "
        "--data-dir (a new identity)",
    )
    UNSOUND = (
        "unsound",
        "its memory, its disk or its processor makes errors, or its program was changed: test the machine, "
        "install the program anew, and begin with an empty --data-dir (a new identity)",
    )


@direct_members
class AdmissionFault(Reason):
    """Reasons for which a peer is not admitted."""

    NOT_SHOWN = "admission-not-shown", "this run takes members by invite only"
    NOT_LISTED = "not-on-the-list", "this run's owner has not put this node on its list"
    OTHER_RUN = "admission-other-run", "the invite is of another run"
    OTHER_PEER = "admission-other-peer", "the admission is another node's"
    GRANT_SIGNATURE = "grant-signature", "the invite is not signed by this run's owner"
    ADMISSION_SIGNATURE = "admission-signature", "the admission is not signed with the invite's key"
    EXPIRED = "invite-expired", "the invite has expired"
    USED_UP = "invite-used-up", "as many nodes as the invite is for have used it"
    REVOKED = "invite-revoked", "this run's owner has revoked the invite"
    BANNED = "banned", "this run's owner has banned this node"
    EXCLUDED = "excluded", "there is a proof that this node lied"
    FULL = "register-full", "as many members as a node remembers have been admitted"


@direct_members
class LossFinding(Reason):
    """Findings of loss audits about a learner."""

    HARM = "harm", "its work makes the model worse"
    NOTHING = "nothing", "its work does no good to the model, on its own data neither"


@direct_members
class MessageFault(Reason):
    """Faults of a control message; recorded as refusals."""

    OUR_OWN_NAME = "our-own-name"
    UNKNOWN_FRAGMENT = "unknown-fragment"
    WRONG_HEADS = "wrong-heads"
    VOTE_OF_ANOTHER = "vote-of-another"
    VOTE_FOR_ANOTHER = "vote-for-another"
    VOTE_SIGNATURE = "vote-signature"
    CERTIFICATE_EMPTY = "certificate-empty"
    CERTIFICATE_REPEATS = "certificate-repeats"
    CERTIFICATE_MINORITY = "certificate-minority"
    CERTIFICATE_SIGNATURE = "certificate-signature"
    EXCLUDED = "excluded"
    """Message of a member that is shown to have lied; recorded once for each."""
    FALSE_PROOF = "false-proof"
    FALSE_STATEMENT = "false-statement"
    """Statement that somebody did not sign."""
    NO_AUDITS = "no-audits"
    """Statement on a merge, in a run in which none can be made again."""
