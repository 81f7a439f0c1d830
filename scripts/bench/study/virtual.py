"""A swarm in one process and in virtual time: learners of different speeds, a network with delays, deaths.

As `study.lockstep`, whose learners, merges and outer steps are production's; what its syncers decide is what
`core.round` decides, without elections and messages that go astray: a round is begun by K
contributions, one of them due and measured against the head, as soon as their headers are there; the others
are called and send what they have, at once or at their next step boundary; it closes when all have answered,
or at the end of the grace window. Time is counted in inner steps of a usual learner. Schedules follow the
tokens that were trained, merged or not, so that all that is compared has the same.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import Struct
from torch import Tensor

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.base import RHYTHM_SHARE
from p2pdiloco.learner.channel import CopiedOut, NothingToCopy
from p2pdiloco.tensors.merge import Input
from study.baselines import Curve
from study.computing import FP32, Computing
from study.lockstep import HELDOUT_TOKENS, Learner, Lockstep
from study.merged_run import Merged, MergedRun, Part

JITTER = 0.5
"""Deviation of the logarithm of a payload's time under way."""
MESSAGE = 0.2
"""Inner steps that a small message takes, at most the mean of a payload."""
SILENCE = 4.0
"""Inner steps after which nobody waits for a dead learner's answer."""


class Fault(Struct, frozen=True):
    """A node is killed, and is back some time later with the newest versions: what it had not yet sent is
    lost, and what was under way."""

    at: float
    learner: int
    away: float


class Circumstances(Struct, frozen=True, kw_only=True):
    """Circumstances of the swarm's world."""

    delay: float = 0.0
    """Mean inner steps that a payload is under way, in each direction."""
    grace: float = 0.75
    """Time that a syncer waits for those it called, in parts of H inner steps; 0 closes at quorum."""
    speeds: tuple[float, ...] = ()
    """Inner steps per unit of time, of each learner; () is 1."""
    faults: tuple[Fault, ...] = ()
    at_once: bool = True
    """Closing calls are answered within an inner step (`learner.mailbox`); else at its end."""
    largest_share: float = 0.0
    """Share of a merge that one learner has at most (`study.merged_run`); 0: nothing is cut."""
    fresh_moments: bool = False
    """A returning learner has none; else those that it had."""
    seed: int = 0


@dataclass
class _Seat:
    """Seat of one learner: what the swarm knows about it."""

    learner: Learner
    index: int
    step_time: float
    life: int = 0
    alive: bool = True
    at: float = 0.0
    """Time at which it was last between two inner steps."""
    mailbox: list[Callable[[], None]] = field(default_factory=list)
    last_install: dict[int, float] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    """Fragments of which a contribution has left and not arrived."""
    changing: list[int] = field(default_factory=list)
    """Fragments that something waits for the next step boundary to change."""

    @property
    def name(self) -> str:
        """Name of its learner."""
        return f"learner-{self.index}"


@dataclass
class Arrived:
    """Contribution that came to its syncer."""

    seat: _Seat
    life: int
    content: Input
    base: int
    due: bool


@dataclass
class _Round:
    """The syncer of one fragment."""

    inbox: dict[tuple[int, int], Arrived] = field(default_factory=dict)
    coming: dict[tuple[int, int], Arrived] = field(default_factory=dict)
    """Contributions of which only the header is here, and which may begin a round."""
    closing: bool = False
    number: int = 0
    not_before: float = 0.0
    """Earliest beginning: half an interval after the last version, unless all are in."""
    waits_for: set[int] = field(default_factory=set)


