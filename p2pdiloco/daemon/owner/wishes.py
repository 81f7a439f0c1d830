"""Wishes of this machine's owner: a pause, limits, the month's transfer, and what follows from them.

`WishKeeper` knows no member: `daemon.owner.control` carries out what it finds. Limits that were changed while
a node ran, and a pause, are kept for its next start in `<data_dir>/owner.json`. A limit that is given at a
start (a flag, a variable, a settings file) wins over a kept one, for that life. `TransferBook` counts the
bytes of a month.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.settings import (
    DEFAULTS,
    FIELDS,
    Bounds,
    OwnLimits,
    bounds_of,
    changed,
    changed_names,
    flag_of,
    value_text,
)
from p2pdiloco.daemon.budgets import apart, begun
from p2pdiloco.daemon.display.snapshot import Finding, PauseReason, PauseRow, TransferRow, size
from p2pdiloco.daemon.owner.pauses import Governor, OwnersMachine
from p2pdiloco.errors import StorageError
from p2pdiloco.util import Frozen, read_note

logger = logging.getLogger(__name__)
WARN_SHARE = 0.8
RESERVE_SHARE = 0.1
"""Largest share of the budget that is left for handing over."""


class KeptWishes(Frozen, forbid_unknown_fields=True):
    """Content of the file."""

    limits: OwnLimits = OwnLimits()
    changed: tuple[str, ...] = ()
    """Names of the limits that were changed, also back to none."""
    paused_since: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    """Seconds since 1970; 0: not paused."""


class LimitRow(Frozen):
    """Row of one limit that can be changed while the node runs."""

    name: str
    """Name of its flag, without the dashes in front: "max-upload"."""
    value: str
    """Value as `limits` takes it, such as "20Mbit"; empty: no limit."""
    comes_from: str
    """Source of the value: "default", "start" (a flag, the environment or a file), "limits" (changed
    while it ran, and kept)."""


@dataclass
class WishKeeper:
    """Keeper of the wishes of one data folder's owner.

    Raises:
        ConfigError: a limit cannot be, or this machine does not tell what it is about.
    """

    _data_dir: Path
    _given: OwnLimits
    """Limits of this start."""
    _machine: OwnersMachine
    _wall: Callable[[], float]

    def __post_init__(self) -> None:
        self._wishes = load_wishes(self._data_dir)
        self.limits, self._sources, words = combined(self._given, self._wishes)
        for sentence in words:
            logger.info("%s", sentence)
        if kept := [flag_of(name) for name, source in self._sources.items() if source == "limits"]:
            logger.info("limits kept from before hold: %s (p2pdiloco limits shows them)", ", ".join(kept))
        self.bounds: Bounds = bounds_of(self.limits)
        self._governor = Governor(self._machine.sources(self.bounds))
        self.book = TransferBook(self._data_dir)
        self._one_at_a_time = asyncio.Lock()
        self.finishing_since = 0.0
        """Time since which the node is to finish, in seconds since 1970; 0: it is not."""
        self._reserve_bytes = 0
        self._warned = ""

    # --- wishes --------------------------------------------------------------------------------------

    @property
    def paused_since(self) -> float:
        """Time since which it is paused, in seconds since 1970; 0: it is not."""
        return self._wishes.paused_since

    async def pause(self, pauses: bool) -> None:
        """Begin or end a pause. Raises: StorageError (it cannot be kept)."""
        async with self._one_at_a_time:
            wishes = replace(self._wishes, paused_since=self._wall() if pauses else 0.0)
            await apart(partial(save_wishes, self._data_dir, wishes))
            self._wishes = wishes

    def finish(self, finishes: bool) -> None:
        """Begin to finish, or take that back."""
        self.finishing_since = self._wall() if finishes else 0.0

    async def change(self, changes: dict[str, str]) -> list[str]:
        """Change limits, all or none. Returns a sentence for each.

        Raises:
            ConfigError: a limit cannot be, or this machine does not tell what it is about.
            StorageError: they cannot be kept.
        """
        async with self._one_at_a_time:
            limits = changed(self.limits, changes)
            bounds = bounds_of(limits)
            sources = await apart(partial(self._machine.sources, bounds))
            names = changed_names(changes)
            wishes = with_changes(self._wishes, limits, changes)
            await apart(partial(save_wishes, self._data_dir, wishes))
            self._wishes, self.limits, self.bounds = wishes, limits, bounds
            self._governor.use(sources)
        self._sources.update(dict.fromkeys(names, "limits"))
        return [self._said(name) for name in names]

    def _said(self, name: str) -> str:
        value = value_text(getattr(self.limits, name)) or "none"
        given = getattr(self._given, name)
        if given not in (DEFAULTS[name], getattr(self.limits, name)):
            later = f"a start with {flag_of(name)} {value_text(given)} wins over it"
        else:
            later = "kept for later starts"
        return f"{flag_of(name)[2:]} is {value} now ({later})"

    def listed(self) -> list[LimitRow]:
        """List all limits."""
        return [
            LimitRow(flag_of(name)[2:], value_text(getattr(self.limits, name)), self._sources[name])
            for name in FIELDS
        ]

    # --- what follows --------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Leave so many bytes of the budget for handing over."""
        self._reserve_bytes = nbytes

    def look(self, now: float, wall: float) -> PauseRow | None:
        """Decide whether the learner rests. `now`: a clock that is never set."""
        return self._governor.look(now, wall, self._words(wall))

    def _words(self, wall: float) -> list[Finding]:
        found = []
        if since := self.finishing_since:
            found.append(Finding(PauseReason.FINISHING, "finishing", "the node has left", since))
        if since := self.paused_since:
            found.append(Finding(PauseReason.PAUSED, "paused by its owner", "`p2pdiloco resume`", since))
        if self.is_used_up(wall):
            words = f"this month's {size(self.bounds.transfer_bytes)} of transfer are used up"
            ends = f"{month_ends(wall)}, or --max-transfer is raised"
            found.append(Finding(PauseReason.TRANSFER, words, ends))
        return found

    def is_used_up(self, wall: float) -> bool:
        """Tell whether the month's transfer is used up, but for what handing over takes."""
        budget = self.bounds.transfer_bytes
        if not budget:
            return False
        used = self.book.month(wall).total
        self._warn(used, budget, wall)
        return used >= budget - min(self._reserve_bytes, RESERVE_SHARE * budget)

    def _warn(self, used: int, budget: int, wall: float) -> None:
        about = f"{month_of(wall)} {budget}"
        if used >= WARN_SHARE * budget and self._warned != about:
            self._warned = about
            what = {"used": size(used), "budget": size(budget), "month": month_of(wall)}
            logger.warning("%(used)s of the %(budget)s of transfer for %(month)s are used", what)

    def transfer_row(self) -> TransferRow:
        """Make the row of this month's bytes."""
        wall = self._wall()
        counts = self.book.month(wall)
        return TransferRow(
            month=month_of(wall),
            sent_bytes=counts.sent,
            received_bytes=counts.received,
            budget_bytes=self.bounds.transfer_bytes,
        )


