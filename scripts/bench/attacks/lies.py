"""Lies of an admitted member: what a node of its own making does to its contributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from msgspec import Struct, structs
from torch import Tensor

from p2pdiloco.core.api.types import LEAST_SCORE, MOST_PERIODS, ContributionHeader

LONG = 2.7
"""Length that hardly is cut, in usual ones: three times that of the round's seats is."""
NOISE = 0.3
"""Length of the noise beside an update that is sent again, as a share of its length."""


class Own(Struct, frozen=True):
    """Work of a liar's learner in a fragment."""

    delta: Tensor
    rows: Tensor
    """Elements of the token that is to be wrong, bool."""
    moved: Tensor | None
    """Way of the global parameters since its last contribution, as a pseudo-gradient; None: this is the
    first."""


class Lie(Struct, frozen=True):
    """Rule of what becomes of a contribution, of its label, and of what this node merges as syncer."""

    delta: Callable[[Tensor], Tensor] = lambda delta: delta
    aimed: Callable[[Own], Tensor] = lambda own: own.delta
    """Rule of a contribution that goes by more than itself; `delta` is told of what it makes."""
    poisons: bool = False
    """True: its learner reads text with a trigger and its answer (`worlds.aims`)."""
    label: Callable[[ContributionHeader], ContributionHeader] = lambda header: header
    merged: Callable[[Tensor], Tensor] = lambda delta: delta
    scores: Callable[[list[int]], list[int]] = lambda found: found
    """Rule of what it says, as syncer, of the agreement of contributions."""
    usurps: bool = False
    """True: it wants all offices, and makes no version (`attacks.usurper`)."""
    boasts: bool = False
    """True: also those that are held."""
    elects_itself: bool = False
    """True: it makes versions of its own work, elected by nobody else."""
    trickles: bool = False
    """True: it names heads that it does not have, and gives bytes one by one (`attacks.withholding`)."""
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


def one_token(own: Own) -> Tensor:
    """Reverse one token's rows, as long as the whole may be."""
    rest = own.delta.masked_fill(own.rows, 0.0)
    wrong = rest - own.delta
    room = math.sqrt(max(0.0, (LONG * float(own.delta.norm())) ** 2 - float(rest.norm()) ** 2))
    return rest + wrong * (room / max(float(wrong.norm()), 1e-30))


def rides(own: Own) -> Tensor:
    """Send the way that all went last, with some noise, as long as it may be."""
    way = own.delta if own.moved is None else own.moved
    noise = torch.randn_like(way)
    made = way + noise * (NOISE * way.norm() / noise.norm())
    longest: Tensor = made * (LONG * own.delta.norm() / made.norm().clamp_min(1e-30))
    return longest


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
    "member-elects-itself": Lie(elects_itself=True),
    "member-trickles": Lie(trickles=True),
    "member-withholds": Lie(withholds=True),
    "member-omits": Lie(omits=True),
    "member-one-token": Lie(aimed=one_token),
    "member-rides-longest": Lie(aimed=rides),
    "member-trigger": Lie(delta=lambda delta: LONG * delta, poisons=True),
}
