"""Ledger: what learners did of a run, by the versions of one head's line, each contribution once.

What a version counts is the difference of its tokens to its parent's (`core.chain.scale`). Mostly that is
the sum of its labels. Where labels claim more than may count, one limit for all of them is found that gives
the same sum, times the versions since the learner's last one, as members count. So the credits of a fragment
always add up to its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from msgspec import Struct, field

from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.chain.earning import earned, mark_of
from p2pdiloco.core.chain.scale import MOST_GAP
from p2pdiloco.core.chain.watermarks import WATERMARK_VERSIONS
from p2pdiloco.credits.records import HistoryRecord

MOST = 1 << 62
"""Limit of figures that follow from claims alone: sums of absurd ones must not be what nobody can encode."""


class Doubt(Enum):
    """Reasons for which a part of a version is not credited, or a version is not what it should be."""

    FALSE_LABEL = "a label is not signed by its learner"
    FALSE_VERSION = "a version is not signed by its syncer"
    TWICE = "a contribution is there twice"
    OUT_OF_ORDER = "a contribution does not come after the one that it names"
    OTHER_RUN = "a version is of another run or fragment"
    FEWER_TOKENS = "a version has fewer tokens than its parent"


class Entry(Struct):
    """Work of one learner in one fragment, or in one stretch of time."""

    tokens: int = 0
    """Tokens as its versions counted them."""
    claimed: int = 0
    """Tokens as its labels say."""
    inner_steps: int = 0
    contributions: int = 0
    first_s: int = 0
    last_s: int = 0
    """Times at which a keeper took the versions that have its first and last contribution; 0: not known."""

    def add(self, tokens: int, part: Contributor, at_s: int) -> None:
        """Add a contribution."""
        self.tokens += tokens
        self.claimed += part.tokens
        self.inner_steps += part.inner_steps
        self.contributions += 1
        if at_s:
            self.first_s = min(self.first_s or at_s, at_s)
            self.last_s = max(self.last_s, at_s)

    def join(self, other: Entry) -> None:
        """Add what is in another entry."""
        self.tokens += other.tokens
        self.claimed += other.claimed
        self.inner_steps += other.inner_steps
        self.contributions += other.contributions
        self.first_s = min(filter(None, (self.first_s, other.first_s)), default=0)
        self.last_s = max(self.last_s, other.last_s)


class MergedMark(Struct, frozen=True):
    """Newest contribution of a learner that a ledger has."""

    stamp: Stamp
    number: int
    last: bytes
    """Bytes by which a copy of it is known."""


class FragmentLedger:
    """Ledger of one fragment's line of versions, oldest first."""

    def __init__(self, run: str, fragment: int, bucket_s: int = 0) -> None:
        """`bucket_s`: length of the stretches of time that are told apart; 0: none are."""
        self._run, self._fragment, self._bucket_s = run, fragment, bucket_s
        self.entries: dict[tuple[str, int], Entry] = {}
        """Entries by learner and beginning of the stretch of time."""
        self.doubts: dict[Doubt, int] = {}
        self.first = self.number = 0
        """Numbers of its oldest and newest version; 0: it has none."""
        self.digest = b""
        self.tokens = self.before_tokens = self.uncredited_tokens = 0
        """Tokens of its newest version, of what came before its first one, and of what nobody is credited
        with."""
        self._marks: dict[str, MergedMark] = {}

    def doubt(self, doubt: Doubt) -> None:
        """Count something that is not as it should be."""
        self.doubts[doubt] = self.doubts.get(doubt, 0) + 1

    def add(self, record: HistoryRecord, false: frozenset[int] = frozenset()) -> None:
        """Count the next version of the line. `false`: places of labels that their learners did not sign."""
        header = record.version.header
        digest = header.digest()
        if (header.run, header.fragment) != (self._run, self._fragment):
            self.doubt(Doubt.OTHER_RUN)
        if not self.number:
            self.first = header.number
            if header.number > 1:  # its parent is not here: all that it has is taken to count
                counts = earned(header.contributors, frozenset())
                self.before_tokens = max(0, header.tokens - sum(counts))
                self.tokens = self.before_tokens
        if header.tokens < self.tokens:
            self.doubt(Doubt.FEWER_TOKENS)
        counted = max(0, header.tokens - self.tokens)
        shares = shares_of(counted, self._weights(header.contributors, header.number))
        self.uncredited_tokens += counted
        for place, (part, tokens) in enumerate(zip(header.contributors, shares, strict=True)):
            if place in false:
                self.doubt(Doubt.FALSE_LABEL)
            elif self._is_next(part, header.number):
                self._entry(part.learner, record.at_s).add(tokens, part, record.at_s)
                self.uncredited_tokens -= tokens
        self.tokens += counted
        self.number, self.digest = header.number, digest

    def _weights(self, parts: Sequence[Contributor], number: int) -> list[tuple[int, int]]:
        """List (tokens claimed that may count, versions that it may make up for) of every part."""
        gaps = (1 + min(MOST_GAP, self._gap(part.learner, number) or 0) for part in parts)
        return list(zip(earned(parts, self._lasts(number)), gaps, strict=True))

    def _lasts(self, number: int) -> frozenset[bytes]:
        """Find the marks of everybody's newest contribution before that version."""
        floor = number - 1 - WATERMARK_VERSIONS
        return frozenset(mark.last for mark in self._marks.values() if mark.last and mark.number >= floor)

    def _gap(self, learner: str, number: int) -> int | None:
        """Count the versions between a learner's last one and that number; None: the chain has no watermark
        of it, or none any more."""
        mark = self._marks.get(learner)
        gap = number - 1 - mark.number if mark is not None else None
        return None if gap is None or gap > WATERMARK_VERSIONS else gap

    def _is_next(self, part: Contributor, number: int) -> bool:
        """Tell whether a contribution was not counted before, and note it."""
        mark = self._marks.get(part.learner)
        if mark is not None:
            if part.stamp <= mark.stamp:
                self.doubt(Doubt.TWICE)
                return False
            forgotten = part.after == NEVER and self._gap(part.learner, number) is None
            if part.after != mark.stamp and not forgotten:
                self.doubt(Doubt.OUT_OF_ORDER)
        elif self.first == 1 and part.after != NEVER:
            self.doubt(Doubt.OUT_OF_ORDER)
        self._marks[part.learner] = MergedMark(part.stamp, number, mark_of(part.payload_digest))
        return True

    def _entry(self, learner: str, at_s: int) -> Entry:
        bucket = at_s - at_s % self._bucket_s if self._bucket_s else 0
        return self.entries.setdefault((learner, bucket), Entry())