FILE = "owner.json"


_decoder = msgspec.json.Decoder(KeptWishes)


def load_wishes(data_dir: Path) -> KeptWishes:
    """Load them; none if there are none."""
    known = read_note(data_dir / FILE, _decoder.decode, logger.warning)
    if known is None:
        return KeptWishes()
    return msgspec.structs.replace(known, changed=tuple(name for name in known.changed if name in FIELDS))


def save_wishes(data_dir: Path, wishes: KeptWishes) -> None:
    """Keep them. Raises: StorageError."""
    Files().save(data_dir / FILE, [msgspec.json.encode(wishes)], durable=True, private=True)


def combined(given: OwnLimits, kept: KeptWishes) -> tuple[OwnLimits, dict[str, str], list[str]]:
    """Combine what a start is given with what is kept.

    Returns the limits that hold, where each is from ("default", "start", "limits"), and sentences on kept
    ones that a given one takes the place of.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    words = []
    for name in FIELDS:
        asked, known = getattr(given, name), getattr(kept.limits, name)
        is_given = asked != DEFAULTS[name]
        values[name], sources[name] = asked, "start" if is_given else "default"
        if name not in kept.changed:
            continue
        if not is_given:
            values[name], sources[name] = known, "limits"
        elif known != asked:
            here, there = value_text(asked) or "none", value_text(known) or "none"
            words.append(
                f"{flag_of(name)} {here}, given at this start, wins over {there} of `p2pdiloco limits`"
            )
    return OwnLimits(**values), sources, words


def change_kept(data_dir: Path, changes: dict[str, str]) -> None:
    """Change what is kept, where no node runs. Raises: ConfigError, StorageError."""
    wishes = load_wishes(data_dir)
    save_wishes(data_dir, with_changes(wishes, changed(wishes.limits, changes), changes))


def with_changes(wishes: KeptWishes, limits: OwnLimits, changes: dict[str, str]) -> KeptWishes:
    """Keep these values of the limits that changes name."""
    names = changed_names(changes)
    return msgspec.structs.replace(
        wishes,
        limits=msgspec.structs.replace(wishes.limits, **{name: getattr(limits, name) for name in names}),
        changed=tuple(sorted({*wishes.changed, *names})),
    )


BOOK_FILE = "transfer.json"
AHEAD_BYTES = 16 << 20
AHEAD_LOOKS = 5
"""Looks at the rate of the last one that the disk is ahead."""
WRITE_LOOKS = 2
"""Looks at that rate for which the disk must still be ahead: the next write begins so long before."""
MONTHS = 36
Amount = Annotated[int, Meta(ge=0, le=1 << 62)]
JUMP_S = 3600.0
"""Difference between the clock of the day and the one that is never set, above which the former was set."""


class Counts(Frozen):
    """Bytes of one month."""

    sent: Amount = 0
    received: Amount = 0

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.sent + self.received

    def plus(self, sent: int, received: int) -> Counts:
        """Add bytes."""
        return Counts(self.sent + max(0, sent), self.received + max(0, received))


Kept = dict[str, Counts] | None
"""Content of the file; None: it could not be written."""
Write = Callable[[], Kept]


class BookFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    months: dict[str, Counts] = {}
    """Counts by month, "2026-11"."""


_book_decoder = msgspec.json.Decoder(BookFile)


def month_of(wall: float) -> str:
    """Name the month of a time, by this machine's clock."""
    return datetime.datetime.fromtimestamp(wall).strftime("%Y-%m")


