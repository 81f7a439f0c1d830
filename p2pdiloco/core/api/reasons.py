"""Why something is refused: codes that may cross the wire, texts for people, and what follows from each.

Code compares members and asks their properties, never texts. An unknown code in a message or an answer is
garbage, as any other value that its schema lacks: nothing of it reaches the core.
"""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.core.machine import direct_members


class Reason(Enum):
    """Base of the reasons. The value is the code; `str` is the text for people, as events.jsonl has it."""

    text: str

    def __str__(self) -> str:
        return self.text


@direct_members
class Then(Enum):
    """What the sender of an offer does after the receiver's word on it."""

    WAIT = auto()
    """A version that contains it is due."""
    WAIT_LONGER = auto()
    """It is not in this round: it waits for company."""
    RETRY = auto()
    """Offer it again after a pause."""
    RELABEL = auto()
    """The same, measured against the newest version."""
    DOUBT = auto()
    """The same, and the second time doubt that this peer is in office at all."""
    GIVE_UP = auto()
    """Nobody will ever take it, unless it was damaged on the way."""


@direct_members
class Verdict(Reason):
    """The receiver's word on an offered contribution or partial merge."""

    then: Then
    counted: bool
    """It is the sender's fault, and recorded as a refusal."""

    def __new__(cls, code: str, then: Then = Then.RETRY, counted: bool = False) -> Verdict:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.then, self.counted = then, counted
        return self

    @property
    def taken(self) -> bool:
        """Whether the receiver has it."""
        return self.then in (Then.WAIT, Then.WAIT_LONGER)

    @staticmethod
    def of(code: str) -> Verdict:
        """The verdict on a payload in which this was found wrong."""
        return _VERDICTS.get(code, Verdict.UNUSABLE)

    IN_ROUND = "in-round", Then.WAIT
    HELD = "held", Then.WAIT_LONGER
    ALREADY_HELD = "already-held", Then.WAIT_LONGER
    # What time mends.
    NOT_SYNCER = "not-syncer", Then.DOUBT
    STALE_BASE = "stale-base", Then.RELABEL
    UNKNOWN_BASE = "unknown-base", Then.RELABEL
    BEHIND = "behind"
    """The receiver lacks what comes before it."""
    OVERLAP = "overlap"
    """The receiver has a part of it already."""
    ALREADY_MERGED = "already-merged"
    IN_TRANSFER = "in-transfer"
    CHAIN_MOVED = "chain-moved"
    CLOSING = "closing"
    FULL = "full"
    OTHER_EPOCH = "other-epoch"
    NOT_HEARD_OF = "not-heard-of"
    UNKNOWN_TRANSFER = "unknown-transfer"
    NOT_READY = "not-ready"
    """No member of a run yet."""
    BUSY = "busy"
    NO_MEMORY = "out-of-memory-budget"
    CUT = "cut"
    """The stream broke: the sender hears nothing."""
    # What is wrong with the label.
    UNKNOWN_FRAGMENT = "unknown-fragment", Then.RETRY, True
    OTHER_RUN = "other-run", Then.RETRY, True
    OTHER_GROUP = "other-group", Then.RETRY, True
    FALSE_LEARNER = "false-learner", Then.RETRY, True
    FALSE_SYNCER = "false-syncer", Then.RETRY, True
    REPEATED_LEARNER = "repeated-learner", Then.RETRY, True
    FALSE_STAMP = "false-stamp", Then.RETRY, True
    BAD_SIGNATURE = "bad-signature", Then.GIVE_UP, True
    WRONG_CODEC = "wrong-codec", Then.GIVE_UP, True
    WRONG_SIZE = "wrong-size", Then.GIVE_UP, True
    IMPLAUSIBLE_TOKENS = "implausible-tokens", Then.GIVE_UP, True
    # What is wrong with the payload.
    WRONG_DIGEST = "wrong-digest", Then.RETRY, True
    WRONG_COUNT = "wrong-count", Then.RETRY, True
    WRONG_WEIGHT = "wrong-weight", Then.RETRY, True
    IMPLAUSIBLE_WEIGHT = "implausible-weight", Then.RETRY, True
    UNUSABLE = "unusable", Then.RETRY, True
    """Whatever else is wrong with it."""
    NON_FINITE = "non-finite", Then.GIVE_UP, True
    OUT_OF_RANGE = "out-of-range", Then.GIVE_UP, True


_VERDICTS = {verdict.value: verdict for verdict in Verdict}


