"""Merged contributions of ours, kept until the versions that have them are beyond doubt.

A heavier chain may replace the one that has them (docs/protocol/forks.md, section 3). Then those that it
lacks are sent once more, as one: displacements are additive. Payloads beyond the newest few wait on the disk.
There is a bound, above which the middle is combined into one already, since a chain that branched off there
is the least likely.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.core.api.effects import Combine, DiscardContribution, Spill
from p2pdiloco.core.api.events import Combined, ContributionReady
from p2pdiloco.core.api.types import Stamp, Ticket
from p2pdiloco.core.shared import Shared

IN_MEMORY = 2
"""Payloads that stay in memory: enough for a fork of one version, the usual one."""
KEPT_MAX = 256
UNTOUCHED = 8
"""Number of oldest contributions that are not combined: most chains that come back branched off among
them."""
UNMERGED = 1 << 62
"""Mark in place of the version number of what our chain lacks."""


class KeptPart:
    """Merged contribution, or several combined."""

    __slots__ = ("first", "number", "ready", "spilled", "stamp")

    def __init__(self, first: Stamp, stamp: Stamp, ready: ContributionReady, number: int) -> None:
        self.first, self.stamp, self.ready, self.number = first, stamp, ready, number
        self.spilled = False


class KeptContributions:
    """Merged contributions of one fragment, oldest first."""

    def __init__(self, shared: Shared, fragment: int) -> None:
        self._shared = shared
        self._fragment = fragment
        self._parts: list[KeptPart] = []
        self._attempts = 0
        self._combining: tuple[KeptPart, ...] = ()
        self._combining_attempt = 0

    def __len__(self) -> int:
        return len(self._parts)

    def find(self, digest: bytes) -> Ticket | None:
        """Find a contribution by the digest of its payload."""
        return next((p.ready.ticket for p in self._parts if p.ready.payload_digest == digest), None)

    def add(self, first: Stamp, stamp: Stamp, ready: ContributionReady, number: int) -> None:
        """Keep a contribution that was merged into our chain's version `number`, or a later one. `first`: the
        oldest that it contains."""
        self._parts.append(KeptPart(first, stamp, ready, number))
        for part in self._parts[:-IN_MEMORY]:
            if not part.spilled:
                part.spilled = True
                self._shared.out.put(Spill(self._fragment, part.ready.ticket))
        self._bound()

    def _bound(self) -> None:
        if len(self._parts) >= 2 * KEPT_MAX:
            self.drop(self._parts[:1], "too many merged contributions are in doubt")
        if len(self._parts) > KEPT_MAX and not self._combining:
            middle = tuple(p for p in self._parts[UNTOUCHED : KEPT_MAX // 2] if p.number != UNMERGED)
            if len(middle) > 1:
                self._combining, self._combining_attempt = middle, self.combine(middle)

    def moved(self, watermark: Stamp, number: int, replaced: bool) -> tuple[KeptPart, ...]:
        """Look at our chain's new head, with this watermark of ours from version `number`. List what it
        lacks."""
        straddling = [part for part in self._parts if part.first <= watermark < part.stamp]
        if straddling:
            self.drop(straddling, "the heavier chain has a part of what was combined")
        for part in self._parts:
            if part.stamp > watermark:
                part.number = UNMERGED
            elif replaced or part.number == UNMERGED:
                part.number = number
        return tuple(part for part in self._parts if part.number == UNMERGED)

    def review(self, witnessed: int) -> None:
        """Let go of what is merged in version `witnessed` or before: all others have that."""
        if self._combining:
            return  # it is being read from the disk: without a part of it, all the rest would be given up
        while self._parts and self._parts[0].number <= witnessed:
            self._discard(self._parts.pop(0))

    def drop(self, parts: Sequence[KeptPart], reason: str) -> None:
        """Give these up: they can never be sent again."""
        self._shared.out.record(
            "fork",
            self._fragment,
            f"given up: {reason}",
            stamp=parts[-1].stamp.sequence,
            tokens=sum(part.ready.tokens for part in parts),
        )
        for part in parts:
            self._parts.remove(part)
            self._discard(part)

    def _discard(self, part: KeptPart) -> None:
        self._shared.out.put(DiscardContribution(self._fragment, part.ready.ticket))

    # --- combining -----------------------------------------------------------------------------------

    def combine(self, parts: Sequence[KeptPart]) -> int:
        """Ask for the sum of these. Returns the number that its answer will bear."""
        self._attempts += 1
        tickets = tuple(part.ready.ticket for part in parts)
        self._shared.out.put(Combine(self._fragment, self._attempts, tickets))
        return self._attempts

    def together(self, parts: Sequence[KeptPart], event: Combined) -> ContributionReady:
        """Describe the sum of these as one contribution."""
        return ContributionReady(
            self._fragment,
            event.ticket,
            sum(part.ready.tokens for part in parts),
            sum(part.ready.inner_steps for part in parts),
            event.payload_digest,
            event.payload_bytes,
            True,
        )

    def combined(self, event: Combined) -> bool:
        """Put the sum in place of the middle. False: it is not wanted any more."""
        middle, self._combining = self._take(event.attempt)
        if not middle or any(p not in self._parts or p.number == UNMERGED for p in middle):
            return False
        at = self._parts.index(middle[0])
        ready = self.together(middle, event)
        whole = KeptPart(middle[0].first, middle[-1].stamp, ready, middle[-1].number)
        whole.spilled = True
        self._shared.out.put(Spill(self._fragment, event.ticket))
        self._parts[at : at + len(middle)] = [whole]
        for part in middle:
            self._discard(part)
        return True

    def combine_failed(self, attempt: int, reason: str) -> None:
        """Drop the middle, which cannot be read: there must be a bound."""
        middle, self._combining = self._take(attempt)
        alive = [part for part in middle if part in self._parts]
        if alive:
            self.drop(alive, reason)

    def _take(self, attempt: int) -> tuple[tuple[KeptPart, ...], tuple[KeptPart, ...]]:
        """Return (what was being combined in this attempt, what still is)."""
        if self._combining and attempt == self._combining_attempt:
            return self._combining, ()
        return (), self._combining
