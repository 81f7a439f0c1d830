"""How far a member's uplink falls short of what offices ask: its *strain*, as heartbeats say (design 5.3).

Strain 0: the uplink carries an office with ease, or nothing is known of it. k > 0: 2^k times as much is asked
as it carries, more than 2^(k-1) times. What is asked follows from the manifest and the pace of all learners,
so that everybody's number is worked out once, by itself, and all rank alike. Whoever carries what is asked
counts like anybody else, however fast: offices spread, and nothing is won by bragging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from p2pdiloco.core.api.types import MAX_STRAIN

if TYPE_CHECKING:
    from p2pdiloco.core.api.config import CoreConfig

UPDATE_COPIES = 2
"""In the time of H inner steps a member sends its contributions once, and as a syncer each update to two."""
EASE = 4.0
"""An office is carried with ease where that takes a quarter of the time."""
MUCH = 3
"""Who is strained by so many classes more than another, an eighth of its rate, leaves offices to that one."""
MARGIN = 0.5
"""Of a class. What was measured must lie so far outside the class that was said to change it."""
KEEP_S = 20.0
"""A class that was said stays so long: a change moves offices."""


def asked_bits_per_s(config: CoreConfig, step_s: float) -> float:
    """Which uplink carries offices with ease where learners' inner steps take `step_s`; 0: not known."""
    cycle_s = config.inner_steps * step_s
    contributions = sum(config.max_payload_bytes)
    sent_bytes = contributions + UPDATE_COPIES * (config.update_bytes or contributions)
    return 8 * EASE * sent_bytes / cycle_s if cycle_s > 0 else 0.0


def shortfall(asked: float, bits_per_s: float) -> float:
    """log2 of how many times more is asked than is there; minus infinity where either is not known."""
    known = asked > 0 and 0 < bits_per_s < math.inf
    return math.log2(asked / bits_per_s) if known else -math.inf


def strain_at(short: float) -> int:
    """The class of a shortfall."""
    return min(MAX_STRAIN, max(0, math.ceil(max(short, 0.0))))


def weights(strains: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Of candidates, for `ranking`. A quarter for every class: a term is so many versions, which take twice
    as long on half an uplink, so half of the terms would be as much time in office."""
    return {peer: 0.25**strain for peer, strain in strains}


class Strain:
    """What we say of our own uplink: changed rarely."""

    def __init__(self) -> None:
        self.value = 0
        self.bits_per_s = math.inf
        """As measured; infinite while nothing is known."""
        self._changed_s = -math.inf

    def look(self, asked: float, now: float) -> bool:
        """Whether what we say of ourselves changes."""
        short = shortfall(asked, self.bits_per_s)
        out = short > self.value + MARGIN or short < self.value - 1 - MARGIN
        found = strain_at(short)
        if not out or found == self.value or now - self._changed_s < KEEP_S:
            return False
        self.value, self._changed_s = found, now
        return True
