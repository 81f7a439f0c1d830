"""Log of the newest outer updates of every fragment, in memory."""

from __future__ import annotations

from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.ports import Buffer


class UpdateLog:
    """Newest outer updates of every fragment: what peers pull when a version is announced.

    Stragglers' older ones come from the disk (`OwnChain.update_of`), or memory would grow with the log.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._logs: dict[int, dict[int, tuple[SignedVersion, Buffer]]] = {}

    def add(self, version: SignedVersion, payload: Buffer) -> None:
        """Keep an update; the oldest beyond the bound goes, and so does what is not of its branch."""
        header = version.header
        log = self._logs.setdefault(header.fragment, {})
        before = log.get(header.number - 1)
        if log and (before is None or before[0].header.digest() != header.parent):
            log.clear()
        log[header.number] = (version, payload)
        for number in [n for n in log if n <= header.number - self._keep or n > header.number]:
            del log[number]

    def clear(self, fragment: int) -> None:
        """Drop a fragment's log: another chain's state was taken, to which it does not lead."""
        self._logs.pop(fragment, None)

    @property
    def held_bytes(self) -> int:
        """Payload bytes that are held in memory."""
        return sum(memoryview(p).nbytes for log in self._logs.values() for _, p in log.values())

    def get(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        """Return a logged update; None: it is not in the log."""
        return self._logs.get(fragment, {}).get(number)
