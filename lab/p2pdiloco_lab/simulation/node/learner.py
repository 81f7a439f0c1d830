"""A simulated learner: inner steps at its own pace, and the counters and slots of every fragment.

Steps are never simulated one by one: their number follows from the clock, and the learner wakes only at
those step boundaries at which something is due, so nothing that the network does can slow it down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdiloco.core.api.versions import Stride
from p2pdiloco_lab.simulation.node.lineage import Displacement
from p2pdiloco_lab.simulation.node.substance import Mode, Resumed, Trainer

TINY_S = 1e-7
"""Tolerance when a time is turned into a step number."""


@dataclass(slots=True)
class CommittedVersion:
    """A version that the daemon has committed and that the learner takes over at its next boundary."""

    fragment: int
    number: int
    digest: bytes
    merged: Displacement | None
    overwrite: bool
    state: bytes = b""
    """Matter of the version's state (`substance`)."""


@dataclass(slots=True)
class LearnerFragment:
    """State of the learner about one fragment."""

    base: bytes
    base_number: int
    unmerged_from: int
    """First inner step that no merged contribution of this learner carries."""
    due_step: int
    stride: Stride
    life_from: int = 0
    """Value of `unmerged_from` when the present process began."""
    slot: Displacement | None = None
    encoding: bool = False
    """The slot's copy is being encoded: its base may not move under it."""
    asked: bool = False
    freed: bool = False
    """The slot, since the last boundary at which something was done."""
    installs: list[CommittedVersion] = field(default_factory=list)

    def portion(self, step: int) -> int:
        """Compute how many inner steps the next copy carries; 0: there is nothing to copy."""
        return self.stride.carried(max(0, step - self.unmerged_from), step)


@dataclass(slots=True)
class Callbacks:
    """Ways of the learner to its daemon and to the clock."""

    wake_at: Callable[[float], None]
    """Call `LearnerModel.wake` at this virtual time."""
    copied_out: Callable[[Displacement, bool], None]
    nothing: Callable[[int], None]
    applied: Callable[[int, int, int], None]
    """(fragment, number, inner step)."""
    dropped: Callable[[int, int, int], None]
    """(fragment, first, end): an overwrite dropped these unmerged steps."""


