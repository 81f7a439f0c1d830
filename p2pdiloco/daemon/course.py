"""Course of the run: how far it is, when it will be over, whether learners make inner steps, and its held-out
loss.

What counts for `RunCourse` is the chain: tokens merged into the heads, the mean over fragments. So all who
hold the same versions agree on where the run is, whatever their learners reckon meanwhile
(`learner.optimizer`). `LearnerCount` says how many train; `Turns` and `Measurements` are of the held-out
loss.

Rules: docs/protocol/learner.md, sections 5 and 8.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.config import Amendment, Going, in_force, newest
from p2pdiloco.core.api.events import CommitVersion
from p2pdiloco.core.base import Shared
from p2pdiloco.core.candidates import ranking
from p2pdiloco.core.node import Core
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import CourseRow, count, sane_loss
from p2pdiloco.errors import clean
from p2pdiloco.learner import channel as ch
from p2pdiloco.learner.schedule import schedule_of
from p2pdiloco.util import loop_s

if TYPE_CHECKING:
    from p2pdiloco.tensors.vault import Vault

logger = logging.getLogger(__name__)
SAMPLE_EVERY_S, SAMPLES = 10.0, 60
"""Times at which it is noted how far the run is, for its pace: of the last ten minutes."""
LEAST_PACE_S = 20.0
SETTLE_S = 5.0
"""Time without a new version after which a run that rests is taken to have merged everything."""


class Pace:
    """Pace of the run, by what was merged lately."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)

    def note(self, now: float, tokens: int) -> None:
        """Note how far the run is."""
        if self._samples and tokens < self._samples[-1][1]:
            self._samples.clear()  # another chain
        if not self._samples or now >= self._samples[-1][0] + SAMPLE_EVERY_S:
            self._samples.append((now, tokens))

    def forget(self) -> None:
        """Forget it: no inner steps are made for now."""
        self._samples.clear()

    def tokens_per_s(self, now: float, tokens: int) -> float:
        """Return the tokens merged a second; 0: not known yet."""
        if not self._samples:
            return 0.0
        since_s, before = self._samples[0]
        return (tokens - before) / (now - since_s) if now - since_s >= LEAST_PACE_S else 0.0


_REST_WORDS: dict[ch.Rests, str] = {
    "no": "the run goes on",
    "paused": "the run's owner has paused it: this node makes no inner steps until it goes on",
    "ended": "the run has ended: this node makes no more inner steps, and gives the result to whoever asks; "
    "it can be stopped",
}


@dataclass
class RunCourse:
    """Course of one run, as this node knows it."""

    _manifest: Manifest
    _core: Core
    _amendments: Callable[[], tuple[Amendment, ...]]
    """Function that lists those of the run's owner."""
    _follow: Callable[[ch.FollowCourse], None]
    """Function that has the learner go by a course."""
    _say: Callable[[str, int], None]
    """Function that hears of every change, and at how many tokens."""

    def __post_init__(self) -> None:
        manifest = self._manifest
        self._inner, self._stops = manifest.inner, manifest.end.learners == "stop"
        self._is_open = manifest.admission.mode == "open"
        self._told = ch.FollowCourse()
        self._pace = Pace()
        self._is_over = False
        self._said_message = ""
        self._in_force: Amendment | None = None
        self._coming: Amendment | None = None
        """Newest amendment, which may not hold yet."""
        self._versions, self._quiet_since_s, self._is_settled = 0, 0.0, False

    @property
    def tokens(self) -> int:
        """Tokens merged into the versions that this node holds, the mean over fragments."""
        fragments = self._core.fragments
        return sum(fragment.chain.head.tokens for fragment in fragments) // len(fragments)

    @property
    def rests(self) -> ch.Rests:
        """Reason why this node's learner makes no inner steps."""
        return self._told.rests

    def look(self, now: float) -> None:
        """Look how far the run is: tell the learner, and a person, what is different from now on."""
        tokens, amendments = self.tokens, self._amendments()
        amendment = in_force(amendments, tokens)
        over = tokens >= schedule_of(self._inner, amendment)
        going = amendment.going if amendment is not None else Going.TRAIN
        ended = going is Going.END or (over and self._stops)
        rests: ch.Rests = "ended" if ended else "paused" if going is Going.PAUSE else "no"
        self._tell(rests, tokens, amendments, amendment)
        if over and not (self._is_over or self._stops):
            self._say("the schedule is over; the run goes on at the floor of the learning rate", tokens)
        self._is_over = over
        if rests == "no":
            self._pace.note(now, tokens)
        else:
            self._pace.forget()
        versions = sum(fragment.chain.head.number for fragment in self._core.fragments)
        if rests == "no" or versions != self._versions:
            self._versions, self._quiet_since_s, self._is_settled = versions, now, False

    def _tell(
        self,
        rests: ch.Rests,
        tokens: int,
        amendments: tuple[Amendment, ...],
        amendment: Amendment | None,
    ) -> None:
        last = newest(amendments)
        message = last.message if last is not None else ""
        if message and message != self._said_message:
            self._say(f"message of the run's owner: {clean(message)}", tokens)
        self._said_message = message
        if amendment is not None and amendment != self._in_force:
            self._say(words_of(amendment), tokens)
        elif last is not None and last.from_tokens > tokens and last != self._coming:
            self._say(words_of(last), tokens)
        self._in_force, self._coming = amendment, last
        before, self._told = self._told, ch.FollowCourse(amendments, rests)
        if self._told != before:
            self._follow(self._told)
        if rests != before.rests:
            self._say(_REST_WORDS[rests], tokens)

    def settles(self, now: float) -> bool:
        """Tell, once, that no inner steps are made any more and that what was made is merged."""
        if self.rests == "no" or self._is_settled or now < self._quiet_since_s + SETTLE_S:
            return False
        self._is_settled = True
        return True

    def row(self, now: float) -> CourseRow:
        """Make the row for reports."""
        tokens, amendments = self.tokens, self._amendments()
        last = newest(amendments) or Amendment(1, 0)
        schedule = schedule_of(self._inner, in_force(amendments, tokens))
        rate = self._pace.tokens_per_s(now, tokens)
        return CourseRow(
            tokens=tokens,
            schedule_tokens=schedule,
            left_s=max(0, schedule - tokens) / rate if rate > 0 else None,
            rests=self.rests,
            amendment=last.number if amendments else 0,
            amendment_from_tokens=last.from_tokens,
            amendment_schedule_tokens=last.schedule_tokens,
            amendment_rate_factor=last.rate_factor,
            amendment_going=last.going,
            rate_factor=self._in_force.rate_factor if self._in_force is not None else 1.0,
            message=last.message,
            seats=min(len(f.context.roster.seats) for f in self._core.fragments) if self._is_open else None,
            absent=max(len(f.chain.absent) for f in self._core.fragments),
        )


