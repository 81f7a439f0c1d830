"""A member that lies with numbers: its work is honest, its labels are at the ends of what can be said."""

from __future__ import annotations

import random

from msgspec.structs import replace

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.types import (
    MAX_INNER_STEPS,
    MOST_PERIODS,
    ContributionHeader,
    SignedContribution,
    Stamp,
    signed_bytes,
)
from p2pdiloco.core.api.versions import SignedOffer
from p2pdiloco_lab.simulation.world.crypto import HashCrypto

LIES = 0.6
"""Share of labels that lie."""


class Liar:
    """Author of false labels, each rightly signed."""

    def __init__(self, config: CoreConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def tell(self, signed: SignedOffer) -> SignedOffer:
        """Put another label on a contribution, or leave it."""
        if not isinstance(signed, SignedContribution) or self._rng.random() > LIES:
            return signed
        lie = SignedContribution(self._lie(signed.header), b"")
        work = lie.contributor().work(lie.header.run, lie.header.fragment)
        return replace(lie, signature=HashCrypto(work.learner).sign(signed_bytes("work", work)))

    def _lie(self, header: ContributionHeader) -> ContributionHeader:
        per_step = self._config.tokens_per_step
        most = min(MOST_PERIODS * self._config.inner_steps, MAX_INNER_STEPS)
        return self._rng.choice(
            [
                replace(header, inner_steps=most, tokens=most * per_step),
                replace(header, inner_steps=most + 1, tokens=1),
                replace(header, tokens=1 << 62),
                replace(header, stamp=Stamp(header.stamp.incarnation, 1 << 62)),
                replace(header, stamp=Stamp(1 << 62, 1)),
            ]
        )
