"""WishKeeper of what this machine's owner wants: a pause, limits, the month's transfer, and what follows.

It knows no member: `daemon.control.owner` carries out what it finds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

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
from p2pdiloco.daemon.apart import apart
from p2pdiloco.daemon.display.own_rows import TransferRow
from p2pdiloco.daemon.display.wording import size
from p2pdiloco.daemon.rest.governor import Governor
from p2pdiloco.daemon.rest.kept_wishes import LimitRow, combined, load_wishes, save_wishes, with_changes
from p2pdiloco.daemon.rest.reasons import Finding, Rest, RestReason
from p2pdiloco.daemon.rest.sources import OwnersMachine
from p2pdiloco.daemon.rest.transfer_book import TransferBook, month_ends, month_of

logger = logging.getLogger(__name__)
WARN_SHARE = 0.8
RESERVE_SHARE = 0.1
"""Largest share of the budget that is left for handing over."""


class WishKeeper:
    """WishKeeper of one data folder's wishes."""

    def __init__(
        self, data_dir: Path, given: OwnLimits, machine: OwnersMachine, wall: Callable[[], float]
    ) -> None:
        """`given`: the limits of this start.

        Raises:
            ConfigError: a limit cannot be, or this machine does not tell what it is about.
        """
        self._data_dir, self._given, self._machine, self._wall = data_dir, given, machine, wall
        self._wishes = load_wishes(data_dir)
        self.limits, self._sources, words = combined(given, self._wishes)
        for sentence in words:
            logger.info("%s", sentence)
        if kept := [flag_of(name) for name, source in self._sources.items() if source == "limits"]:
            logger.info("limits kept from before hold: %s (p2pdiloco limits shows them)", ", ".join(kept))
        self.bounds: Bounds = bounds_of(self.limits)
        self._governor = Governor(machine.sources(self.bounds))
        self.book = TransferBook(data_dir)
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
            later = f"a start with {flag_of(name)} {value_text(given)}, as this one, wins over it"
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

    def look(self, now: float, wall: float) -> Rest | None:
        """Decide whether the learner rests. `now`: a clock that is never set."""
        return self._governor.look(now, wall, self._words(wall))

    def _words(self, wall: float) -> list[Finding]:
        found = []
        if since := self.finishing_since:
            found.append(Finding(RestReason.FINISHING, "finishing", "the node has left", since))
        if since := self.paused_since:
            found.append(Finding(RestReason.PAUSED, "paused by its owner", "`p2pdiloco resume`", since))
        if self.is_used_up(wall):
            words = f"this month's {size(self.bounds.transfer_bytes)} of transfer are used up"
            ends = f"{month_ends(wall)}, or --max-transfer is raised"
            found.append(Finding(RestReason.TRANSFER, words, ends))
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
