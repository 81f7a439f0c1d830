"""Parts of a merge in the making, and what its syncer states of each.

Rules: docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from p2pdiloco.core.api.effects import MergeInput, PartialInput
from p2pdiloco.core.api.events import Measured
from p2pdiloco.core.api.partials import MergedPartial
from p2pdiloco.core.api.trust_weight import sample_seed
from p2pdiloco.core.api.types import ContributionHeader, Contributor
from p2pdiloco.core.chain.watermarks import Marks
from p2pdiloco.core.rounds.handover import Job

NOTHING_FOUND = Measured(0.0)


class MergedParts:
    """Contributions and partial merges of a closed round, in the order in which they are merged."""

    def __init__(self, job: Job, marks: Marks) -> None:
        inputs, partials = [], []
        self._inner: list[Contributor] = []
        self.merged: tuple[MergedPartial, ...] = ()
        """Partial merges in it, with their limits: those of the groups below, and those of which they were
        made."""
        for held in job.held:
            if held.ticket is None:
                continue
            if isinstance(held.header, ContributionHeader):
                part = replace(held.parts[0], votes=held.parts[0].learner in marks.voters)
                inputs.append(MergeInput(part, held.ticket, marks.mean(part.learner)))
            else:
                partials.append(PartialInput(held.ticket, held.header.payload_digest))
                self._inner += held.parts
                self.merged += held.partials
        self.inputs: tuple[MergeInput, ...] = tuple(inputs)
        self.partials: tuple[PartialInput, ...] = tuple(partials)

    def listed(self, measured: Sequence[Measured] = ()) -> tuple[Contributor, ...]:
        """List all contributions by learner, with what was measured of the inputs; empty: nothing was."""
        found = measured or [NOTHING_FOUND] * len(self.inputs)
        parts = [_stated(given, each) for given, each in zip(self.inputs, found, strict=True)]
        return tuple(sorted([*parts, *self._inner], key=lambda part: part.learner))

    def seed(self) -> bytes:
        """Compute what nobody knows before all of it is here: it draws the sample on which contributions are
        compared."""
        return sample_seed(given.contributor for given in self.inputs)


def _stated(given: MergeInput, found: Measured) -> Contributor:
    trust = given.mean.trust(found.score)
    return replace(given.contributor, trust=trust, length=found.length, score=found.score)
