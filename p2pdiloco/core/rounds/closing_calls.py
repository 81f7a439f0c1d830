"""Closing calls of a syncer: whose answer is still out, and how long answers take.

Rules: docs/protocol/rounds.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.rounds.inbox import Held
from p2pdiloco.core.rounds.laggards import Laggards
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.timing import (
    ARRIVAL_INTERVALS,
    ARRIVAL_SHARE,
    answer_bound_s,
    grace_cap_s,
    grace_window_s,
    patience_s,
)


class ClosingCalls:
    """Last closing call of one group.

    Answers count also when the round went on without them: only so does a window that was too short for any
    learn that it was.
    """

    def __init__(self, shared: Shared, electorate: Electorate, level: int) -> None:
        self._shared = shared
        self._electorate = electorate
        self._level = level
        self._answer_time = shared.answer_time(level)
        self._newcomers = Laggards(shared)
        self._out: set[str] = set()
        self._sent_s = 0.0
        self._number = 0

    def called(self, children: Iterable[str], number: int, now: float) -> None:
        """Note that these are asked for what they have, for version `number`."""
        self._out, self._sent_s, self._number = set(children), now, number

    def answered(self, child: str, now: float, number: int | None = None) -> None:
        """Note that a contribution (or a pass, which names the `number`) of that child is here, in time or
        not."""
        if child in self._out and number in (None, self._number):
            self._out.discard(child)
            if not self._out:
                self._add(now)

    def end_last(self, now: float) -> None:
        """End the last call, as the next is about to go out: a live child that has not answered takes at
        least so long."""
        if self._out & set(self._electorate.expected(now)):
            self._add(now)
        self.forget()

    def forget(self) -> None:
        """Forget the call: we are no longer the syncer, and answers go elsewhere."""
        self._out = set()

    def grace_s(self, quorum_s: float, sync_s: float, now: float) -> float:
        """Compute the grace window of a round that reached its quorum now (`timing.grace_window_s`).

        Above the leaves it is as long as may be. Whoever is missing there is a whole group, whose own window
        may have begun later, and no sum of answer times seen so far says how much later.
        """
        shared, config = self._shared, self._shared.config
        step_s = shared.median_step_s(now)
        answer_s = math.inf if self._level else self._answer_time.expected_s
        return grace_window_s(
            config.delay_steps,
            step_s,
            quorum_s,
            sync_s,
            config.grace_fraction,
            grace_cap_s(config.grace_cap_s, self._level),
            min(answer_s, self._bound_s(now)),
        )

    def arrivals_until_s(self, closes_at_s: float, ready: Iterable[Held], now: float) -> float:
        """Compute how long a round whose window ended then waits for payloads that are on their way: some
        sync intervals, and no longer than those whose contributions are in are patient with us."""
        shared, config = self._shared, self._shared.config
        step_s = shared.median_step_s(now)
        until_s = closes_at_s + ARRIVAL_INTERVALS * config.inner_steps * step_s
        for held in ready:
            if not held.own:
                took_s, floor_s = held.ready_s - held.arrived_s, shared.timing.answer_floor_s
                patient_s = patience_s(floor_s, took_s, config.delay_steps, step_s)
                until_s = min(until_s, held.ready_s + ARRIVAL_SHARE * patient_s)
        return until_s

    def outruns(self, chain: Chain, ready: Iterable[Held], now: float) -> bool:
        """Tell whether we would merge while none of the others here has our last version.

        Versions made faster than they travel keep newcomers out, and leave all others in this round, with
        work against an older one, behind. For some sync intervals only. Members that leave are not waited
        for; a syncer that leaves does not wait.
        """
        shared, view = self._shared, self._shared.view
        if shared.leaving:
            return False
        head = chain.head.number
        if any(not held.own and held.based_on >= head for held in ready):
            return False
        stay = [peer for peer in self._electorate.live(now) if (p := view.progress(peer)) and p.stands]
        heads = {peer: view.head(peer, chain.header.fragment) for peer in stay}
        if any(named is not None and named.number >= head for named in heads.values()):
            return False
        if not any([self._newcomers.waits_for(peer, named, chain) for peer, named in heads.items()]):
            return False
        wait_s = ARRIVAL_INTERVALS * shared.config.inner_steps * shared.median_step_s(now)
        return now < max((held.arrived_s for held in ready), default=self._sent_s) + wait_s

    def _add(self, now: float) -> None:
        self._answer_time.add(min(now - self._sent_s, self._bound_s(now)))

    def _bound_s(self, now: float) -> float:
        """Compute the most that answers may take (`timing.answer_bound_s`). Before any learner has said how
        long its inner steps are it is not nothing: a run's first versions would be made of whoever came
        first."""
        step_s = self._shared.median_step_s(now)
        if step_s <= 0:
            return self._shared.timing.answer_floor_s
        return answer_bound_s(self._shared.config.inner_steps, step_s, self._level)
