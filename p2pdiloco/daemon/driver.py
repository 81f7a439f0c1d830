"""Driver of the core: the only place where events go in and effects are carried out.

`Runner` handles what is in the letter box (`Post`) and has the `Executors` carry effects out, of which
`Outbound` (control messages), `Merging` and `Committing` are here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.events import CommitVersion, Event, SendFailed
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.membership import in_one
from p2pdiloco.core.node import Core
from p2pdiloco.daemon.budgets import Background
from p2pdiloco.daemon.bulk.merge_audits import LossAuditing
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.history import HistoryKeeper
from p2pdiloco.daemon.learner_link import LearnerLink
from p2pdiloco.daemon.payloads import Compute, Durable, KeptPayloads, Tickets, UpdateLog
from p2pdiloco.daemon.trying import Trying
from p2pdiloco.errors import RemoteError, StorageError, TransportError, UserError
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import Buffer, PostEvent, Transport
from p2pdiloco.tensors.codecs import Unsound, UnusableInputs
from p2pdiloco.tensors.merge import Findings, Input, Payload, digest_of
from p2pdiloco.tensors.outer_update import Correction, steps_as_everywhere
from p2pdiloco.tensors.vault import MergeResult, PartialMerge
from p2pdiloco.util import Action, Frozen, cancelled

logger = logging.getLogger(__name__)


class Executors(Frozen):
    """Objects that carry out the core's effects."""

    tickets: Tickets
    outbound: Outbound
    transfers: Transfers
    learner: LearnerLink
    kept: KeptPayloads
    merging: Merging
    committing: Committing
    durable: Durable
    loss_auditing: LossAuditing
    trying: Trying
    record: Callable[[ev.Record], None]
    """Writer of the core's decisions."""


