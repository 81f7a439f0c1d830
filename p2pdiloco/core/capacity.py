"""Capacity of one node: what its uplink carries, and whether its disk takes votes.

An uplink is *thin* if it carries less than an office asks. What is asked follows from the manifest and the
pace of all learners, so everybody judges by one measure (docs/protocol/links.md, section 3). An uplink that
carries it counts like any other, however fast: offices spread, and nothing is won by bragging.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pdiloco.core.api.config import CoreConfig

UPDATE_COPIES = 2
"""Copies of each update that a syncer sends in the time of H inner steps, beside its own contributions."""
MARGIN = 1.4
"""Factor by which a rate must lie beyond what is asked to change what was said."""


def asked_bits_per_s(config: CoreConfig, step_s: float) -> float:
    """Compute the uplink that offices ask for where learners' inner steps take `step_s`; 0: not known."""
    cycle_s = config.inner_steps * step_s
    contributions = sum(config.max_payload_bytes)
    sent_bytes = contributions + UPDATE_COPIES * (config.update_bytes or contributions)
    return 8 * sent_bytes / cycle_s if cycle_s > 0 else 0.0


class OwnUplink:
    """Knowledge of our own uplink, and what we say of it: changed rarely."""

    def __init__(self) -> None:
        self.thin = False
        self.bits_per_s = math.inf
        """Rate as measured; infinite while nothing is known."""

    def measured(self, bits_per_s: float) -> None:
        """Take in what it carries."""
        self.bits_per_s = bits_per_s

    def look(self, asked: float) -> bool:
        """Judge anew. Tell whether what we say of ourselves changes."""
        before, self.thin = self.thin, self.bits_per_s < (asked * MARGIN if self.thin else asked / MARGIN)
        return self.thin is not before


LEAST_BYTES = 256 * 1024
"""Smallest transfer that counts: shorter ones say more about round trips than about the link."""
LONG_S = 10.0
"""Longest stretch that is one sample: on a busy link transfers overlap for ever."""
SAMPLES = 32
LEAST_SAMPLES = 6
"""Samples below which nothing is known: each may have waited for its sender or our own tensors, or shared a
peer's link."""
LEAST_S = 5.0
"""Time of all samples together that says something already, where a mistake is soon mended."""
TELL_EVERY_S = 5.0
"""Interval at which the core is told what is new."""


class Meter:
    """Rate of transfers one way, while any of ours is under way: the best of the latest, once there were a
    few.

    Rules: docs/protocol/links.md, section 3.
    """

    def __init__(
        self,
        total_bytes: Callable[[], float],
        now: Callable[[], float],
        overhead: float = 1.0,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """Begin without samples. `total_bytes` counts everything that went this way; `overhead`: bytes on the
        link for each."""
        self._total_bytes = total_bytes
        self._now = now
        self._overhead = overhead
        self._least_bytes = least_bytes
        self._active = 0
        self._since_s = 0.0
        self._from_bytes = 0.0
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._measured_s = 0.0
        """Time that all samples took."""

    @property
    def bits_per_s(self) -> float:
        """Best of the latest rates, on the link; infinite while unknown."""
        return max(self._rates) if len(self._rates) >= LEAST_SAMPLES else math.inf

    @property
    def early_bits_per_s(self) -> float:
        """Best of the latest rates, known sooner on a slow link: from fewer, longer transfers."""
        return max(self._rates) if self._rates and self._measured_s >= LEAST_S else self.bits_per_s

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Count something as under way inside the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count something as under way from now on."""
        if not self._active:
            self._since_s, self._from_bytes = self._now(), self._total_bytes()
        self._active += 1

    def end(self) -> None:
        """Count it no more, and take a sample if one is complete."""
        self._active -= 1
        now, total = self._now(), self._total_bytes()
        took_s, moved = now - self._since_s, total - self._from_bytes
        if self._active and took_s < LONG_S:
            return
        if moved >= self._least_bytes and took_s > 0:
            self._rates.append(8 * self._overhead * moved / took_s)
            self._measured_s += took_s
        self._since_s, self._from_bytes = now, total


class UplinkMeter:
    """Meter of our uplink, and what an earlier life knew. A node that holds all offices contributes to itself
    only, and one that has just started has sent nothing."""

    def __init__(self, meter: Callable[[], Meter], remembered_bits_per_s: float = math.inf) -> None:
        """Make the meters. `meter` makes one of all that goes out; `remembered_bits_per_s` is of an earlier
        life, infinite if there is none."""
        self.own = meter()
        """Meter while contributions or partial merges of ours are under way."""
        self.given = meter()
        """Meter while updates are under way to those who asked for them."""
        self._remembered = remembered_bits_per_s

    @property
    def measured_bits_per_s(self) -> float:
        """Rate of this life; infinite while unknown. The better of both: each may have been held up
        elsewhere."""
        known = [rate for m in (self.own, self.given) if (rate := m.early_bits_per_s) < math.inf]
        return max(known, default=math.inf)

    @property
    def sure_bits_per_s(self) -> float:
        """Rate of this life once contributions have shown it; else infinite."""
        return self.measured_bits_per_s if self.own.bits_per_s < math.inf else math.inf

    @property
    def bits_per_s(self) -> float:
        """Rate that was measured, else remembered; infinite while unknown."""
        measured = self.measured_bits_per_s
        return measured if measured < math.inf else self._remembered


class VoteDisk:
    """State of the disk for votes. It tries by itself whether there is room again.

    A vote that is not durable is not given. A member whose disk is full would so stand in the way of every
    majority that needs it, two members' always. So it says that it has no vote until its disk takes one, and
    counts in no majority meanwhile, its own view's included (docs/protocol/election.md, section 4). It
    trains, contributes and follows as before.

    Args:
        on_change: called with the reason once votes can be saved no more, or again.
        every_s: interval at which a disk that refused a vote is tried with it again.
    """

    def __init__(self, on_change: Callable[[str, float], None], every_s: float) -> None:
        self._every_s = every_s
        self.works = True
        """True: votes can be saved, for all that is known."""
        self._on_change = on_change
        self._again: Callable[[], None] = lambda: None
        self._try_s = 0.0

    def saved(self, now: float) -> None:
        """Take in that the disk took a vote."""
        if not self.works:
            self.works = True
            self._on_change("votes can be saved again", now)

    def failed(self, again: Callable[[], None], why: str, now: float) -> None:
        """Take in that the disk did not. `again` saves that vote once more: it binds us, whoever heard of
        it."""
        self._again, self._try_s = again, now + self._every_s
        if self.works:
            self.works = False
            self._on_change(f"no vote until one can be saved: {why}", now)

    def poll(self, now: float) -> None:
        """Try again, if it is time."""
        if not self.works and now >= self._try_s:
            self._try_s = now + self._every_s
            self._again()
