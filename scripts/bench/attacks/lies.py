"""Lies of an admitted member: what a node of its own making does to its contributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from msgspec import Struct, structs
from torch import Tensor

from p2pdiloco.core.api.types import LEAST_SCORE, MOST_PERIODS, ContributionHeader


class Lie(Struct, frozen=True):
    """Rule of what becomes of a contribution, of its label, and of what this node merges as syncer."""

    delta: Callable[[Tensor], Tensor] = lambda delta: delta
    label: Callable[[ContributionHeader], ContributionHeader] = lambda header: header
    merged: Callable[[Tensor], Tensor] = lambda delta: delta
    scores: Callable[[list[int]], list[int]] = lambda found: found
    """Rule of what it says, as syncer, of the agreement of contributions."""
    usurps: bool = False
    """True: it wants all offices, and makes no version (`attacks.usurper`)."""
    boasts: bool = False
    """True: also those that are held."""
    withholds: bool = False
    """True: it gives no updates and no states (`attacks.withholding`)."""
    omits: bool = False
    """True: it leaves one learner's work out of what it merges."""


def most_steps(header: ContributionHeader) -> ContributionHeader:
    """Claim about as much work as a label can, with as many tokens a step as were trained."""
    factor = MOST_PERIODS // 2
    return structs.replace(header, tokens=factor * header.tokens, inner_steps=factor * header.inner_steps)


def noise(times: float) -> Callable[[Tensor], Tensor]:
    """Make noise of so many times the length, whatever was merged."""

    def of_its_length(delta: Tensor) -> Tensor:
        made = torch.randn_like(delta)
        instead: Tensor = made * (times * delta.norm() / made.norm())
        return instead

    return of_its_length


BY_A_MEMBER: Mapping[str, Lie] = {
    "member-huge-values": Lie(delta=lambda delta: (delta.sign() + (delta == 0)) * 2.0**39),
    "member-claims": Lie(label=most_steps),
    "member-claims-flipped": Lie(delta=lambda delta: -delta, label=most_steps),
    "member-x100": Lie(delta=lambda delta: delta * 100),
    "member-false-update": Lie(merged=noise(20.0)),
    "member-quiet-false-update": Lie(merged=noise(1.0)),
    "member-false-scores": Lie(scores=lambda found: [LEAST_SCORE] * len(found)),
    "member-flipped-x10": Lie(delta=lambda delta: delta * -10),
    "member-offices": Lie(usurps=True, boasts=True),
    "member-idle": Lie(usurps=True),
    "member-withholds": Lie(withholds=True),
    "member-omits": Lie(omits=True),
}
