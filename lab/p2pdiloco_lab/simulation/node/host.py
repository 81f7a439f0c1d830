"""One run of one node: the production core, and a simulated daemon that carries its effects out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from p2pdiloco.core.api import effects as fx
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.core.api.types import ContributionHeader, Reach
from p2pdiloco.core.capacity import LEAST_BYTES, TELL_EVERY_S, Meter, UplinkMeter
from p2pdiloco.core.node import Core
from p2pdiloco.errors import InvariantViolation
from p2pdiloco_lab.simulation.node.learner_side import LearnerSide
from p2pdiloco_lab.simulation.node.lineage import Displacement, PartialSum
from p2pdiloco_lab.simulation.node.stores import Store
from p2pdiloco_lab.simulation.node.tickets import TicketBuffers
from p2pdiloco_lab.simulation.node.worker import Worker
from p2pdiloco_lab.simulation.node.writer import DiskWriter
from p2pdiloco_lab.simulation.rules.violation import Violation
from p2pdiloco_lab.simulation.world.crypto import HashCrypto
from p2pdiloco_lab.simulation.world.disk import Checkpoint, Disk, restored_from
from p2pdiloco_lab.simulation.world.plan import NodeSpec, stream

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.world.world import World

MAX_TICKS_AT_ONCE = 200
"""Ticks that a core may ask for within `SPIN_WINDOW_S`."""
SPIN_WINDOW_S = 0.1
OFFERS_END = (ev.OfferAnswered, ev.OfferUndelivered)
"""Events at the end of a transfer that this node started."""
TIMER_S = 1e-6
"""Timers are not finer than this; clocks with an offset round differently."""


def _as_it_is(_peer: str, message: Message) -> Message | None:
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
        self.outgoing: Callable[[str, Message], Message | None] = self.liar.says if self.liar else _as_it_is
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
        rng = stream(world.plan.seed, f"host/{self.peer}/{incarnation}")
        self.learner = LearnerSide(self, rng, first_step)
        self.writer = DiskWriter(self, rng)
        self.worker = Worker(self, rng)
        restored = restored_from(disk, found, self.config)
        crypto, rng = HashCrypto(self.peer), stream(world.plan.seed, f"core/{self.peer}/{incarnation}")
        self.core = Core(self.config, self.peer, incarnation, crypto, rng, restored, genesis, self.local_now)
        sent = partial(world.network.sent_bytes, self.peer)
        least_bytes = min(LEAST_BYTES, max(self.config.max_payload_bytes) // 2)
        self.uplink = UplinkMeter(
            lambda: Meter(sent, lambda: self.local_now, least_bytes=least_bytes), disk.uplink_bits_per_s
        )
        self._handlers = self._effect_handlers()

    def _effect_handlers(self) -> dict[type[fx.Effect], Callable[[Any], None]]:
        bulk = self.world.bulk
        return {
            fx.Send: self._send,
            fx.Persist: self.writer.persist,
            fx.RequestFragment: lambda e: self.learner.request(e.fragment),
            fx.Offer: self._offer,
            fx.DiscardContribution: lambda e: self.tickets.free(e.ticket),
            fx.Spill: lambda e: self.tickets.spill(e.ticket),
            fx.Combine: self.worker.combine,
            fx.RetireSlot: self.learner.retire,
            fx.AcceptTransfer: lambda e: bulk.accept(e.transfer),
            fx.AnswerTransfer: self._answer,
            fx.Release: lambda e: self.tickets.free(e.ticket),
            fx.Merge: self.worker.merge,
            fx.MergePartial: self.worker.merge_partial,
            fx.FetchUpdate: lambda e: bulk.fetch_update(self, e),
            fx.FetchState: self.worker.fetch_state,
            fx.ApplyUpdate: self.worker.apply_update,
            fx.Audit: self.worker.audit,
            fx.LossAudit: self.worker.loss_audit,
            fx.DropSpare: lambda e: self.stores[e.fragment].drop_spare(),
            fx.CommitVersion: self.worker.commit,
            fx.KeepProofs: lambda e: self.disk.keep_proofs(e.proofs),
            fx.CastOut: self._cast_out,
            fx.Record: self._record,
            fx.Confirmed: self._confirmed,
            fx.Left: lambda e: self.world.later_left(self),
        }

    def _genesis(self, fragment: int) -> Checkpoint:
        return Checkpoint(self.config.genesis_versions[fragment], self.world.genesis[fragment], (), {})

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
        if isinstance(event, OFFERS_END):
            self.uplink.own.end()
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

    def carry_out(self, effect: fx.Effect) -> None:
        """One effect."""
        if self.world.trace.verbose:
            self.world.trace.effect(self.now, self.peer, effect)
        if self.world.faults.trap is not None:
            self.world.faults.spring(self, effect)
        if self.liar is not None:
            self.liar.sees(self, effect)
        if self.world.on_effect is not None:
            self.world.on_effect(self, effect)
        self._handlers[type(effect)](effect)

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

    def _send(self, effect: fx.Send) -> None:
        message = self.outgoing(effect.peer, effect.message)
        if message is not None:
            self.world.watch.sent(self, message)
            self.world.network.send(self, effect.peer, message)

    def _cast_out(self, effect: fx.CastOut) -> None:
        """Go on, if this is a liar: there is a proof against it."""
        if self.liar is None:
            raise Violation("only-liars", f"{self.peer} is to end, and never lied: {effect.words}")

    def _confirmed(self, _effect: fx.Confirmed) -> None:
        self.confirmed_at_s = self.now

    def _record(self, effect: fx.Record) -> None:
        self.world.records[effect.kind] = self.world.records.get(effect.kind, 0) + 1
        text = f"{effect.kind}: {effect.reason}"
        self.world.trace.decision(self.now, self.peer, text, effect.fragment, effect.fields)
        if effect.kind == "excluded" and self.liar is None:
            self.world.exclusion.excluded(self, str(dict(effect.fields)["peer"]))
        if effect.kind == "suspicion" and effect.reason == str(Suspicion.LEFT_OUT):
            self.world.exclusion.said_to_leave_out(self, str(dict(effect.fields)["syncer"]))

    # --- contributions -------------------------------------------------------------------------------

    def _offer(self, effect: fx.Offer) -> None:
        header = effect.signed.header
        content: Displacement | PartialSum
        if isinstance(header, ContributionHeader):
            content = self.tickets.contribution(effect.ticket)
            self.world.watch.offered(self, header, content, self.config.tokens_per_step)
        else:
            content = self.tickets.partial(effect.ticket)
        self.uplink.own.begin()
        self.world.bulk.offer(self, effect, content)

    def _answer(self, effect: fx.AnswerTransfer) -> None:
        head = self.stores[effect.fragment].version.header.head()
        self.world.bulk.answer(effect.transfer, effect.verdict, head)