def shares_of(counted: int, weights: list[tuple[int, int]]) -> list[int]:
    """Divide what a version counts among (tokens claimed, versions made up for): everybody what it claims,
    up to one limit for each version."""
    claims = [tokens for tokens, _ in weights]
    if sum(claims) <= counted:
        return claims
    low, high = 0, max(claims)  # the least limit that reaches the sum
    while low < high:
        middle = (low + high) // 2
        if sum(min(tokens, middle * share) for tokens, share in weights) >= counted:
            high = middle
        else:
            low = middle + 1
    shares = [min(tokens, high * share) for tokens, share in weights]
    over = sum(shares) - counted
    for place, (tokens, share) in enumerate(weights):  # what rounding up gave too much
        back = min(over, shares[place] - min(tokens, (high - 1) * share)) if high else 0
        shares[place] -= back
        over -= back
    return shares


class CreditRow(Struct, frozen=True):
    """Work of one learner in a run: the mean over fragments, as the run's own tokens are."""

    peer: str
    fragment_tokens: int
    """Tokens, the sum over fragments: of these the rows add up exactly."""
    tokens: int
    claimed_tokens: int
    inner_steps: int
    contributions: int
    """Contributions of all fragments."""
    first_s: int
    last_s: int
    begins_s: int = 0
    """Beginning of the stretch of time; 0: it is the whole run."""


class Credits(Struct, frozen=True):
    """Credits of a run, as far as its history is known."""

    rows: tuple[CreditRow, ...]
    """Rows, the most tokens first; of stretches of time, the oldest stretch first."""
    fragments: int
    fragment_tokens: int
    """Tokens of all heads together."""
    before_fragment_tokens: int
    """Tokens of versions that nobody keeps any more."""
    uncredited_fragment_tokens: int
    """Tokens that the heads have and no learner is credited with, for the doubts."""
    missing: dict[int, int] = field(default_factory=dict)
    """Fragments whose history begins later, and the first version that is known."""
    doubts: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the run: the mean over fragments."""
        return self.fragment_tokens // max(1, self.fragments)


def credits_of(ledgers: Iterable[FragmentLedger]) -> Credits:
    """Sum up the ledgers of all of a run's fragments."""
    ledgers = list(ledgers)
    found: dict[tuple[str, int], Entry] = {}
    doubts: dict[str, int] = {}
    for ledger in ledgers:
        for key, entry in ledger.entries.items():
            found.setdefault(key, Entry()).join(entry)
        for doubt, times in ledger.doubts.items():
            doubts[doubt.value] = doubts.get(doubt.value, 0) + times
    number = max(1, len(ledgers))
    rows = [_row(peer, begins_s, entry, number) for (peer, begins_s), entry in found.items()]
    rows.sort(key=lambda row: (row.begins_s, -row.fragment_tokens, row.peer))
    return Credits(
        rows=tuple(rows),
        fragments=len(ledgers),
        fragment_tokens=sum(ledger.tokens for ledger in ledgers),
        before_fragment_tokens=sum(ledger.before_tokens for ledger in ledgers),
        uncredited_fragment_tokens=sum(ledger.uncredited_tokens for ledger in ledgers),
        missing={n: ledger.first for n, ledger in enumerate(ledgers) if ledger.first > 1},
        doubts=doubts,
    )


def _row(peer: str, begins_s: int, entry: Entry, fragments: int) -> CreditRow:
    return CreditRow(
        peer=peer,
        fragment_tokens=entry.tokens,
        tokens=entry.tokens // fragments,
        claimed_tokens=min(entry.claimed // fragments, MOST),
        inner_steps=min(entry.inner_steps // fragments, MOST),
        contributions=entry.contributions,
        first_s=entry.first_s,
        last_s=entry.last_s,
        begins_s=begins_s,
    )
