"""Serving of a run's history to anybody who asks, within bounds.

Whoever keeps none gives the newest versions that it has anyway: a keeper that was away fills its gap with
them, and of a run that nobody keeps something can be told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import HistoryRecord, Tip, page_of
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import HISTORY_BYTES, HISTORY_S, Budget, Enough
from p2pdiloco.daemon.history.keeping import HistoryKeeper
from p2pdiloco.daemon.history.queries import KEEPS_NONE, CreditsAnswer, CreditsQuery, PullHistory
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.ports import PullSource, Refusal

MAX_GIVEN = 4
"""Number of pages that go out at one time."""
LEAST_BYTES = 64 * 1024
"""Bytes as which every question counts: one for a single version, or none, has a segment unfolded, too."""
Log = Callable[[int], Sequence[SignedVersion]]
"""Function that lists the newest versions of a fragment of our chain, oldest first."""


class HistoryDoor:
    """Giver of a run's history and credits."""

    def __init__(
        self, run: str, log: Log, keeper: HistoryKeeper | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`keeper`: None: this node keeps no history."""
        self._run, self._log, self._keeper = run, log, keeper
        self._budget = Budget(Enough.HISTORIES, HISTORY_BYTES, HISTORY_S, now)
        self._to: set[str] = set()

    def answer(self, query: CreditsQuery) -> CreditsAnswer:
        """Answer who did how much. Raises: RemoteError (`KEEPS_NONE`)."""
        if self._keeper is None:
            raise RemoteError(KEEPS_NONE)
        return self._keeper.answer(query.offset)

    async def serve(self, sender: str, pull: PullHistory, limited: bool) -> PullSource | Refusal:
        """Serve a page. `limited`: it is no member of our run. Raises: PutOff (and had enough)."""
        if pull.run != self._run:
            return wire.refuse(PullRefusal.OTHER_RUN)
        if limited:
            self._budget.check(sender)
        if sender in self._to or len(self._to) >= MAX_GIVEN:
            return wire.refuse(PullRefusal.BUSY)
        self._to.add(sender)
        try:
            page = await self._page(pull.fragment, Tip(pull.number, pull.digest))
        except BaseException:
            self._to.discard(sender)
            raise
        if limited:
            self._budget.take(sender, max(LEAST_BYTES, len(page)))
        if not page:
            self._to.discard(sender)
            return wire.refuse(PullRefusal.NOT_HERE)
        return PullSource(b"", (page,), partial(self._to.discard, sender))

    async def _page(self, fragment: int, tip: Tip) -> bytes:
        log, page = self._log(fragment), b""
        if self._keeper is not None and log:
            with contextlib.suppress(StorageError):  # the keeper's person hears of it when it writes
                page = await self._keeper.page(fragment, tip)
        return page or page_of(from_log(log, tip))


def from_log(log: Sequence[SignedVersion], tip: Tip) -> Iterator[HistoryRecord]:
    """Find that version and those before it, as far as they are among the newest ones; version 0 is not."""
    by_number = {version.header.number: version for version in log}
    number, digest = tip.number, tip.digest
    while number > 0:
        version = by_number.get(number)
        if version is None or version.header.digest() != digest:
            return
        yield HistoryRecord(0, version)
        number, digest = number - 1, version.header.parent
