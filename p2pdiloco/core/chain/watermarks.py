"""Watermarks of a chain: the newest merged contribution of every learner, and who votes, by version.

The table of a version follows from its parent's and from its contributors, so everybody computes the same,
and the header commits to it (`VersionHeader.table`). It is the roster of the fragment: a learner enters by a
merged contribution, votes after a probation, and is forgotten when nothing of it was merged for long.

A table is immutable, and there is one per version. In a large run it names thousands of learners. Nodes of
one process that follow the same chain (the simulator's) share one: it is worked out once for a version,
however many ask.

Rules: docs/protocol/trust.md, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from statistics import median_high

from msgspec.structs import replace

from p2pdiloco.core.api.trust_weight import BEGINS, Mean, trust_of
from p2pdiloco.core.api.types import MAX_WATERMARKS, NEVER, Contributor, Stamp, Watermark, table_digest
from p2pdiloco.core.chain.earning import alone, earned, mark_of

WATERMARK_VERSIONS = 1024
"""Versions after which a learner that was merged in none of them is forgotten; its base is long too old by
then."""
LATELY_VERSIONS = 32
"""Versions since a learner's newest merged contribution in which it counts as one that takes part."""
REMEMBERED = 64
"""Tables of children that are remembered for whoever asks next: a version's is worked out before it is
committed, and in a simulator for thousands of nodes."""

FOUNDING_VERSIONS = 64
"""Versions at a run's beginning in which everybody votes soon: nobody has been there for long."""
FOUNDING_MERGES = 2
"""Merged versions after which a learner votes at the run's beginning. Those in which it is trusted less than
a newcomer do not count: else zeros and noise would earn a vote."""
PROBATION_MERGES = 8
"""Merged versions, likewise, after which a learner may vote later."""
FEWEST_VOTERS = 3
"""Voters who decide without others at the run's beginning. One of fewer that gives its versions to nobody
could never be replaced, as it has half of all votes."""
NEWCOMERS_VERSIONS = 64
NEWCOMERS_SHARE = 8
"""Limit of new voters: one for so many that vote, and one at least, in `NEWCOMERS_VERSIONS`. A crowd of new
identities needs hundreds of versions of honest-looking work before it outvotes those who were there."""


