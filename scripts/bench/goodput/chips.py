"""Chips that fail and come back: how much of a data centre's chip time trains (arXiv 2604.21428).

The failure process of the paper's goodput table, event by event. A learner is `chips` chips that train in
lock step. Every chip fails after an exponential time; a failed chip comes back after an exponentiated-Weibull
delay. Its learner, and no other, stalls: for `downscale_s` when it must go on without the chip, for
`upscale_s` when chips that are back are let in again. That happens once all are back and the learner has
trained undisturbed for `patience_s`, so that a burst costs one upscale and not many; under a rain of failures
that never ends it happens when `max_waiting_share` of the chips wait. A chip that fails while its learner
stands still is left out by the reconfiguration that is under way.

Data parallel training is one learner of all chips; decoupled training is M learners of chips/M.
The constants are a fit, since the paper's are unpublished; shapes of the return delay are free.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

YEAR_S = 365.25 * 86400.0
INTEGRATION_POINTS = 4000

Mishap = Callable[[Random], tuple[float, float]]
"""Cost of a failure beyond the stall: (more seconds of standing still, seconds of training undone)."""


def no_mishap(_rng: Random) -> tuple[float, float]:
    """The paper's assumption: a learner goes on exactly where it was."""
    return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class ChipTimes:
    """Constants of the process, in seconds; `return_*` shape the exponentiated Weibull delay."""

    mtbi_s: float = YEAR_S
    downscale_s: float = 20.0
    upscale_s: float = 14.0
    patience_s: float = 60.0
    mean_return_s: float = 60.0
    max_waiting_share: float = 0.001
    return_weibull: float = 1.0
    """Shape of the Weibull law under the exponent."""
    return_exponent: float = 2.0

    def closed_form(self, chips: int, learners: int) -> float:
        """The fit `1/(1 + r(20.1 + 14.3 e^(-104 r)))`, r = failures per second and learner."""
        rate = chips / learners / self.mtbi_s
        return 1.0 / (1.0 + rate * (20.1 + 14.3 * math.exp(-104.0 * rate)))


@dataclass(slots=True)
class Tally:
    """Account of one learner. `useful_s` is in seconds of the whole learner: half its chips count half."""

    total_s: float = 0.0
    useful_s: float = 0.0
    undone_s: float = 0.0
    """Trained, but in no contribution when the learner died; not in `useful_s`."""
    failures: int = 0
    downscales: int = 0
    upscales: int = 0

    @property
    def goodput(self) -> float:
        """Useful share of chip time."""
        return self.useful_s / self.total_s


class ReturnDelay:
    """Draws exponentiated-Weibull delays: distribution function `(1 - e^(-(x/scale)^k))^a`."""

    def __init__(self, mean_s: float, weibull: float, exponent: float) -> None:
        self._k, self._a = weibull, exponent
        points = [(i + 0.5) / INTEGRATION_POINTS for i in range(INTEGRATION_POINTS)]
        self._scale_s = mean_s / (sum(self._unit(p) for p in points) / INTEGRATION_POINTS)

    def _unit(self, uniform: float) -> float:
        # log1p keeps the far tail, where uniform^(1/a) is nearly one.
        survival = -math.expm1(math.log(uniform) / self._a)
        return float((-math.log(survival)) ** (1.0 / self._k))

    def draw(self, rng: Random) -> float:
        """One delay in seconds."""
        return self._scale_s * self._unit(1.0 - rng.random())


class Learner:
    """One learner's life, event by event."""

    def __init__(self, chips: int, times: ChipTimes, rng: Random, mishap: Mishap = no_mishap) -> None:
        self.tally = Tally()
        self._chips, self._times, self._rng, self._mishap = chips, times, rng, mishap
        self._delay = ReturnDelay(times.mean_return_s, times.return_weibull, times.return_exponent)
        self._now_s = 0.0
        self._away: list[float] = []
        """Times at which failed chips will be back, a heap."""
        self._waiting = 0
        """Chips that are back and not yet let in."""
        self._quiet_from_s = 0.0
        self._since_start_s = 0.0
        """Trained since the last failure: no more than that can be undone."""

    def run(self, failures: int) -> Tally:
        """Live until so many chips have failed."""
        while self.tally.failures < failures:
            self._train()
        return self.tally

    def _next_failure_s(self) -> float:
        # Superposed Poisson processes of the chips that are in; memoryless, so drawn anew at every event.
        return self._now_s + self._rng.expovariate((self._chips - self._out()) / self._times.mtbi_s)

    def _next_upscale_s(self) -> float:
        if self._waiting > self._times.max_waiting_share * self._chips:
            return self._now_s
        if self._waiting and not self._away:
            return max(self._now_s, self._quiet_from_s + self._times.patience_s)
        return math.inf

    def _out(self) -> int:
        return len(self._away) + self._waiting

    def _train(self) -> None:
        """Train up to the next event, and deal with it."""
        failure_s = self._next_failure_s()
        back_s = self._away[0] if self._away else math.inf
        until_s = min(failure_s, back_s, self._next_upscale_s())
        trained_s = until_s - self._now_s
        gained_s = trained_s * (1.0 - self._out() / self._chips)
        self.tally.useful_s += gained_s
        self.tally.total_s += trained_s
        self._since_start_s += gained_s
        self._now_s = until_s
        if until_s == failure_s:
            self._fail()
        elif until_s == back_s:
            self._come_back()
        else:
            self._waiting = 0
            self.tally.upscales += 1
            self._stall(self._times.upscale_s)

    def _come_back(self) -> None:
        self._quiet_from_s = heapq.heappop(self._away)
        self._waiting += 1

    def _lose_chip(self) -> None:
        self.tally.failures += 1
        self._quiet_from_s = self._now_s
        heapq.heappush(self._away, self._now_s + self._delay.draw(self._rng))

    def _fail(self) -> None:
        """A chip fails while its learner trains."""
        self._lose_chip()
        self.tally.downscales += 1
        more_s, undone_s = self._mishap(self._rng)
        undone_s = min(undone_s, self._since_start_s)
        self.tally.useful_s -= undone_s
        self.tally.undone_s += undone_s
        self._since_start_s = 0.0
        self._stall(self._times.downscale_s + more_s)

    def _stall(self, for_s: float) -> None:
        """Let nobody train; chips fail and come back all the same."""
        until_s = self._now_s + for_s
        self.tally.total_s += for_s
        while True:
            failure_s = self._next_failure_s()
            back_s = self._away[0] if self._away else math.inf
            event_s = min(failure_s, back_s)
            if event_s >= until_s:
                break
            self._now_s = event_s
            if event_s == back_s:
                self._come_back()
            else:
                self._lose_chip()
        self._now_s = self._quiet_from_s = until_s


def goodput(
    chips: int, learners: int, times: ChipTimes, rng: Random, failures: int, mishap: Mishap = no_mishap
) -> Tally:
    """`learners` learners of chips/learners chips each; about `failures` failures in all. Sums of all."""
    total = Tally()
    for _ in range(learners):
        one = Learner(chips // learners, times, rng, mishap).run(max(1, failures // learners))
        for name in Tally.__slots__:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total
