"""Table of the attacks: one class each."""

from __future__ import annotations

from typing import Protocol

from attacks.heads import EndOfCounts, ForgedHead, HugeValues, NeverDelivered
from attacks.records import Ghosts, OtherRuns
from attacks.stranger import Attack, Work
from attacks.streams import BulkPulls, SlowStreams
from attacks.votes import AllOffices, SilentVoters


class Makes(Protocol):
    """Maker of an attack."""

    def __call__(self, work: Work) -> Attack:
        """Make it."""


BY_STRANGERS: dict[str, Makes] = {
    "forged-head": ForgedHead,
    "huge-values": HugeValues,
    "all-offices": AllOffices,
    "end-of-counts": EndOfCounts,
    "ghosts": Ghosts,
    "silent-voters": SilentVoters,
    "slow-streams": SlowStreams,
    "other-runs": OtherRuns,
    "never-delivered": NeverDelivered,
    "bulk-pulls": BulkPulls,
}
WITH_A_NEWCOMER = {"other-runs"}
"""Attacks during which a node joins, which is what they are to prevent."""
