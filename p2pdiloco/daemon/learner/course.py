"""Course of the run: how far it is, when it will be over, and whether learners make inner steps.

What counts is the chain: tokens merged into the heads, the mean over fragments. So all who hold the same
versions agree on where the run is, whatever their learners reckon meanwhile (`learner.optimizer.schedule`).

Rules: docs/protocol/learner.md, section 5.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.config import Amendment, Going, in_force, newest
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.display.snapshot import CourseRow
from p2pdiloco.daemon.display.wording import count
from p2pdiloco.errors import clean
from p2pdiloco.learner import channel as ch
from p2pdiloco.learner.optimizer import schedule_of

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


class FollowsCourse(Protocol):
    """Learner, as far as this is concerned (`daemon.learner.learner_link`)."""

    def follow(self, course: ch.FollowCourse) -> None:
        """Go by this course."""


class RunCourse:
    """Course of one run, as this node knows it."""

    def __init__(
        self,
        manifest: Manifest,
        core: Core,
        amendments: Callable[[], tuple[Amendment, ...]],
        learner: FollowsCourse,
        say: Callable[[str, int], None],
    ) -> None:
        """`amendments`: those of the run's owner. `say` hears of every change, and at how many tokens."""
        self._inner, self._stops = manifest.inner, manifest.end.learners == "stop"
        self._core, self._amendments, self._learner, self._say = core, amendments, learner, say
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
            self._learner.follow(self._told)
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
        )


_REST_WORDS: dict[ch.Rests, str] = {
    "no": "the run goes on",
    "paused": "the run's owner has paused it: this node makes no inner steps until it goes on",
    "ended": "the run has ended: this node makes no more inner steps, and gives the result to whoever asks; "
    "it can be stopped",
}


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
