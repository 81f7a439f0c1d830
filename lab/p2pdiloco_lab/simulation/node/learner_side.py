"""A node's daemon towards its learner: starts and restarts it, encodes its copies, tells it of versions."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Amendment, Going, in_force
from p2pdiloco.core.api.effects import RetireSlot
from p2pdiloco_lab.simulation.node.learner import Callbacks, CommittedVersion, LearnerModel
from p2pdiloco_lab.simulation.node.lineage import Displacement
from p2pdiloco_lab.simulation.node.substance import Resumed
from p2pdiloco_lab.simulation.world.disk import ResumeNote

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host

STATUS_EVERY_S = 1.0


class LearnerSide:
    """The learner of one host, over all its lives."""

    def __init__(self, host: Host, rng: random.Random, first_step: int) -> None:
        self._host = host
        self._rng = rng
        self._wanted = False
        self._paces = 0
        """Number of changes of the pace; there may be two between two reports."""
        self.amendments: tuple[Amendment, ...] = ()
        """Changes of the run by its owner, as far as this node has heard."""
        bases = [(s.version.header.digest(), s.version.header.number) for s in host.stores]
        tell = Callbacks(self._wake_at, self._copied_out, self._nothing, self._applied, self._dropped)
        steps, step_time_s = host.config.inner_steps, host.spec.step_time_s
        states = [(s.version.header.number, s.state.matter) for s in host.stores]
        trainer = host.world.substance.trainer(host.peer, states)
        at_once = host.spec.answers_at_once
        self.model = LearnerModel(host.peer, steps, step_time_s, bases, tell, trainer, at_once)
        self.model.resume_counting(first_step)

    # --- life ----------------------------------------------------------------------------------------

    def want(self) -> None:
        """The node has caught up: a learner is started, once."""
        if not self._wanted:
            self._wanted = True
            self._host.later(self._rng.uniform(0.3, 1.5), self.start)

    def start(self) -> None:
        """A learner process is ready."""
        host, model = self._host, self.model
        if not model.running:
            model.start(host.now, model.step_at(host.now), self._resumed())
            for fragment, counters in enumerate(model.fragments):
                host.world.watch.begins(host.peer, fragment, counters.life_from)
                self._applied(fragment, counters.base_number, model.step_at(host.now))
            self._tell_status()

    def _resumed(self) -> dict[int, Resumed]:
        host = self._host
        notes, host.disk.resume = host.disk.resume, {}
        found = {f: note.resumed(host.core.fragments[f].own.take_up(note.left)) for f, note in notes.items()}
        return {fragment: again for fragment, again in found.items() if again is not None}

    def hear(self, amendments: tuple[Amendment, ...]) -> None:
        """Hear what the run's owner has changed."""
        self.amendments = amendments
        self._follow_course()

    def _follow_course(self) -> None:
        """Rest or go on, as the owner wants it where this node's versions are."""
        stores = self._host.stores
        tokens = sum(store.version.header.tokens for store in stores) // len(stores)
        amendment = in_force(self.amendments, tokens)
        rests = amendment is not None and amendment.going is not Going.TRAIN
        if rests != self.model.rests:
            self._paces += 1
            self.model.rest(rests, self._host.now)

    def slow_down(self, factor: float) -> None:
        """Let a step take so many times as long, from now on, as this machine needs at best."""
        self._host.run_when_awake(self._set_pace, factor)

    def _set_pace(self, factor: float) -> None:
        # Not while it stands still: `shift` moves the clock by the whole standstill, at its end.
        self._paces += 1
        self.model.set_pace(self._host.spec.step_time_s * factor, self._host.now)

    def crash(self, back_in_s: float) -> None:
        """The learner process dies and is started again."""
        host = self._host
        if host.up and self.model.running:
            self.model.stop(host.now)
            host.run_when_awake(host.feed, ev.LearnerLost())
            host.later(back_in_s, self.start)

    def save_at_leave(self) -> None:
        """An orderly end: state and displacements are saved, for the day of return."""
        host = self._host
        if host.disk.full:
            return
        self.model.take_all_over(host.now)
        for fragment, store in enumerate(host.stores):
            host.disk.keep_checkpoint(store.checkpoint())
            counters = self.model.fragments[fragment]
            rest_from = counters.slot.end if counters.slot else counters.unmerged_from
            if self.model.running:
                saved = self.model.trainer.saved(fragment)
                left = host.core.fragments[fragment].own.unmerged()
                host.disk.resume[fragment] = ResumeNote(left, counters.unmerged_from, rest_from, *saved)

    def report(self) -> None:
        """Tell the core where the learner is, every second."""
        self._tell_status()
        self._host.later(max(STATUS_EVERY_S, self._host.config.timing.heartbeat_s), self.report)

    def _tell_status(self) -> None:
        host, model = self._host, self.model
        per_step, steps = host.config.tokens_per_step, model.step_at(host.now)
        step_s = model.step_time_s if model.running else 0.0
        no_pace = host.now if model.rests else 0.0
        life = (host.incarnation, model.life, model.running, host.thaws, self._paces, no_pace)
        host.world.watch.reports(host, steps, life)
        rate = per_step / step_s if model.running and not model.rests else 0.0
        host.feed(ev.LearnerStatus(model.running, steps, steps * per_step, rate, step_s, None))

    # --- from the core -------------------------------------------------------------------------------

    def request(self, fragment: int) -> None:
        """A closing call."""
        self.model.request(fragment, self._host.now)

    def install(self, install: CommittedVersion) -> None:
        """A version to go over to."""
        self.model.install(install, self._host.now)
        self._follow_course()

    def retire(self, effect: RetireSlot) -> None:
        """The copy will not be merged as it stands."""
        host = self._host
        copied = host.tickets.contribution(effect.ticket)
        if self.model.fragments[effect.fragment].slot == copied:
            self.model.retire(effect.fragment, host.now)
        host.tickets.free(effect.ticket)

    # --- from the learner ----------------------------------------------------------------------------

    def _wake_at(self, time_s: float) -> None:
        host = self._host
        host.world.clock.at(time_s, host.run_when_awake, lambda: self.model.wake(host.now))

    def _copied_out(self, copied: Displacement, due: bool) -> None:
        substance, delay_s = self._host.world.substance, self._rng.uniform(0.001, 0.08)
        delay_s += substance.waits_s if self._host.peer in substance.liars else 0.0
        self._host.later(delay_s, self._encoded, copied, due, self.model.life)

    def _encoded(self, copied: Displacement, due: bool, life: int) -> None:
        host, fragment = self._host, copied.fragment
        if life != self.model.life or not self.model.running:
            return
        steps, substance = copied.end - copied.first, host.world.substance
        if host.peer in substance.liars:
            told = substance.told(host.peer, fragment, copied.matter)
            copied, steps = replace(copied, matter=told.matter), max(1, round(told.work * steps))
        tokens, size = steps * host.config.tokens_per_step, host.max_payload_bytes(fragment)
        ticket = host.tickets.new(copied)
        host.feed(ev.ContributionReady(fragment, ticket, tokens, steps, copied.digest(), size, due))
        self.model.encoded(fragment, host.now)

    def _nothing(self, fragment: int) -> None:
        self._host.later(0.0, self._host.feed, ev.NothingToContribute(fragment))

    def _applied(self, fragment: int, number: int, step: int) -> None:
        self._host.later(0.0, self._host.feed, ev.LearnerApplied(fragment, number, step))

    def _dropped(self, fragment: int, first: int, end: int) -> None:
        self._host.world.watch.begins(self._host.peer, fragment, end)
        text = f"overwrites steps {first}..{end}"
        self._host.world.trace.decision(self._host.now, self._host.peer, text, fragment)
