"""Fetching a run's history: what is missing of the line that leads to a head, from whoever has it.

Every record is compared with the digest that its child names, so it does not matter who gives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.credits import MAX_RECORD_BYTES, PAGE_BYTES, HistoryRecord, Tip, VersionLine, received
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.history.queries import PullHistory
from p2pdiloco.daemon.run_files.giving import check_given
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport

logger = logging.getLogger(__name__)
MAX_PAGE_BYTES = PAGE_BYTES + MAX_RECORD_BYTES
PAGE_TIMEOUT_S = 20.0
TRIES, BUSY_S = 5, 2.0
Pull = Callable[[str, PullHistory], Awaitable[list[HistoryRecord]]]
"""Function that asks a peer for a page, which is checked. Raises: RemoteError, TransportError."""


class FalseHistory(RemoteError):
    """Error: a peer gave other versions than it was asked for."""

    def __init__(self, detail: str) -> None:
        super().__init__("false-history", detail)


class FetchedInto(Protocol):
    """Place for records that were fetched."""

    async def line(self, fragment: int, tip: Tip) -> VersionLine:
        """Find what is here of the chain that ends in `tip`."""

    async def add(self, records: Sequence[HistoryRecord]) -> None:
        """Add records."""


async def pull_page(transport: Transport, peer: str, asked: PullHistory) -> list[HistoryRecord]:
    """Ask a peer for a page of records, the newest first, each the parent of the one before.

    Raises:
        TransportError, RemoteError: it gave none, or false ones.
    """
    request = wire.encode(asked)
    answer = await transport.pull(peer, request, MAX_PAGE_BYTES, PAGE_TIMEOUT_S)
    _, payload = check_given(answer)
    records = received(bytes(payload))
    check_page(asked, records)
    return records


def check_page(asked: PullHistory, records: Sequence[HistoryRecord]) -> None:
    """Check that these are the versions that were asked for. Raises: FalseHistory."""
    number, digest = asked.number, asked.digest
    for record in records:
        header = record.version.header
        right = (header.run, header.fragment, header.number) == (asked.run, asked.fragment, number)
        if number < 1 or not right or header.digest() != digest:
            raise FalseHistory(f"version {header.number} of fragment {header.fragment}")
        number, digest = number - 1, header.parent
    if not records:
        raise FalseHistory("an empty page")


class Filling:
    """Filling of one run's history from peers."""

    def __init__(self, run: str, pull: Pull, peers: Sequence[str]) -> None:
        self._run, self._pull = run, pull
        self._peers = list(peers)
        self.refusals: dict[str, str] = {}
        """Reasons for which peers were not asked any more."""
        self.fetched = 0
        """Number of records that came."""

    async def fill(self, into: FetchedInto, fragment: int, tip: Tip) -> int:
        """Fetch what is missing of the line that ends in `tip`. Returns the oldest version that is there."""
        asked = list(self._peers)
        while True:
            line = await into.line(fragment, tip)
            if line.is_whole:
                return line.first
            tip = Tip(line.first - 1, line.wanted)
            records = await self._page(asked, PullHistory(self._run, fragment, tip.number, tip.digest))
            if not records:
                return line.first
            await into.add(records)
            self.fetched += len(records)

    async def _page(self, peers: list[str], asked: PullHistory) -> list[HistoryRecord]:
        """Ask one peer after the other, who stays first if it gives; who does not is left out for now.

        Those that have others to serve are asked again after a pause.
        """
        for _ in range(TRIES):
            busy = []
            while peers:
                peer = peers[0]
                try:
                    return await self._pull(peer, asked)
                except FalseHistory as error:
                    self.refusals[peer] = str(error)[:120]
                    self._peers = [p for p in self._peers if p != peer]
                except (RemoteError, TransportError) as error:
                    self.refusals[peer] = str(error)[:120]
                    busy += [peer] if _is_busy(error) else []
                peers.pop(0)
            if not busy:
                break
            peers += busy
            await asyncio.sleep(BUSY_S)
        return []


def _is_busy(error: Exception) -> bool:
    return isinstance(error, wire.PullRefused) and error.why is PullRefusal.BUSY
