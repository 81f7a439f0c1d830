"""One run of one node: the production core, and a simulated daemon that carries its effects out.

`LearnerSide` is the daemon towards its learner: it starts and restarts it, encodes its copies, tells it of
versions. `DiskWriter` makes durable writes: one at a time, in order, lost or half done when the node is
killed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Amendment, Going, in_force
from p2pdiloco.core.api.events import Persist, RetireSlot, UpdateRecord, VoteRecord
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.types import ContributionHeader, Reach
from p2pdiloco.core.capacity import LEAST_BYTES, TELL_EVERY_S, Meter, UplinkMeter
from p2pdiloco.core.chain import founding
from p2pdiloco.core.contributions import LEFT_OUT
from p2pdiloco.core.node import Core
from p2pdiloco.errors import InvariantViolation
from p2pdiloco_lab.simulation.lineage import Displacement, HashCrypto, PartialSum, Resumed
from p2pdiloco_lab.simulation.seed_plan import NodeSpec, random_stream
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_disk import Checkpoint, Disk, ResumeNote, Store, restored_from
from p2pdiloco_lab.simulation.sim_network import Answer
from p2pdiloco_lab.simulation.sim_worker import (
    Callbacks,
    CommittedVersion,
    LearnerModel,
    TicketBuffers,
    Worker,
)

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_world import World

MAX_TICKS_AT_ONCE = 200
"""Ticks that a core may ask for within `SPIN_WINDOW_S`."""
SPIN_WINDOW_S = 0.1
TIMER_S = 1e-6
"""Timers are not finer than this; clocks with an offset round differently."""


def _unchanged(_peer: str, message: Message) -> Message | None:
    return message


class Host:
    """A node from start to stop or crash. A restart is a new `Host` with the same disk and a higher
    incarnation."""

    def __init__(
        self, world: World, spec: NodeSpec, disk: Disk, incarnation: int, first_step: int, genesis: bool
    ) -> None:
        self.world, self.spec, self.disk = world, spec, disk
        self.peer, self.incarnation = spec.peer, incarnation
        self.up, self.frozen, self.leaving = True, False, False
        self.config = world.plan.config
        self.tickets = TicketBuffers(self.peer, self.config.fragments, self.config.group_size)
        self.liar = world.perjurers.get(self.peer)
        self.outgoing: Callable[[str, Message], Message | None] = self.liar.says if self.liar else _unchanged
        """Every control message passes through it: a liar could change or swallow what its core says."""
        self.returns_in_s: float | None = None
        """Set while leaving: it comes back after so long."""
        self.confirmed_at_s = math.inf
        """Virtual time since which this life of the node is a full member."""
        self.thaws = 0
        """Number of times that the node stood still and went on."""
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tick_at_s = math.inf
        self._ticks: tuple[float, int] = (0.0, 0)
        count, substance = self.config.fragments, world.substance
        found = [disk.restore(f, self._genesis(f), substance) for f in range(count)]
        self.stores = [Store(c.version, c.state, c.watermarks, c.log) for c in found]
        for store in self.stores:
            world.watch.restored(store.version, store.state)
        rng = random_stream(world.plan.seed, f"host/{self.peer}/{incarnation}")
        self.learner = LearnerSide(self, rng, first_step)
        self.writer = DiskWriter(self, rng)
        self.worker = Worker(self, rng)
        restored = restored_from(disk, found, self.config)
        crypto, rng = HashCrypto(self.peer), random_stream(world.plan.seed, f"core/{self.peer}/{incarnation}")
        self.core = Core(self.config, self.peer, incarnation, crypto, rng, restored, genesis, self.local_now)
        sent = partial(world.network.sent_bytes, self.peer)
        least_bytes = min(LEAST_BYTES, max(self.config.max_payload_bytes) // 2)
        self.uplink = UplinkMeter(
            lambda: Meter(sent, lambda: self.local_now, least_bytes=least_bytes), disk.uplink_bits_per_s
        )
        self._asked: set[int] = set()
        """Tokens of what is not answered yet."""
        self._cut: set[int] = set()
        """Tokens of fetches that were cut short, and whose real answer is still to come."""
        self._handlers, self._answers = self._effect_handlers(), self._answering()

    def _effect_handlers(self) -> dict[type[ev.Effect], Callable[[Any], None]]:
        bulk = self.world.bulk
        return {
            ev.Send: self._send,
            ev.RequestFragment: lambda e: self.learner.request(e.fragment),
            ev.DiscardContribution: lambda e: self.tickets.free(e.ticket),
            ev.Spill: lambda e: self.tickets.spill(e.ticket),
            ev.RetireSlot: self.learner.retire,
            ev.AcceptTransfer: lambda e: bulk.accept(e.transfer),
            ev.AnswerTransfer: self._answer,
            ev.Release: lambda e: self.tickets.free(e.ticket),
            ev.DropSpare: lambda e: self.stores[e.fragment].drop_spare(),
            ev.CommitVersion: self.worker.commit,
            ev.KeepProofs: lambda e: self.disk.keep_proofs(e.proofs),
            ev.CastOut: self._cast_out,
            ev.Record: self._record,
            ev.CutShort: lambda e: self.later(0.0, self._cut_short, e.token),
            ev.Confirmed: self._confirmed,
            ev.Left: lambda e: self.world.later_left(self),
        }

    def _answering(self) -> dict[type, Callable[[Any, Answer], None]]:
        worker = self.worker
        return {
            ev.Persist: self.writer.persist,
            ev.Offer: self._offer,
            ev.Combine: worker.combine,
            ev.Merge: worker.merge,
            ev.MergePartial: worker.merge_partial,
            ev.FetchUpdate: lambda e, answer: self.world.bulk.fetch(self, e, answer),
            ev.FetchState: worker.fetch_state,
            ev.ApplyUpdate: worker.apply_update,
            ev.Audit: worker.audit,
            ev.LossAudit: worker.loss_audit,
            ev.TryStates: worker.try_states,
        }

    def _genesis(self, fragment: int) -> Checkpoint:
        table = founding(self.config.seats).table
        return Checkpoint(self.config.genesis_versions[fragment], self.world.genesis[fragment], table, {})

    def start(self) -> None:
        """The daemon is up."""
        self.learner.report()
        self.look_outside()
        self._look_at_uplink()
        self._plan_tick()

    def look_outside(self) -> None:
        """Tell the core whether others can dial it, if that is new."""
        reach = Reach.OUTBOUND if self.peer in self.world.network.hidden else Reach.DIRECT
        if reach is not self.core.shared.reach:
            self.feed(ev.ReachChanged(reach))

    def _look_at_uplink(self) -> None:
        """Tell the core what its transfers achieved, if that is new."""
        rate = self.uplink.bits_per_s
        if rate != self.core.shared.uplink.bits_per_s:
            self.disk.uplink_bits_per_s = rate
            self.feed(ev.UplinkMeasured(rate))
        self.later(TELL_EVERY_S, self._look_at_uplink)

    def crash(self) -> None:
        """kill -9: memory is gone."""
        self.learner.model.stop(self.now)
        self.up = False
        self.writer.killed()

    # --- time ----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time."""
        return self.world.clock.now

    @property
    def local_now(self) -> float:
        """Time that this machine's monotonic clock shows, in seconds."""
        return self.spec.local_s(self.world.clock.now)

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something of this node's own; not after its crash, and not while it is frozen."""
        self.world.clock.after(delay_s, self.run_when_awake, action, *args)

    def run_when_awake(self, action: Callable[..., None], *args: Any) -> None:
        """Now, or when the node thaws."""
        if not self.up:
            return
        if self.frozen:
            if self.peer not in self.world.broken:
                self._backlog.append((action, args))
        else:
            action(*args)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self, after_s: float) -> None:
        """SIGCONT: everything that waited happens now, in order."""
        if not self.up or not self.frozen or self.peer in self.world.broken:
            return
        self.frozen = False
        self.thaws += 1
        self.learner.model.shift(after_s)
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run_when_awake(action, *args)

    # --- the core ------------------------------------------------------------------------------------

    @property
    def may_serve(self) -> bool:
        """Tell whether the node is a full member."""
        return self.core.confirmed

    def max_payload_bytes(self, fragment: int) -> int:
        """Size of a contribution or update."""
        return self.config.max_payload_bytes[fragment]

    def receive(self, sender: str, message: Message) -> None:
        """A control message is here."""
        self.run_when_awake(self.feed, ev.MessageReceived(sender, message))

    def send_failed(self, peer: str) -> None:
        """A control message was not delivered."""
        self.run_when_awake(self.feed, ev.SendFailed(peer))

    def feed(self, event: ev.Event) -> None:
        """Let the core handle an event and carry out what it wants."""
        world = self.world
        world.trace.event(world.clock.now, self.peer, event)
        try:
            effects = self.core.handle(event, self.local_now)
        except InvariantViolation as error:
            raise Violation("core-invariant", f"{self.peer} on {type(event).__name__}: {error}") from error
        for effect in effects:
            self.carry_out(effect)
        if self.may_serve:
            self.learner.want()
        # Half of all events are heartbeats that change nothing. A deadline that one does bring forward is
        # found at our own next heartbeat, within `heartbeat_s`; a fifth of the running time is saved.
        if effects or not (type(event) is ev.MessageReceived and type(event.message) is Progress):
            self._plan_tick()

    def carry_out(self, effect: ev.Effect) -> None:
        """One effect."""
        if isinstance(effect, ev.Ask):
            self._asked.add(effect.token)
            answered = partial(self._answered, effect.token)
            self._observed(effect.effect)
            self._answers[type(effect.effect)](effect.effect, answered)
        else:
            self._observed(effect)
            self._handlers[type(effect)](effect)

    def _answered(self, token: int, answer: Struct | None) -> None:
        if token in self._cut:
            self._cut.discard(token)
            if isinstance(answer, ev.UpdateFetched):
                self.tickets.free(answer.ticket)
            return
        self._asked.discard(token)
        self.feed(ev.Answered(token, answer))

    def _cut_short(self, token: int) -> None:
        if token in self._asked:
            self._answered(token, ev.FetchFailed(FetchFailure.SLOW))
            self._cut.add(token)

    def _observed(self, effect: ev.Effect) -> None:
        if self.world.trace.verbose:
            self.world.trace.effect(self.now, self.peer, effect)
        if self.world.faults.trap is not None:
            self.world.faults.spring(self, effect)
        if self.liar is not None:
            self.liar.sees(self, effect)
        if self.world.on_effect is not None:
            self.world.on_effect(self, effect)

    def _plan_tick(self) -> None:
        at_s = max(self.spec.virtual_s(self.core.next_deadline()), self.now + TIMER_S)
        if at_s < self._tick_at_s:
            self._tick_at_s = at_s
            self.world.clock.at(at_s, self.run_when_awake, self._tick, at_s)

    def _tick(self, planned_s: float) -> None:
        if planned_s != self._tick_at_s:
            return
        self._tick_at_s = math.inf
        since_s, count = self._ticks
        self._ticks = (since_s, count + 1) if self.now - since_s < SPIN_WINDOW_S else (self.now, 1)
        if self._ticks[1] > MAX_TICKS_AT_ONCE:
            raise Violation("no-spinning", f"{self.peer} asks for a tick again and again at {self.now:.3f}")
        self.feed(ev.Tick())

    def _send(self, effect: ev.Send) -> None:
        message = self.outgoing(effect.peer, effect.message)
        if message is not None:
            self.world.watch.sent(self, message)
            self.world.network.send(self, effect.peer, message)

    def _cast_out(self, effect: ev.CastOut) -> None:
        """Go on, if this is a liar: there is a proof against it."""
        if self.liar is None:
            raise Violation("only-liars", f"{self.peer} is to end, and never lied: {effect.words}")

    def _confirmed(self, _effect: ev.Confirmed) -> None:
        self.confirmed_at_s = self.now

    def _record(self, effect: ev.Record) -> None:
        self.world.records[effect.kind] = self.world.records.get(effect.kind, 0) + 1
        text = f"{effect.kind}: {effect.reason}"
        self.world.trace.decision(self.now, self.peer, text, effect.fragment, effect.fields)
        if effect.kind == "excluded" and self.liar is None:
            self.world.exclusion.excluded(self, str(dict(effect.fields)["peer"]))
        if effect.kind == "suspicion" and effect.reason == LEFT_OUT:
            self.world.exclusion.said_to_leave_out(self, str(dict(effect.fields)["syncer"]))

    # --- contributions -------------------------------------------------------------------------------

    def _offer(self, effect: ev.Offer, answer: Answer) -> None:
        header = effect.signed.header
        content: Displacement | PartialSum
        if isinstance(header, ContributionHeader):
            content = self.tickets.contribution(effect.ticket)
            self.world.watch.offered(self, header, content, self.config.tokens_per_step)
        else:
            content = self.tickets.partial(effect.ticket)
        self.uplink.own.begin()

        def ended(how: Struct | None) -> None:
            self.uplink.own.end()
            answer(how)

        self.world.bulk.offer(self, effect, content, ended)

    def _answer(self, effect: ev.AnswerTransfer) -> None:
        head = self.stores[effect.fragment].version.header.head()
        self.world.bulk.answer(effect.transfer, effect.verdict, head)


