"""Asking members: some members of a run that are asked again and again how it is doing.

A few members are asked in turn, each as often as its budget for strangers allows (`daemon.budgets`), so none
ever refuses. Who does not answer is replaced by another member, of those that the DHT lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from msgspec import Struct

from p2pdiloco.cli.status import Search
from p2pdiloco.daemon.budgets import LISTING_S, REPORT_BYTES
from p2pdiloco.daemon.display.snapshot import StatusReport
from p2pdiloco.daemon.network.discovery import ask_status
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport

WITNESSES = 4
LEAST_S, SHARE = 2.0, 0.5
"""Shortest pause between two questions to one member, and the part of its budget that is used."""
BYTES_PER_S = SHARE * REPORT_BYTES / LISTING_S
LOOK_AGAIN_S, LOOK_SOON_S = 20.0, 3.0
"""Pause between two looks at the list of members; and while witnesses are missing."""
DOUBT_S, MOST_DOUBT_S = 4.0, 60.0
"""Time for which who did not answer is left alone: twice as long each time."""
TICK_S = 0.25
MAX_KNOWN = 256


class HeardReport(Struct, frozen=True):
    """Word of one member."""

    report: StatusReport
    at_s: float


class _Known(Struct):
    """State of a member that can be asked."""

    addresses: tuple[str, ...] = ()
    next_s: float = 0.0
    doubt_s: float = DOUBT_S
    is_asked: bool = False
    why: str = ""
    """Reason why it does not answer; empty: it does, or was not asked."""


class AskedMembers:
    """Members that are asked, and what they said last."""

    def __init__(self, search: Search, run: str, now: Callable[[], float]) -> None:
        """`run`: id of the run."""
        self._search, self._run, self._now = search, run, now
        self._known: dict[str, _Known] = {peer: _Known() for peer in search.joined}
        self._chosen: list[str] = []
        self._look_s = 0.0
        self.answers: dict[str, HeardReport] = {}
        """Last answers, of those too that do not answer any more."""

    @property
    def silent(self) -> dict[str, str]:
        """Members that answered once and do not now, and why."""
        return {peer: self._known[peer].why for peer in self.answers if self._known[peer].why}

    def take(self, report: StatusReport, size_bytes: int = 0) -> None:
        """Take an answer in."""
        peer, now = report.answered_by, self._now()
        known = self._known.setdefault(peer, _Known())
        pause_s = max(LEAST_S, size_bytes / BYTES_PER_S) * random.uniform(1.0, 1.3)  # each at its own time
        known.next_s, known.why, known.doubt_s = now + pause_s, "", DOUBT_S
        self.answers[peer] = HeardReport(report, now)
        if peer not in self._chosen:
            self._chosen.append(peer)

    async def watch(self, transport: Transport) -> None:
        """Ask for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                if self._now() >= self._look_s:
                    self._look_s = self._now() + LOOK_AGAIN_S
                    group.create_task(self._look(transport))
                for peer in self._due():
                    self._known[peer].is_asked = True
                    group.create_task(self._ask(transport, peer))
                await asyncio.sleep(TICK_S)

    def _due(self) -> list[str]:
        """Choose whom to ask now: the witnesses, in place of those that fail others that may be asked."""
        now = self._now()
        self._chosen = [peer for peer in self._chosen if not self._known[peer].why]
        free = [
            peer
            for peer, known in self._known.items()
            if peer not in self._chosen and not known.is_asked and now >= known.next_s
        ]
        # Those that failed come last.
        free.sort(key=lambda peer: bool(self._known[peer].why))
        asked = sum(known.is_asked for peer, known in self._known.items() if peer not in self._chosen)
        more = free[: max(0, WITNESSES - len(self._chosen) - asked)]
        due = [p for p in self._chosen if not self._known[p].is_asked and now >= self._known[p].next_s]
        return [*due, *more]

    async def _ask(self, transport: Transport, peer: str) -> None:
        known = self._known[peer]
        try:
            if known.addresses:
                await transport.connect(peer, known.addresses)
            self.take(*await ask_status(transport, peer, self._run))
        except (RemoteError, TransportError) as error:
            # What p2pd says of a dial is longer than a line, and tells nobody more.
            known.why = "not reached" if isinstance(error, TransportError) else str(error)[:120]
            known.next_s = self._now() + known.doubt_s
            known.doubt_s = min(2 * known.doubt_s, MOST_DOUBT_S)
            self._look_s = min(self._look_s, self._now() + LOOK_SOON_S)
        finally:
            known.is_asked = False

    async def _look(self, transport: Transport) -> None:
        with contextlib.suppress(TransportError):
            for peer, addresses in (await self._search.members(transport, self._run)).items():
                if peer in self._known or len(self._known) < MAX_KNOWN:
                    self._known.setdefault(peer, _Known()).addresses = addresses
