"""Owners of bytes: tickets, the memory budget, the tensors thread, kept contributions, the log of updates.

`Durable` writes the core's records onto the disk.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from p2pdiloco.adapters.run_store import KeptFiles, RunStore
from p2pdiloco.core.api.events import (
    Combine,
    Combined,
    CommitVersion,
    Spill,
    Undone,
    UpdateRecord,
    VoteRecord,
)
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.wire import StateHeader
from p2pdiloco.errors import InvariantViolation, RemoteError, StorageError, UserError, invariant
from p2pdiloco.learner.channel import BaseRef
from p2pdiloco.ports import Buffer
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import Exchange, FragmentLayout, scatter
from p2pdiloco.tensors.merge import Payload, memory_bytes
from p2pdiloco.tensors.outer_update import Encoded, Pin
from p2pdiloco.tensors.vault import Vault
from p2pdiloco.util import Action, T, loop_s

logger = logging.getLogger(__name__)


class Tickets:
    """Table of payloads by ticket, by which the core knows them: contributions, partial merges and outer
    updates.

    They are in host memory or, of what peers pushed, in scratch on the disk. What the core released is gone;
    what a running job still reads stays alive.
    """

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._pushed: set[int] = set()
        self._spilled: dict[int, Callable[[int], None]] = {}
        self._next = 1
        self._when_released: dict[int, Action] = {}

    def put(self, payload: Payload, pushed: bool = False, when_released: Action | None = None) -> int:
        """Give a payload a new ticket.

        `pushed`: by a peer. `when_released`: called then. Whoever refers to the payload beside this table
        must not do so for longer: it counts nowhere from then on.
        """
        ticket = self._next
        self._next += 1
        self._payloads[ticket] = payload
        if pushed:
            self._pushed.add(ticket)
        if when_released is not None:
            self._when_released[ticket] = when_released
        return ticket

    def when_released(self, ticket: int, then: Action) -> None:
        """Register a call for when an open ticket is released, for which nothing is to be called yet."""
        invariant(ticket in self._payloads, f"ticket {ticket} is not open")
        invariant(ticket not in self._when_released, f"ticket {ticket} is looked after twice")
        self._when_released[ticket] = then

    def payload(self, ticket: int) -> Payload:
        """Return the payload behind a ticket that is neither released nor spilled."""
        invariant(ticket in self._payloads, f"ticket {ticket} is not open")
        return self._payloads[ticket]

    def is_open(self, ticket: int) -> bool:
        """Tell whether a ticket's payload counts here: it is neither released nor spilled."""
        return ticket in self._payloads

    def get(self, ticket: int) -> Buffer:
        """Return the payload of a ticket that is in memory, as all are that no peer pushed."""
        payload = self.payload(ticket)
        if not isinstance(payload, Buffer):
            raise InvariantViolation(f"ticket {ticket} is not in memory")
        return payload

    def in_memory(self, ticket: int) -> Buffer | None:
        """Return the payload behind a ticket that is not released; None: it is on the disk."""
        return None if ticket in self._spilled else self.get(ticket)

    def spilled(self, ticket: int, forget: Callable[[int], None]) -> bool:
        """Let go of a payload that has been written to the disk. False: its ticket was released already.

        `forget` removes it from the disk when the ticket is released.
        """
        if self._payloads.pop(ticket, None) is None:
            return False
        self._pushed.discard(ticket)
        self._spilled[ticket] = forget
        return True

    def release(self, ticket: int) -> None:
        """Forget a ticket; a second time is without effect."""
        self._payloads.pop(ticket, None)
        self._pushed.discard(ticket)
        self._when_released.pop(ticket, lambda: None)()
        if ticket in self._spilled:
            self._spilled.pop(ticket)(ticket)

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def held_bytes(self) -> int:
        """Payload bytes that are held in memory."""
        return sum(map(memory_bytes, self._payloads.values()))

    @property
    def pushed_bytes(self) -> int:
        """Payload bytes in memory that peers pushed."""
        return sum(memory_bytes(self._payloads[ticket]) for ticket in self._pushed)