@dataclass
class Runner:
    """Pump of events through the core."""

    _core: Core
    _post: Post
    _background: Background
    _executors: Executors

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = 0.0
        self._offers: set[asyncio.Task[Any]] = set()
        self._asked: dict[int, asyncio.Task[Any]] = {}
        """Fetches of updates under way, by their token."""
        self._cut: set[int] = set()
        self._keeping: asyncio.Task[None] | None = None
        """Newest saving of proofs."""
        self.confirmed: asyncio.Future[None] = self._loop.create_future()
        """Future that is done when the core counts as a full member."""
        self.departure: asyncio.Future[None] = self._loop.create_future()
        """Done once the core has left (`Left`)."""
        self._do, self._answers = self._effects(), self._answering()
        self._post.emptied_by(self._pump)

    def _effects(self) -> dict[type, Callable[[Any], object]]:
        executors, spawn = self._executors, self._background.spawn
        tickets, learner, transfers = executors.tickets, executors.learner, executors.transfers
        return {
            ev.Ask: self._ask,
            ev.Send: lambda e: executors.outbound.send(e.peer, e.message),
            ev.KeepProofs: self._keep_proofs,
            ev.CastOut: lambda e: spawn(self._cast_out(e)),
            ev.RequestFragment: lambda e: learner.request(e.fragment),
            ev.DiscardContribution: lambda e: tickets.release(e.ticket),
            ev.Spill: self._spill,
            ev.RetireSlot: lambda e: learner.retire(e.fragment, e.ticket),
            ev.AcceptTransfer: lambda e: transfers.pushes_in.decided(e),
            ev.AnswerTransfer: lambda e: transfers.pushes_in.decided(e),
            ev.Release: lambda e: tickets.release(e.ticket),
            ev.DropSpare: lambda e: spawn(executors.merging.drop_spare(e)),
            ev.CommitVersion: lambda e: spawn(executors.committing.commit(e)),
            ev.Record: executors.record,
            ev.CutShort: lambda e: self._cut_short(e.token),
            ev.Confirmed: lambda _effect: _happened(self.confirmed),
            ev.Left: lambda _effect: _happened(self.departure),
        }

    def _answering(self) -> dict[type, Callable[[Any], Coroutine[Any, Any, Struct | None]]]:
        """Ways to answer effects. Payloads that are sent or merged are held from the call on: the core may
        release their tickets before the work begins."""
        executors, merging, transfers = self._executors, self._executors.merging, self._executors.transfers
        kept = executors.kept
        return {
            ev.Persist: self._persist,
            ev.Offer: lambda e: transfers.offer(e, executors.tickets.get(e.ticket)),
            ev.Combine: lambda e: kept.run_combine(e, kept.sources(e)),
            ev.Merge: merging.merge,
            ev.MergePartial: merging.merge_partial,
            ev.FetchUpdate: transfers.fetch_update,
            ev.FetchState: transfers.fetch_state,
            ev.ApplyUpdate: merging.apply,
            ev.Audit: transfers.auditing.audit,
            ev.LossAudit: executors.loss_auditing.audit,
            ev.TryStates: executors.trying.tried,
        }

    # --- pump ----------------------------------------------------------------------------------------

    def _pump(self) -> None:
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
            self._executors.learner.count_learners()  # somebody's may have begun, or ended

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

    def _spill(self, effect: ev.Spill) -> None:
        writing = self._executors.kept.spill(effect)
        if writing is not None:
            self._background.spawn(writing)

    def _ask(self, asked: ev.Ask) -> None:
        work = self._answers[type(asked.effect)](asked.effect)
        task = self._background.spawn(self._answer(asked.token, work))
        if isinstance(asked.effect, ev.FetchUpdate):
            self._asked[asked.token] = task
        task.add_done_callback(lambda _task: work.close())  # one that was cut may not have begun
        if isinstance(asked.effect, ev.Offer):
            self._offers.add(task)
            task.add_done_callback(self._offers.discard)

    async def _answer(self, token: int, work: Coroutine[Any, Any, Struct | None]) -> None:
        try:
            answer = await work
        except asyncio.CancelledError:
            if token not in self._cut:
                raise
            answer = ev.FetchFailed(FetchFailure.SLOW)
        finally:
            self._asked.pop(token, None)
            self._cut.discard(token)
        self._post.put(ev.Answered(token, answer))

    def _cut_short(self, token: int) -> None:
        task = self._asked.get(token)
        if task is not None:
            self._cut.add(token)
            task.cancel()

    async def end_offers(self) -> None:
        """Cut what of ours is on its way: from now on nobody has more of it than the core knows."""
        await cancelled(self._offers)

    def _keep_proofs(self, effect: ev.KeepProofs) -> None:
        self._keeping = self._background.spawn(self._executors.durable.keep_proofs(effect.proofs))

    async def _cast_out(self, effect: ev.CastOut) -> None:
        """End this node, which nobody listens to any more, once it knows so at its next start, too."""
        if self._keeping is not None:
            await self._keeping
        raise UserError(f"the others exclude this node for good: {effect.words}", str(effect.why))

    async def _persist(self, effect: ev.Persist) -> ev.Undone | None:
        try:
            await self._executors.durable.save(effect.record)
        except StorageError as error:
            return ev.Undone(str(error)[:160])
        for then in effect.then:
            self._do[type(then)](then)
        return None


