"""Budget of memory for payloads (--max-memory): whoever asks for more is put off, and counted.

Counted are payloads behind tickets (contributions, updates, partial merges), the newest outer updates, and
whatever is arriving or kept of cut streams. Not counted is the model itself (the vault and what daemon and
learner share), which no node can do without.

Listed in docs/reference/bounds.md, section 5.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.errors import RemoteError, UserError
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import FragmentLayout

OUT_OF_BUDGET = Verdict.NO_MEMORY.value


class OutOfBudget(RemoteError):
    """Error: there is no room for what a peer would give us."""


class Holder(Protocol):
    """Holder of payloads."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds at this moment."""


class GivesWay(Holder, Protocol):
    """Holder of payloads that are kept only while nothing else wants the memory."""

    def give_up(self) -> None:
        """Let go of them."""


class Memory:
    """Budget of payloads: how much of it is used, and how often it did not suffice."""

    def __init__(self, most_bytes: float = 0.0, fetch_bytes: int = 0) -> None:
        """`most_bytes`: size of the budget; 0: no bound."""
        self.most_bytes = most_bytes or math.inf
        self._holders: list[Holder] = []
        self._give_way: list[GivesWay] = []
        self._reserved_bytes = 0
        self.fetch_bytes = fetch_bytes
        """Bytes that are kept free of what peers push, so that a node whose inbox is full can follow
        nevertheless."""
        self.refused = 0

    @classmethod
    def of_run(
        cls,
        most_bytes: float,
        layouts: Sequence[FragmentLayout],
        contribution: str,
        update: str,
        updates_kept: int,
    ) -> Memory:
        """Make the budget for a run with these codecs.

        Raises:
            UserError: no node of this run could live within the budget.
        """
        check_budget(most_bytes, least_bytes(layouts, contribution, update, updates_kept))
        return cls(most_bytes, fetched_bytes(layouts))

    def count(self, *holders: Holder) -> None:
        """Count payloads of these holders in the budget from now on."""
        self._holders += holders

    @property
    def claimed_bytes(self) -> int:
        """Bytes that are held now, or promised to what is under way."""
        return self._reserved_bytes + sum(holder.held_bytes for holder in self._holders)

    def give_way_by(self, holder: GivesWay) -> None:
        """Let this holder, which is counted, make room when nothing else can."""
        self._give_way.append(holder)

    def refuse(self) -> None:
        """Count what did not fit."""
        self.refused += 1

    def fits_push(self, size_bytes: int) -> bool:
        """Tell whether a pushed payload of this size may come. What gives way has done so then."""
        return self.fits_fetch(size_bytes + max(0, self.fetch_bytes - self._reserved_bytes))

    def fits_fetch(self, size_bytes: int) -> bool:
        """Tell whether something of at most this size may be fetched now. What gives way has done so
        then."""
        over = self.claimed_bytes + size_bytes - self.most_bytes
        if 0 < over <= sum(holder.held_bytes for holder in self._give_way):
            for holder in self._give_way:
                holder.give_up()
            return self.claimed_bytes + size_bytes <= self.most_bytes
        return over <= 0

    @contextlib.contextmanager
    def fetching(self, size_bytes: int) -> Iterator[None]:
        """Context in which something of at most this size is fetched.

        Raises:
            OutOfBudget: there is no room just now. The peer is innocent.
        """
        if not self.fits_fetch(size_bytes):
            self.refuse()
            raise OutOfBudget("busy", OUT_OF_BUDGET)
        self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= size_bytes


def least_bytes(layouts: Sequence[FragmentLayout], contribution: str, update: str, updates_kept: int) -> int:
    """Work out what a node of a run cannot do without.

    It is its own contributions, the updates that it keeps for others, one update under way, and two
    contributions of others.
    """
    sent = [codec(contribution).encoded_bytes(layout.numel) for layout in layouts]
    kept = [codec(update).encoded_bytes(layout.numel) for layout in layouts]
    return sum(sent) + (updates_kept + 1) * sum(kept) + fetched_bytes(layouts) + 2 * max(sent)


def fetched_bytes(layouts: Sequence[FragmentLayout]) -> int:
    """Return a bound of the largest update; states are written straight into the vault."""
    return max(map(most_update_bytes, layouts))


def most_update_bytes(layout: FragmentLayout) -> int:
    """Return a bound of one fragment's update: no codec takes more than four bytes a parameter, and
    scales."""
    return 4 * layout.numel + 4096


def check_budget(most_bytes: float, least: int) -> None:
    """Check a budget. Raises: UserError (too little for this run)."""
    if most_bytes and most_bytes < least:
        raise UserError(
            f"--max-memory is too little for this run, which needs {math.ceil(least / 2**20)} MiB",
            "give more, or join a run of a smaller model",
        )
