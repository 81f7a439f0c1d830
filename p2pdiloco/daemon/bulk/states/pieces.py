"""Parts of a state: which are here, are on their way, or are missing."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from p2pdiloco.daemon import wire
from p2pdiloco.tensors.outer_update import Loan

PIECES = 16
LEAST_PIECE_BYTES = 1 << 20
MOST_PIECE_BYTES = 32 << 20


class StatePart:
    """Bytes start to end of a state, of which those up to `have` are here."""

    def __init__(self, start: int, end: int) -> None:
        self.have, self.end = start, end
        self.asked_s = self.began_s = 0.0
        """Times at which it was asked for, and began to come; 0: not yet."""
        self.began_at = start
        self.pull: asyncio.Future[Any] | None = None
        self.stolen = False

    def asked(self, pull: asyncio.Future[Any], now: float) -> None:
        """Note that it is asked for."""
        self.pull, self.asked_s = pull, now

    def began(self, now: float) -> None:
        """Note that it begins to come."""
        self.began_s, self.began_at = now, self.have

    def came(self, to: int) -> None:
        """Note that all before that byte is here."""
        self.have = to

    def steal(self) -> None:
        """Take it from who gives it too slowly."""
        self.stolen = True
        if self.pull is not None:
            self.pull.cancel()

    def rate(self, now: float) -> float:
        """Return the rate in bytes per second since it began to come."""
        return (self.have - self.began_at) / max(now - self.began_s, 1e-6)


class StateCopy:
    """Version of a fragment of which a part is here."""

    def __init__(self, size: int, loan: Loan) -> None:
        self.size = size
        self.loan = loan
        self.header: wire.StateHeader | None = None
        self.givers: set[str] = set()
        self.missing: deque[tuple[int, int]] = deque([(0, size)])
        self.active: list[StatePart] = []
        self.begun, self.changed = asyncio.Event(), asyncio.Event()

    @property
    def digest(self) -> bytes:
        """Digest of the state; empty: not known yet."""
        return self.header.version.header.state_digest if self.header else b""

    @property
    def here_bytes(self) -> int:
        """Number of bytes that are here."""
        missing = sum(end - start for start, end in self.missing)
        return self.size - missing - sum(part.end - part.have for part in self.active)

    @property
    def complete(self) -> bool:
        """True: all of it is here."""
        return not self.missing and not self.active

    def ask_anew(self) -> None:
        """Begin with another holder: nobody has begun to give yet."""
        self.begun = asyncio.Event()

    def begins(self, giver: str, header: wire.StateHeader | None) -> None:
        """Note that a holder begins to give; `header`: of what is copied, if this is the first."""
        self.header = header or self.header
        self.givers.add(giver)
        self.begun.set()

    def take(self) -> StatePart | None:
        """Take a piece that nobody fetches; None: there is none."""
        if not self.missing:
            return None
        start, end = self.missing.popleft()
        most = min(max(self.size // PIECES, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        if end - start > most:
            self.missing.appendleft((start + most, end))
            end = start + most
        part = StatePart(start, end)
        self.active.append(part)
        return part

    def done(self, part: StatePart) -> None:
        """Note that nobody fetches this part any more; what is missing of it is missing."""
        self.active.remove(part)
        if part.have < part.end:
            self.missing.appendleft((part.have, part.end))
        self.changed.set()

    def anew(self, part: StatePart) -> None:
        """Begin anew: another version comes than the one of which something is here."""
        self.givers.clear()
        part.have = part.began_at = 0
        part.end = min(part.end, self.size)
        self.missing = deque([(part.end, self.size)] if part.end < self.size else [])
