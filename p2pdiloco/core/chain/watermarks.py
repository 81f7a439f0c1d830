"""Watermarks of a chain: the newest merged contribution of every learner, by version.

A table is immutable, and there is one per version. In a large run it names thousands of learners. Nodes of
one process that follow the same chain (the simulator's) share one: it is worked out once for a header,
however many ask.
"""

from __future__ import annotations

from p2pdiloco.core.api.types import MAX_WATERMARKS, NEVER, Stamp, VersionHeader, Watermark

WATERMARK_VERSIONS = 1024
"""Versions after which a learner that was merged in none of them is forgotten; its base is long too old by
then."""
REMEMBERED = 4
"""Successors that a table remembers: more than branches that start from one version."""


class Marks:
    """Watermarks of one version."""

    __slots__ = ("_by", "_next", "table")

    def __init__(self, table: tuple[Watermark, ...]) -> None:
        self.table = table
        """Watermarks in canonical order."""
        self._by = {mark.learner: mark for mark in table}
        self._next: list[tuple[VersionHeader, Marks]] = []

    def stamp(self, learner: str) -> Stamp:
        """Find the stamp of that learner's newest contribution."""
        mark = self._by.get(learner)
        return mark.stamp if mark else NEVER

    def number(self, learner: str) -> int:
        """Find the version that has that learner's newest contribution; 0 if there is none."""
        mark = self._by.get(learner)
        return mark.number if mark else 0

    def after(self, header: VersionHeader) -> Marks:
        """Compute the table of the version with this header, a child of ours."""
        for known, marks in self._next:
            if known is header:
                return marks
        marks = Marks(self._table_after(header))
        self._next = [*self._next[1 - REMEMBERED :], (header, marks)]
        return marks

    def _table_after(self, header: VersionHeader) -> tuple[Watermark, ...]:
        table = dict(self._by)
        for part in header.contributors:
            table[part.learner] = Watermark(part.learner, part.stamp, header.number)
        floor = header.number - WATERMARK_VERSIONS
        kept = [mark for _, mark in sorted(table.items()) if mark.number >= floor]
        if len(kept) > MAX_WATERMARKS:
            newest = sorted(kept, key=lambda mark: (-mark.number, mark.learner))[:MAX_WATERMARKS]
            kept = sorted(newest, key=lambda mark: mark.learner)
        return tuple(kept)


_NOTHING = Marks(())


def marks_of(table: tuple[Watermark, ...]) -> Marks:
    """Make the table that was read or received. Without entries it is the same object for everybody."""
    return Marks(table) if table else _NOTHING
