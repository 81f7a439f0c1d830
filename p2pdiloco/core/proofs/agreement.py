"""Agreement of those who vote: what most of them state is believed by who cannot make the merge again.

Only voters by our own chain count: more than half of all of them, but the accused and who is excluded, more
than half of the members that are here, and two at least. Whoever has so many decides all else as well. In a
run that few vote in yet, they alone exclude nobody.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.api.statements import Statement
from p2pdiloco.util import BoundedDict

MAX_CULPRITS = 16
FEWEST = 2
"""Least number of members whose word excludes somebody."""


class Agreement:
    """Members that state of somebody that it lied, each under its own signature."""

    def __init__(self) -> None:
        self._authors: BoundedDict[str, frozenset[str]] = BoundedDict(MAX_CULPRITS)

    def has(self, statement: Statement) -> bool:
        """Tell whether its author's word on that member is counted."""
        return statement.author() in self._authors.get(statement.culprit(), frozenset())

    def count(self, statement: Statement) -> None:
        """Count the word of a voter."""
        culprit = statement.culprit()
        self._authors[culprit] = self._authors.get(culprit, frozenset()) | {statement.author()}

    def most(self, statement: Statement, voters: frozenset[str], here: frozenset[str]) -> bool:
        """Tell whether with this one most voters agree, and so many that they are most of who is here."""
        authors = (self._authors.get(statement.culprit(), frozenset()) | {statement.author()}) & voters
        return len(authors) >= max(FEWEST, len(voters) // 2 + 1, len(here) // 2 + 1)
