"""Payloads of what we merged lately, contributions and partial merges, or of a merge that we found false,
kept for a while for those who audit.

They stay where they are: in memory, or in scratch on the disk. Whatever else wants the memory gets it.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from msgspec import Struct

from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.tensors.merge import Payload, memory_bytes, size_of

KEEP_S = 60.0
"""Time for which they are kept; an audit takes no longer."""
MOST_MEMORY_BYTES = 256 << 20
MOST_SCRATCH_BYTES = 2 << 30
NO_TICKET = -1


class _Kept(Struct, frozen=True):
    ticket: int
    payload: Payload
    until_s: float


class MergedPayloads:
    """Payloads of merges, by fragment and digest. Use from a running event loop.

    Later merges do not drive them out before their time: who audits may have been kept waiting.
    """

    def __init__(self, tickets: Tickets) -> None:
        """`tickets`: as long as one is open, its payload counts there."""
        self._tickets = tickets
        self._kept: dict[tuple[int, bytes], _Kept] = {}
        """Payloads by fragment and digest, oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of payloads that are kept for nothing else."""
        kept = self._kept.values()
        return sum(memory_bytes(each.payload) for each in kept if not self._tickets.is_open(each.ticket))

    def keep(self, fragment: int, merged: Iterable[tuple[bytes, int, Payload]]) -> None:
        """Keep what was merged, (digest, ticket, payload). A ticket may be released already."""
        until_s = asyncio.get_running_loop().time() + KEEP_S
        for digest, ticket, payload in merged:
            self._kept.pop((fragment, digest), None)  # the newest is the last
            self._kept[fragment, digest] = _Kept(ticket, payload, until_s)
        self._bound()
        if self._timer is None and self._kept:
            self._timer = asyncio.get_running_loop().call_at(until_s, self._forget_old)

    def keep_audited(self, fragment: int, payloads: Mapping[bytes, Payload]) -> None:
        """Keep what was merged again, by digest, and gave something else than its syncer says: others are to
        find that, too."""
        here = {digest: self._kept.get((fragment, digest)) for digest in payloads}
        known = {digest: (kept.ticket, kept.payload) for digest, kept in here.items() if kept is not None}
        named = payloads.items()
        self.keep(fragment, [(digest, *known.get(digest, (NO_TICKET, each))) for digest, each in named])

    def get(self, fragment: int, digest: bytes) -> Payload | None:
        """Return a payload; None: it is not, or no longer, kept."""
        kept = self._kept.get((fragment, digest))
        return None if kept is None else kept.payload

    def give_up(self) -> None:
        """Let go of all that is in memory: it is wanted for something else."""
        for key in [key for key, kept in self._kept.items() if memory_bytes(kept.payload)]:
            del self._kept[key]

    def forget(self) -> None:
        """Let go of everything."""
        self._kept.clear()

    def _bound(self) -> None:
        """Let go of the oldest beyond the bounds of memory and of scratch."""
        memory = sum(memory_bytes(each.payload) for each in self._kept.values())
        scratch = sum(size_of(each.payload) for each in self._kept.values()) - memory
        for key, kept in list(self._kept.items()):
            in_memory = memory_bytes(kept.payload)
            if in_memory and memory > MOST_MEMORY_BYTES:
                memory -= in_memory
                del self._kept[key]
            elif not in_memory and scratch > MOST_SCRATCH_BYTES:
                scratch -= size_of(kept.payload)
                del self._kept[key]

    def _forget_old(self) -> None:
        loop = asyncio.get_running_loop()
        for key in [key for key, kept in self._kept.items() if kept.until_s <= loop.time()]:
            del self._kept[key]
        first = next(iter(self._kept.values()), None)
        self._timer = None if first is None else loop.call_at(first.until_s, self._forget_old)
