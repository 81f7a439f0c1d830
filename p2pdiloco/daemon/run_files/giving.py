"""Giving files of a run to peers that ask: to a few at a time, who ask one peer after the other.

One stream a peer: whoever takes its time keeps nobody else from them.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon.budgets import COPIES, COPIES_S, SMALL_BYTES, Budget, Enough
from p2pdiloco.daemon.wire import refuse, refused
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Buffer, PullSource, Refusal

T = TypeVar("T")
PAUSE_S = 15.0
MAX_ASKED = 8
MAX_GIVEN = 4
"""Number of streams of such files that go out at one time, of one kind."""


async def first_that_gives(what: str, peers: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> T:
    """Ask these peers in any order, and take what the first one gives.

    `ask` raises RemoteError or TransportError where a peer gives nothing.

    Raises:
        TransportError: nobody gives it; why the last one did not.
    """
    why = "nobody lists it"
    for peer in random.sample(list(peers), min(MAX_ASKED, len(peers))):
        try:
            return await ask(peer)
        except (TransportError, RemoteError) as error:
            why = f"…{peer[-6:]}: {error}"
    raise TransportError(f"{what}: {why}"[:200])


def check_given(answer: T | Refusal) -> T:
    """Check the answer to a pull. Raises: PullRefused."""
    if isinstance(answer, Refusal):
        raise refused(answer)
    return answer


class Giving:
    """Giver of one kind of file."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._to: set[str] = set()
        self._budget = Budget(Enough.FILES, COPIES, COPIES * COPIES_S, now)
        self._longest_bytes = SMALL_BYTES

    def serve(
        self,
        peer: str,
        read: Callable[[], tuple[bytes, Buffer] | PullRefusal],
        limited: bool = True,
    ) -> PullSource | Refusal:
        """Serve a peer what `read` finds, header and payload, or the reason why it is refused.

        `limited`: it is no member of our run. Raises: PutOff (and had enough).
        """
        if limited:
            self._budget.check(peer)
        if peer in self._to or len(self._to) >= MAX_GIVEN:
            return refuse(PullRefusal.BUSY)
        found = read()
        if isinstance(found, PullRefusal):
            return refuse(found)
        self._to.add(peer)
        header, payload = found
        if limited:
            size = memoryview(payload).nbytes
            self._longest_bytes = max(self._longest_bytes, size)
            self._budget.take(peer, size / self._longest_bytes)
        return PullSource(header, (payload,), partial(self._to.discard, peer))


def mapped(file: Path) -> memoryview | None:
    """Map a file, whose bytes are read as they are sent; None: it is not there, or empty."""
    try:
        with file.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None
