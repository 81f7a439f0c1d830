"""Carries out what the core wants: the only place where events go in and effects come out.

`post` may be called from anywhere on the event loop; events are handled one after the other, and the
effects of one are carried out before the next is handled. Whatever takes time becomes a task that posts
the answering event. A bug of ours in any of them ends the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from p2pdiloco.adapters.disk.run_store import RunStore
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.bulk.transfers import Transfers
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.outbound import Outbound
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.keeper import Keeper
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.ports import Buffer
from p2pdiloco.tensors.payload import Payload
from p2pdiloco.tensors.vault import Input

logger = logging.getLogger(__name__)
COMPLAIN_EVERY_S = 30.0


class Runner:
    """Pumps events through the core."""

    def __init__(
        self,
        core: Core,
        compute: Compute,
        tickets: Tickets,
        store: RunStore,
        update_log: UpdateLog,
        io: ThreadPoolExecutor,
        on_record: Callable[[ef.Record], None],
    ) -> None:
        self.core = core
        self._compute = compute
        self._tickets = tickets
        self._store = store
        self._log = update_log
        self._io = io
        self._on_record = on_record
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[ev.Event] = deque()
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = 0.0
        self._complaint, self._complain_again_s = "", 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._offers: set[asyncio.Task[Any]] = set()
        self.left: asyncio.Future[None] = self._loop.create_future()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        """Fails with our own bug; the daemon ends then."""
        self.outbound: Outbound
        self.learner: LearnerLink
        self.transfers: Transfers
        self.keeper: Keeper
        self._do: dict[type, Callable[[Any], object]] = {
            ef.Send: lambda e: self.outbound.send(e.peer, e.message),
            ef.Persist: lambda e: self.spawn(self._persist(e)),
            ef.RequestFragment: lambda e: self.learner.request(e.fragment),
            ef.Offer: lambda e: self._up(self.transfers.offer(e, tickets.get(e.ticket))),
            ef.DiscardContribution: lambda e: self._tickets.release(e.ticket),
            ef.Spill: self._spill,
            ef.Combine: lambda e: self.spawn(self.keeper.run_combine(e, self.keeper.sources(e))),
            ef.RetireSlot: lambda e: self.learner.retire(e.fragment, e.ticket),
            ef.AcceptTransfer: lambda e: self.transfers.pushes_in.decided(e),
            ef.AnswerTransfer: lambda e: self.transfers.pushes_in.decided(e),
            ef.Release: lambda e: self._tickets.release(e.ticket),
            ef.Merge: self._merge,
            ef.MergePartial: self._merge_partial,
            ef.FetchUpdate: lambda e: self.spawn(self.transfers.fetch_update(e)),
            ef.FetchState: lambda e: self.spawn(self.transfers.fetch_state(e)),
            ef.ApplyUpdate: self._apply,
            ef.DropSpare: lambda e: self.spawn(self._compute.run(self._compute.drop_spare, e.fragment)),
            ef.CommitVersion: self._commit,
            ef.Record: self._on_record,
            ef.Left: self._left,
        }

    # --- pump ----------------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """Take an event in, now or right after the one that is being handled."""
        self._inbox.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._inbox:
                for effect in self.core.handle(self._inbox.popleft(), self._loop.time()):
                    self._do[type(effect)](effect)
        except BaseException as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        finally:
            self._pumping = False
        self._arm()
        if isinstance(event, ev.MessageReceived):
            self.learner.count_learners()  # somebody's may have begun, or ended

    def _arm(self) -> None:
        deadline = self.core.next_deadline()
        if self._timer is not None:
            if self._armed_for_s == deadline:
                return
            self._timer.cancel()
        self._armed_for_s = deadline
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(ev.Tick())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task of ours; an error in it that nobody expected ends the daemon."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def close(self) -> None:
        """Stop the clock and all tasks."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- effects -------------------------------------------------------------------------------------

    def _spill(self, effect: ef.Spill) -> None:
        writing = self.keeper.spill(effect)
        if writing is not None:
            self.spawn(writing)

    def _up(self, transfer: Coroutine[Any, Any, None]) -> None:
        task = self.spawn(transfer)
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)

    async def end_offers(self) -> None:
        """Cut what of ours is on its way: from now on nobody has more of it than the core knows."""
        await asyncio.sleep(0)  # all of them have begun: what never ran cannot be cut
        offers = list(self._offers)
        for task in offers:
            task.cancel()
        await asyncio.gather(*offers, return_exceptions=True)

    async def _persist(self, effect: ef.Persist) -> None:
        record = effect.record
        try:
            if isinstance(record, ef.VoteRecord):
                await self._loop.run_in_executor(self._io, self._store.save_vote, record)
            else:
                payload = self._tickets.get(record.ticket)
                await self._loop.run_in_executor(
                    self._io, lambda: self._store.save_update(record.version, payload, durable=True)
                )
        except StorageError as error:
            self._complain(str(error))
            self.post(ev.PersistFailed(effect.token, str(error)[:160]))
            return
        for then in effect.then:
            self._do[type(then)](then)
        self.post(ev.Persisted(effect.token))

    def _complain(self, text: str) -> None:
        """Tell the person, but not every time that a full disk is tried again, for whichever file."""
        now, reason = self._loop.time(), text.rpartition(": ")[2]
        if reason != self._complaint or now >= self._complain_again_s:
            logger.error("%s", text)
            self._complaint, self._complain_again_s = reason, now + COMPLAIN_EVERY_S

    def _left(self, _effect: ef.Left) -> None:
        if not self.left.done():
            self.left.set_result(None)

    def _inputs(self, effect: ef.Merge | ef.MergePartial) -> tuple[list[Input], list[Payload]]:
        """Payloads of a merge, held from now on: the core may release the tickets meanwhile."""
        tickets = self._tickets
        return (
            [
                (tickets.payload(i.ticket), i.contributor.tokens, i.contributor.inner_steps)
                for i in effect.inputs
            ],
            [tickets.payload(ticket) for ticket in effect.partials],
        )

    def _merge(self, effect: ef.Merge) -> None:
        self.spawn(self._run_merge(effect, *self._inputs(effect)))

    async def _run_merge(self, effect: ef.Merge, inputs: list[Input], partials: list[Payload]) -> None:
        key = (effect.fragment, effect.term, effect.number)
        compute = self._compute
        try:
            done = await compute.run(
                compute.merge, effect.fragment, effect.number, inputs, partials, effect.longest_steps
            )
        except (RemoteError, StorageError) as error:
            self.post(ev.MergeFailed(*key, str(error)[:160]))
            return
        ticket = self._tickets.put(done.update)
        self.post(ev.Merged(*key, ticket, done.update_digest, len(done.update), done.state_digest))

    def _merge_partial(self, effect: ef.MergePartial) -> None:
        self.spawn(self._run_merge_partial(effect, *self._inputs(effect)))

    async def _run_merge_partial(
        self, effect: ef.MergePartial, inputs: list[Input], partials: list[Payload]
    ) -> None:
        key = (effect.fragment, effect.group, effect.attempt)
        compute = self._compute
        try:
            done = await compute.run(compute.merge_partial, effect.fragment, inputs, partials)
        except (RemoteError, StorageError) as error:
            self.post(ev.PartialFailed(*key, str(error)[:160]))
            return
        ticket = self._tickets.put(done.payload)
        self.post(ev.PartialMerged(*key, ticket, done.digest, len(done.payload)))

    def _apply(self, effect: ef.ApplyUpdate) -> None:
        self.spawn(self._run_apply(effect, self._tickets.get(effect.ticket)))

    async def _run_apply(self, effect: ef.ApplyUpdate, update: Buffer) -> None:
        try:
            digest = await self._compute.run(
                self._compute.apply, effect.fragment, effect.number, update, effect.longest_steps
            )
        except RemoteError as error:
            logger.warning(
                "fragment %d: update %d cannot be applied: %s", effect.fragment, effect.number, error
            )
            digest = b""
        self.post(ev.UpdateApplied(effect.fragment, effect.number, effect.ticket, digest))

    def _commit(self, effect: ef.CommitVersion) -> None:
        fragment = effect.version.header.fragment
        own_merged = self.learner.committed(effect)
        payload = None
        if effect.update is None:
            self._log.clear(fragment)
        else:
            payload = self._tickets.get(effect.update)
            self._log.add(effect.version, payload)
            self._tickets.release(effect.update)
        self.spawn(self._run_commit(effect, own_merged, payload))

    async def _run_commit(self, effect: ef.CommitVersion, own_merged: bool, payload: Buffer | None) -> None:
        await self._compute.run(self._compute.commit, effect, own_merged)
        fragment = effect.version.header.fragment
        self.learner.after_commit(fragment)
        if payload is not None and effect.version.header.syncer != self.core.shared.me:
            kept = payload
            try:
                await self._loop.run_in_executor(
                    self._io, lambda: self._store.save_update(effect.version, kept, durable=False)
                )
            except StorageError as error:
                # Only a replay at the next start is lost; peers have the update as well.
                self._complain(str(error))
