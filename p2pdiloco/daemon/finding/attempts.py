"""Attempts that may be made in a time: so many at once, and as many again after it."""

from __future__ import annotations


class Attempts:
    """Bucket that fills again with time."""

    def __init__(self, most: int, full_again_s: float) -> None:
        self._most = float(most)
        self._per_s = most / full_again_s
        self._left = self._most
        self._at_s: float | None = None

    def take(self, now: float) -> bool:
        """Take one; False: there is none left now."""
        if self._at_s is not None:
            self._left = min(self._most, self._left + self._per_s * (now - self._at_s))
        self._at_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