@direct_members
class FetchFailure(Reason):
    """Why a holder did not give an update or a state."""

    innocent: bool
    """An honest holder may fail so: the network's reasons, and what time brings."""

    def __new__(cls, code: str, innocent: bool = True) -> FetchFailure:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.innocent = innocent
        return self

    UNREACHABLE = "unreachable"
    NOT_READY = "not-ready"
    CUT = "cut"
    BUSY = "busy"
    GONE = "gone"
    """No longer in its log."""
    BEHIND = "behind"
    LATER = "later"
    """It is on its way to the holder itself."""
    FALSE = "false", False
    """Whatever else was wrong with its answer."""

    @staticmethod
    def of(code: str) -> FetchFailure:
        """The failure that a peer's refusal, or an error found in its answer, stands for."""
        return _FAILURES.get(code, FetchFailure.FALSE)


_FAILURES = {failure.value: failure for failure in FetchFailure}


@direct_members
class VersionFault(Reason):
    """Why a fetched version does not become this node's."""

    forked: bool
    """It is of another branch: the whole state is to be copied."""
    innocent: bool
    """The holder did nothing wrong."""

    def __new__(cls, code: str, forked: bool = False, innocent: bool = False) -> VersionFault:
        self = object.__new__(cls)
        self._value_ = self.text = code
        self.forked, self.innocent = forked, innocent
        return self

    CHAIN_MOVED = "chain-moved", False, True
    BEHIND = "behind", False, True
    PARENT_DIFFERS = "parent-differs", True, True
    OTHER_SYNCER = "other-syncer", True, True
    """Both sides of a split elected one in this term."""
    DIGEST_DIFFERS = "digest-differs", True, True
    """The outer step made here has another result."""
    WRONG_FRAGMENT = "wrong-fragment"
    SIGNATURE = "version-signature"
    FALSE_PLAN = "false-plan"
    FALSE_TERM = "false-term"
    FALSE_TOKENS = "false-tokens"
    IMPLAUSIBLE_TOKENS = "implausible-tokens"


@direct_members
class VoteRefusal(Reason):
    """Why a member does not vote for a candidate."""

    soft: bool
    """The voter will know more in a moment: it is asked again in the same term."""

    def __new__(cls, code: str, text: str, soft: bool = False) -> VoteRefusal:
        self = object.__new__(cls)
        self._value_, self.text, self.soft = code, text, soft
        return self

    OTHER_EPOCH = "other-epoch", "other epoch", True
    NOT_HEARD_OF = "not-heard-of", "not heard of yet", True
    NO_DISK = "no-disk", "our disk takes no votes"
    CATCHING_UP = "catching-up", "we are catching up ourselves"
    NOT_CONFIRMED = "not-confirmed", "not a confirmed member"
    FAR_AHEAD = "far-ahead", "that term is far ahead of ours"
    CERTIFIED = "certified", "that term, or a later one, is certified already"
    VOTE_GIVEN = "vote-given", "our vote of that term, or of a later one, is given"
    SAVING = "saving", "our last votes are still being saved"
    LIGHTER = "lighter", "our chain is heavier"
    COUNTED_ON = "counted-on", "the syncer in office is alive"
    CLOSING = "closing", "our round is closing"


@direct_members
class Suspicion(Reason):
    """Why a member does not count on a syncer that is alive."""

    def __new__(cls, code: str, text: str) -> Suspicion:
        self = object.__new__(cls)
        self._value_, self.text = code, text
        return self

    NO_VERSION = "no-version", "no version in time"
    """It holds a contribution, or a partial, and nothing comes of it."""
    NOT_IN_OFFICE = "not-in-office", "the syncer says that it is not in office"
    RESTARTED = "restarted", "the syncer was restarted"


@direct_members
class MessageFault(Reason):
    """What is wrong with a control message; recorded as a refusal."""

    def __new__(cls, code: str) -> MessageFault:
        self = object.__new__(cls)
        self._value_ = self.text = code
        return self

    OUR_OWN_NAME = "our-own-name"
    UNKNOWN_FRAGMENT = "unknown-fragment"
    WRONG_HEADS = "wrong-heads"
    VOTE_OF_ANOTHER = "vote-of-another"
    VOTE_FOR_ANOTHER = "vote-for-another"
    VOTE_SIGNATURE = "vote-signature"
    CERTIFICATE_EMPTY = "certificate-empty"
    CERTIFICATE_MINORITY = "certificate-minority"
    CERTIFICATE_SIGNATURE = "certificate-signature"
