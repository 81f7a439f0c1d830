"""Contributions that liars send instead of their work: pure functions of what they know.

Pseudo-gradients are flat, fp32, and never changed in place. Whoever calls decides what a liar knows. Liars
who work together are given the same `common_seed`, and all see the honest work of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from worlds.kinds import COLLUDING, Lie

ALIE_DEVIATIONS = 1.5
"""Standard deviations that "a little is enough" moves every element by (arXiv 1902.06156)."""
DRIFT_SHARE = 0.9
"""Length of a drift, as a share of the longest that is not cut."""
TURNS_AT = 10
"""Version from which on an honest member lies; and so many versions have the lies of one that does it
sometimes:"""
OF_TEN = 3
HALVINGS = 24
"""Halvings in the search for how far one can push."""
ENOUGH_AGREEMENT = 0.25
"""Share of the usual agreement that has all of the weight, and some to spare (`core.api.versions`)."""
FEWEST_OTHERS = 3
RIDGE = 1e-6
MOST_AGAINST = 64.0
"""Limit of how far one goes against some, beside how far it goes with the others."""
OWN_SHARE = 0.02
"""Share of noise with which liars that send the same send no copies."""
LONG_SHARE = 0.9
"""Length of who knows the limits, as a share of the longest that is not cut: three times the usual one."""
RIDES_NOISE = 0.3
"""Length of the noise beside an update that is sent again, as a share of the update's."""


class Known(Struct, frozen=True, kw_only=True):
    """Knowledge of a liar when it sends its contribution to one fragment."""

    own: Tensor
    """Honest pseudo-gradient of its own."""
    liars: Sequence[Tensor] = ()
    """Honest pseudo-gradients of all liars of this round, its own among them."""
    honest: Sequence[Tensor] = ()
    """Pseudo-gradients of all others in this round, which only an omniscient liar has; (): liars' must do."""
    before: Sequence[Tensor] = ()
    """Pseudo-gradients of all others in the last round."""
    first: Tensor | None = None
    """Honest one of its own of the first round; None: this is the first."""
    last: Tensor | None = None
    """Honest one of its own of the last round; None: this is the first."""
    merged: Tensor | None = None
    """Update that was merged last."""
    rows: Tensor | None = None
    """Elements of the token that it wants wrong, bool; None: this fragment has none."""
    radius: float = math.inf
    """Length of the longest contribution that is not cut; infinite: not known."""
    round: int = 0
    seed: int = 0
    """Seed of its own numbers."""
    common_seed: int = 0
    """Seed of numbers that all liars share."""

    @property
    def seen(self) -> Sequence[Tensor]:
        """Honest pseudo-gradients that it goes by."""
        return self.honest or self.liars or (self.own,)


class Told(Struct, frozen=True):
    """Contribution as a liar sends it."""

    delta: Tensor
    work: float = 1.0
    """Tokens and inner steps of its label, as multiples of the true ones."""


def tell(lie: Lie, known: Known) -> Told:
    """Tell a lie."""
    told = _TOLD[lie](known)
    return Told(_apart(told.delta, known.seed), told.work) if lie in COLLUDING else told


def _apart(delta: Tensor, seed: int) -> Tensor:
    """Move an element of its own by the usual size of one or more, so that no two liars send the same bytes,
    whatever the codec."""
    own = delta.clone()
    own[seed % own.numel()] += (1 + seed % 97 / 97) * _length(delta) / math.sqrt(own.numel())
    return own


def _flip(known: Known) -> Told:
    return Told(-known.own)


def _flip_x10(known: Known) -> Told:
    return Told(-10 * known.own)


def _turning(known: Known) -> Told:
    return Told(-known.own if known.round >= TURNS_AT else known.own)


def _sometimes(known: Known) -> Told:
    return Told(-known.own if known.round % 10 >= 10 - OF_TEN else known.own)


def _x1000_smallest(known: Known) -> Told:
    return Told(1000 * known.own, work=0.1)


def _noise(known: Known) -> Told:
    return Told(_of_length(_drawn(known.own, known.seed, known.round), _length(known.own)))


def _honest(known: Known) -> Told:
    return Told(known.own)


def _alie(known: Known) -> Told:
    mean, spread = _mean_and_spread(known.seen)
    return Told(mean - ALIE_DEVIATIONS * spread)


def _min_max(known: Known) -> Told:
    mean, _ = _mean_and_spread(known.seen)
    return Told(_pushed(known.seen, mean, -_of_length(mean, 1.0)))


def _min_max_spread(known: Known) -> Told:
    mean, spread = _mean_and_spread(known.seen)
    return Told(_pushed(known.seen, mean, -_of_length(spread, 1.0)))


def _inner_product(share: float) -> Callable[[Known], Told]:
    def told(known: Known) -> Told:
        mean, _ = _mean_and_spread(known.seen)
        return Told(-share * mean)

    return told