OUT_OF_BUDGET = Verdict.NO_MEMORY.value


class OutOfBudget(RemoteError):
    """Error: there is no room for what a peer would give us."""


class Holder(Protocol):
    """Holder of payloads."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds at this moment."""


class GivesWay(Holder, Protocol):
    """Holder of payloads that are kept only while nothing else wants the memory."""

    def give_up(self) -> None:
        """Let go of them."""


class Memory:
    """Budget of memory for payloads (--max-memory): how much of it is used, and how often it did not suffice.

    Counted are payloads behind tickets (contributions, updates, partial merges), the newest outer updates,
    and whatever is arriving or kept of cut streams. Not counted is the model itself (the vault and what
    daemon and learner share), which no node can do without. A peer for which there is no room is put off, and
    counted.

    Listed in docs/reference/bounds.md, section 5.
    """

    def __init__(self, most_bytes: float = 0.0, fetch_bytes: int = 0) -> None:
        """`most_bytes`: size of the budget; 0: no bound."""
        self.most_bytes = most_bytes or math.inf
        self._holders: list[Holder] = []
        self._give_way: list[GivesWay] = []
        self._reserved_bytes = 0
        self.fetch_bytes = fetch_bytes
        """Bytes that are kept free of what peers push, so that a node whose inbox is full can follow
        nevertheless."""
        self.refused = 0

    @classmethod
    def of_run(
        cls,
        most_bytes: float,
        layouts: Sequence[FragmentLayout],
        contribution: str,
        update: str,
        updates_kept: int,
    ) -> Memory:
        """Make the budget for a run with these codecs.

        Raises:
            UserError: no node of this run could live within the budget.
        """
        check_budget(most_bytes, least_bytes(layouts, contribution, update, updates_kept))
        return cls(most_bytes, fetched_bytes(layouts))

    def count(self, *holders: Holder) -> None:
        """Count payloads of these holders in the budget from now on."""
        self._holders += holders

    @property
    def claimed_bytes(self) -> int:
        """Bytes that are held now, or promised to what is under way."""
        return self._reserved_bytes + sum(holder.held_bytes for holder in self._holders)

    def give_way_by(self, holder: GivesWay) -> None:
        """Let this holder, which is counted, make room when nothing else can."""
        self._give_way.append(holder)

    def refuse(self) -> None:
        """Count what did not fit."""
        self.refused += 1

    def fits_push(self, size_bytes: int) -> bool:
        """Tell whether a pushed payload of this size may come. What gives way has done so then."""
        return self.fits_fetch(size_bytes + max(0, self.fetch_bytes - self._reserved_bytes))

    def fits_fetch(self, size_bytes: int) -> bool:
        """Tell whether something of at most this size may be fetched now. What gives way has done so
        then."""
        over = self.claimed_bytes + size_bytes - self.most_bytes
        if 0 < over <= sum(holder.held_bytes for holder in self._give_way):
            for holder in self._give_way:
                holder.give_up()
            return self.claimed_bytes + size_bytes <= self.most_bytes
        return over <= 0

    @contextmanager
    def fetching(self, size_bytes: int) -> Iterator[None]:
        """Context in which something of at most this size is fetched.

        Raises:
            OutOfBudget: there is no room just now. The peer is innocent.
        """
        if not self.fits_fetch(size_bytes):
            self.refuse()
            raise OutOfBudget("busy", OUT_OF_BUDGET)
        self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= size_bytes


def least_bytes(layouts: Sequence[FragmentLayout], contribution: str, update: str, updates_kept: int) -> int:
    """Work out what a node of a run cannot do without.

    It is its own contributions, the updates that it keeps for others, one update under way, and two
    contributions of others.
    """
    sent = [codec(contribution).encoded_bytes(layout.numel) for layout in layouts]
    kept = [codec(update).encoded_bytes(layout.numel) for layout in layouts]
    return sum(sent) + (updates_kept + 1) * sum(kept) + fetched_bytes(layouts) + 2 * max(sent)


