"""Who measures the global parameters: one member at a time, and all hear of the result.

For so many versions as a term has, rendezvous hashing over the live learners names an order, without a word
exchanged. The first measures when the newest result that it knows of is older than the interval; each later
one is half an interval more patient, so somebody does when the first is gone or cannot. Results travel in
presence records. A member knows the learners of its own neighbourhood: a run of more than
`group.size` members has one measurement per interval and neighbourhood, not one in all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Protocol

from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.node import Core
from p2pdiloco.daemon import wire
from p2pdiloco.tensors.vault import Vault

FIRST_EVALUATION_S = 5.0
"""Who has just come back has something better to do: the others wait for its work."""
LOOK_FOR_TURN_S = 1.0
PATIENCE = 0.5
"""Of an interval, for each rank."""
OFFICE = "evaluation"


class Turns:
    """What one member knows of results, and whether it is its turn."""

    def __init__(self, run: str, me: str, interval_s: float, first_s: float, term_versions: int) -> None:
        """`first_s`: so early the first result may be, in seconds after our start."""
        self._run, self._me = run, me
        self._interval_s, self._term_versions = interval_s, term_versions
        self._known_s = -math.inf
        self._first_s = min(first_s, interval_s)
        self._began_s: float | None = None
        self.newest: wire.Result | None = None
        self.by = ""
        """Who measured it."""
        self.own: wire.Result | None = None

    def mine(self, now: float, number: int, learners: Sequence[str]) -> bool:
        """Whether to measure now. `number`: of the first fragment's version; `learners`: live ones."""
        if self._began_s is None:
            self._began_s = now
            self._known_s = max(self._known_s, now - self._interval_s + self._first_s)
        if now - self._known_s < self._interval_s:
            return False  # not even for the first
        order = ranking(self._run, OFFICE, 0, number // self._term_versions, {*learners, self._me})
        patience_s = self._interval_s * (1 + PATIENCE * order.index(self._me))
        return now - self._known_s >= patience_s

    def begin(self, now: float) -> None:
        """We measure: not again before the next interval, whatever comes of it."""
        self._known_s = now

    def measured(self, result: wire.Result, now: float) -> None:
        """We have a result."""
        self.own = result
        self._take(self._me, result, now)

    def heard(self, peer: str, result: wire.Result, now: float) -> None:
        """A peer's record has one; a newer state of the run counts more."""
        if self.newest is None or result.merges > self.newest.merges:
            self._take(peer, result, now)

    def _take(self, peer: str, result: wire.Result, now: float) -> None:
        self.newest, self.by, self._known_s = result, peer, now


class Measurements:
    """Results for the run as it is here: our own, which are news for others, and what they say of theirs."""

    def __init__(self, turns: Turns, vault: Vault, log_versions: int, alone: bool) -> None:
        """`alone`: others' results do not count here (--evaluate each)."""
        self.turns = turns
        self.alone = alone
        self._vault = vault
        self._log_versions = log_versions
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        """Set when we have a new result to tell."""

    @property
    def newest(self) -> wire.Result | None:
        """The newest result that we know of."""
        return self.turns.newest

    @property
    def by(self) -> str:
        """Who measured the newest."""
        return self.turns.by

    @property
    def own(self) -> wire.Result | None:
        """The last of our own."""
        return self.turns.own

    def _merges(self) -> int:
        return sum(self._vault.version(layout.index) or 0 for layout in self._vault.layouts)

    def measured(self, loss: float, tokens: int) -> None:
        """Our learner has measured."""
        if math.isfinite(loss):
            self.turns.measured(wire.Result(self._merges(), loss, tokens), self._loop.time())
            self.news.set()

    def heard(self, peer: str, result: wire.Result) -> None:
        """A peer says that it has measured. What is far ahead of us cannot be true, or not for us: it would
        silence all results to come."""
        most = self._merges() + len(self._vault.layouts) * self._log_versions
        if not self.alone and result.merges <= most:
            self.turns.heard(peer, result, self._loop.time())


class Measures(Protocol):
    """The learner, as far as this is concerned (`daemon.learner.learner_link`)."""

    ready: asyncio.Event

    def evaluate(self, tag: int) -> None:
        """Ask for the held-out loss."""


async def evaluate_regularly(
    measurements: Measurements, learner: Measures, core: Core, every_s: float
) -> None:
    """Measure when it is our turn, for ever; alone or with --evaluate each it always is."""
    tag, look_s = 0, min(LOOK_FOR_TURN_S, every_s / 4)
    loop, turns = asyncio.get_running_loop(), measurements.turns
    while True:
        await learner.ready.wait()
        now = loop.time()
        learners = () if measurements.alone else core.shared.expected_learners(now)
        if turns.mine(now, core.fragments[0].chain.head.number, learners):
            turns.begin(now)
            learner.evaluate(tag)
            tag += 1
        await asyncio.sleep(look_s)