class Marks:
    """Watermarks of one version."""

    def __init__(self, table: tuple[Watermark, ...]) -> None:
        self.table = table
        """Watermarks in canonical order."""
        self._by = {mark.learner: mark for mark in table}

    @cached_property
    def digest(self) -> bytes:
        """Digest of the table, as headers state it."""
        return table_digest(self.table)

    @cached_property
    def voters(self) -> frozenset[str]:
        """Learners that vote."""
        return frozenset(mark.learner for mark in self.table if mark.voter)

    def voting_since(self, number: int) -> frozenset[str]:
        """List the learners that vote and were merged in that version or later."""
        return frozenset(mark.learner for mark in self.table if mark.voter and mark.number >= number)

    def often(self, learner: str, number: int, of: int) -> int:
        """Compute in how many of `of` versions up to this table's, version `number`, a learner with a mark
        has been, as a mean since it has its mark."""
        mark = self._by[learner]
        return min(of, of * mark.merges // max(1, number - mark.first + 1))

    @cached_property
    def deciding(self) -> frozenset[str]:
        """Learners that decide: those that vote. While fewer than `FEWEST_VOTERS` do at a run's beginning,
        all of which one merged version counts for a vote."""
        founding = max((mark.number for mark in self.table), default=0) <= FOUNDING_VERSIONS
        if not founding or not 0 < len(self.voters) < FEWEST_VOTERS:
            return self.voters
        return frozenset(mark.learner for mark in self.table if mark.voter or mark.earned)

    def voter_since(self, learner: str) -> int:
        """Find the version since which that learner votes; 0: it does not."""
        mark = self._by.get(learner)
        return mark.voter if mark else 0

    def __contains__(self, learner: str) -> bool:
        """Tell whether that learner has a mark."""
        return learner in self._by

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
        return mark.first if mark else None

    def mean(self, learner: str) -> Mean:
        """Find how far that learner's contributions agree with the others'."""
        mark = self._by.get(learner)
        return Mean(mark.agreement, mark.merges) if mark else Mean()

    @cached_property
    def _usual_trust(self) -> int:
        return median_high(trust_of(mark.agreement) for mark in self.table)

    def weighs(self, learner: str) -> float | None:
        """Compute what that learner's work weighs beside as much of a usual one's, 0 to 1; None: it has no
        mark. For people: nothing follows from it."""
        mark = self._by.get(learner)
        return min(1.0, trust_of(mark.agreement) / self._usual_trust) if mark else None

    @cached_property
    def lasts(self) -> frozenset[bytes]:
        """Marks of everybody's newest contribution, by which copies are known."""
        return frozenset(mark.last for mark in self.table if mark.last)

    def is_copy(self, payload_digest: bytes) -> bool:
        """Tell whether somebody's newest contribution has this payload."""
        return mark_of(payload_digest) in self.lasts

    @cached_property
    def lately(self) -> int:
        """Number of learners of which something was merged lately, up to this table's version."""
        newest = max((mark.number for mark in self.table), default=0)
        return self.merged_since(newest - LATELY_VERSIONS)

    def merged_since(self, number: int) -> int:
        """Count the learners of which something was merged in version `number` or later."""
        return sum(mark.number >= number for mark in self.table)

    def after(self, number: int, contributors: tuple[Contributor, ...]) -> Marks:
        """Compute the table of a child of ours: version `number`, with these contributors."""
        for parent, known, parts, marks in _known:
            if parent is self and parts is contributors and known == number:
                return marks
        marks = Marks(self._table_after(number, contributors))
        _known[:] = [*_known[1 - REMEMBERED :], (self, number, contributors, marks)]
        return marks

    def _table_after(self, number: int, contributors: tuple[Contributor, ...]) -> tuple[Watermark, ...]:
        table = dict(self._by)
        counts = zip(contributors, earned(contributors, self.lasts), alone(contributors), strict=True)
        for part, tokens, is_alone in counts:
            old = table.get(part.learner)
            old = old or Watermark(part.learner, part.stamp, number, number, 0, earned=0)
            agreement = self.mean(part.learner).after(part.score)
            table[part.learner] = replace(
                old,
                stamp=part.stamp,
                number=number,
                merges=old.merges + 1,
                agreement=agreement,
                last=mark_of(part.payload_digest),
                earned=old.earned + (tokens > 0 and is_alone and agreement >= BEGINS),
            )
        floor = number - WATERMARK_VERSIONS
        kept = [mark for _, mark in sorted(table.items()) if mark.number >= floor]
        if len(kept) > MAX_WATERMARKS:
            ranked = sorted(kept, key=lambda mark: (not mark.voter, -mark.number, mark.learner))
            kept = sorted(ranked[:MAX_WATERMARKS], key=lambda mark: mark.learner)
        return _with_new_voters(number, kept)


def _with_new_voters(number: int, table: list[Watermark]) -> tuple[Watermark, ...]:
    founding = number <= FOUNDING_VERSIONS
    needed = FOUNDING_MERGES if founding else PROBATION_MERGES
    ready = [mark for mark in table if not mark.voter and mark.earned >= needed]
    if not ready:
        return tuple(table)
    if not founding:
        voters = [mark.voter for mark in table if mark.voter]
        since = max(FOUNDING_VERSIONS, number - NEWCOMERS_VERSIONS)
        room = max(1, len(voters) // NEWCOMERS_SHARE) - sum(voter > since for voter in voters)
        ready = sorted(ready, key=lambda mark: (mark.first, mark.learner))[: max(0, room)]
    chosen = {mark.learner for mark in ready}
    return tuple(replace(mark, voter=number) if mark.learner in chosen else mark for mark in table)


_NOTHING = Marks(())
_known: list[tuple[Marks, int, tuple[Contributor, ...], Marks]] = []
"""Tables and their children. A table does not hold its children itself: all have the empty one, which would
hold every table since."""


def marks_of(table: Iterable[Watermark]) -> Marks:
    """Make the table that was read or received. Without entries it is the same object for everybody."""
    marks = tuple(table)
    return Marks(marks) if marks else _NOTHING
