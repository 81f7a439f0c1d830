"""History of a run, kept by whoever wants: written with every version, fetched and given to anybody.

`HistoryKeeper` keeps it (`node --keep-history`), `Filling` fetches what is missing, `HistoryDoor` gives it to
peers, `AskedCredits` asks members who did how much of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import (
    MAX_RECORD_BYTES,
    MOST,
    PAGE_BYTES,
    Credits,
    FragmentLedger,
    HeadRef,
    HistoryRecord,
    HistoryStore,
    NamesFile,
    VersionLine,
    count_line,
    credits_of,
    decode_page,
    page_of,
)
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import HISTORY_BYTES, HISTORY_S, Budget, Enough
from p2pdiloco.daemon.network.discovery import ask
from p2pdiloco.daemon.run_files.shared_files import check_given
from p2pdiloco.daemon.wire import KEEPS_NONE, MAX_ROWS, CreditLine, CreditsAnswer, CreditsQuery, PullHistory
from p2pdiloco.errors import RemoteError, StorageError, TransportError
from p2pdiloco.ports import PullSource, Refusal, Transport
from p2pdiloco.util import Action, Now, T, loop_s

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
REST = 50.0
"""Factor of the time that adding up took after which it is done again: large runs have many learners."""
AGAIN_S, LONGEST_AGAIN_S = 5.0, 1800.0
"""Time after which others are asked again for what is missing, the first time and at most."""
COMPLAIN_EVERY_S = 300.0
EMPTY = Credits((), 1, 0, 0, 0)
Pull = Callable[[str, PullHistory], Awaitable[list[HistoryRecord]]]
"""Function that asks a peer for a page, which is checked. Raises: RemoteError, TransportError."""


class FalseHistory(RemoteError):
    """Error: a peer gave other versions than it was asked for."""

    def __init__(self, detail: str) -> None:
        super().__init__("false-history", detail)


class HistoryKeeper:
    """Keeper of one run's history: every version that this node takes, and what it lacks.

    Reading and writing happen in a thread of its own. Ledgers follow the chain; after a fork, or when
    something was missing, a fragment is counted anew.
    """

    def __init__(self, run: str, fragments: int, folder: Path, names: Mapping[str, str]) -> None:
        """`folder`: of the history; `names`: of members, as they were seen last."""
        self._run, self._history = run, HistoryStore(folder)
        self._names = NamesFile(folder / "names.json", names)
        self._io = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._loop = asyncio.get_running_loop()
        self._tips: dict[int, HeadRef] = {}
        self._ledgers = [FragmentLedger(run, fragment) for fragment in range(fragments)]
        self._stale: set[int] = set()
        """Fragments whose ledger does not follow the chain."""
        self._incomplete: set[int] = set()
        self._kept: dict[int, HeadRef] = {}
        """Newest version of each fragment that was appended: the thread's own."""
        self._changed = asyncio.Event()
        self._complain_again_s = 0.0
        self.credits = EMPTY
        """Credits as they were a moment ago."""

    def close(self) -> None:
        """End its thread when what was noted is written."""
        self._io.submit(self._history.close)
        self._io.shutdown(wait=True)

    # --- versions ------------------------------------------------------------------------------------

    def begin(self, log: Sequence[SignedVersion]) -> None:
        """Take in the newest versions of a fragment as this node starts with them, oldest first."""
        versions = tuple(version for version in log if version.header.number)
        if versions:
            fragment = versions[-1].header.fragment
            self._tips[fragment] = HeadRef.of(versions[-1].header.head())
            self._stale.add(fragment)
            self._changed.set()
            self._submit(partial(self._begin, versions))

    def _begin(self, versions: Sequence[SignedVersion]) -> None:
        for version in versions:
            header = version.header
            try:
                if self._history.find(header.fragment, HeadRef.of(header.head())) is None:
                    self._history.append(HistoryRecord(0, version))  # nobody knows when it was taken
            except StorageError as error:
                self._complain(error)
                return
            self._kept[header.fragment] = HeadRef.of(header.head())

    def note(self, version: SignedVersion) -> None:
        """Keep a version that is now this node's. A full disk leaves a gap, which others may fill later."""
        header = version.header
        self._tips[header.fragment] = HeadRef.of(header.head())
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
        self._kept[fragment] = HeadRef.of(header.head())
        ledger = self._ledgers[fragment]
        if ledger.number + 1 == header.number and (not ledger.number or ledger.digest == header.parent):
            ledger.add(record)
        else:
            self._stale.add(fragment)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def _submit(self, work: Action) -> None:
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
            now = loop_s()
            due = self._incomplete and now >= asked_at_s + again_s
            if self._stale or due:
                again_s = AGAIN_S if self._stale else min(2 * again_s, LONGEST_AGAIN_S)
                asked_at_s = now
                await self._mend(filling())
            self._changed.clear()
            began_s = loop_s()
            await self._add_up()
            await asyncio.sleep(max(LOOK_EVERY_S, REST * (loop_s() - began_s)))
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
        tip = self._tips[fragment]
        if self._history.find(fragment, tip) is None:
            tip = self._kept.get(fragment, tip)
        self._ledgers[fragment] = count_line(self._history, self._run, fragment, tip)

    async def line(self, fragment: int, tip: HeadRef) -> VersionLine:
        """Find what is here of the chain that ends in `tip`. Raises: StorageError."""
        return await self._in_thread(partial(self._history.line, fragment, tip))

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
            if peers := [row.peer for row in self.credits.rows]:
                await self._in_thread(partial(self._names.save, peers))
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

    async def page(self, fragment: int, tip: HeadRef) -> bytes:
        """Read that version and those before it, until a page is full; empty: it is not here.

        Raises: StorageError.
        """
        return await self._in_thread(lambda: page_of(self._history.down(fragment, tip)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._io, work)


def _tell_bug(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("history of the run: %r", error)


MAX_PAGE_BYTES = PAGE_BYTES + MAX_RECORD_BYTES
PAGE_TIMEOUT_S = 20.0
TRIES, BUSY_S = 5, 2.0


class FetchedInto(Protocol):
    """Place for records that were fetched."""

    async def line(self, fragment: int, tip: HeadRef) -> VersionLine:
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
    records = decode_page(bytes(payload))
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
    """Filling of one run's history: fetches what is missing of the line that leads to a head, from peers.

    Every record is compared with the digest that its child names, so it does not matter who gives it.
    """

    def __init__(self, run: str, pull: Pull, peers: Sequence[str]) -> None:
        self._run, self._pull = run, pull
        self._peers = list(peers)
        self.refusals: dict[str, str] = {}
        """Reasons for which peers were not asked any more."""

    async def fill(self, into: FetchedInto, fragment: int, tip: HeadRef) -> int:
        """Fetch what is missing of the line that ends in `tip`. Returns the oldest version that is there."""
        asked = list(self._peers)
        while True:
            line = await into.line(fragment, tip)
            if line.is_whole:
                return line.first
            tip = HeadRef(line.first - 1, line.wanted)
            records = await self._page(asked, PullHistory(self._run, fragment, tip.number, tip.digest))
            if not records:
                return line.first
            await into.add(records)

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


MAX_GIVEN = 4
"""Number of pages that go out at one time."""
LEAST_BYTES = 64 * 1024
"""Bytes as which every question counts: one for a single version, or none, reads the disk, too."""
Log = Callable[[int], Sequence[SignedVersion]]
"""Function that lists the newest versions of a fragment of our chain, oldest first."""


@dataclass
class HistoryDoor:
    """Giver of a run's history and credits to anybody who asks, within bounds.

    A node that keeps none gives the newest versions that it has anyway: a keeper that was away fills its gap
    with them, and of a run that nobody keeps something can be told.
    """

    _run: str
    _log: Log
    _keeper: HistoryKeeper | None
    """Keeper of this node; None: it keeps no history."""
    _now: Now = time.monotonic

    def __post_init__(self) -> None:
        self._budget = Budget(Enough.HISTORIES, HISTORY_BYTES, HISTORY_S, self._now)
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
        with ExitStack() as served:
            served.callback(self._to.discard, sender)
            page = await self._page(pull.fragment, HeadRef(pull.number, pull.digest))
            if limited:
                self._budget.take(sender, max(LEAST_BYTES, len(page)))
            if not page:
                return wire.refuse(PullRefusal.NOT_HERE)
            return PullSource(b"", (page,), served.pop_all().close)

    async def _page(self, fragment: int, tip: HeadRef) -> bytes:
        log, page = self._log(fragment), b""
        if self._keeper is not None and log:
            with suppress(StorageError):  # the keeper's person hears of it when it writes
                page = await self._keeper.page(fragment, tip)
        return page or page_of(from_log(log, tip))


def from_log(log: Sequence[SignedVersion], tip: HeadRef) -> Iterator[HistoryRecord]:
    """Find that version and those before it, as far as they are among the newest ones; version 0 is not."""
    for version in reversed(log):
        header = version.header
        if header.number == tip.number > 0 and header.digest() == tip.digest:
            yield HistoryRecord(0, version)
            tip = HeadRef(header.number - 1, header.parent)


EVERY_S = 60.0
"""Pause between two questions for credits."""
MOST_ASKED = 8


def believed(answers: Mapping[str, CreditsAnswer]) -> str:
    """Choose the keeper in the middle, by the tokens of which it knows whose they are: one liar among three
    is not believed, also where it says that it alone knows all."""
    known = {peer: told.fragment_tokens - told.before_fragment_tokens for peer, told in answers.items()}
    return sorted(known, key=lambda peer: known[peer])[len(known) // 2]


class AskedCredits:
    """Credits of a run as its members tell them, asked now and then."""

    def __init__(self, now: Now = time.monotonic) -> None:
        self._now = now
        self._asked_at_s = -EVERY_S
        self.answer: CreditsAnswer | None = None
        """Answer that is believed; None: nobody that was asked keeps the history."""

    async def look(self, transport: Transport, run: str, peers: Sequence[str]) -> None:
        """Ask these members, which are connected, if it is time."""
        if not peers or self._now() - self._asked_at_s < EVERY_S:
            return
        self._asked_at_s = self._now()
        asked, query = peers[:MOST_ASKED], CreditsQuery(run)
        told = await asyncio.gather(*(ask(transport, peer, query, CreditsAnswer) for peer in asked))
        answers = {peer: answer for peer, answer in zip(asked, told, strict=True) if answer is not None}
        if answers:
            self.answer = answers[believed(answers)]