class LearnerModel:
    """The learner of one node. `step_time_s` is fixed; freezes shift its clock, crashes end a life."""

    def __init__(
        self,
        peer: str,
        inner_steps: int,
        step_time_s: float,
        bases: list[tuple[bytes, int]],
        tell: Callbacks,
        trainer: Trainer | None = None,
        at_once: bool = True,
    ) -> None:
        """`at_once`: it answers closing calls within an inner step."""
        self.peer = peer
        self._at_once = at_once
        self.running = self.rests = False
        self.life = 0
        self.step_time_s = step_time_s
        self._inner_steps = inner_steps
        self._tell = tell
        self.trainer = trainer or Trainer()
        self._started_s = 0.0
        self._first_step = 0
        self._wake_s = math.inf
        self.fragments = [
            LearnerFragment(digest, number, 0, 0, Stride(inner_steps)) for digest, number in bases
        ]

    def resume_counting(self, first_step: int) -> None:
        """Earlier processes of this node made so many steps; ours get other numbers."""
        self._first_step = first_step

    # --- pace ----------------------------------------------------------------------------------------

    def step_at(self, now: float) -> int:
        """Number of inner steps that this learner has ever made."""
        if not self.running or self.rests:
            return self._first_step
        return self._first_step + math.floor((now - self._started_s) / self.step_time_s + TINY_S)

    def _time_of(self, step: int) -> float:
        return self._started_s + (step - self._first_step) * self.step_time_s

    def start(self, now: float, first_step: int, resumed: dict[int, Resumed] | None = None) -> None:
        """A new life: parameters are the daemon's, earlier unmerged steps are gone, unless `resumed` says
        (by fragment) that they were saved with the parameters."""
        again = resumed or {}
        self.running = True
        self.life += 1
        self._started_s, self._first_step = now, first_step
        count = len(self.fragments)
        for index, counters in enumerate(self.fragments):
            for install in counters.installs:
                counters.base, counters.base_number = install.digest, install.number
                self.trainer.install(index, install.number, install.state, "rebase")
            counters.installs.clear()
            counters.asked = counters.encoding = counters.freed = False
            counters.slot = None
            counters.stride = Stride(self._inner_steps, first_step)
            counters.unmerged_from = counters.life_from = again.get(index, (first_step, b""))[0]
            counters.due_step = first_step + max(1, (index + 1) * self._inner_steps // count)
        self.trainer.begin(first_step, again)
        self.plan(now)

    def stop(self, now: float) -> None:
        """The process died; copies that were not yet encoded are gone with it."""
        self._first_step = self.step_at(now)
        self.running = False
        self.trainer.end()
        self._wake_s = math.inf

    def set_pace(self, step_time_s: float, now: float) -> None:
        """Make a step take so long, from the last step boundary on."""
        if self.running:
            step = self.step_at(now)
            self._started_s, self._first_step = self._time_of(step), step
        self.step_time_s = step_time_s
        self._wake_s = math.inf
        self.plan(now)

    def rest(self, rests: bool, now: float) -> None:
        """Make no inner steps from now on, and copy out what is in no contribution; or go on."""
        if self.running:
            self._started_s, self._first_step = now, self.step_at(now)
        self.rests = rests
        self._wake_s = math.inf
        self.plan(now)

    def shift(self, by_s: float) -> None:
        """The process stood still for so long."""
        self._started_s += by_s

    # --- what the daemon asks ------------------------------------------------------------------------

    def request(self, fragment: int, now: float) -> None:
        """Copy the fragment out: now, or at the next boundary."""
        counters = self.fragments[fragment]
        if self._at_once and self.running and not (counters.installs or counters.freed):
            step = self.step_at(now)
            self.trainer.advance(step)
            if self._answer(fragment, step):
                counters.due_step += 1  # the step under way is none of the H
        else:
            counters.asked = True
        self.plan(now)

    def install(self, install: CommittedVersion, now: float) -> None:
        """Take a version over at the next boundary; without a learner, at once."""
        counters = self.fragments[install.fragment]
        counters.installs.append(install)
        if self.running and install.merged is not None and counters.slot == install.merged:
            self.trainer.committed(install.fragment)
        if not self.running:
            self._take_over(counters, now)
        self.plan(now)

    def retire(self, fragment: int, now: float) -> None:
        """The slot's copy will not be merged as it stands."""
        counters = self.fragments[fragment]
        if self.running:
            step = self.step_at(now)
            self.trainer.advance(step)
            if counters.slot is not None:
                counters.stride.given_up(step)
        counters.slot, counters.freed = None, True
        self.trainer.retire(fragment)
        self.plan(now)

    def encoded(self, fragment: int, now: float) -> None:
        """The slot's copy has been encoded."""
        self.fragments[fragment].encoding = False
        if not self.running:
            self._take_over(self.fragments[fragment], now)
        self.plan(now)

    def take_all_over(self, now: float) -> None:
        """Asked to end: every version that was handed over is taken over before anything is saved."""
        for counters in self.fragments:
            counters.encoding = False
            self._take_over(counters, now)

    # --- boundaries ----------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Be woken at the next boundary at which something is to be done."""
        if not self.running:
            return
        if self.rests:
            self._plan_at_rest(now)
            return
        following = self.step_at(now) + 1
        step = None
        for counters in self.fragments:
            if counters.asked or (counters.installs and not counters.encoding):
                step = following
                break
            if counters.slot is None:
                due = max(counters.due_step, following)
                step = due if step is None else min(step, due)
        if step is None:
            return
        time_s = self._time_of(step)
        if time_s < self._wake_s - TINY_S:
            self._wake_s = time_s
            self._tell.wake_at(time_s)

    def _plan_at_rest(self, now: float) -> None:
        step = self.step_at(now)
        for counters in self.fragments:
            takes_over = counters.installs and not counters.encoding
            if counters.asked or takes_over or (counters.slot is None and counters.portion(step)):
                self._wake_s = now
                self._tell.wake_at(now)
                return

    def wake(self, now: float) -> None:
        """A step boundary: installs first, then what was asked for or is due."""
        if not self.running or now < self._wake_s - TINY_S:
            return
        self._wake_s = math.inf
        step = self.step_at(now)
        self.trainer.advance(step)
        for index, counters in enumerate(self.fragments):
            self._take_over(counters, now)
            asked, counters.asked = counters.asked, False
            counters.freed = False
            due = self.rests or step >= counters.due_step
            if asked or due:
                self._answer(index, step, asked, due)
        self.plan(now)

    def _answer(self, fragment: int, step: int, asked: bool = True, due: bool = False) -> bool:
        """Copy a fragment out as it is at this step, if there is anything to copy and room for it."""
        counters = self.fragments[fragment]
        if counters.slot is None and (steps := counters.portion(step)):
            first = counters.unmerged_from
            end = first + steps
            matter = self.trainer.copy_out(fragment, end - first)
            counters.slot = Displacement(fragment, self.peer, first, end, counters.base, matter=matter)
            counters.encoding = True
            counters.due_step = step + self._inner_steps
            self._tell.copied_out(counters.slot, due)
            return True
        if asked and not counters.encoding:  # else the copy that is being encoded is the answer
            self._tell.nothing(fragment)
        return False

    def _take_over(self, counters: LearnerFragment, now: float) -> None:
        if counters.encoding:
            return
        step = self.step_at(now)
        if self.running:
            self.trainer.advance(step)
        for install in counters.installs:
            counters.base, counters.base_number = install.digest, install.number
            mine = install.merged is not None and counters.slot == install.merged
            mode: Mode = "overwrite" if install.overwrite else "merged" if mine else "rebase"
            self.trainer.install(install.fragment, install.number, install.state, mode)
            if install.merged is not None:
                counters.unmerged_from = max(counters.unmerged_from, install.merged.end)
                if mine:
                    counters.slot = None
                    counters.stride.merged(install.merged.end - install.merged.first, step)
            elif install.overwrite:
                if counters.unmerged_from < step:
                    self._tell.dropped(install.fragment, counters.unmerged_from, step)
                counters.unmerged_from = step
            counters.due_step = max(step + 1, step + self._inner_steps)
            self._tell.applied(install.fragment, install.number, step)
        counters.installs.clear()
