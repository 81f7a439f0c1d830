"""Chain of a fragment's versions, watermarks of its learners, and what its numbers may be.

`Chain` has the head and the recent log, `Marks` the watermarks of one version, `Witnesses` what other peers
have. `Scale` and the functions below it work out what is usual in a chain and what a contribution counts;
`version_fault` says what is wrong with the numbers of a version.

Rules: docs/protocol/exactly-once.md, section 2; docs/protocol/seats.md, section 2; docs/protocol/weights.md,
sections 2 and 9.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from functools import cached_property, lru_cache
from statistics import median_high

from msgspec import Struct

from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.papers import MAX_PAPERS, Paper, signatures_of
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.types import (
    FULL_TRUST,
    LEAST_TRUST,
    MAX_CONTRIBUTORS,
    MAX_PEERS,
    NEVER,
    NO_LIMITS,
    Attestation,
    Contributor,
    Finality,
    Head,
    MergeLimits,
    Milestone,
    Seat,
    Stamp,
    Watermark,
    table_digest,
)
from p2pdiloco.core.api.versions import (
    FEWEST_REFERENCES,
    REMEMBERED,
    Mean,
    Plan,
    SignedVersion,
    VersionHeader,
    next_plan,
    plausible_score,
    trust_of,
)
from p2pdiloco.core.finality import absent, advance, coherent, opened
from p2pdiloco.core.seating import Seating, stands
from p2pdiloco.errors import invariant


class Chain:
    """Versions of one fragment as this node holds them: head, recent log, watermarks.

    It goes forward: `extend` by a child of the head, or `replace` by the state of another chain, a heavier
    one or one with more support (`ForkChoice`).

    Rules: docs/protocol/exactly-once.md, section 2.
    """

    def __init__(
        self,
        log: tuple[SignedVersion, ...],
        watermarks: Iterable[Watermark],
        keep: int,
        founders: Iterable[str] = (),
    ) -> None:
        """`founders`: peers that have a seat from version 0 on."""
        invariant(bool(log), "a chain starts with at least one version")
        self._keep = keep
        self._log: dict[int, SignedVersion] = {}
        self._digests: dict[int, bytes] = {}
        self.signed, self.head = log[-1], log[-1].header.head()
        for version in log:
            self._remember(version, version.header.digest())
        self.marks = marks_of(watermarks)
        """Watermarks of the head, with the roster of the fragment."""
        if not self.head.number and not self.marks.table:
            self.marks = founding(tuple(founders))
        self.replaced = 0
        """Number of times that another chain's state was taken."""
        self.yielded = 0
        """Number of times that it was a lighter one."""
        self.copied = self.head.number
        """Number of the version that was copied last, or with which this life began: below it no ancestor is
        known for certain."""

    def _remember(self, version: SignedVersion, digest: bytes) -> None:
        number = version.header.number
        self._log[number] = version
        self._digests[number] = digest
        for old in [n for n in self._log if n < number - self._keep]:
            del self._log[old]
            del self._digests[old]

    @property
    def header(self) -> VersionHeader:
        """Header of the head."""
        return self.signed.header

    def knows(self, number: int, digest: bytes) -> bool:
        """Tell whether that version is the head or one of its logged ancestors."""
        return self._digests.get(number) == digest

    def contradicts(self, head: Head) -> bool:
        """Tell whether that head is surely of another branch: the log has another version of its number."""
        return self._digests.get(head.number, head.digest) != head.digest

    def digest_of(self, number: int) -> bytes | None:
        """Find the digest of a logged version's header; None if it is not in the log."""
        return self._digests.get(number)

    def logged(self, number: int) -> SignedVersion | None:
        """Find a version of the log; None if it is not there."""
        return self._log.get(number)

    def find(self, digest: bytes) -> SignedVersion | None:
        """Find a version of the log by its header's digest; None if it is not there."""
        number = next((number for number, known in self._digests.items() if known == digest), None)
        return None if number is None else self._log[number]

    def repaired(self, digest: bytes) -> bool:
        """Tell whether a version of the log repairs that one."""
        return any(version.header.repairs == digest for version in self._log.values())

    def logged_all(self) -> tuple[SignedVersion, ...]:
        """List the whole log, oldest first, the head last."""
        return tuple(version for _, version in sorted(self._log.items()))

    def is_child(self, header: VersionHeader) -> bool:
        """Tell whether the header continues this chain by one."""
        return header.number == self.head.number + 1 and header.parent == self.head.digest

    @property
    def link(self) -> Attestation | None:
        """What a label attests that is merged into a child of the head; None: nothing yet."""
        upon = opened(self.header.finality, self._milestone)
        return Attestation(upon.source, upon.target) if upon.target.number else None

    @property
    def _milestone(self) -> Milestone:
        return Milestone(self.head.number, self.head.digest)

    def marks_after(self, header: VersionHeader) -> Marks:
        """Compute the watermarks once `header` extends this chain."""
        return self.marks_with(header.number, header.contributors, header.papers)

    def marks_with(
        self, number: int, contributors: tuple[Contributor, ...], papers: tuple[Paper, ...] = ()
    ) -> Marks:
        """Compute the watermarks of a child of the head, version `number`, with these contributors and
        papers."""
        return self.marks.after(number, contributors, papers, self.link)

    def finality_after(self, marks: Marks) -> Finality:
        """Compute how far a child of the head with these watermarks is attested."""
        return advance(self.header.finality, self._milestone, marks.table)

    def extend(self, version: SignedVersion) -> None:
        """Append a child of the head."""
        invariant(self.is_child(version.header), "extended by something that is not a child of the head")
        self.marks = self.marks_after(version.header)
        self.signed, self.head = version, version.header.head()
        self._remember(version, self.head.digest)

    def replace(self, version: SignedVersion, watermarks: Iterable[Watermark], yields: bool = False) -> None:
        """Take another chain's state: its ancestors are unknown to us. `yields`: though it may be lighter."""
        head = version.header.head()
        invariant(yields or head.weight > self.head.weight, "replaced by a lighter chain")
        self.replaced += 1
        self.yielded += head.weight <= self.head.weight
        self._log.clear()
        self._digests.clear()
        self.signed, self.head = version, head
        self._remember(version, head.digest)
        self.marks = marks_of(watermarks)
        self.copied = head.number

    @property
    def final(self) -> int:
        """Number of the newest final version that was made since this node follows the chain; 0: none was.
        What is said of earlier ones is the word of whoever gave a copy."""
        number = self.header.finality.final.number
        return number if number >= self.copied else 0

    @property
    def absent(self) -> tuple[str, ...]:
        """Seats that attested nothing for half of the run, in which nothing became final."""
        return absent(self.header.finality, self.marks.table)


