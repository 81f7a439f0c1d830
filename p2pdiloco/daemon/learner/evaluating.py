"""Measuring the global parameters: one member at a time does, and all hear of the held-out loss.

For so many versions as a term has, rendezvous hashing over the live learners names an order, without a word
exchanged. The first measures when the newest loss that it knows of is older than the interval. Each later one
is half an interval more patient, so somebody does when the first is gone or cannot. Losses travel in presence
records. In that order, and heard, are only those that have a mark (in runs by invite or list: are admitted).
A member knows the learners of its own neighbourhood: a run of more than `group.size` members has one
measurement per interval and neighbourhood, not one in all.

Rules: docs/protocol/learner.md, section 8.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from p2pdiloco.core.candidates import ranking
from p2pdiloco.core.node import Core
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import sane_loss
from p2pdiloco.tensors.vault import Vault

FIRST_EVALUATION_S = 5.0
"""Time until the first evaluation: who has just come back has something better to do, as others wait for
its work."""
MOST = 0.05
"""Largest share of a learner's time that its measurements take: after one that took long it pauses for
longer, and others, who are more patient, may come before it."""
PATIENCE = 0.5
"""Share of an interval by which each rank is more patient than the one before."""
OFFICE = "evaluation"


class Turns:
    """Order in which members measure: what one of them knows of losses, and whether it is its turn."""

    def __init__(self, run: str, me: str, interval_s: float, first_s: float, term_versions: int) -> None:
        """`first_s`: earliest time of the first measurement, in seconds after our start."""
        self._run, self._me = run, me
        self._interval_s, self._term_versions = interval_s, term_versions
        self._known_s = -math.inf
        self._first_s = min(first_s, interval_s)
        self._rested_s = -math.inf
        """Time before which we do not measure again, as it took long."""
        self._began_s: float | None = None
        self.newest: wire.HeldoutLoss | None = None
        self.by = ""
        """Peer id of the member that measured the newest."""
        self.at_s = -math.inf
        """Time at which we measured or heard it."""
        self.own: wire.HeldoutLoss | None = None

    def due_s(self, now: float, number: int, learners: Sequence[str]) -> float:
        """Compute when to measure, unless a loss is heard of before. `number`: of the first fragment's
        version; `learners`: the live ones."""
        if self._began_s is None:
            self._began_s = now
            self._known_s = max(self._known_s, now - self._interval_s + self._first_s)
        first_s = self._known_s + self._interval_s
        if now < first_s:
            return first_s  # whose turn it is then may change
        order = ranking(self._run, OFFICE, 0, number // self._term_versions, {*learners, self._me})
        return max(self._rested_s, first_s + self._interval_s * PATIENCE * order.index(self._me))

    def ended(self, now: float, took_s: float | None) -> None:
        """Note that our measurement is over: not again before the next interval, whatever came of it.
        `took_s`: how long training paused for it; None: unknown."""
        self._known_s = now
        self._rested_s = now + (took_s or 0.0) * (1 / MOST - 1)

    def measured(self, heldout: wire.HeldoutLoss, now: float) -> None:
        """Take in a loss that we measured."""
        self.own = heldout
        self._take(self._me, heldout, now)

    def heard(self, peer: str, heldout: wire.HeldoutLoss, now: float) -> None:
        """Take in a loss from a peer's record; a newer state of the run counts more."""
        if self.newest is None or heldout.merges > self.newest.merges:
            self._take(peer, heldout, now)

    def _take(self, peer: str, heldout: wire.HeldoutLoss, now: float) -> None:
        self.newest, self.by, self.at_s, self._known_s = heldout, peer, now, now


class Measurements:
    """Held-out losses of the run as it is here: our own, which are news for others, and what others say."""

    def __init__(
        self,
        turns: Turns,
        vault: Vault,
        log_versions: int,
        alone: bool,
        counts: Callable[[str], bool] = lambda _peer: True,
    ) -> None:
        """`alone`: others' losses do not count here (--evaluate each). `counts`: tells whether to listen to
        a peer."""
        self.turns = turns
        self.counts = counts
        self.alone = alone
        self._vault = vault
        self._log_versions = log_versions
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        """Event that is set when we have a new loss to tell."""

    @property
    def newest(self) -> wire.HeldoutLoss | None:
        """Newest loss that we know of."""
        return self.turns.newest

    @property
    def by(self) -> str:
        """Peer id of the member that measured the newest."""
        return self.turns.by

    @property
    def at_s(self) -> float:
        """Time at which the newest was measured or heard."""
        return self.turns.at_s

    @property
    def own(self) -> wire.HeldoutLoss | None:
        """Newest loss of our own."""
        return self.turns.own

    def measured(self, loss: float, tokens: int) -> None:
        """Take in what our learner has measured."""
        if sane_loss(loss) is not None:
            self.turns.measured(wire.HeldoutLoss(self._vault.merges, loss, tokens), self._loop.time())
            self.news.set()

    def heard(self, peer: str, heldout: wire.HeldoutLoss) -> None:
        """Take in what a peer says that it has measured.

        What is far ahead of us cannot be true, or not for us: it would silence all losses to come.
        """
        most = self._vault.merges + len(self._vault.layouts) * self._log_versions
        if self.alone or heldout.merges > most or sane_loss(heldout.loss) is None:
            return
        if self.counts(peer):
            self.turns.heard(peer, heldout, self._loop.time())


class MeasuringLearner(Protocol):
    """Learner, as far as this is concerned (`daemon.learner.learner_link`)."""

    ready: asyncio.Event

    async def evaluate(self) -> float | None:
        """Let it measure the held-out loss; returns the seconds that it took, None if nothing came."""


async def evaluate_regularly(
    measurements: Measurements, learner: MeasuringLearner, core: Core, committed: asyncio.Event
) -> None:
    """Measure when it is our turn, for ever; alone or with --evaluate each it always is.

    `committed` is set with every version: the order may be another one then.
    """
    loop, turns = asyncio.get_running_loop(), measurements.turns
    while True:
        await learner.ready.wait()
        now = loop.time()
        others = [] if measurements.alone else core.shared.expected_learners(now)
        learners = [peer for peer in others if measurements.counts(peer)]
        due_s = turns.due_s(now, core.fragments[0].chain.head.number, learners)
        if now >= due_s:
            took_s = await learner.evaluate()
            turns.ended(loop.time(), took_s)
            continue
        committed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await committed.wait()