def fetched_bytes(layouts: Sequence[FragmentLayout]) -> int:
    """Return a bound of the largest update; states are written straight into the vault."""
    return max(map(most_update_bytes, layouts))


def most_update_bytes(layout: FragmentLayout) -> int:
    """Return a bound of one fragment's update: no codec takes more than four bytes a parameter, and
    scales."""
    return 4 * layout.numel + 4096


def check_budget(most_bytes: float, least: int) -> None:
    """Check a budget. Raises: UserError (too little for this run)."""
    if most_bytes and most_bytes < least:
        raise UserError(
            f"--max-memory is too little for this run, which needs {math.ceil(least / 2**20)} MiB",
            "give more, or join a run of a smaller model",
        )


IN_MEMORY_BYTES = 128 << 20
"""Bytes of what may go to the disk that stay in memory nevertheless: most is beyond doubt 20 s later, and
to write and delete it took a twentieth of a round. Nothing stays where a person bounds memory."""


@dataclass
class KeptPayloads:
    """Payloads of merged contributions that are not beyond doubt yet: carries out `Spill` and `Combine`.

    `core.pending` decides which go onto the disk, and come back as one.
    """

    _files: KeptFiles
    _tickets: Tickets
    _compute: Compute
    _io: ThreadPoolExecutor
    _most_bytes: int = 0

    def __post_init__(self) -> None:
        self._here_bytes = 0
        """Bytes in memory of what may go to the disk."""

    def spill(self, effect: Spill) -> Coroutine[Any, Any, None] | None:
        """Move a payload to the disk, unless there is room for it in memory. Where the disk is full, it stays
        here.

        The payload is taken at once, since the core may release its ticket before the coroutine starts.
        """
        payload = self._tickets.get(effect.ticket)
        size = memoryview(payload).nbytes
        if self._here_bytes + size <= self._most_bytes:
            self._here_bytes += size
            self._tickets.when_released(effect.ticket, lambda: self._left(size))
            return None
        return self._spill(effect, payload)

    def _left(self, size: int) -> None:
        self._here_bytes -= size

    async def _spill(self, effect: Spill, payload: Buffer) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._io, self._files.save, effect.ticket, payload)
        except StorageError as error:
            logger.debug("a merged contribution stays in memory: %s", error)
            return
        if not self._tickets.spilled(effect.ticket, self._forget):
            self._forget(effect.ticket)

    def _forget(self, ticket: int) -> None:
        self._io.submit(self._remove, ticket)

    def _remove(self, ticket: int) -> None:
        try:
            self._files.remove(ticket)
        except StorageError as error:
            logger.warning("%s", error)

    def sources(self, effect: Combine) -> list[Callable[[], Buffer]]:
        """Return functions that get the payloads; asked at once, since the core may release their tickets."""
        return [self._source(ticket) for ticket in effect.tickets]

    def _source(self, ticket: int) -> Callable[[], Buffer]:
        payload = self._tickets.in_memory(ticket)
        return (lambda: self._files.load(ticket)) if payload is None else (lambda: payload)

    async def read(self, ticket: int) -> Buffer | None:
        """Return the payload of a contribution of ours, from the disk if it is there. None: it cannot be
        read."""
        here = self._tickets.in_memory(ticket)
        if here is not None:
            return here
        try:
            return await asyncio.get_running_loop().run_in_executor(self._io, self._files.load, ticket)
        except StorageError as error:
            logger.debug("a merged contribution cannot be given: %s", error)
            return None

    async def run_combine(self, effect: Combine, sources: list[Callable[[], Buffer]]) -> Combined | Undone:
        """Add payloads up in the tensors thread; of those on the disk, one at a time is in memory."""
        try:
            done = await self._compute.run(self._compute.vault.own.combine, effect.fragment, sources)
        except (RemoteError, StorageError) as error:
            logger.error("contributions that a lost branch had merged cannot be sent again: %s", error)
            return Undone(str(error)[:160])
        return Combined(self._tickets.put(done.payload), done.digest, len(done.payload))


