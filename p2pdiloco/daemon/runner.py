"""Runner of the core: the only place where events go in and effects are carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Struct

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.background import Background
from p2pdiloco.daemon.bulk.audits.loss_auditing import LossAuditing
from p2pdiloco.daemon.bulk.transfers import Transfers
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.outbound import Outbound
from p2pdiloco.daemon.payloads.committing import Committing
from p2pdiloco.daemon.payloads.durable import Durable
from p2pdiloco.daemon.payloads.kept_payloads import KeptPayloads
from p2pdiloco.daemon.payloads.merging import Merging
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.daemon.post import Post
from p2pdiloco.errors import StorageError, UserError


class Hands(Struct, frozen=True):
    """Objects that carry effects out."""

    tickets: Tickets
    outbound: Outbound
    transfers: Transfers
    learner: LearnerLink
    kept: KeptPayloads
    merging: Merging
    committing: Committing
    durable: Durable
    loss_auditing: LossAuditing
    record: Callable[[ef.Record], None]
    """Writer of the core's decisions."""


class Runner:
    """Pump of events through the core."""

    def __init__(self, core: Core, post: Post, background: Background, hands: Hands) -> None:
        self._core = core
        self._post = post
        self._background = background
        self._hands = hands
        self._loop = asyncio.get_running_loop()
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = 0.0
        self._offers: set[asyncio.Task[Any]] = set()
        self._keeping: asyncio.Task[None] | None = None
        """Newest saving of proofs."""
        self.confirmed: asyncio.Future[None] = self._loop.create_future()
        """Future that is done when the core counts as a full member."""
        self.departure: asyncio.Future[None] = self._loop.create_future()
        """Done once the core has left (`Left`)."""
        self._do = self._effects()
        post.emptied_by(self._pump)

    def _effects(self) -> dict[type, Callable[[Any], object]]:
        hands, spawn = self._hands, self._background.spawn
        tickets, learner, transfers = hands.tickets, hands.learner, hands.transfers
        kept, merging = hands.kept, hands.merging
        return {
            ef.Send: lambda e: hands.outbound.send(e.peer, e.message),
            ef.Persist: lambda e: spawn(self._persist(e)),
            ef.KeepProofs: self._keep_proofs,
            ef.CastOut: lambda e: spawn(self._cast_out(e)),
            ef.RequestFragment: lambda e: learner.request(e.fragment),
            ef.Offer: lambda e: self._up(transfers.offer(e, tickets.get(e.ticket))),
            ef.DiscardContribution: lambda e: tickets.release(e.ticket),
            ef.Spill: self._spill,
            ef.Combine: lambda e: spawn(kept.run_combine(e, kept.sources(e))),
            ef.RetireSlot: lambda e: learner.retire(e.fragment, e.ticket),
            ef.AcceptTransfer: lambda e: transfers.pushes_in.decided(e),
            ef.AnswerTransfer: lambda e: transfers.pushes_in.decided(e),
            ef.Release: lambda e: tickets.release(e.ticket),
            ef.Merge: lambda e: spawn(merging.merge(e)),
            ef.MergePartial: lambda e: spawn(merging.merge_partial(e)),
            ef.FetchUpdate: lambda e: spawn(transfers.fetch_update(e)),
            ef.FetchState: lambda e: spawn(transfers.fetch_state(e)),
            ef.ApplyUpdate: lambda e: spawn(merging.apply(e)),
            ef.Audit: lambda e: spawn(transfers.auditing.audit(e)),
            ef.LossAudit: lambda e: spawn(hands.loss_auditing.audit(e)),
            ef.DropSpare: lambda e: spawn(merging.drop_spare(e)),
            ef.CommitVersion: lambda e: spawn(hands.committing.commit(e)),
            ef.Record: hands.record,
            ef.Confirmed: lambda _effect: _happened(self.confirmed),
            ef.Left: lambda _effect: _happened(self.departure),
        }

    # --- pump ----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Handle whatever has been posted, unless that is being done."""
        if self._pumping:
            return
        self._pumping = True
        heard = False
        try:
            while (event := self._post.take()) is not None:
                heard = heard or isinstance(event, ev.MessageReceived)
                for effect in self._core.handle(event, self._loop.time()):
                    self._do[type(effect)](effect)
        except BaseException as error:
            self._background.fail(error)
            raise
        finally:
            self._pumping = False
        self._arm()
        if heard:
            self._hands.learner.count_learners()  # somebody's may have begun, or ended

    def _arm(self) -> None:
        deadline = self._core.next_deadline()
        if self._timer is not None:
            if self._armed_for_s == deadline:
                return
            self._timer.cancel()
        self._armed_for_s = deadline
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._post.put(ev.Tick())

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    # --- effects -------------------------------------------------------------------------------------

    def _spill(self, effect: ef.Spill) -> None:
        writing = self._hands.kept.spill(effect)
        if writing is not None:
            self._background.spawn(writing)

    def _up(self, transfer: Coroutine[Any, Any, None]) -> None:
        task = self._background.spawn(transfer)
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)

    async def end_offers(self) -> None:
        """Cut what of ours is on its way: from now on nobody has more of it than the core knows."""
        await asyncio.sleep(0)  # all of them have begun: what never ran cannot be cut
        offers = list(self._offers)
        for task in offers:
            task.cancel()
        await asyncio.gather(*offers, return_exceptions=True)

    def _keep_proofs(self, effect: ef.KeepProofs) -> None:
        self._keeping = self._background.spawn(self._hands.durable.keep_proofs(effect.proofs))

    async def _cast_out(self, effect: ef.CastOut) -> None:
        """End this node, which nobody listens to any more, once it knows so at its next start, too."""
        if self._keeping is not None:
            await self._keeping
        raise UserError(f"the others exclude this node for good: {effect.words}", str(effect.why))

    async def _persist(self, effect: ef.Persist) -> None:
        try:
            await self._hands.durable.save(effect.record)
        except StorageError as error:
            self._post.put(ev.PersistFailed(effect.token, str(error)[:160]))
            return
        for then in effect.then:
            self._do[type(then)](then)
        self._post.put(ev.Persisted(effect.token))


def _happened(future: asyncio.Future[None]) -> None:
    """Tell those that wait for a future, unless they have stopped waiting."""
    if not future.done():
        future.set_result(None)
