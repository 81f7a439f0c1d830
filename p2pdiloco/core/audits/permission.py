"""Permission to audit: a node makes one merge again at a time, of whatever fragment.

Rules: docs/protocol/audits.md, section 1.
"""

from __future__ import annotations


class Audits:
    """Permission to audit: one version of all fragments at a time."""

    def __init__(self) -> None:
        self._fragment: int | None = None

    def begin(self, fragment: int) -> bool:
        """Ask for it. False: another audit is under way."""
        if self._fragment is not None:
            return False
        self._fragment = fragment
        return True

    def end(self, fragment: int) -> None:
        """Give it back."""
        if self._fragment == fragment:
            self._fragment = None