def _knows_trust(known: Known) -> Told:
    """Keep the median cosine with all others at a quarter of the usual, which has all of the weight, and go
    against those that no median hears: all liars send much the same, and with them a few honest ones are
    most."""
    others = known.honest or known.before
    if len(others) < FEWEST_OTHERS:
        return Told(-known.own)
    units = torch.stack([_of_length(one, 1.0) for one in others]).double()
    gram = units @ units.T + RIDGE * torch.eye(len(units), dtype=torch.float64)
    liars = max(1, len(known.liars))
    friends = min(len(units), max(1, (len(units) + liars - 1) // 2 + 1 - (liars - 1)))
    liked = torch.tensor([float(place < friends) for place in range(len(units))], dtype=torch.float64)
    ways = torch.linalg.solve(gram, torch.stack([liked, liked - 1.0], dim=1)).T @ units
    least = ENOUGH_AGREEMENT * float(torch.cat([_others(row, n) for n, row in enumerate(gram)]).median())
    low, high = 0.0, MOST_AGAINST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        agrees = 1.0 / float(torch.linalg.vector_norm(ways[0] + middle * ways[1]))
        low, high = (middle, high) if agrees >= least else (low, middle)
    told = (ways[0] + low * ways[1]).float()
    told += _of_length(_drawn(told, known.seed, known.round), OWN_SHARE * _length(told))
    return Told(_of_length(told, _longest(known)))


def _longest(known: Known) -> float:
    """Compute the length of what is not cut, by what it knows of the others'."""
    usual = float(
        torch.tensor([_length(one) for one in known.honest or known.before or (known.own,)]).median()
    )
    return LONG_SHARE * min(known.radius, 3 * usual)


def _one_token(known: Known) -> Told:
    """Agree with the others everywhere else: cosines are of the whole, where such rows are few."""
    if known.rows is None or not known.rows.any():
        return Told(known.own)
    rest = known.own.masked_fill(known.rows, 0.0)
    room = math.sqrt(max(0.0, _longest(known) ** 2 - _length(rest) ** 2))
    return Told(rest - _of_length(known.own - rest, room))


def _useful_longest(known: Known) -> Told:
    return Told(_of_length(known.own, _longest(known)))


def _rides_longest(known: Known) -> Told:
    update = known.own if known.merged is None else known.merged
    noise = _of_length(_drawn(update, known.seed, known.round), RIDES_NOISE * _length(update))
    return Told(_of_length(update + noise, _longest(known)))


def _others(row: Tensor, n: int) -> Tensor:
    return torch.cat([row[:n], row[n + 1 :]])


def _drift(known: Known) -> Told:
    length = DRIFT_SHARE * known.radius
    if math.isinf(length):
        length = max(_length(one) for one in known.seen)
    return Told(_of_length(_drawn(known.own, known.common_seed, 0), length))


def _copycat(known: Known) -> Told:
    return Told(known.honest[0] if known.honest else known.own)


def _copycat_late(known: Known) -> Told:
    return Told(known.before[0] if known.before else known.own)


def _zero(known: Known) -> Told:
    return Told(torch.zeros_like(known.own))


def _stale_first(known: Known) -> Told:
    return Told(known.own if known.first is None else known.first)


def _stale_last(known: Known) -> Told:
    return Told(known.own if known.last is None else known.last)


def _tokens_x10(known: Known) -> Told:
    return Told(known.own, work=10.0)


def _tokens_x10_flip(known: Known) -> Told:
    return Told(-known.own, work=10.0)


_TOLD: Mapping[Lie, Callable[[Known], Told]] = {
    Lie.FLIP: _flip,
    Lie.FLIP_X10: _flip_x10,
    Lie.TURNING: _turning,
    Lie.SOMETIMES: _sometimes,
    Lie.X1000_SMALLEST: _x1000_smallest,
    Lie.NOISE: _noise,
    Lie.LABELS: _honest,
    Lie.ALIE: _alie,
    Lie.MIN_MAX: _min_max,
    Lie.MIN_MAX_SPREAD: _min_max_spread,
    Lie.INNER_PRODUCT_01: _inner_product(0.1),
    Lie.INNER_PRODUCT_05: _inner_product(0.5),
    Lie.INNER_PRODUCT_1: _inner_product(1.0),
    Lie.KNOWS_TRUST: _knows_trust,
    Lie.DRIFT: _drift,
    Lie.COPYCAT: _copycat,
    Lie.COPYCAT_LATE: _copycat_late,
    Lie.ZERO: _zero,
    Lie.STALE_FIRST: _stale_first,
    Lie.STALE_LAST: _stale_last,
    Lie.TOKENS_X10: _tokens_x10,
    Lie.TOKENS_X10_FLIP: _tokens_x10_flip,
    Lie.ONE_TOKEN: _one_token,
    Lie.TRIGGER: _useful_longest,
    Lie.USEFUL_LONGEST: _useful_longest,
    Lie.RIDES_LONGEST: _rides_longest,
}


def _length(delta: Tensor) -> float:
    return float(torch.linalg.vector_norm(delta))


def _of_length(delta: Tensor, length: float) -> Tensor:
    found = _length(delta)
    return delta * (length / found) if found else delta


def _drawn(like: Tensor, seed: int, round_: int) -> Tensor:
    """Draw normal numbers: the same for the same seed and round."""
    generator = torch.Generator().manual_seed(((seed << 24) + round_) % (1 << 63))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _mean_and_spread(deltas: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    together = torch.stack(tuple(deltas))
    return together.mean(dim=0), together.std(dim=0, correction=0)


def _pushed(deltas: Sequence[Tensor], start: Tensor, way: Tensor) -> Tensor:
    """Go from `start` along `way`, so far that no honest one is farther than two of them are apart.

    (Shejwalkar and Houmansadr, NDSS 2021.)"""
    apart = max(_length(one - other) for one in deltas for other in deltas)
    low, high = 0.0, 4 * apart + 4 * _length(start)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        far = max(_length(start + middle * way - one) for one in deltas)
        low, high = (middle, high) if far <= apart else (low, middle)
    return start + low * way
