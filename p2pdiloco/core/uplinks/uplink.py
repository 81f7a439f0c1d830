"""Judgement whether our uplink is *thin*: carries less than what an office asks.

What is asked follows from the manifest and the pace of all learners, so everybody judges by one measure
(docs/protocol/links.md, section 3). An uplink that carries it counts like any other, however fast: offices
spread, and nothing is won by bragging.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pdiloco.core.api.config import CoreConfig

UPDATE_COPIES = 2
"""Copies of each update that a syncer sends in the time of H inner steps, beside its own contributions."""
MARGIN = 1.4
"""Factor by which a rate must lie beyond what is asked to change what was said."""
KEEP_S = 20.0
"""Time for which what was said stays: a change moves offices."""


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
        self._changed_s = -math.inf

    def measured(self, bits_per_s: float) -> None:
        """Take in what it carries."""
        self.bits_per_s = bits_per_s

    def look(self, asked: float, now: float) -> bool:
        """Judge anew. Tell whether what we say of ourselves changes."""
        thin = self.bits_per_s < (asked * MARGIN if self.thin else asked / MARGIN)
        if thin == self.thin or now - self._changed_s < KEEP_S:
            return False
        self.thin, self._changed_s = thin, now
        return True
