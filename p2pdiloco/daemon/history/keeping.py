"""Keeping of a run's history (`node --keep-history`): every version that this node takes, and what it lacks.

Reading and writing happen in a thread of its own. Ledgers follow the chain; after a fork, or when something
was missing, a fragment is counted anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import (
    MOST,
    Credits,
    FragmentLedger,
    HistoryRecord,
    HistoryStore,
    NamesFile,
    Tip,
    VersionLine,
    count,
    credits_of,
    page_of,
)
from p2pdiloco.daemon.history.fetching import Filling
from p2pdiloco.daemon.history.queries import MAX_ROWS, CreditLine, CreditsAnswer
from p2pdiloco.errors import StorageError

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
REST = 50.0
"""Factor of the time that adding up took after which it is done again: large runs have many learners."""
AGAIN_S, LONGEST_AGAIN_S = 5.0, 1800.0
"""Time after which others are asked again for what is missing, the first time and at most."""
COMPLAIN_EVERY_S = 300.0
EMPTY = Credits((), 1, 0, 0, 0)
T = TypeVar("T")


class HistoryKeeper:
    """HistoryKeeper of one run's history."""

    def __init__(self, run: str, fragments: int, folder: Path, names: Mapping[str, str]) -> None:
        """`folder`: of the history; `names`: of members, as they were seen last."""
        self._run, self._history = run, HistoryStore(folder)
        self._names = NamesFile(folder / "names.json", names)
        self._io = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._loop = asyncio.get_running_loop()
        self._tips: dict[int, Tip] = {}
        self._ledgers = [FragmentLedger(run, fragment) for fragment in range(fragments)]
        self._stale: set[int] = set()
        """Fragments whose ledger does not follow the chain."""
        self._incomplete: set[int] = set()
        self._kept: dict[int, Tip] = {}
        """Newest version of each fragment that was appended: the thread's own."""
        self._changed = asyncio.Event()
        self._complain_again_s = 0.0
        self.credits = EMPTY
        """Credits as they were a moment ago."""

    def close(self) -> None:
        """End its thread when what was noted is written."""
        self._io.shutdown(wait=True)

    # --- versions ------------------------------------------------------------------------------------

    def begin(self, log: Sequence[SignedVersion]) -> None:
        """Take in the newest versions of a fragment as this node starts with them, oldest first."""
        versions = tuple(version for version in log if version.header.number)
        if versions:
            fragment = versions[-1].header.fragment
            self._tips[fragment] = Tip.of(versions[-1].header.head())
            self._stale.add(fragment)
            self._changed.set()
            self._submit(partial(self._begin, versions))

    def _begin(self, versions: Sequence[SignedVersion]) -> None:
        for version in versions:
            header = version.header
            try:
                if self._history.find(header.fragment, header.number, header.digest()) is None:
                    self._history.append(HistoryRecord(0, version))  # nobody knows when it was taken
            except StorageError as error:
                self._complain(error)
                return
            self._kept[header.fragment] = Tip.of(header.head())

    def note(self, version: SignedVersion) -> None:
        """Keep a version that is now this node's. A full disk leaves a gap, which others may fill later."""
        header = version.header
        self._tips[header.fragment] = Tip.of(header.head())
        self._submit(partial(self._note, HistoryRecord(int(time.time()), version)))

    def _note(self, record: HistoryRecord) -> None:
        """Append a record; where the ledger does not go on with it, it is to be made anew."""
        header = record.version.header
        fragment = header.fragment
        try:
            self._history.append(record)
        except StorageError as error:
            self._complain(error)
            self._stale.add(fragment)
            return
        self._kept[fragment] = Tip.of(header.head())
        ledger = self._ledgers[fragment]
        if ledger.number + 1 == header.number and (not ledger.number or ledger.digest == header.parent):
            ledger.add(record)
        else:
            self._stale.add(fragment)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def _submit(self, work: Callable[[], None]) -> None:
        """Let the thread do it, in the order in which it is told."""
        self._io.submit(work).add_done_callback(_tell_bug)

    def _complain(self, error: StorageError) -> None:
        now = time.monotonic()
        if now >= self._complain_again_s:
            self._complain_again_s = now + COMPLAIN_EVERY_S
            logger.error("history of the run: %s", error)

    # --- what is missing -----------------------------------------------------------------------------

    async def watch(self, filling: Callable[[], Filling]) -> None:
        """Count anew what does not follow, ask others for what is missing, and add up, for ever."""
        again_s, asked_at_s = AGAIN_S, -LONGEST_AGAIN_S
        while True:
            now = self._loop.time()
            due = self._incomplete and now >= asked_at_s + again_s
            if self._stale or due:
                again_s = AGAIN_S if self._stale else min(2 * again_s, LONGEST_AGAIN_S)
                asked_at_s = now
                await self._mend(filling())
            self._changed.clear()
            began_s = self._loop.time()
            await self._add_up()
            await asyncio.sleep(max(LOOK_EVERY_S, REST * (self._loop.time() - began_s)))
            if not self._stale and not self._incomplete:
                await self._changed.wait()

    async def _mend(self, filling: Filling) -> None:
        for fragment in sorted(self._stale | self._incomplete):
            tip = self._tips[fragment]
            self._stale.discard(fragment)
            try:
                first = await filling.fill(self, fragment, tip)
                await self._in_thread(partial(self._recount, fragment))
            except StorageError as error:
                self._complain(error)
                self._incomplete.add(fragment)
                continue
            if first > 1:
                self._incomplete.add(fragment)
            else:
                self._incomplete.discard(fragment)

    def _recount(self, fragment: int) -> None:
        """Count a fragment anew, to the newest version that is here."""
        tip = self._tips[fragment]
        if self._history.find(fragment, tip.number, tip.digest) is None:
            tip = self._kept.get(fragment, tip)
        self._ledgers[fragment] = count(self._history, self._run, fragment, tip)

    async def line(self, fragment: int, tip: Tip) -> VersionLine:
        """Find what is here of the chain that ends in `tip`. Raises: StorageError."""
        return await self._in_thread(partial(self._history.line, fragment, tip.number, tip.digest))

    async def add(self, records: Sequence[HistoryRecord]) -> None:
        """Keep records that others gave. Raises: StorageError."""

        def append() -> None:
            for record in records:
                self._history.append(record)

        await self._in_thread(append)

    # --- credits -------------------------------------------------------------------------------------

    async def _add_up(self) -> None:
        self.credits = await self._in_thread(lambda: credits_of(self._ledgers))
        try:
            await self._in_thread(partial(self._names.save, [row.peer for row in self.credits.rows]))
        except StorageError as error:
            self._complain(error)

    def name(self, peer: str) -> str:
        """Find the name by which a learner called itself last."""
        return self._names.get(peer)

    def answer(self, offset: int) -> CreditsAnswer:
        """Answer who did how much, from that row on."""
        found = self.credits
        tips = hashlib.sha256(b"".join(tip.digest for _, tip in sorted(self._tips.items()))).digest()
        rows = tuple(
            CreditLine(
                row.peer,
                self.name(row.peer),
                min(row.fragment_tokens, MOST),
                row.claimed_tokens,
                row.inner_steps,
                row.contributions,
                row.first_s,
                row.last_s,
            )
            for row in found.rows[offset : offset + MAX_ROWS]
        )
        return CreditsAnswer(
            found.fragments,
            min(found.fragment_tokens, MOST),
            min(found.before_fragment_tokens, MOST),
            min(found.uncredited_fragment_tokens, MOST),
            len(found.rows),
            tuple(sorted(found.missing.items())),
            tuple(found.doubts.items()),
            tips,
            rows,
        )

    # --- for others ----------------------------------------------------------------------------------

    async def page(self, fragment: int, tip: Tip) -> bytes:
        """Read that version and those before it, until a page is full; empty: it is not here.

        Raises: StorageError.
        """
        return await self._in_thread(lambda: page_of(self._history.down(fragment, tip.number, tip.digest)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._io, work)


def _tell_bug(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("history of the run: %r", error)
