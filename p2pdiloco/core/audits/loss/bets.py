"""Sequential test of what is measured again and again: bets against a mean of at least so much.

Whoever bets a share of its money on each measurement being less than `least` cannot grow rich if the mean is
at least that, whatever else is true of the measurements, and however they depend on what came before. (Each
factor is then at most 1 on the mean: Ville's inequality; Waudby-Smith and Ramdas, 2010.09686.) Who is rich
has shown that the mean is less.

Money never falls below its start, so that what was long good does not pay for what is bad now. So of n
measurements of who keeps `least` the chance that any of them makes `ENOUGH` is at most n / `ENOUGH`.

Rules: docs/protocol/loss-audits.md, section 4.
"""

from __future__ import annotations

ENOUGH = float(1 << 20)
"""Money, in stakes, at which the mean is shown to be less."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the largest possible bet; a quarter of the stake is on each."""
Money = tuple[float, ...]
START: Money = (1.0,) * len(SHARES)


def after(money: Money, value: float, least: float) -> Money:
    """Bet once more that a value in [-1, 1] is less than `least`, of (-1, 1)."""
    gain = (least - value) / (1.0 - least)
    return tuple(max(1.0, each) * (1.0 + share * gain) for each, share in zip(money, SHARES, strict=True))


def worth(money: Money) -> float:
    """Count the money, in stakes."""
    return sum(money) / len(money)
