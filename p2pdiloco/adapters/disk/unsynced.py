"""Updates in a run's log that a power cut may still take: written, but not synced, or not written at all.

Synchronous, for the I/O thread of `adapters.disk.run_store`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.errors import StorageError


class UnsyncedUpdates:
    """Numbers of the updates of each fragment that are not durable. No more than the log has."""

    def __init__(self, files: Files, folder_of: Callable[[int], Path]) -> None:
        """`folder_of`: the folder with a fragment's updates."""
        self._files, self._folder_of = files, folder_of
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._failed: defaultdict[int, set[int]] = defaultdict(set)

    def save(self, fragment: int, number: int, write: Callable[[], None]) -> None:
        """Write an update without a sync. Raises: StorageError, as `write` does."""
        try:
            write()
        except StorageError:
            self._failed[fragment].add(number)
            raise
        self._failed[fragment].discard(number)
        self._written[fragment].add(number)

    def fragments(self) -> list[int]:
        """List the fragments of which something is written and not synced."""
        return [fragment for fragment, numbers in self._written.items() if numbers]

    def sync(self, fragment: int) -> int:
        """Sync what is written of a fragment. Returns the number of updates.

        Raises:
            StorageError: none of it counts as durable, also when a later sync succeeds: the kernel reports
                a write that failed once, and drops it.
        """
        numbers, folder = self._written.pop(fragment, set()), self._folder_of(fragment)
        try:
            for number in sorted(numbers):
                self._files.make_durable(folder / f"{number}.update")
            if numbers:
                self._files.make_names_durable(folder)
        except StorageError:
            self._failed[fragment] |= numbers
            raise
        return len(numbers)

    def forget_below(self, fragment: int, number: int) -> None:
        """Forget those below `number`: they are deleted, or a durable checkpoint has them."""
        for known in (self._written, self._failed):
            known[fragment] = {n for n in known[fragment] if n >= number}

    def first(self, fragment: int) -> int | None:
        """Find the lowest number that is not durable: a power cut may take that and all after it."""
        return min(self._written[fragment] | self._failed[fragment], default=None)