def _happened(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Post:
    """Letter box of the core: events in the order in which they came. Used on the event loop only.

    It is made before everything that has something to tell the core.
    """

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._empty: Action | None = None

    def put(self, event: Event) -> None:
        """Take an event in. It is handled before this returns, or right after the one that is being handled.

        An event that comes before there is anybody to handle it waits.
        """
        self._waiting.append(event)
        if self._empty is not None:
            self._empty()

    def take(self) -> Event | None:
        """Take out the event that has waited longest; None: there is none."""
        return self._waiting.popleft() if self._waiting else None

    def emptied_by(self, empty: Action) -> None:
        """Let `empty` handle what comes from now on."""
        self._empty = empty


MAX_QUEUED = 256
IN_FLIGHT = 4
TIMEOUT_S = 5.0


@dataclass
class Outbound:
    """Queues of control messages on their way out, one per peer, a few at a time. Failures become events.

    A heartbeat takes in one that still waits; a full queue drops its oldest.
    """

    _transport: Transport
    _encode: Callable[[Message], bytes]
    _post: Callable[[SendFailed], None]

    def __post_init__(self) -> None:
        self._queues: dict[str, deque[Message]] = {}
        self._senders: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0
        self.bytes_sent = 0

    def send(self, peer: str, message: Message) -> None:
        """Queue a message."""
        queue = self._queues.setdefault(peer, deque())
        if isinstance(message, Progress):
            for index, waiting in enumerate(queue):
                if isinstance(waiting, Progress):
                    queue[index] = in_one(waiting, message)
                    return
        if len(queue) >= MAX_QUEUED:
            queue.popleft()
            self.dropped += 1
        queue.append(message)
        if self._senders[peer] < IN_FLIGHT:
            self._senders[peer] += 1
            task = asyncio.create_task(self._drain(peer), name=f"send-{peer[-6:]}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _drain(self, peer: str) -> None:
        queue = self._queues[peer]
        try:
            while queue:
                data = self._encode(queue.popleft())
                try:
                    await self._transport.send(peer, data, TIMEOUT_S)
                    self.bytes_sent += len(data)
                except TransportError:
                    self._post(SendFailed(peer))
                except RemoteError as error:
                    logger.debug("%s refused a message: %s", peer, error.reason)
        finally:
            self._senders -= Counter([peer])
            if not (self._senders[peer] or queue):
                self._queues.pop(peer, None)

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued is sent, at most so long."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def close(self) -> None:
        """Drop what is left."""
        self._queues.clear()
        for task in self._tasks:
            task.cancel()


SEED_BYTES = 16
"""Size of the seed of a sample that nobody else draws."""
Named = tuple[bytes, int, Payload]
"""Digest, ticket, and a payload itself."""


@dataclass
class Merging:
    """Merging: carries out `Merge`, `MergePartial`, `ApplyUpdate` and `DropSpare` in the tensors thread."""

    _compute: Compute
    _tickets: Tickets
    _post: PostEvent
    _keep: Callable[[int, list[Named]], None] = lambda _fragment, _merged: None
    """Keeper of what was merged, and of partial merges, for audits."""
    _repair: Callable[[SignedVersion], Awaitable[Correction | None]] | None = None
    """Finder of what makes a false version good; None: nothing is."""

    async def examine(self) -> None:
        """See whether this machine makes the merges and outer steps that all others make: else its versions
        would be false, and cost it its place."""
        if not await self._compute.run(steps_as_everywhere):
            logger.error(
                "this machine does not calculate as all others do: it trains, and stands for no office"
            )
            self._post(ev.Miscalculates())

    def _inputs(self, effect: ev.Merge | ev.MergePartial) -> tuple[list[Input], list[Payload]]:
        tickets = self._tickets
        return (
            [_input(given, tickets.payload(given.ticket)) for given in effect.inputs],
            [tickets.payload(part.ticket) for part in effect.partials],
        )

    def merge(self, effect: ev.Merge) -> Coroutine[Any, Any, ev.Merged | ev.Undone]:
        """Merge into the spare, as a new version."""
        return self._merge(effect, *self._inputs(effect))

    async def _merge(
        self, effect: ev.Merge, inputs: list[Input], partials: list[Payload]
    ) -> ev.Merged | ev.Undone:
        vault, correction, named = self._compute.vault, None, _named(effect, inputs, partials)
        if effect.repairs is not None and self._repair is not None:
            correction = await self._repair(effect.repairs)

        def make() -> MergeResult:
            done = vault.merge(
                effect.fragment,
                effect.number,
                inputs,
                partials,
                effect.longest_steps,
                effect.limits,
                effect.seed,
                correction,
            )
            _check_whole(named)
            if correction is not None and not correction.is_whole():
                raise StorageError("what a repair consists of was damaged here")
            if not vault.is_whole(effect.fragment):  # we would sign a false state
                raise StorageError("the state of this fragment was damaged in memory")
            return done

        try:
            if correction is not None and not await self._compute.run(correction.is_whole):
                correction = None
            done = await self._compute.run(make)
        except (UnusableInputs, StorageError) as error:
            return ev.Undone(str(error)[:160], _unusable(effect, error))
        if vault.maker.repeatable:
            self._keep(effect.fragment, named)
        ticket = self._tickets.put(done.update)
        return ev.Merged(
            ticket,
            update_digest=done.update_digest,
            update_bytes=len(done.update),
            state_digest=done.state_digest,
            norm=done.norm,
            cut=_learners(effect, done.found.cut),
            measured=_measured(done.found),
            repaired=correction is not None,
        )

    def merge_partial(self, effect: ev.MergePartial) -> Coroutine[Any, Any, ev.PartialMerged | ev.Undone]:
        """Add up what a group contributed."""
        return self._merge_partial(effect, *self._inputs(effect))

    async def _merge_partial(
        self, effect: ev.MergePartial, inputs: list[Input], partials: list[Payload]
    ) -> ev.PartialMerged | ev.Undone:
        vault, named = self._compute.vault, _named(effect, inputs, partials)

        def make() -> PartialMerge:
            done = vault.merge_partial(effect.fragment, inputs, partials, effect.limits, effect.seed)
            _check_whole(named)
            return done

        try:
            done = await self._compute.run(make)
        except (UnusableInputs, StorageError) as error:
            return ev.Undone(str(error)[:160], _unusable(effect, error))
        ticket = self._tickets.put(done.payload)
        if vault.maker.repeatable:
            made = done.digest, ticket, done.payload
            self._keep(effect.fragment, [*named, made])
        return ev.PartialMerged(
            ticket,
            payload_digest=done.digest,
            payload_bytes=len(done.payload),
            cut=_learners(effect, done.found.cut),
            measured=_measured(done.found),
        )

    def apply(self, effect: ev.ApplyUpdate) -> Coroutine[Any, Any, ev.UpdateApplied]:
        """Make the outer step of somebody else's update into the spare."""
        own = None if effect.own is None else self._tickets.in_memory(effect.own)
        return self._apply(effect, self._tickets.get(effect.ticket), own)

    async def _apply(self, effect: ev.ApplyUpdate, update: Buffer, own: Buffer | None) -> ev.UpdateApplied:
        vault, unsound, cosine, certain = self._compute.vault, False, None, False

        def step() -> bytes:
            return vault.apply(effect.fragment, effect.number, update, effect.longest_steps, effect.norm)

        def apply() -> tuple[bytes, bool, float | None]:
            made, certain = step(), False
            if effect.stated and made != effect.stated:
                first, made = made, step()
                certain = made == first and self._is_sound(effect, update)
            return made, certain, None if own is None else self._cosine(effect.fragment, own, update)

        try:
            digest, certain, cosine = await self._compute.run(apply)
        except RemoteError as error:
            logger.warning(
                "fragment %(fragment)d: update %(number)d cannot be applied: %(error)s",
                {"fragment": effect.fragment, "number": effect.number, "error": str(error)},
            )
            digest, unsound = b"", True
        return ev.UpdateApplied(digest, unsound, cosine, certain)

    def _is_sound(self, effect: ev.ApplyUpdate, update: Buffer) -> bool:
        """Tell whether that an outer step has another result than its syncer states is no fault of ours."""
        whole = (
            self._compute.vault.is_whole(effect.fragment) and content_digest(update) == effect.update_digest
        )
        if not (sound := whole and steps_as_everywhere()):
            logger.error(
                "fragment %(fragment)d: version %(number)d has another state here, which may be a fault of "
                "ours: %(fault)s",
                {
                    "fragment": effect.fragment,
                    "number": effect.number,
                    "fault": "it calculates otherwise than others" if whole else "its memory was damaged",
                },
            )
        return sound

    def _cosine(self, fragment: int, own: Buffer, update: Buffer) -> float | None:
        """Compare our contribution with an update. None: it cannot be told, or read back: one that waits on
        the disk is not."""
        try:
            return self._compute.vault.maker.cosine(fragment, own, update, secrets.token_bytes(SEED_BYTES))
        except Unsound:
            return None

    def drop_spare(self, effect: ev.DropSpare) -> Coroutine[Any, Any, None]:
        """Give up what is in the spare."""
        return self._compute.run(self._compute.vault.drop_spare, effect.fragment)


@dataclass
class Committing:
    """Committing of new versions: carries out `CommitVersion`, for vault, log of updates, disk and
    learner."""

    _me: str
    """Our peer id; our own versions' updates are on the disk already."""
    _compute: Compute
    _tickets: Tickets
    _log: UpdateLog
    _durable: Durable
    _learner: LearnerLink
    _keeper: HistoryKeeper | None = None
    """Keeper of the run's history."""

    def __post_init__(self) -> None:
        self.done = asyncio.Event()
        """Event that is set with every version that the vault has taken in. Who waits looks, clears it,
        and waits."""

    def commit(self, effect: CommitVersion) -> Coroutine[Any, Any, None]:
        """Take the version into log and plans at once; the rest is work for the background."""
        fragment = effect.version.header.fragment
        if self._keeper is not None:
            self._keeper.note(effect.version)
        own_merged = self._learner.committed(effect)
        payload = None
        if effect.update is None:
            self._log.clear(fragment)
        else:
            payload = self._tickets.get(effect.update)
            self._log.add(effect.version, payload)
            self._tickets.release(effect.update)
        return self._commit(effect, own_merged, payload)

    async def _commit(self, effect: CommitVersion, own_merged: bool, payload: Buffer | None) -> None:
        await self._compute.run(self._compute.commit, effect, own_merged)
        self.done.set()
        header = effect.version.header
        self._learner.after_commit(header.fragment)
        if payload is not None and header.syncer != self._me:
            await self._durable.keep(effect.version, payload)


def _input(given: ev.MergeInput, payload: Payload) -> Input:
    part = given.contributor
    return Input(payload, part.tokens, part.inner_steps, mean=given.mean, votes=part.votes)


def _named(effect: ev.Merge | ev.MergePartial, inputs: list[Input], partials: list[Payload]) -> list[Named]:
    own = [(part.contributor.payload_digest, part.ticket) for part in effect.inputs]
    below = [(part.payload_digest, part.ticket) for part in effect.partials]
    payloads = [*(each.payload for each in inputs), *partials]
    return [(*name, payload) for name, payload in zip([*own, *below], payloads, strict=True)]


def _check_whole(named: list[Named]) -> None:
    """Check that what was merged is still what came: under our signature a damage of our memory or disk
    would be a false merge. Raises: UnusableInputs, StorageError."""
    whole = [digest_of(payload) == digest for digest, _ticket, payload in named]
    if not all(whole):
        logger.error(
            "%(damaged)d payloads were damaged here since they came", {"damaged": whole.count(False)}
        )
        raise UnusableInputs(
            {n: Unsound(Verdict.DAMAGED) for n, is_whole in enumerate(whole) if not is_whole}
        )


def _measured(found: Findings) -> tuple[ev.Measured, ...]:
    return tuple(map(ev.Measured, found.lengths, found.scores))


def _learners(effect: ev.Merge | ev.MergePartial, inputs: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(effect.inputs[index].contributor.learner for index in inputs)


def _unusable(
    effect: ev.Merge | ev.MergePartial, error: UnusableInputs | StorageError
) -> tuple[tuple[Ticket, Verdict], ...]:
    """List the inputs of a merge that are at fault, by ticket; none, if it is our disk."""
    if isinstance(error, StorageError):
        return ()
    tickets = [*(part.ticket for part in effect.inputs), *(part.ticket for part in effect.partials)]
    return tuple((tickets[index], fault.verdict) for index, fault in error.faults.items())