# Towards the learner.

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
                displacement, rest = self.model.trainer.saved(fragment)
                left = host.core.fragments[fragment].own.unmerged()
                host.disk.resume[fragment] = ResumeNote(
                    left, counters.unmerged_from, rest_from, displacement, rest
                )

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
        liar = self._host.liar
        if liar is not None and not liar.works_on(copied.fragment):
            self._host.later(0.0, self._keeps_to_itself, copied.fragment)
            return
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

    def _keeps_to_itself(self, fragment: int) -> None:
        """Forget a copy, and pass."""
        self.model.encoded(fragment, self._host.now)
        self.model.retire(fragment, self._host.now)
        self._nothing(fragment)

    def _nothing(self, fragment: int) -> None:
        self._host.later(0.0, self._host.feed, ev.NothingToContribute(fragment))

    def _applied(self, fragment: int, number: int, step: int) -> None:
        self._host.later(0.0, self._host.feed, ev.LearnerApplied(fragment, number, step))

    def _dropped(self, fragment: int, first: int, end: int) -> None:
        self._host.world.watch.begins(self._host.peer, fragment, end)
        text = f"overwrites steps {first}..{end}"
        self._host.world.trace.decision(self._host.now, self._host.peer, text, fragment)


# Durable writes.


class DiskWriter:
    """The queue before a node's disk. A continuation happens after its record is durable, never before."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._disk = host.disk
        self._rng = rng
        self._queue: list[tuple[Persist, Answer] | Checkpoint] = []

    def persist(self, effect: Persist, answer: Answer) -> None:
        """A record that the core wants to be durable."""
        if isinstance(effect.record, UpdateRecord):
            self._host.tickets.update(effect.record.ticket)
        elif effect.then:  # else it is one that is only tried again: nobody hears of it
            self._host.world.watch.votes_for(self._host, effect.record)
        self.write((effect, answer))

    def write(self, job: tuple[Persist, Answer] | Checkpoint) -> None:
        """One more write."""
        self._queue.append(job)
        if len(self._queue) == 1:
            self._next()

    def _next(self) -> None:
        """Begin the next write; it takes as long as the disk is slow at its turn."""
        factor = 3.0 if isinstance(self._queue[0], Checkpoint) else 1.0
        time_s = self._disk.write_s * self._disk.slow_factor * self._rng.uniform(0.5, 2.0) * factor
        self._host.later(time_s, self._written)

    def _written(self) -> None:
        job = self._queue.pop(0)
        if self._queue:
            self._next()
        if isinstance(job, Checkpoint):
            self._keep(job)
            return
        effect, answer = job
        if self._disk.full:
            answer(ev.Undone("disk full"))
            return
        self._keep(effect)
        for following in effect.then:
            self._host.carry_out(following)
        answer(None)

    def killed(self) -> None:
        """Keep some of the writes under way, in order: the disk got those before the node died. Nobody goes
        on with them."""
        for job in self._queue[: self._rng.randint(0, len(self._queue))]:
            self._keep(job if isinstance(job, Checkpoint) else job[0])

    def _keep(self, job: Persist | Checkpoint) -> None:
        if self._disk.full:
            return
        if isinstance(job, Checkpoint):
            self._disk.keep_checkpoint(job)
        elif isinstance(job.record, VoteRecord):
            self._disk.keep_vote(job.record)
        else:
            update = self._host.tickets.update(job.record.ticket)
            self._host.world.watch.makes(job.record.version.header)
            self._host.world.exclusion.makes(self._host, job.record.version)
            self._disk.keep_update(job.record.version, update, self._host.config.log_versions)