class Virtual(Lockstep):
    """See the module. `play` once; `close` gives shared memory back."""

    def __init__(
        self,
        manifest: Manifest,
        learners: int,
        world: Circumstances,
        heldout_tokens: int = HELDOUT_TOKENS,
        computing: Computing = FP32,
    ) -> None:
        super().__init__(manifest, learners, heldout_tokens=heldout_tokens, computing=computing)
        speeds = world.speeds or (1.0,) * learners
        self._world, self._rng = world, random.Random(world.seed)
        self._seats = [
            _Seat(made, i, 1 / s) for i, (made, s) in enumerate(zip(self._learners, speeds, strict=True))
        ]
        self._rounds = [_Round() for _ in self.layouts]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._clock = 0.0, 0
        """The time of the last inner step, and the tokens that were trained before it."""
        self.merged_tokens = [0 for _ in self.layouts]
        """Merged into each fragment's head."""
        self._merged_run = MergedRun(manifest, self.global_state, world.largest_share, self._roster())
        self.merges = self.contributions = self.tokens = 0

    def play(self, duration: int, evaluate_every: int, tokens: int = 0) -> Curve:
        """Play so many units of time, and then until `tokens` are trained by all.

        Returns (time, held-out loss), every `evaluate_every` and at the end.
        """
        curve: Curve = []
        for seat in self._seats:
            if seat.alive:
                self._step_later(seat)
        for fault in self._world.faults:
            self._push(fault.at, partial(self._die, fault))
        marks = [*range(evaluate_every, duration, evaluate_every), duration]
        while marks:
            if self._events and self._events[0][0] <= marks[0]:
                self._now, _, act = heapq.heappop(self._events)
                act()
            elif len(marks) == 1 and self.tokens < tokens:
                marks[0] += 1
            else:
                curve.append((marks.pop(0), self.loss()))
        return curve

    # --- learners --------------------------------------------------------------------------------------

    def _roster(self) -> list[str]:
        """Name the learners that have seats of the run."""
        return [seat.name for seat in self._seats]

    def _push(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), act))

    def _step_later(self, seat: _Seat) -> None:
        life = seat.life
        self._push(self._now + seat.step_time, lambda: self._step(seat) if seat.life == life else None)

    def _step(self, seat: _Seat) -> None:
        """An inner step has ended; what came meanwhile is done now."""
        if self._now > self._clock[0]:
            self._clock = self._now, self.tokens
        seat.learner.training.run_is_at(self._clock[1])
        self.tokens += seat.learner.step()
        seat.at = self._now
        waiting, seat.mailbox = seat.mailbox, []
        seat.changing.clear()
        for act in waiting:
            act()
        self._send_due(seat)
        self._step_later(seat)

    def _send_due(self, seat: _Seat) -> None:
        for copied in seat.learner.fragments.copy_due(seat.learner.training.inner_step):
            self._send(seat, copied)

    def _arrive_at(self, seat: _Seat, life: int, act: Callable[[], None], changes: int | None = None) -> None:
        """`act`, which `changes` a fragment, at the learner's next step boundary, if it still lives."""
        if seat.life != life or not seat.alive:
            return
        if seat.at == self._now:
            act()
            self._send_due(seat)
            return
        seat.mailbox.append(act)
        if changes is not None:
            seat.changing.append(changes)

    def _call(self, seat: _Seat, life: int, fragment: int) -> None:
        """A closing call arrives."""
        called = partial(self._called, fragment, seat)
        if not self._world.at_once or fragment in seat.changing:
            self._arrive_at(seat, life, called)
        elif seat.life == life and seat.alive:
            called()

    def _send(self, seat: _Seat, copied: CopiedOut) -> None:
        arrived = Arrived(seat, seat.life, seat.learner.encoded(copied), copied.base_number, copied.due)
        seat.under_way.add(copied.fragment)
        took = self._delay()
        self._push(self._now + min(self._message, took), lambda: self._announced(copied.fragment, arrived))
        self._push(self._now + took, lambda: self._arrive(copied.fragment, arrived))

    def _delay(self) -> float:
        mean = self._world.delay
        return mean * self._rng.lognormvariate(-JITTER * JITTER / 2, JITTER) if mean else 0.0

    @property
    def _message(self) -> float:
        return min(MESSAGE, self._world.delay)

    def _die(self, fault: Fault) -> None:
        seat = self._seats[fault.learner]
        if not seat.alive:
            return
        seat.alive, seat.life = False, seat.life + 1
        seat.mailbox, seat.last_install = [], {}
        seat.under_way.clear()
        seat.changing.clear()
        self._push(self._now + SILENCE, lambda: self._silent(seat))
        self._push(self._now + fault.away, lambda: self._come_back(seat))

    def _silent(self, seat: _Seat) -> None:
        for fragment in range(len(self._rounds)):
            self._answered(fragment, seat)

    def _come_back(self, seat: _Seat) -> None:
        seat.alive = True
        seat.learner.begin(self)
        if self._world.fresh_moments:
            seat.learner.training.optimizer.state.clear()
            seat.learner.training.optimizer_steps = 0
        self._step_later(seat)

    # --- rounds ----------------------------------------------------------------------------------------

    def _announced(self, fragment: int, arrived: Arrived) -> None:
        """A header: where others are called at all, it is enough to call them."""
        seat, round_ = arrived.seat, self._rounds[fragment]
        if seat.life == arrived.life and arrived.due and arrived.base == self.head(fragment)[0]:
            round_.coming[seat.index, seat.life] = arrived
            self._consider(fragment)

    def _arrive(self, fragment: int, arrived: Arrived) -> None:
        seat, round_ = arrived.seat, self._rounds[fragment]
        if seat.life != arrived.life:
            return
        seat.under_way.discard(fragment)
        round_.coming.pop((seat.index, seat.life), None)
        if self.head(fragment)[0] - arrived.base > self.manifest.group.max_base_age_versions:
            refused = partial(self._refused, seat, fragment)
            self._push(
                self._now + self._message, partial(self._arrive_at, seat, seat.life, refused, fragment)
            )
            return
        round_.inbox[seat.index, seat.life] = arrived
        if round_.closing:
            self._answered(fragment, seat)
            return
        self._consider(fragment)
        if not round_.closing and round_.inbox:
            number = round_.number
            patience = self._now + self.manifest.sync.inner_steps
            self._push(patience, lambda: self._consider(fragment, number))

    def _refused(self, seat: _Seat, fragment: int) -> None:
        seat.learner.vault.own.discard_residual(fragment)
        seat.learner.fragments.free_slot(fragment)

    def _consider(self, fragment: int, overdue: int | None = None) -> None:
        """Begin to close the round, if there is reason to. `overdue`: the round that waited for H steps."""
        round_, head = self._rounds[fragment], self.head(fragment)[0]
        live = [seat for seat in self._seats if seat.alive]
        here = dict(round_.inbox)
        if self._world.grace:
            coming = round_.coming.items()
            here.update((key, one) for key, one in coming if one.base == head and one.seat.life == one.life)
        if round_.closing or len(here) < max(1, min(self.manifest.sync.quorum, len(live))):
            return
        starts = any(one.due and one.base == head for one in here.values())
        if not starts and overdue != round_.number:
            return
        others = [seat for seat in live if (seat.index, seat.life) not in round_.inbox]
        if others and self._now < round_.not_before:
            later = partial(self._consider, fragment, overdue)
            self._push(round_.not_before, lambda: later() if self._rounds[fragment] is round_ else None)
            return
        if not others or not self._world.grace:
            self._close(fragment)
            return
        round_.closing, round_.waits_for = True, {seat.index for seat in others}
        for seat in others:
            self._push(self._now + self._message, partial(self._call, seat, seat.life, fragment))
        window = self._world.grace * self.manifest.sync.inner_steps
        self._push(
            self._now + window, lambda: self._close(fragment) if self._rounds[fragment] is round_ else None
        )

    def _called(self, fragment: int, seat: _Seat) -> None:
        training, under_way = seat.learner.training, seat.at != self._now
        copied = seat.learner.fragments.copy_out(fragment, training.inner_step, under_way)
        if not isinstance(copied, NothingToCopy):
            self._send(seat, copied)
        elif fragment not in seat.under_way:
            self._push(self._now + self._message, lambda: self._answered(fragment, seat))

    def _answered(self, fragment: int, seat: _Seat) -> None:
        round_ = self._rounds[fragment]
        round_.waits_for.discard(seat.index)
        if round_.closing and not round_.waits_for:
            self._close(fragment)

    def _close(self, fragment: int) -> None:
        round_ = self._rounds[fragment]
        merged = [round_.inbox[key] for key in sorted(round_.inbox)]
        self._rounds[fragment] = _Round(coming=round_.coming, number=round_.number + 1)
        if not merged:
            return  # whose header began it died
        fastest = min((seat.step_time for seat in self._seats if seat.alive), default=1.0)
        interval = self.manifest.sync.inner_steps * fastest
        self._rounds[fragment].not_before = self._now + RHYTHM_SHARE * interval
        made = self._merge_round(fragment, merged)
        for one in [one for one in merged if made is None or one.seat.name in made.refused]:
            self._refused(one.seat, fragment)
            merged.remove(one)
        if made is None:
            return
        number = self.head(fragment)[0]
        self.merges += 1
        self.contributions += len(merged)
        self.merged_tokens[fragment] += sum(one.content[1] for one in merged)
        theta = self.global_state.theta(fragment).clone()
        lives = {(one.seat.index, one.life) for one in merged}
        for seat in self._seats:
            if seat.alive:
                inside = (seat.index, seat.life) in lives
                self._publish(seat, fragment, number, theta, inside)

    def _merge_round(self, fragment: int, arrived: Sequence[Arrived]) -> Merged | None:
        """Merge what came in a round."""
        parts = [Part(one.seat.name, one.content) for one in arrived]
        return self._merged_run.merge(fragment, parts)

    def _publish(self, seat: _Seat, fragment: int, number: int, theta: Tensor, inside: bool) -> None:
        """Versions arrive in order."""
        install = partial(seat.learner.install, fragment, number, theta, inside)
        at = max(self._now + self._delay(), seat.last_install.get(fragment, 0.0))
        seat.last_install[fragment] = at
        self._push(at, partial(self._arrive_at, seat, seat.life, install, fragment))