WATERMARK_VERSIONS = 1024
"""Versions after which a learner that was merged in none of them is forgotten; its base is long too old by
then."""
LATELY_VERSIONS = 32
"""Versions since a learner's newest merged contribution in which it counts as one that takes part, and is
waited for after the death of all."""
WITHIN_VERSIONS = 8
"""Versions by which an accused one may be behind our head, or ahead of it, within which a false one is
repaired, and for which a partial merge may not know of new seats: others have those in their logs, and what
they merged."""


class Marks:
    """Watermarks of one version: the newest merged contribution of every learner, and who has a seat.

    The table of a version follows from its parent's, its contributors and its papers, so everybody computes
    the same, and the header commits to it (`VersionHeader.table`). A learner enters by a merged contribution,
    and is forgotten when nothing of it was merged for long; a seat begins and ends by papers alone. The seats
    of a table are the roster that decides on the versions after it.

    A table is immutable, and there is one per version. In a large run it names thousands of learners. Nodes
    of one process that follow the same chain (the simulator's) share one: it is worked out once for a
    version, however many ask.

    Rules: docs/protocol/seats.md.
    """

    def __init__(self, table: tuple[Watermark, ...]) -> None:
        self.table = table
        """Watermarks in canonical order."""
        self._by = {mark.learner: mark for mark in table}

    @cached_property
    def digest(self) -> bytes:
        """Digest of the table, as headers state it."""
        return table_digest(self.table)

    @cached_property
    def seats(self) -> frozenset[str]:
        """Peers whose seat stands: the roster."""
        return frozenset(mark.learner for mark in self.table if mark.seat and stands(mark.seat))

    @cached_property
    def places(self) -> int:
        """Places that the chain ever had."""
        return max((mark.seat.place for mark in self.table if mark.seat), default=0)

    def seat(self, peer: str) -> Seat | None:
        """Find the seat of that peer, or of an invite's key what ended it; None: it never had one."""
        mark = self._by.get(peer)
        return mark.seat if mark else None

    def seated_since(self, number: int) -> frozenset[str]:
        """List the peers that have a seat and were merged in that version or later."""
        lately = (mark.learner for mark in self._worked if mark.number >= number)
        return self.seats.intersection(lately)

    @cached_property
    def _worked(self) -> tuple[Watermark, ...]:
        return tuple(mark for mark in self.table if mark.merges)

    def often(self, learner: str, number: int, of: int) -> int:
        """Compute in how many of `of` versions up to this table's, version `number`, a learner with a mark
        has been, as a mean since it has its mark."""
        mark = self._by[learner]
        return min(of, of * mark.merges // max(1, number - mark.first + 1))

    def __contains__(self, learner: str) -> bool:
        """Tell whether anything of that learner was merged."""
        mark = self._by.get(learner)
        return mark is not None and mark.merges > 0

    def attested(self, learner: str) -> int:
        """Find the number of the newest milestone that this learner attested; 0: none."""
        mark = self._by.get(learner)
        return mark.attested if mark else 0

    def stamp(self, learner: str) -> Stamp:
        """Find the stamp of that learner's newest contribution."""
        mark = self._by.get(learner)
        return mark.stamp if mark else NEVER

    def number(self, learner: str) -> int:
        """Find the version that has that learner's newest contribution; 0 if there is none."""
        mark = self._by.get(learner)
        return mark.number if mark else 0

    def first(self, learner: str) -> int | None:
        """Find the version since which that learner has had a mark; None if it has none."""
        mark = self._by.get(learner)
        return mark.first if mark and mark.merges else None

    def mean(self, learner: str) -> Mean:
        """Find how far that learner's contributions agree with the others'."""
        mark = self._by.get(learner)
        return Mean(mark.agreement, mark.merges) if mark and mark.merges else Mean()

    @cached_property
    def _usual_trust(self) -> int:
        return median_high(trust_of(mark.agreement) for mark in self._worked)

    def weighs(self, learner: str) -> float | None:
        """Compute what that learner's work weighs beside as much of a usual one's, 0 to 1; None: it has no
        mark. For people: nothing follows from it."""
        mark = self._by.get(learner)
        return min(1.0, trust_of(mark.agreement) / self._usual_trust) if mark and mark.merges else None

    @cached_property
    def lasts(self) -> frozenset[bytes]:
        """Marks of everybody's newest contribution, by which copies are known."""
        return frozenset(mark.last for mark in self.table if mark.last)

    def is_copy(self, payload_digest: bytes) -> bool:
        """Tell whether somebody's newest contribution has this payload."""
        return copy_mark(payload_digest) in self.lasts

    @cached_property
    def lately(self) -> int:
        """Number of learners of which something was merged lately, up to this table's version."""
        newest = max((mark.number for mark in self.table), default=0)
        return self.merged_since(newest - LATELY_VERSIONS)

    def merged_since(self, number: int) -> int:
        """Count the learners of which something was merged in version `number` or later."""
        return sum(mark.number >= number for mark in self._worked)

    def after(
        self,
        number: int,
        contributors: tuple[Contributor, ...],
        papers: tuple[Paper, ...] = (),
        link: Attestation | None = None,
    ) -> Marks:
        """Compute the table of a child of ours: version `number`, with these contributors and papers. `link`:
        the milestones that are attested upon us."""
        asked = number, papers, link
        for parent, parts, known, marks in _known_tables:
            if parent is self and parts is contributors and known == asked:
                return marks
        marks = Marks(self._table_after(number, contributors, papers, link))
        _known_tables[:] = [*_known_tables[1 - REMEMBERED :], (self, contributors, asked, marks)]
        return marks

    def _table_after(
        self,
        number: int,
        contributors: tuple[Contributor, ...],
        papers: tuple[Paper, ...],
        link: Attestation | None,
    ) -> tuple[Watermark, ...]:
        table = dict(self._by)
        for part in contributors:
            old = table.get(part.learner)
            begun = old is not None and old.merges
            table[part.learner] = Watermark(
                part.learner,
                part.stamp,
                number,
                old.first if old and begun else number,
                old.merges + 1 if old else 1,
                old.seat if old else None,
                self.mean(part.learner).after(part.score),
                copy_mark(part.payload_digest),
                link.target.number if link and part.attestation == link else old.attested if old else 0,
            )
        floor = number - WATERMARK_VERSIONS
        kept = [mark for _, mark in sorted(table.items()) if mark.number >= floor or mark.seat]
        seatless = [mark for mark in kept if not mark.seat]
        if len(seatless) > MAX_PEERS:  # in places of their own: they push out no seat's
            seatless.sort(key=lambda mark: (-mark.number, mark.learner))
            kept = [mark for mark in kept if mark.seat] + seatless[:MAX_PEERS]
            kept.sort(key=lambda mark: mark.learner)
        if not papers:
            return tuple(kept)
        seats = Seating(self.table, number)
        for paper in papers:
            seats.take(paper)
        return seats.into(kept)


@lru_cache(REMEMBERED)
def founding(founders: tuple[str, ...]) -> Marks:
    """Compute the table of version 0 of a run that begins with these seats."""
    seats = {peer: Seat(place) for place, peer in enumerate(founders, 1)}
    return marks_of(Watermark(peer, NEVER, 0, 0, 0, seats[peer]) for peer in sorted(seats))


_EMPTY = Marks(())
_Asked = tuple[int, tuple[Paper, ...], Attestation | None]
_known_tables: list[tuple[Marks, tuple[Contributor, ...], _Asked, Marks]] = []
"""Tables and their children. A table does not hold its children itself: all have the empty one, which would
hold every table since."""


def marks_of(table: Iterable[Watermark]) -> Marks:
    """Make the table that was read or received. Without entries it is the same object for everybody."""
    marks = tuple(table)
    return Marks(marks) if marks else _EMPTY


NO_VERSION = -1
LOOK_EVERY_S = 2.0
"""Interval at which a seat's heads are looked at, and merged contributions that everybody has looked for."""


class _Seen:
    """Reports of one seat."""

    __slots__ = ("head", "heard_s", "lately", "lately_s", "left", "sure")

    def __init__(self, now: float) -> None:
        self.head: Head | None = None
        self.heard_s = now
        self.sure = self.lately = NO_VERSION
        """Version of our chain that it reported at least `durable_s` ago; and its newest report."""
        self.lately_s = 0.0
        self.left = False
        """True: it left with `head`, and will not go further."""


class Witnesses:
    """Versions of our chain of one fragment that the other seats are known to have.

    Versions that a seat lacks may still lose against a chain that goes on without them
    (docs/protocol/belief.md, section 7). One that reports a head of our chain has everything below it, too.
    The report must be some time old: a crash may take it back to its last checkpoint.
    """

    def __init__(self, chain: Chain, me: str, timing: Timing, now: float) -> None:
        self._chain, self._me, self._timing = chain, me, timing
        self._replaced = chain.replaced
        self._since_s = now
        self._seen: dict[str, _Seen] = {}

    def heard(self, peer: str, head: Head, now: float) -> None:
        """Take in the head that a peer reports."""
        if peer in self._chain.marks.seats:
            self._seen.setdefault(peer, _Seen(-math.inf))
        seen = self._seen.get(peer)
        if seen and now >= seen.heard_s + LOOK_EVERY_S:
            if seen.left:
                seen.sure = seen.lately = NO_VERSION
            seen.head, seen.heard_s, seen.left = head, now, False

    def _note(self, seen: _Seen, number: int, now: float) -> None:
        if seen.lately == NO_VERSION:
            seen.lately, seen.lately_s = number, now
        elif now - seen.lately_s >= self._timing.durable_s:
            seen.sure = seen.lately
            seen.lately, seen.lately_s = max(number, seen.lately), now

    def count_merged(self, max_base_age: int, now: float) -> None:
        """Count every seat whose work is in our chain as a witness: it held a version of it not long before.

        Of members of other groups, which do not report to us, that is all that is known.
        """
        for mark in self._chain.marks.table:  # of a seat that was never merged the number is 0
            number = mark.number - 1 - max_base_age
            if number >= 0 and mark.learner in self._chain.marks.seats:
                seen = self._seen.setdefault(mark.learner, _Seen(now))
                if number > seen.lately:
                    seen.heard_s = now
                self._note(seen, number, now)

    def said_goodbye(self, peer: str, head: Head) -> None:
        """Remember the head with which a peer goes."""
        seen = self._seen.get(peer)
        if seen is not None:
            seen.head, seen.left = head, True

    def restarted(self, peer: str) -> None:
        """Forget the reports of a peer that was restarted: it may have come back with an older state."""
        if peer in self._seen:
            self._seen[peer] = _Seen(self._seen[peer].heard_s)

    def review(self, now: float) -> tuple[int, list[int]]:
        """Find the newest version that is beyond doubt, -1 if none is; and which the other seats certainly
        have, lowest first.

        What all have is beyond doubt. So is what two thirds have, once the others were not heard for long
        (`fork_horizon_s`): where all are here, no head without it has support. A seat that ended counts as
        long: the version that ended it is in doubt itself.
        """
        seats = self._chain.marks.seats
        if self._replaced != self._chain.replaced:
            self._replaced = self._chain.replaced
            for seen in self._seen.values():
                seen.sure = seen.lately = NO_VERSION
        horizon_s = now - self._timing.fork_horizon_s
        for peer in self._seen.keys() - seats:
            if self._seen[peer].heard_s < horizon_s:
                del self._seen[peer]
        known = [self._seen.get(p) or _Seen(self._since_s) for p in {*seats, *self._seen} - {self._me}]
        for seen in known:
            if seen.head and self._chain.knows(seen.head.number, seen.head.digest):
                self._note(seen, seen.head.number, now)
                if seen.left:  # it will come back with a version of our chain, or not at all
                    seen.sure = MOST_VERSIONS
        head, versions = self._chain.head.number, sorted(seen.sure for seen in known)
        of_most = [*versions, head][len(seats) // 3]
        lately = min((seen.sure for seen in known if seen.heard_s >= horizon_s), default=head)
        return max(min(versions, default=head), min(of_most, lately)), versions


COUNTED_UNITS = 8
"""Units that one contribution counts at most, for every version since the learner's last one."""
COUNTED_WEIGHTS = 2
"""Times the tokens that it weighs at most, or that H inner steps take, that it counts at most, likewise."""
MOST_GAP = 63
"""Limit of versions between two contributions of a learner that are made up for."""
MOST_GROWTH = 256
"""Limit of the unit, as a multiple of that of version 0: H inner steps."""
LONGEST = 3.0
"""Length to which a contribution is cut, as a multiple of the reach."""
COMPANY, LEAST_COMPANY = 2, 1 / 24
"""Divisor of those who vote: with so large a part of them, as far as they are trusted, a version may be as
long as any; with a smaller one it is shorter, by the square. And the least share of that length: an eighth of
the reach."""
LEAST_OFTEN = FULL_TRUST // 3
"""Part of all versions, of `FULL_TRUST`, in which a voter is reckoned to be at least. Those on thin links are
in fewer, and one alone is what is usual there."""
FIRST_LONGEST = 8.0
"""Length to which one is cut in version 1, before which none was measured."""
FIRST_REACH = 0.25
"""Reach of version 0, as a share of its own length: first strides of twice that are not cut."""
FASTEST = 8
"""Divisor of a step: unit and reach move by so small a part of the way to the newest value."""
FINDING_VERSIONS, FINDING = 16, 2
"""Versions at a run's beginning in which the reach moves by a larger part: what is usual is not known yet.
It comes from above: while learning rates warm up, lengths grow tenfold from one version to the next."""
REACHES = 2.0**-20, 2.0**10
"""Least and largest reach, as multiples of version 0's length. No run needs others, and none gets stuck."""
MOST_SEQUENCE = 1 << 16
"""Contributions of a learner that can have come to nothing between two that are merged."""
MOST_INCARNATION = 1 << 43
"""Limit of incarnations, which are milliseconds since 1970: the year 2248."""
MOST_TERMS = 1 << 16
"""Elections that there can be between two versions. Terms start above the head's: numbers that end."""
MOST_VERSIONS = 1 << 40
MOST_TOKENS = MAX_CONTRIBUTORS * COUNTED_UNITS * (1 + MOST_GAP) * MOST_GROWTH
"""Limit of what one version adds to a chain's tokens, as a multiple of version 0's unit."""


class Scale(Struct, frozen=True):
    """Figures of a version that follow from its parent and from what was merged: what is usual in its chain.

    Members say themselves how many tokens their work took, and how long it is, nobody can know. So every
    header carries two running figures: `unit`, the tokens of a usual contribution, and `reach`, the length of
    a usual one. They follow from the parent's header and from what was merged, so that every node that has
    the parent works them out anew (`scale_after`), and refuses another value. What is beyond them is cut: it
    counts, weighs and moves no more than a generous member's work would.

    - *counted*: a chain's tokens, and with them the schedule of the learning rate, grow by at most 8 units
      for a contribution, and by twice what it weighs at most (or 2 H inner steps: a fast learner's beside
      slow ones), times the versions since that learner's last one
    - *weighed*: no contribution has more weight than 4 units have, however long it took, and none has more
      than a third of a merge to which all others bring usual ones (the run may say other numbers). Where
      members are known, by invite or list, H inner steps weigh in full: there an honest learner may be much
      the fastest
    - length: a contribution is cut to three times the reach, and three times what is usual in its round
      (less, where few of those who vote are in a version)
    - a learner that is not trusted (`core.api.versions.Mean`) counts and measures nothing

    The medians of a round's tokens and lengths move unit and reach, by an eighth at most: so fewer than half
    of a round cannot move them, and of two the smaller counts. Only seats are asked: identities are free.
    What all others count together is at most the run's `open_share` of what the seats do.

    Rules: docs/protocol/weights.md, section 2.
    """

    tokens: int
    """Tokens of the chain, as counted."""
    unit: int
    reach: float


def unit_of(header: VersionHeader, config: CoreConfig) -> int:
    """Tokens of a usual contribution once this is the head; H inner steps' where no version says so."""
    return header.unit or config.usual_tokens


def limits_after(chain: Chain, config: CoreConfig, learners: Iterable[str] | None = None) -> MergeLimits:
    """Compute the limits of what is merged into a child of the chain's head. `learners`: those whose work it
    is, if that is all that is merged; None: it is a part of a version."""
    unit = unit_of(chain.header, config)
    heaviest = heaviest_units(chain.marks.lately, config) * unit
    if config.admits:
        heaviest = max(heaviest, min(config.usual_tokens, config.most_units * unit))
    of_median = LONGEST if chain.header.reach else 0.0
    most_tokens = min(round(heaviest), NO_LIMITS.most_tokens)
    longest = longest_after(chain.header)
    if learners is not None and chain.header.groups == 1:
        longest *= _company(chain, learners)
    return MergeLimits(most_tokens, longest, of_median)


def _company(chain: Chain, learners: Iterable[str]) -> float:
    """Compute the share of the longest contribution that may be merged in a version of these learners. A
    syncer can leave all others out: then nothing is measured, and its own work has all of the weight, however
    little it is trusted. So few of those who vote in the parent's table move the chain by little; each voter
    counts as often as it is in versions."""
    marks, number = chain.marks, chain.header.number
    voting = marks.seated_since(number - LATELY_VERSIONS)
    if len(voting) < FEWEST_REFERENCES:
        return 1.0
    here = sum(trust_of(marks.mean(each).agreement) for each in voting.intersection(learners))
    usual = sum(max(LEAST_OFTEN, marks.often(each, number, FULL_TRUST)) for each in voting)
    share = COMPANY * here / usual
    return min(1.0, max(LEAST_COMPANY, share * share))


def heaviest_units(learners: int, config: CoreConfig) -> float:
    """Compute how many units one contribution weighs at most, where so many learners were merged lately.

    A usual one always weighs in full. Of two learners none can be told from the other: no share helps."""
    share = config.largest_share
    if learners <= 2 or share >= 1.0:
        return config.most_units
    return min(max(1.0, (learners - 1) * share / (1.0 - share)), config.most_units)


def plan_of(parent: VersionHeader, config: CoreConfig) -> Plan:
    """Make the plan by which members fall into groups for a child of this version."""
    return Plan(config.run, parent.fragment, parent.epoch, parent.groups, config.group_size)


def longest_after(header: VersionHeader) -> float:
    """Compute the length of a contribution to a child of this version at most."""
    return (LONGEST if header.number else FIRST_LONGEST) * header.reach or math.inf


def strange_after(header: VersionHeader) -> float:
    """Compute the length beyond which a contribution to a child of this version is hardly of a learner that
    still learns."""
    return FIRST_LONGEST * header.reach or math.inf


def scale_after(chain: Chain, contributors: tuple[Contributor, ...], config: CoreConfig) -> Scale:
    """Compute the figures of the version that merges this into the chain's head."""
    tokens, unit = _counted(chain, contributors, config)
    return Scale(tokens, unit, _next_reach(chain.header, contributors, config))


_known_numbers: list[tuple[VersionHeader, tuple[Contributor, ...], CoreConfig, tuple[int, int]]] = []


def _counted(chain: Chain, parts: tuple[Contributor, ...], config: CoreConfig) -> tuple[int, int]:
    """Compute (tokens, unit) of the next version. In a simulator thousands of nodes ask the same."""
    for known, merged, run, answer in _known_numbers:
        if known is chain.header and merged is parts and run is config:
            return answer
    answer = _count(chain, parts, config)
    _known_numbers[:] = [*_known_numbers[1 - REMEMBERED :], (chain.header, parts, config, answer)]
    return answer


def _count(chain: Chain, parts: tuple[Contributor, ...], config: CoreConfig) -> tuple[int, int]:
    measures: list[int] = []
    strangers = 0
    parent, first = chain.header, config.usual_tokens
    tokens, unit = parent.tokens, unit_of(parent, config)
    most = min(COUNTED_WEIGHTS * limits_after(chain, config).most_tokens, COUNTED_UNITS * unit)
    most = max(most, COUNTED_WEIGHTS * first)
    for part, earns in zip(parts, earned(parts, chain.marks.lasts), strict=True):
        if not earns:
            continue
        last = chain.marks.number(part.learner)
        share = 1 + min(MOST_GAP, max(0, parent.number - last)) if last else 1
        if part.votes:
            measures.append(earns // share)
            tokens += min(earns, most * share)
        else:
            strangers += min(earns, most * share)
    tokens += min(strangers, int(config.open_share * (tokens - parent.tokens)))
    if not measures:
        return tokens + 1, unit  # else it would be no heavier than its parent, and nobody would follow it
    measures.sort()
    median = measures[(len(measures) - 1) // 2]
    way = min(max(median, unit // 2), 2 * unit) - unit
    # Towards zero, so that small units do not creep down.
    unit += way // FASTEST if way > 0 else -(-way // FASTEST)
    return tokens, min(max(1, unit), MOST_GROWTH * first)


def _next_reach(parent: VersionHeader, parts: tuple[Contributor, ...], config: CoreConfig) -> float:
    """Floating-point operations that have one result everywhere: no sum is reordered, nothing is fused."""
    first, reach = config.genesis_versions[parent.fragment].header.norm, parent.reach
    if not first:
        return 0.0  # a run made by hand, whose lengths are not known: nothing is cut
    usual = _usual_length(parts, config.inner_steps)
    if not usual:
        return reach
    way = min(max(usual, reach / 2), 2 * reach) - reach
    reach += way / (FINDING if parent.number < FINDING_VERSIONS else FASTEST)
    return min(max(reach, first * REACHES[0]), first * REACHES[1])


def _usual_length(parts: Sequence[Contributor], period: int) -> float:
    """Find the lower median of the lengths, each as if it was of H inner steps: work of fewer is shorter, by
    about the square root of their number."""
    trusted = [part for part in parts if part.trust > LEAST_TRUST] or list(parts)
    trusted = [part for part in trusted if part.votes]
    found = sorted(part.length / math.sqrt(min(1.0, part.inner_steps / period)) for part in trusted)
    return found[(len(found) - 1) // 2] if found else 0.0


# --- what is beyond every scale ---------------------------------------------------------------------------


def stamp_follows(stamp: Stamp, mark: Stamp) -> bool:
    """Tell whether a contribution of that stamp can come after the one merged last: such numbers end, and
    who takes them to their end could never contribute again."""
    floor = mark.sequence if mark.incarnation == stamp.incarnation else 0
    return stamp.incarnation <= MOST_INCARNATION and stamp.sequence <= floor + MOST_SEQUENCE


def numbers_can_be(header: VersionHeader, watermarks: Sequence[Watermark], config: CoreConfig) -> bool:
    """Tell whether some chain can have such numbers, whatever its history: asked of copies, whose parent is
    not known."""
    first = config.genesis_versions[header.fragment].header.norm
    return (
        header.number <= MOST_VERSIONS
        and header.term <= header.number * MOST_TERMS
        and header.tokens <= header.number * MOST_TOKENS * config.usual_tokens
        and header.unit <= MOST_GROWTH * config.usual_tokens
        and 0.0 <= header.reach <= first * REACHES[1]
        and math.isfinite(header.norm)
        and coherent(header.finality, header.number)
        and all(mark.stamp.incarnation <= MOST_INCARNATION for mark in watermarks)
        and all(mark.stamp.sequence <= header.number * MOST_SEQUENCE for mark in watermarks)
    )


def rightly_stated(chain: Chain, part: Contributor) -> bool:
    """Tell whether a part of a merge has measurements that can be, and the trust weight that follows from its
    score and the chain."""
    can_be_so = 0.0 <= part.length < math.inf and plausible_score(part.score) and _votes_so(chain, part)
    return can_be_so and part.trust == chain.marks.mean(part.learner).trust(part.score)


def _votes_so(chain: Chain, part: Contributor) -> bool:
    """Tell whether a part says rightly whether its learner has a seat. What comes in a partial merge may be
    of an earlier table: whose seat began or ended a few versions ago may be called otherwise."""
    if part.votes == (part.learner in chain.marks.seats):
        return True
    seat = chain.marks.seat(part.learner)
    news = max(seat.since, seat.ended) if seat and seat.place else -WITHIN_VERSIONS
    return chain.header.groups > 1 and news + WITHIN_VERSIONS > chain.header.number


# --- what a version states --------------------------------------------------------------------------------


def version_fault(chain: Chain, header: VersionHeader, config: CoreConfig) -> VersionFault | None:
    """Say what is wrong with the numbers and papers of a child of the chain's head; None: nothing. Signatures
    are another question."""
    for part in header.contributors:
        mark = chain.marks.stamp(part.learner)
        if part.after != mark or not stamp_follows(part.stamp, mark):
            return VersionFault.FALSE_STAMP
        if not rightly_stated(chain, part):
            return VersionFault.FALSE_TRUST
    limits = limits_after(chain, config, [part.learner for part in header.contributors])
    if not 0.0 <= header.norm <= limits.longest_update or math.isinf(header.norm):
        return VersionFault.OUT_OF_SCALE
    right = scale_after(chain, header.contributors, config)
    if header.tokens != right.tokens:
        return VersionFault.FALSE_TOKENS
    stated = header.unit, header.reach, header.limits
    if stated != (right.unit, right.reach, limits):
        return VersionFault.FALSE_SCALE
    if header.papers:
        seats = Seating(chain.marks.table, header.number)
        many = sum(map(signatures_of, header.papers)) > MAX_PAPERS
        if many or header.term == chain.header.term or not all(map(seats.take, header.papers)):
            return VersionFault.FALSE_PAPERS
    roster = chain.marks.seats | chain.marks_after(header).seats
    if roster.isdisjoint(part.learner for part in header.contributors):
        return VersionFault.SEATLESS
    near = all(entry.by(limits).near(limits) for entry in header.partials)
    tree = header.tree(plan_of(chain.header, config))
    if not near or tree is None:
        return VersionFault.FALSE_PARTIALS
    seatless = (each for each in tree.values() if not each.below and not _has_seat(each.parts))
    return VersionFault.SEATLESS if next(seatless, None) else None


def _has_seat(parts: Iterable[Contributor]) -> bool:
    return any(part.votes for part in parts)


LAST_BYTES = 8
"""Bytes of a payload's digest by which a copy of it is known."""
NOT_KNOWN = bytes(32)
"""Digest of a contributor that names no payload."""


def copy_mark(payload_digest: bytes) -> bytes:
    """Find the bytes by which a copy of that payload is known; empty: it is not named."""
    return b"" if payload_digest == NOT_KNOWN else payload_digest[:LAST_BYTES]


def earned(parts: Sequence[Contributor], lasts: Container[bytes]) -> list[int]:
    """Compute the tokens of each contribution that count. `lasts`: marks of everybody's newest one in the
    parent's chain.

    Work of a learner that its round did not trust counts nothing, nor does a copy: a learner that sends again
    what it, or anybody, sent before has trained nothing. A copy is known by the first bytes of its payload's
    digest, which the table of watermarks has of every learner's newest contribution. Where several in one
    version have the same payload, they count together as one: nobody can tell who copied whom, and no honest
    learner is to be robbed.

    Rules: docs/protocol/weights.md, section 9.
    """
    marks = [copy_mark(part.payload_digest) for part in parts]
    alike = Counter(filter(None, marks))
    return [
        0 if part.trust == LEAST_TRUST or mark in lasts else part.tokens // max(1, alike[mark])
        for part, mark in zip(parts, marks, strict=True)
    ]


LATELY_TERMS = 2
"""Terms in whose versions a seat's work was merged to be counted: who works, not who is listed, makes
groups."""
AWAKE_VERSIONS = 4
"""Versions in one of which a seat's work was merged if it is here: a group with none of these is vacant."""


def plan_after(parent: VersionHeader, marks: Marks, number: int, config: CoreConfig) -> tuple[int, int]:
    """Decide (epoch, groups) that the header of version `number` states. `marks`: the table after it.

    Rules: docs/protocol/groups.md, section 1.
    """

    def vacant(epoch: int, groups: int) -> int:
        since = number + 1 - AWAKE_VERSIONS
        plan = plan_of(parent, config)._replace(epoch=epoch, groups=groups)
        return _vacant(marks, since, plan) if groups > 1 and since > 0 else 0

    size, term_versions = config.group_size, config.term_versions
    members = len(marks.seated_since(number - LATELY_TERMS * term_versions))
    return next_plan(parent.epoch, parent.groups, number, members, size, term_versions, vacant)


@lru_cache(REMEMBERED)
def _vacant(marks: Marks, since: int, plan: Plan) -> int:
    """Count the leaf groups without a seat that was merged in version `since` or later."""
    return plan.groups - len({plan.leaf_of(seat) for seat in marks.seated_since(since)})
