"""One run of one node: the production core, and a simulated daemon that carries its effects out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2pdiloco.core import effects as fx
from p2pdiloco.core import events as ev
from p2pdiloco.core.messages import Message
from p2pdiloco.core.node import Core
from p2pdiloco.core.types import Head, SignedVersion, Watermark
from p2pdiloco.errors import InvariantViolation
from p2pdiloco.simulation.crypto import HashCrypto
from p2pdiloco.simulation.disk import Checkpoint, Disk, ResumeNote, restored_from
from p2pdiloco.simulation.invariants import Violation
from p2pdiloco.simulation.learner import Callbacks, Install, LearnerModel
from p2pdiloco.simulation.lineage import Displacement, FragmentState, MergedPart, OuterUpdate, genesis_state
from p2pdiloco.simulation.plan import NodeSpec, stream
from p2pdiloco.simulation.stores import Store

if TYPE_CHECKING:
    from p2pdiloco.simulation.world import World

STATUS_EVERY_S = 1.0
MAX_TICKS_AT_ONCE = 200
"""In one `SPIN_WINDOW_S`."""
SPIN_WINDOW_S = 0.1
TIMER_S = 1e-6
"""Timers are not finer than this; clocks with an offset round differently."""


class Host:
    """From start to stop or crash. A restart is a new `Host` with the same disk and a higher incarnation."""

    def __init__(
        self, world: World, spec: NodeSpec, disk: Disk, incarnation: int, first_step: int, genesis: bool
    ) -> None:
        self.world, self.spec, self.disk = world, spec, disk
        self.peer, self.incarnation = spec.peer, incarnation
        self.up, self.frozen, self.leaving = True, False, False
        self.config = world.plan.config
        self.tickets: dict[int, Displacement | OuterUpdate] = {}
        self._rng = stream(world.plan.seed, f"host/{self.peer}/{incarnation}")
        self.returns_in_s: float | None = None
        """Set while leaving: it comes back after so long."""
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tickets_made = 0
        self._writing: list[fx.Persist | Checkpoint] = []
        self._tick_at_s = math.inf
        self._ticks: tuple[float, int] = (0.0, 0)
        found = [disk.restore(f, self._genesis(f)) for f in range(self.config.fragments)]
        self.stores = [Store(c.version, c.state, c.watermarks, c.log) for c in found]
        for store in self.stores:
            world.watch.restored(store.version, store.state)
        bases = [(s.version.header.digest(), s.version.header.number) for s in self.stores]
        tell = Callbacks(self._wake_at, self._copied_out, self._nothing, self._applied, self._dropped)
        self.learner = LearnerModel(self.peer, self.config.inner_steps, spec.step_time_s, bases, tell)
        self.learner.resume_counting(first_step)
        self._learner_wanted = False
        restored = restored_from(disk, found, self.config)
        crypto, rng = HashCrypto(self.peer), stream(world.plan.seed, f"core/{self.peer}/{incarnation}")
        self.core = Core(self.config, self.peer, incarnation, crypto, rng, restored, genesis, self.local_now)
        self._handlers: dict[type[fx.Effect], Callable[[Any], None]] = {
            fx.Send: self._send,
            fx.Persist: self._persist,
            fx.RequestFragment: lambda e: self.learner.request(e.fragment, self.now),
            fx.OfferContribution: self._offer,
            fx.DiscardContribution: lambda e: self._free(e.ticket),
            fx.RetireSlot: self._retire,
            fx.AcceptTransfer: lambda e: world.bulk.accept(e.transfer),
            fx.RefuseTransfer: lambda e: self._answer(e, accepted=False),
            fx.AnswerTransfer: lambda e: self._answer(e, accepted=e.accepted),
            fx.Release: lambda e: self._free(e.ticket),
            fx.Merge: self._merge,
            fx.FetchUpdate: lambda e: world.bulk.fetch_update(self, e),
            fx.FetchState: self._fetch_state,
            fx.ApplyUpdate: self._apply_update,
            fx.DropSpare: lambda e: self.stores[e.fragment].drop_spare(),
            fx.CommitVersion: self._commit,
            fx.Record: self._record,
            fx.Left: lambda e: world.later_left(self),
        }

    def _genesis(self, fragment: int) -> Checkpoint:
        return Checkpoint(self.config.genesis_versions[fragment], genesis_state(fragment), (), {})

    def start(self) -> None:
        """The daemon is up."""
        self._status()
        self._plan_tick()

    # --- time ----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time."""
        return self.world.clock.now

    @property
    def local_now(self) -> float:
        """What this machine's monotonic clock shows."""
        return self.world.clock.now + self.spec.clock_offset_s

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something of this node's own; not after its crash, and not while it is frozen."""
        self.world.clock.after(delay_s, self.run_when_awake, action, *args)

    def run_when_awake(self, action: Callable[..., None], *args: Any) -> None:
        """Now, or when the node thaws."""
        if not self.up:
            return
        if self.frozen:
            self._backlog.append((action, args))
        else:
            action(*args)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self, after_s: float) -> None:
        """SIGCONT: everything that waited happens now, in order."""
        if not self.up or not self.frozen:
            return
        self.frozen = False
        self.learner.shift(after_s)
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run_when_awake(action, *args)

    # --- the core ------------------------------------------------------------------------------------

    @property
    def may_serve(self) -> bool:
        """Whether the core lets its state be given to others."""
        return self.core.may_serve

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
        if not self._learner_wanted and self.may_serve:
            self._learner_wanted = True
            self.later(self._rng.uniform(0.3, 1.5), self.start_learner)
        self._plan_tick()

    def carry_out(self, effect: fx.Effect) -> None:
        """One effect."""
        if self.world.trace.write is not None:
            self.world.trace.effect(self.now, self.peer, effect)
        if self.world.faults.trap is not None:
            self.world.faults.spring(self, effect)
        if self.world.on_effect is not None:
            self.world.on_effect(self, effect)
        self._handlers[type(effect)](effect)

    def _plan_tick(self) -> None:
        at_s = max(self.core.next_deadline() - self.spec.clock_offset_s, self.now + TIMER_S)
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

    def _send(self, effect: fx.Send) -> None:
        self.world.watch.sent(self, effect.message)
        self.world.network.send(self, effect.peer, effect.message)

    def _record(self, effect: fx.Record) -> None:
        self.world.records[effect.kind] = self.world.records.get(effect.kind, 0) + 1
        self.world.trace.decision(self.now, self.peer, f"{effect.kind} f{effect.fragment}: {effect.reason}")

    # --- tickets -------------------------------------------------------------------------------------

    def new_ticket(self, content: Displacement | OuterUpdate) -> int:
        """A buffer."""
        self._tickets_made += 1
        self.tickets[self._tickets_made] = content
        self.world.watch.tickets(self)
        return self._tickets_made

    def _free(self, ticket: int) -> None:
        if self.tickets.pop(ticket, None) is None:
            raise Violation("tickets", f"{self.peer} frees buffer {ticket}, which it does not hold")

    def _held(self, ticket: int) -> Displacement | OuterUpdate:
        if ticket not in self.tickets:
            raise Violation("tickets", f"{self.peer} uses buffer {ticket}, which it does not hold")
        return self.tickets[ticket]

    # --- learner -------------------------------------------------------------------------------------

    def start_learner(self) -> None:
        """A learner process is ready."""
        if not self.learner.running:
            self.learner.start(self.now, self.learner.step_at(self.now), self._resumed())
            for fragment, counters in enumerate(self.learner.fragments):
                self._applied(fragment, counters.base_number, self.learner.step_at(self.now))
            self._tell_status()

    def _resumed(self) -> dict[int, int]:
        notes, self.disk.resume = self.disk.resume, {}
        found = {f: n.first_step(self.core.fragments[f].chain.watermark(self.peer)) for f, n in notes.items()}
        return {fragment: first for fragment, first in found.items() if first is not None}

    def save_at_leave(self) -> None:
        """An orderly end: state and the learner's displacements are saved, for the day of return."""
        if self.disk.full:
            return
        self.learner.settle(self.now)
        for fragment, store in enumerate(self.stores):
            self.disk.keep_checkpoint(store.checkpoint())
            counters = self.learner.fragments[fragment]
            after, pending = self.core.fragments[fragment].own.resume_stamps()
            rest_from = counters.slot.end if counters.slot else counters.unmerged_from
            if self.learner.running:
                self.disk.resume[fragment] = ResumeNote(after, pending, counters.unmerged_from, rest_from)

    def crash_learner(self, back_in_s: float) -> None:
        """The learner process dies and is started again."""
        if not self.up or not self.learner.running:
            return
        self.learner.stop(self.now)
        self.run_when_awake(self.feed, ev.LearnerLost())
        self.later(back_in_s, self.start_learner)

    def _status(self) -> None:
        self._tell_status()
        self.later(STATUS_EVERY_S, self._status)

    def _tell_status(self) -> None:
        learner, per_step = self.learner, self.config.tokens_per_step
        steps = learner.step_at(self.now)
        rate = per_step / learner.step_time_s if learner.running else 0.0
        step_s = learner.step_time_s if learner.running else 0.0
        self.feed(ev.LearnerStatus(learner.running, steps, steps * per_step, rate, step_s, None))

    def _wake_at(self, time_s: float) -> None:
        self.world.clock.at(time_s, self.run_when_awake, lambda: self.learner.wake(self.now))

    def _copied_out(self, copied: Displacement, due: bool) -> None:
        self.later(self._rng.uniform(0.001, 0.08), self._encoded, copied, due, self.learner.life)

    def _encoded(self, copied: Displacement, due: bool, life: int) -> None:
        if life != self.learner.life or not self.learner.running:
            return
        steps = copied.end - copied.first
        size = self.max_payload_bytes(copied.fragment)
        tokens = steps * self.config.tokens_per_step
        ticket = self.new_ticket(copied)
        self.feed(ev.ContributionReady(copied.fragment, ticket, tokens, steps, copied.digest(), size, due))
        self.learner.encoded(copied.fragment, self.now)

    def _nothing(self, fragment: int) -> None:
        self.later(0.0, self.feed, ev.NothingToContribute(fragment))

    def _applied(self, fragment: int, number: int, step: int) -> None:
        self.later(0.0, self.feed, ev.LearnerApplied(fragment, number, step))

    def _dropped(self, fragment: int, first: int, end: int) -> None:
        self.world.trace.decision(self.now, self.peer, f"overwrites steps {first}..{end} of f{fragment}")

    def _retire(self, effect: fx.RetireSlot) -> None:
        copied = self._held(effect.ticket)
        if self.learner.fragments[effect.fragment].slot == copied:
            self.learner.retire(effect.fragment, self.now)
        self._free(effect.ticket)

    # --- contributions -------------------------------------------------------------------------------

    def _offer(self, effect: fx.OfferContribution) -> None:
        displacement = self._held(effect.ticket)
        if not isinstance(displacement, Displacement):
            raise Violation("tickets", f"{self.peer} offers an update as a contribution")
        self.world.watch.offered(self, effect.signed.header, displacement, self.config.tokens_per_step)
        self.world.bulk.offer(self, effect, displacement)

    def _answer(self, effect: fx.RefuseTransfer | fx.AnswerTransfer, accepted: bool) -> None:
        head: Head = self.stores[effect.fragment].version.header.head()
        self.world.bulk.answer(effect.transfer, accepted, effect.reason, head)

    def _merge(self, effect: fx.Merge) -> None:
        parts = []
        for part in effect.inputs:
            content = self._held(part.ticket)
            if not isinstance(content, Displacement) or content.learner != part.contributor.learner:
                raise Violation("tickets", f"{self.peer} merges the wrong buffer {part.ticket}")
            parts.append(MergedPart(content.learner, part.contributor.stamp, content.first, content.end))
        update = OuterUpdate.of(effect.fragment, effect.number, tuple(parts))
        store = self.stores[effect.fragment]
        state = store.state.apply(update)
        self.world.watch.merged(self, state)
        generation = self._take_spare(effect.fragment)
        self.later(self._work_s(), self._merge_done, effect, update, state, generation)

    def _merge_done(
        self, effect: fx.Merge, update: OuterUpdate, state: FragmentState, generation: int
    ) -> None:
        self.stores[effect.fragment].fill_spare(generation, state)
        size = self.max_payload_bytes(effect.fragment)
        ticket = self.new_ticket(update)
        self.feed(
            ev.Merged(effect.fragment, effect.term, effect.number, ticket, update.digest, size, state.digest)
        )

    def _work_s(self) -> float:
        return self._rng.uniform(0.002, 0.15)

    def _take_spare(self, fragment: int) -> int:
        generation = self.stores[fragment].take_spare()
        if generation is None:
            raise Violation(
                "one-spare", f"{self.peer} fragment {fragment}: two jobs want the spare copy at once"
            )
        return generation

    # --- durable -------------------------------------------------------------------------------------

    def _persist(self, effect: fx.Persist) -> None:
        if isinstance(effect.record, fx.UpdateRecord):
            self._held(effect.record.ticket)
        else:
            self.world.watch.votes_for(self, effect.record)
        self._write(effect)

    def _write(self, job: fx.Persist | Checkpoint) -> None:
        """One write at a time, in order, as slow as the disk is when its turn comes."""
        self._writing.append(job)
        if len(self._writing) == 1:
            self._next_write()

    def _next_write(self) -> None:
        factor = 3.0 if isinstance(self._writing[0], Checkpoint) else 1.0
        time_s = self.disk.write_s * self.disk.slow_factor * self._rng.uniform(0.5, 2.0) * factor
        self.later(time_s, self._written)

    def crash(self) -> None:
        """kill -9: memory is gone; of the writes under way some made it to the disk, in order."""
        self.up = False
        for job in self._writing[: self._rng.randint(0, len(self._writing))]:
            self._keep(job)

    def _written(self) -> None:
        effect = self._writing.pop(0)
        if self._writing:
            self._next_write()
        if isinstance(effect, Checkpoint):
            self._keep(effect)
            return
        if self.disk.full:
            self.feed(ev.PersistFailed(effect.token, "disk full"))
            return
        self._keep(effect)
        for following in effect.then:
            self.carry_out(following)
        self.feed(ev.Persisted(effect.token))

    def _keep(self, job: fx.Persist | Checkpoint) -> None:
        if self.disk.full:
            return
        if isinstance(job, Checkpoint):
            self.disk.keep_checkpoint(job)
            return
        record = job.record
        if isinstance(record, fx.VoteRecord):
            self.disk.keep_vote(record)
            return
        update = self._held(record.ticket)
        if not isinstance(update, OuterUpdate):
            raise Violation("tickets", f"{self.peer} saves a contribution as an update")
        self.disk.keep_update(record.version, update, self.config.log_versions)

    # --- versions ------------------------------------------------------------------------------------

    def _apply_update(self, effect: fx.ApplyUpdate) -> None:
        update = self._held(effect.ticket)
        if not isinstance(update, OuterUpdate):
            raise Violation("tickets", f"{self.peer} applies a contribution as an update")
        generation = self._take_spare(effect.fragment)
        state = self.stores[effect.fragment].state.apply(update)
        self.later(self._work_s(), self._apply_done, effect, state, generation)

    def _apply_done(self, effect: fx.ApplyUpdate, state: FragmentState, generation: int) -> None:
        self.stores[effect.fragment].fill_spare(generation, state)
        self.feed(ev.UpdateApplied(effect.fragment, effect.number, effect.ticket, state.digest))

    def _fetch_state(self, effect: fx.FetchState) -> None:
        self.world.bulk.fetch_state(self, effect, self._take_spare(effect.fragment))

    def state_arrived(
        self,
        effect: fx.FetchState,
        generation: int,
        version: SignedVersion,
        state: FragmentState,
        watermarks: tuple[Watermark, ...],
    ) -> None:
        """A donor's fragment is here."""
        self.stores[effect.fragment].fill_spare(generation, state)
        self.feed(ev.StateFetched(effect.fragment, effect.peer, version, watermarks))

    def state_failed(self, effect: fx.FetchState, generation: int) -> None:
        """No donor's fragment came."""
        self.stores[effect.fragment].fill_spare(generation, None)

    def _commit(self, effect: fx.CommitVersion) -> None:
        header = effect.version.header
        store = self.stores[header.fragment]
        if store.spare is None:
            raise Violation(
                "equal-state", f"{self.peer} commits version {header.number} from an empty spare copy"
            )
        self.world.watch.committed(self, effect.version, store.version, store.spare)
        update = None
        if effect.update is not None:
            held = self._held(effect.update)
            self._free(effect.update)
            update = held if isinstance(held, OuterUpdate) else None
        store.commit(effect.version, update, effect.watermarks, self.config.log_versions)
        merged = None
        if effect.merged_ticket is not None:
            content = self._held(effect.merged_ticket)
            merged = content if isinstance(content, Displacement) else None
        install = Install(header.fragment, header.number, header.digest(), merged, effect.overwrite)
        self.learner.install(install, self.now)
        self.world.committed(self, header)
        if self.now - store.saved_s >= self.spec.checkpoint_every_s:
            store.saved_s = self.now
            self._write(store.checkpoint())