class UpdateLog:
    """Newest outer updates of every fragment: what peers pull when a version is announced.

    Stragglers' older ones come from the disk (`OwnChain.update_of`), or memory would grow with the log.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._logs: dict[int, dict[int, tuple[SignedVersion, Buffer]]] = {}

    def add(self, version: SignedVersion, payload: Buffer) -> None:
        """Keep an update; the oldest beyond the bound goes, and so does what is not of its branch."""
        header = version.header
        log = self._logs.setdefault(header.fragment, {})
        before = log.get(header.number - 1)
        if log and (before is None or before[0].header.digest() != header.parent):
            log.clear()
        log[header.number] = (version, payload)
        for number in [n for n in log if n <= header.number - self._keep or n > header.number]:
            del log[number]

    def clear(self, fragment: int) -> None:
        """Drop a fragment's log: another chain's state was taken, to which it does not lead."""
        self._logs.pop(fragment, None)

    @property
    def held_bytes(self) -> int:
        """Payload bytes that are held in memory."""
        return sum(memoryview(p).nbytes for log in self._logs.values() for _, p in log.values())

    def get(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        """Return a logged update; None: it is not in the log."""
        return self._logs.get(fragment, {}).get(number)


COMPLAIN_EVERY_S = 30.0
SYNC_EVERY_S = 10.0
"""Interval at which updates of others' versions are synced. Others count what we have had for `durable_s` as
safe from a crash of ours: that is 10 s more, for the disk to do it in."""


@dataclass
class Durable:
    """Writer of the core's records, votes and outer updates, in the thread for the disk.

    A full disk is told to the person now and then, not at every try.
    """

    _store: RunStore
    _tickets: Tickets
    _io: Executor
    """Thread for the disk."""
    _safe_s: float
    """Time after which others count an update as safe here (`durable_s` of `core.api.config.Timing`)."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._complaint, self._complain_again_s = "", 0.0
        self.synced = self.syncs_failed = 0
        """Numbers of updates that were synced after they were written, and of syncs that failed."""

    async def save(self, record: VoteRecord | UpdateRecord) -> None:
        """Make a record durable. Raises: StorageError (told to the person already)."""
        try:
            if isinstance(record, VoteRecord):
                await self._loop.run_in_executor(self._io, self._store.save_vote, record)
            else:
                payload = self._tickets.get(record.ticket)
                await self._loop.run_in_executor(
                    self._io, lambda: self._store.save_update(record.version, payload, durable=True)
                )
        except StorageError as error:
            self._complain(str(error))
            raise

    async def keep_proofs(self, proofs: tuple[Evidence, ...]) -> None:
        """Save these proofs in the place of those before. After a failure others tell them again."""
        try:
            await self._loop.run_in_executor(self._io, self._store.save_proofs, proofs)
        except StorageError as error:
            self._complain(str(error))

    async def keep(self, version: SignedVersion, update: Buffer) -> None:
        """Save an update of somebody else's version for a replay at the next start.

        A failure costs only that: peers have the update as well.
        """
        try:
            await self._loop.run_in_executor(
                self._io, lambda: self._store.save_update(version, update, durable=False)
            )
        except StorageError as error:
            self._complain(str(error))

    async def sync_regularly(self) -> None:
        """Make durable, every `SYNC_EVERY_S`, what `keep` has written since, for ever."""
        began_s = loop_s()
        while True:
            await asyncio.sleep(began_s + SYNC_EVERY_S - loop_s())
            before_s, began_s = began_s, loop_s()
            await self.sync()
            if (took_s := loop_s() - before_s) > self._safe_s:
                self._complain(
                    f"a power cut would take versions that others count on: a sync took {took_s:.0f} s"
                )

    async def sync(self) -> None:
        """Make durable what `keep` has written. A vote waits for one fragment of it at most.

        A failure costs what a power cut may take: it is told, and counted.
        """
        unsynced = self._store.unsynced
        for fragment in await self._loop.run_in_executor(self._io, unsynced.fragments):
            try:
                self.synced += await self._loop.run_in_executor(self._io, unsynced.sync, fragment)
            except StorageError as error:
                self.syncs_failed += 1
                self._complain(
                    f"fragment {fragment} is not safe from a power cut until its next checkpoint: {error}"
                )

    def _complain(self, text: str) -> None:
        """Tell the person, but not every time that a full disk is tried again, for whichever file."""
        now, reason = loop_s(), text.rpartition(": ")[2]
        if reason != self._complaint or now >= self._complain_again_s:
            logger.error("%s", text)
            self._complaint, self._complain_again_s = reason, now + COMPLAIN_EVERY_S