def month_ends(wall: float) -> str:
    """Word when the next month begins: "2026-12-01 00:00"."""
    day = datetime.datetime.fromtimestamp(wall).replace(day=1) + datetime.timedelta(days=32)
    return day.strftime("%Y-%m-01 00:00")


class TransferBook:
    """Book of the bytes that this node moved, by calendar month, over all its lives:
    `<data_dir>/transfer.json`.

    What stands on the disk is ahead of what was counted: a life that ends without a word (SIGKILL, a power
    cut) is charged up to `AHEAD_BYTES`, or what moves in five seconds if that is more, too much. It is
    charged too little only if what moves while a write takes place is more than what it was ahead by. An
    orderly end writes what was counted. Writes take place beside the event loop, one at a time.

    A machine whose clock is set back, or was ahead in an earlier life, gets no second budget: what stands
    under later months counts for the present one, too.
    """

    def __init__(self, data_dir: Path, begin: Callable[[Write], Future[Kept]] = begun) -> None:
        """`begin`: begins a write; of the event loop's thread nobody can wait for a disk."""
        self._begin = begin
        self._writing: Future[Kept] | None = None
        self._path = data_dir / BOOK_FILE
        known = read_note(self._path, _book_decoder.decode, logger.warning)
        self._months = dict(known.months) if known is not None else {}
        self._written = self._months.copy()
        self._seen = (0, 0)
        self._month = ""
        self._this_life = Counts()
        self._clocks: tuple[float, float] | None = None
        self._complained = False

    def month(self, wall: float) -> Counts:
        """Count this month's bytes, with those of months that are still to come by this clock."""
        present = month_of(wall)
        found = [counts for month, counts in self._months.items() if month >= present]
        return Counts(sum(c.sent for c in found), sum(c.received for c in found))

    def begin(self) -> None:
        """Count from nothing: a transport began."""
        self._seen = (0, 0)

    def look(self, carried: tuple[int, int], now: float, wall: float) -> None:
        """Take in how many bytes the transport has moved, (out, in); write when the disk is not ahead."""
        before, self._seen = self._seen, carried
        sent, received = (max(0, new - old) for new, old in zip(carried, before, strict=True))
        month = month_of(wall)
        if self._was_set(now, wall) and month != self._month:
            # What this life moved in a month that never was counts for the one that it is.
            sent, received = sent + self._this_life.sent, received + self._this_life.received
            self._this_life = Counts()
        self._month = month
        self._this_life = self._this_life.plus(sent, received)
        self._months[month] = counts = self._months.get(month, Counts()).plus(sent, received)
        self._take_up()
        if self._writing is not None:
            return
        written = self._written.get(month, Counts())
        soon = counts.plus(WRITE_LOOKS * sent, WRITE_LOOKS * received)
        if soon.sent > written.sent or soon.received > written.received:
            ahead = max(AHEAD_BYTES, AHEAD_LOOKS * (sent + received))
            self._writing = self._begin(partial(self._write, {**self._months, month: _ahead(counts, ahead)}))
            self._take_up()

    def close(self) -> None:
        """Write what was counted: an orderly end. It waits for the disk."""
        if self._writing is not None:
            self._writing.result()
            self._take_up()
        if self._months != self._written:
            self._note(self._write(self._months))

    def _was_set(self, now: float, wall: float) -> bool:
        """Tell whether the clock of the day was set since the last look."""
        before, self._clocks = self._clocks, (now, wall)
        return before is not None and abs((wall - before[1]) - (now - before[0])) > JUMP_S

    def _take_up(self) -> None:
        if self._writing is not None and self._writing.done():
            self._note(self._writing.result())
            self._writing = None

    def _note(self, kept: Kept) -> None:
        if kept is not None:
            self._written = kept
        self._complained = kept is None

    def _write(self, months: dict[str, Counts]) -> Kept:
        kept = dict(sorted(months.items())[-MONTHS:])
        try:
            Files().save(self._path, [msgspec.json.encode(BookFile(kept))], durable=True)
        except StorageError as error:
            if not self._complained:
                logger.warning("the bytes of this month are not kept over a restart: %s", error)
            return None
        return kept


def _ahead(counts: Counts, by: int) -> Counts:
    """Charge so much ahead, about in the proportion of both ways."""
    share = counts.sent / counts.total if counts.total else 0.5
    sent = round(by * min(0.875, max(0.125, share)))
    return counts.plus(sent, by - sent)