def words_of(amendment: Amendment) -> str:
    """Word an amendment for people."""
    words = [
        f"amendment {amendment.number} of the run's owner holds from {count(amendment.from_tokens)} tokens on"
    ]
    if amendment.schedule_tokens:
        words.append(f"a schedule of {count(amendment.schedule_tokens)} tokens")
    if amendment.rate_factor != 1:
        words.append(f"the learning rate times {amendment.rate_factor:g}")
    if amendment.going is not Going.TRAIN:
        words.append(f"learners {amendment.going.value}")
    return ", ".join(words)


class LearnerCount:
    """Number of learners that train in the run, as versions and the swarm show it: a learner reckons by it.
    Those without a seat count as far as a version counts their work (docs/protocol/seats.md, section 4):
    identities are free, and heartbeats are their word.

    Told a second late, a whole swarm's first steps were a fourth as long as they should be, and the next ones
    four times as long: a run of 700 steps ended 1 to 4 % worse.
    """

    def __init__(self, swarm: Shared) -> None:
        self._swarm = swarm
        self._merged = self._seats_merged = 0
        """Contributors of the version made last, all and those with a seat: in a run of many groups we hear
        of our neighbours only."""

    def committed(self, effect: CommitVersion) -> None:
        """Take in a version that is being committed."""
        parts = effect.version.header.contributors
        self._merged, self._seats_merged = len(parts), sum(part.votes for part in parts)

    def at(self, now: float) -> int:
        """Count the learners, ours included."""
        training, seats = self._swarm.training(now)
        most = round(max(seats, self._seats_merged) * (1 + self._swarm.config.open_share))
        return max(1, min(most, max(training, self._merged)))


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
    """Order in which members measure the global parameters: one at a time does, and all hear of the held-out
    loss.

    For so many versions as a term has, rendezvous hashing over the live learners names an order, without a
    word exchanged. The first measures when the newest loss that it knows of is older than the interval. Each
    later one is half an interval more patient, so somebody does when the first is gone or cannot. Losses
    travel in presence records. In that order, and heard, are only those that have a mark (in runs by invite
    or list: are admitted). A member knows the learners of its own neighbourhood: a run of more than
    `group.size` members has one measurement per interval and neighbourhood, not one in all.
    """

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


@dataclass
class Measurements:
    """Held-out losses of the run as it is here: our own, which are news for others, and what others say."""

    turns: Turns
    _vault: Vault
    _log_versions: int
    alone: bool
    """True: others' losses do not count here (--evaluate each)."""
    counts: Callable[[str], bool] = lambda _peer: True
    """Function that tells whether to listen to a peer."""

    def __post_init__(self) -> None:
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
            self.turns.measured(wire.HeldoutLoss(self._vault.merges, loss, tokens), loop_s())
            self.news.set()

    def heard(self, peer: str, heldout: wire.HeldoutLoss) -> None:
        """Take in what a peer says that it has measured.

        What is far ahead of us cannot be true, or not for us: it would silence all losses to come.
        """
        most = self._vault.merges + len(self._vault.layouts) * self._log_versions
        if self.alone or heldout.merges > most or sane_loss(heldout.loss) is None:
            return
        if self.counts(peer):
            self.turns.heard(peer, heldout, loop_s())


async def evaluate_regularly(
    measurements: Measurements,
    ready: asyncio.Event,
    evaluate: Callable[[], Awaitable[float | None]],
    core: Core,
    committed: asyncio.Event,
) -> None:
    """Measure when it is our turn, for ever; alone or with --evaluate each it always is.

    `ready` is set while the learner makes inner steps; `evaluate` has it measure the held-out loss, and
    returns the seconds that it took, None if nothing came. `committed` is set with every version: the order
    may be another one then.
    """
    turns = measurements.turns
    while True:
        await ready.wait()
        now = loop_s()
        others = [] if measurements.alone else core.shared.expected_learners(now)
        learners = [peer for peer in others if measurements.counts(peer)]
        due_s = turns.due_s(now, core.fragments[0].chain.head.number, learners)
        if now >= due_s:
            took_s = await evaluate()
            turns.ended(loop_s(), took_s)
            continue
        committed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await committed.wait()