@dataclass
class Compute:
    """Tensors thread: the only one that reads and writes Theta, momentum and the exchange buffers.

    Jobs run strictly in the order in which they were posted, which is the order of the core's effects. So a
    commit that was posted before a merge is done before it. The event loop posts a job to the thread, and
    gets the result back. Methods without `async` are jobs to be run in that thread, as the vault's own are.
    """

    vault: Vault
    _given: Exchange | None
    """Memory shared with the learner; None: there is no learner, and states are copied only."""

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "tensors")
        self._committed: dict[int, tuple[SignedVersion, tuple[Watermark, ...]]] = {}

    async def run(self, job: Callable[..., T], *arguments: object) -> T:
        """Post a job; return its result, or raise its exception."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, job, *arguments)

    @property
    def _exchange(self) -> Exchange:
        invariant(self._given is not None, "there is no learner to exchange anything with")
        assert self._given is not None
        return self._given

    def close(self) -> None:
        """End the thread when its jobs are done."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- jobs ----------------------------------------------------------------------------------------

    def load(self, versions: Mapping[int, tuple[SignedVersion, tuple[Watermark, ...]]]) -> None:
        """Note which versions the vault holds after start-up, with their watermarks."""
        torch.set_num_threads(1)
        self._committed = dict(versions)

    def encode(self, fragment: int, base_buffer: int) -> Encoded:
        """Encode the pseudo-gradient of what the learner copied out."""
        return self.vault.own.encode(
            fragment, self._exchange.base(fragment, base_buffer), self._exchange.sent(fragment)
        )

    def commit(self, effect: CommitVersion, own_merged: bool) -> None:
        """Make the spare the state."""
        header = effect.version.header
        self.vault.commit(header.fragment, header.number, header.state_digest)
        self._committed[header.fragment] = (effect.version, effect.watermarks)
        if own_merged:
            self.vault.own.commit_residual(header.fragment)

    def post(self, fragment: int, buffer: int) -> BaseRef:
        """Copy the committed Theta into a base buffer of the exchange; return which version it is."""
        self._exchange.base(fragment, buffer).copy_(self.vault.theta(fragment))
        header = self._committed[fragment][0].header
        return BaseRef(header.number, buffer, header.tokens)

    def copy_out(self, layout: FragmentLayout, parameters: dict[str, Tensor]) -> SignedVersion:
        """Copy a fragment's committed version, as a result, into the parameters by name; return which one
        it is."""
        scatter(self.vault.result(layout.index), layout, parameters)
        return self._committed[layout.index][0]

    def pin(self, fragment: int) -> tuple[StateHeader, Pin]:
        """Pin the committed state for a reader that takes its time."""
        version, watermarks = self._committed[fragment]
        return StateHeader(version, watermarks), self.vault.pin(fragment)
