"""One life of a member of a bulk world: the daemon's real bulk code, and a script where the core would be.

`MemberHandlers` are what peers reach: what a member gives is perhaps a lie, what it takes is counted
(`WatchedTransport`). `PushInbox` decides on contributions as a syncer does. At the end `left_over` searches
all objects of a member for tables, counters and pins that must be empty, whatever they are called.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import Struct

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NEVER, WHOLE_RUN, ContributionHeader, Head, SignedContribution, Stamp
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.daemon.network.link import LinkMeters
from p2pdiloco.daemon.payloads import Compute, Memory, Tickets, UpdateLog, least_bytes, most_update_bytes
from p2pdiloco.errors import RemoteError
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import Buffer, PullSink, PullSource, PushSink, Refusal
from p2pdiloco_lab.bulk_world.bulk_plan import INNER_STEPS, RUN, MemberSpec, forged, sound
from p2pdiloco_lab.memory_net import MemoryTransport
from p2pdiloco_lab.simulation.seed_plan import random_stream

if TYPE_CHECKING:
    from p2pdiloco_lab.bulk_world.bulk_world import BulkWorld

UPDATES_IN_MEMORY = 2
AVOID_S = (1.0, 4.0)
"""A holder that failed is not named again for so long, if there is another."""


class BulkMember:
    """Transfers with everything beneath them, from a start to a death. Implements `ChainView`."""

    run = RUN
    dialable = True

    def __init__(self, world: BulkWorld, spec: MemberSpec, life: int, numbers: Sequence[int | None]) -> None:
        """`numbers`: of the versions that its disk holds, by fragment."""
        self.world, self.spec, self.name, self.life = world, spec, spec.name, life
        self.born_s = world.now
        self.rng: Random = random_stream(world.plan.seed, f"{spec.name} {life}")
        self.numbers = list(numbers)
        self.fetching: dict[int, int] = {}
        """Fragment -> which of its fetches is under way: they are counted."""
        self._fetches = 0
        self._sequence = 0
        self.learning = 0
        """Contributions that are not given yet."""
        self._copying: set[int] = set()
        self._avoided: dict[str, float] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        ledger, codec = world.ledger, world.plan.codec
        self.vault = ledger.vault()
        for fragment, number in enumerate(self.numbers):
            if number is not None:
                ledger.load(self.vault, fragment, number)
        self.compute = Compute(self.vault, None)
        held = {f: (ledger.versions[f, n], ()) for f, n in enumerate(self.numbers) if n is not None}
        self.compute.load(held)
        self.tickets, self.log = Tickets(), UpdateLog(UPDATES_IN_MEMORY)
        sizes = (ledger.layouts, codec, codec, UPDATES_IN_MEMORY)
        most = least_bytes(*sizes) * self.rng.uniform(1.0, 1.5) if spec.tight else 0.0
        self.memory = Memory.of_run(most, *sizes)
        payload_bytes = len(ledger.contribution(0, Random(0)))
        self.spool = Spool(world.folder, int(payload_bytes * self.rng.uniform(0.5, 4.0)), 0)
        self.transport = WatchedTransport(world, self)
        self.transfers = Transfers(
            self,
            self.transport,
            self.compute,
            self.tickets,
            self._post,
            LinkMeters(self.transport),
            self.memory,
            self.spool,
        )
        self.memory.count(self.tickets, self.log, self.transfers)
        self.inbox = PushInbox(self)
        self.door = MemberHandlers(world, self)

    async def start(self) -> None:
        """Be there."""
        await self.transport.start(self.door)
        for fragment in range(self.world.plan.fragments):
            self.spawn(self._follow(fragment))
            self.spawn(self._learn(fragment))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task that ends with this life; an error in it breaks a rule."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.rules.error(self.name, error)

    def kill(self) -> None:
        """Be gone without a word."""
        self.world.hub.kill(self.name)
        for task in self.tasks:
            task.cancel()

    def say(self, text: str, fragment: int | None = None) -> None:
        """A line of the trace."""
        self.world.trace.decision(self.world.now, self.name, text, fragment)

    def close(self) -> None:
        """Let go of files and threads."""
        self.spool.close()
        self.compute.close()

    def drop_inbox(self) -> None:
        """Release what waits to be merged: nobody merges any more."""
        for fragment in range(self.world.plan.fragments):
            for ticket in self.inbox.take(fragment):
                self.tickets.release(ticket)

    def is_copying(self, fragment: int) -> bool:
        """Tell whether it is fetching a state of the fragment, not an update."""
        return fragment in self._copying

    # --- what the daemon asks and tells the core -------------------------------------------------------

    @property
    def may_serve(self) -> bool:
        return None not in self.numbers

    def is_member(self, peer: str) -> bool:
        """Everybody is."""
        return True

    def signed(self, version: SignedVersion) -> bool:
        return sound(version)

    def head(self, fragment: int) -> Head:
        """Return the head; of a fragment that is not here yet, version 0."""
        return self.world.ledger.versions[fragment, self.numbers[fragment] or 0].header.head()

    def state_bytes(self, fragment: int) -> int:
        return 8 * self.world.ledger.layouts[fragment].numel

    def most_update_bytes(self, fragment: int) -> int:
        return most_update_bytes(self.world.ledger.layouts[fragment])

    async def update_of(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        found = self.log.get(fragment, number)
        mine = self.numbers[fragment]
        if found is not None or mine is None or not 0 < number <= mine:
            return found
        update = await self.compute.run(lambda: self.world.ledger.updates[fragment, number])
        return self.world.ledger.versions[fragment, number], update

    async def contribution_of(self, fragment: int, digest: bytes) -> Buffer | None:
        """Nobody audits here."""
        return None

    def holders(self, fragment: int, digest: bytes) -> Sequence[str]:
        versions = self.world.ledger.versions
        return [
            member.name
            for member in self.world.alive()
            if (n := member.numbers[fragment]) is not None and versions[fragment, n].header.digest() == digest
        ]

    def _post(self, event: ev.Event) -> None:
        match event:
            case ev.Offered() | ev.PayloadReceived() | ev.PayloadBroken():
                self.inbox.post(event)

    # --- following the chain ---------------------------------------------------------------------------

    async def _follow(self, fragment: int) -> None:
        while True:
            mine, newest = self.numbers[fragment], self.world.newest(fragment, self)
            if newest is None or mine == newest:
                await self.world.news(fragment)
                await asyncio.sleep(self.rng.uniform(0.0, 0.3))
                continue
            state = mine is None or newest - mine > self.world.plan.log_versions
            wanted = newest if state else (mine or 0) + 1
            holder = self._holder(fragment, wanted)
            if holder is None or not await self._fetch(fragment, wanted, holder, state):
                await asyncio.sleep(self.rng.uniform(0.2, 0.6))

    def _holder(self, fragment: int, number: int) -> str | None:
        """Choose whom to ask: most often the version's syncer."""
        now = self.world.now
        able = [
            member.name
            for member in self.world.listed()
            if member.name != self.name and (member.numbers[fragment] or 0) >= number
        ]
        able = [peer for peer in able if self._avoided.get(peer, 0.0) <= now] or able
        syncer = self.world.ledger.versions[fragment, number].header.syncer
        if syncer in able and self.rng.random() < 0.7:
            return syncer
        return self.rng.choice(able) if able else None

    async def _fetch(self, fragment: int, number: int, holder: str, state: bool) -> bool:
        self._fetches += 1
        self.fetching[fragment] = self._fetches
        self.say(f"asks {holder} for {'state' if state else 'update'} {number}", fragment)
        answer: ev.StateFetched | ev.UpdateFetched | ev.FetchFailed
        if state:
            self._copying.add(fragment)
            answer = await self.transfers.fetch_state(ev.FetchState(fragment, number, holder))
            self._copying.discard(fragment)
        else:
            answer = await self.transfers.fetch_update(ev.FetchUpdate(fragment, number, holder))
        if isinstance(answer, ev.FetchFailed):
            self.say(f"has not got {number} from {holder}: {answer.failure.text} {answer.detail}", fragment)
            self._avoided[holder] = self.world.now + self.rng.uniform(*AVOID_S)
            self.world.rules.failed(self, fragment, holder, answer)
            return False
        if isinstance(answer, ev.StateFetched):
            await self._commit(answer.version)
        else:
            await self._apply(answer)
        return True

    async def _apply(self, given: ev.UpdateFetched) -> None:
        header, payload = given.version.header, self.tickets.get(given.ticket)
        self.world.rules.update_delivered(self, given.version, payload)
        steps = header.longest_steps()
        digest = await self.compute.run(self.vault.apply, header.fragment, header.number, payload, steps)
        self.world.rules.same_state(self, given.version, digest)
        self.log.add(given.version, payload)
        self.tickets.release(given.ticket)
        await self._commit(given.version, keeps_log=True)

    async def _commit(self, version: SignedVersion, keeps_log: bool = False) -> None:
        header = version.header
        if not keeps_log:
            self.log.clear(header.fragment)
        effect = ev.CommitVersion(version, None, None, (), NEVER, False)
        await self.compute.run(self.compute.commit, effect, False)
        self.numbers[header.fragment] = header.number
        self.say(f"has version {header.number}", header.fragment)
        self.world.rules.committed(self, version)
        self.world.tell(header.fragment)

    # --- contributions and versions --------------------------------------------------------------------

    async def _learn(self, fragment: int) -> None:
        while not self.world.over:
            await asyncio.sleep(self.rng.uniform(2.0, 8.0))
            if self.numbers[fragment] is None or self.world.over:
                continue
            self._sequence += 1
            stamp = Stamp(self.life + 1, self._sequence)
            payload = self.world.ledger.contribution(fragment, self.rng)
            ticket = self.tickets.put(payload)
            self.learning += 1
            while not await self._offer(fragment, stamp, ticket, payload):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(self.rng.uniform(0.3, 1.5))
            self.learning -= 1
            self.tickets.release(ticket)

    async def _offer(self, fragment: int, stamp: Stamp, ticket: int, payload: bytearray) -> bool:
        """Tell whether nothing remains to be done for this contribution."""
        syncer = self.world.syncer(fragment)
        if syncer == self.name:
            return True
        signed = self.inbox.label(fragment, stamp, payload)
        given = self.door.as_given(payload)
        answer = await self.transfers.offer(ev.Offer(syncer, signed, ticket), given)
        if not isinstance(answer, ev.OfferAnswered):
            self.say(f"did not get {stamp.sequence} to {syncer}", fragment)
            return False
        self.say(f"gave {stamp.sequence} to {syncer}: {answer.verdict.text}", fragment)
        self.world.rules.answered(self, syncer, signed.header, answer.verdict)
        return answer.verdict.taken or answer.verdict is Verdict.FULL

    async def make(self, fragment: int, number: int) -> None:
        """Merge what is here into the next version."""
        inputs = self.inbox.take(fragment)
        payloads = [(self.tickets.payload(ticket), INNER_STEPS, INNER_STEPS) for ticket in inputs]
        payloads.append((self.world.ledger.contribution(fragment, self.rng), INNER_STEPS, INNER_STEPS))
        done = await self.compute.run(self.vault.merge, fragment, number, payloads, [], INNER_STEPS)
        for ticket in inputs:
            self.tickets.release(ticket)
        del payloads
        await asyncio.sleep(self.rng.uniform(0.005, 0.1))  # the disk
        size = len(done.update)
        version = self.world.ledger.signed(
            fragment, number, self.name, done.state_digest, done.update_digest, size
        )
        self.log.add(version, done.update)
        effect = ev.CommitVersion(version, None, None, (), NEVER, False)
        await self.compute.run(self.compute.commit, effect, False)
        self.world.ledger.add(version, bytes(done.update), self.vault)
        self.numbers[fragment] = number
        self.say(f"made version {number} of {len(inputs) + 1} contributions", fragment)
        self.world.tell(fragment)


# The ends that peers reach.

FORGED = 0.3
"""Share of lies that are another version under the same signature; the others are damaged bytes."""


class MemberHandlers:
    """Handlers of a member: peers reach its transfers, and what they are given may be false. Implements
    `ports.TransportHandlers`."""

    def __init__(self, world: BulkWorld, member: BulkMember) -> None:
        self._world, self._member = world, member

    def is_member(self, sender: str) -> bool:
        """Everybody is."""
        return True

    def is_stranger(self, sender: str) -> bool:
        """Nobody is."""
        return False

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """Nobody sends messages here."""
        raise RemoteError("garbage")

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        return self._member.transfers.pushes_in.on_push(sender, wire.decode(header, wire.PushContribution))

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        pull = wire.decode(request, cast(Any, wire.PullUpdate | wire.PullState))
        self._world.rules.asked(self._member, sender, pull)
        answer = await self._member.transfers.on_pull(sender, pull)
        if isinstance(answer, PullSource) and self._world.lies(self._member.name):
            return self._lie(sender, pull, answer)
        return answer

    def _lie(self, sender: str, pull: wire.PullUpdate | wire.PullState, source: PullSource) -> PullSource:
        member = self._member
        if member.rng.random() < FORGED:
            header = wire.decode(source.header, cast(Any, wire.UpdateHeader | wire.StateHeader))
            member.say(f"forges a version for {sender}", pull.fragment)
            false = msgspec.structs.replace(header, version=forged(header.version))
            return msgspec.structs.replace(source, header=wire.encode(false))
        member.say(f"damages what it gives {sender}", pull.fragment)
        payload = bytearray().join(source.payload)
        _damage(payload)
        noted = self._world.rules.lied(member, sender, pull)

        def delivered() -> None:
            noted()
            source.delivered()

        return msgspec.structs.replace(source, payload=(payload,), delivered=delivered)

    def as_given(self, payload: bytearray) -> bytearray:
        """Return what the member really pushes of its own contribution."""
        if not self._world.lies(self._member.name):
            return payload
        given = bytearray(payload)
        _damage(given)
        return given


def _damage(payload: bytearray) -> None:
    if payload:
        payload[len(payload) // 2] ^= 1


class WatchedTransport(MemoryTransport):
    """A transport that tells the rules what was pulled over it."""

    def __init__(self, world: BulkWorld, member: BulkMember) -> None:
        super().__init__(world.hub, member.name)
        self._world, self._member = world, member

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:

        def count(version: VersionHeader, nbytes: int) -> None:
            self._world.rules.came(self._member, version, nbytes)
            self._world.moved(self._member.name, peer, nbytes)

        counted = _Counted(sink, count)
        return await super().pull_into(peer, request, counted, timeout_s)


class _Counted:
    """A sink whose bytes are counted by the version that they are said to belong to."""

    def __init__(self, sink: PullSink, count: Callable[[VersionHeader, int], None]) -> None:
        self._sink, self._count = sink, count
        self._version: VersionHeader | None = None

    def begin(self, header: bytes, payload_bytes: int) -> None:
        found = wire.decode(header, cast(Any, wire.UpdateHeader | wire.StateHeader))
        self._version = found.version.header
        self._sink.begin(header, payload_bytes)

    def write(self, offset: int, chunk: memoryview) -> None:
        assert self._version is not None
        self._sink.write(offset, chunk)
        self._count(self._version, len(chunk))


# A syncer's decisions on contributions that peers push, as short as they can be said.

MOST_WAITING = 6
"""Contributions of a fragment that wait to be merged."""


class PushInbox:
    """Contributions by their learner's stamp: on their way, here, or merged."""

    def __init__(self, member: BulkMember) -> None:
        self._member = member
        self._coming: dict[int, ContributionHeader] = {}
        """Transfer -> what is coming."""
        self._here: dict[int, ContributionHeader] = {}
        """Ticket -> what is here."""
        self._known: Counter[tuple[int, str, Stamp]] = Counter()
        """Arrivals of each that ever came: (fragment, learner, stamp)."""

    def label(self, fragment: int, stamp: Stamp, payload: bytearray) -> SignedContribution:
        """Label a contribution of the member's own learner."""
        head = self._member.head(fragment)
        header = ContributionHeader(
            run=RUN,
            group=WHOLE_RUN,
            fragment=fragment,
            learner=self._member.name,
            stamp=stamp,
            after=NEVER,
            base_number=head.number,
            base_digest=head.digest,
            tokens=INNER_STEPS,
            inner_steps=INNER_STEPS,
            payload_digest=content_digest(payload),
            payload_bytes=len(payload),
            codec=self._member.world.plan.codec,
            due=True,
        )
        return SignedContribution(header, b"")

    def post(self, event: ev.Offered | ev.PayloadReceived | ev.PayloadBroken) -> None:
        """An event of the receiving half of pushes."""
        pushes_in = self._member.transfers.pushes_in
        if isinstance(event, ev.Offered):
            assert isinstance(event.signed, SignedContribution)
            label = event.signed.header
            refusal = self._why_not(label)
            if refusal is not None:
                pushes_in.decided(ev.AnswerTransfer(event.transfer, label.fragment, refusal))
            else:
                self._coming[event.transfer] = label
                pushes_in.decided(ev.AcceptTransfer(event.transfer, label.fragment, label.payload_bytes))
        elif isinstance(event, ev.PayloadBroken):
            label = self._coming.pop(event.transfer)
            self._member.world.rules.broken_off(self._member, label, event.verdict)
        else:
            label = self._coming.pop(event.transfer)
            self._here[event.ticket] = label
            self._known[label.fragment, label.learner, label.stamp] += 1
            payload = self._member.tickets.payload(event.ticket)
            self._member.world.rules.contribution_delivered(self._member, label, payload)
            pushes_in.decided(ev.AnswerTransfer(event.transfer, label.fragment, Verdict.IN_ROUND))

    def _why_not(self, label: ContributionHeader) -> Verdict | None:
        key = (label.fragment, label.learner, label.stamp)
        if self._known[key]:
            return Verdict.ALREADY_HELD
        if any((x.fragment, x.learner, x.stamp) == key for x in self._coming.values()):
            return Verdict.IN_TRANSFER
        waiting = [x for x in (*self._coming.values(), *self._here.values()) if x.fragment == label.fragment]
        return Verdict.FULL if len(waiting) >= MOST_WAITING else None

    def count(self, label: ContributionHeader) -> int:
        """Count how often it came here."""
        return self._known[label.fragment, label.learner, label.stamp]

    def take(self, fragment: int) -> list[int]:
        """Tickets of what is here of a fragment: it is merged now."""
        taken = [ticket for ticket, label in self._here.items() if label.fragment == fragment]
        for ticket in taken:
            del self._here[ticket]
        return taken

    @property
    def empty(self) -> bool:
        """Tell whether nothing is coming, and nothing waits to be merged."""
        return not self._coming and not self._here


# Leftovers.

SEARCHED = (
    "p2pdiloco.daemon.bulk",
    "p2pdiloco.daemon.payloads",
    "p2pdiloco.daemon.driver",
    "p2pdiloco.adapters",
    "p2pdiloco.tensors",
)
CONTAINERS = (list, dict, set, frozenset, deque)
REMEMBER = frozenset({"_known", "_until", "_given", "takers", "_flows", "refusals", "_committed"})
"""Tables that outlive transfers: who was fast, who failed, who was served, windows."""
OF_RUN = frozenset({"_states", "_spares", "_residuals", "_left_out", "_holders", "_logs"})
"""Tables with a place for each fragment of the run."""
MOST_ENTRIES = 256
COUNTERS = frozenset(
    {
        "pins",
        "streams",
        "in_flight_bytes",
        "unacknowledged_bytes",
        "_arriving_bytes",
        "_checked_bytes",
        "_reserved_bytes",
        "_refusing",
        "_queued_bytes",
    }
)
"""Counters that go up when something begins, and down when it is over."""


def too_large(member: BulkMember) -> str:
    """Name a table that has outgrown its bound; mostly nothing."""
    for path, value in _containers_in(member.transfers, "transfers", set()):
        if isinstance(value, CONTAINERS) and len(value) > MOST_ENTRIES:
            return f"{path} holds {len(value)}"
    used, most = member.memory.claimed_bytes, member.memory.most_bytes
    if used > most:
        return f"{used} bytes of {most:.0f} that it may have"
    return ""


def left_over(member: BulkMember) -> str:
    """Name something that is not over although nothing is under way; mostly nothing."""
    member.transfers.pushes_in.forget_old()  # as whoever pushes or pulls next would do
    if member.spool.held_bytes:
        return f"{member.spool.held_bytes} bytes of scratch"
    for root, owner in (("transfers", member.transfers), ("transport", member.transport)):
        for path, value in _containers_in(owner, root, set()):
            name = path.rpartition(".")[2]
            if name in COUNTERS and value:
                return f"{path} is {value}"
            if isinstance(value, CONTAINERS) and value and name not in REMEMBER | OF_RUN:
                return f"{path} holds {len(value)}"
    if member.vault.pins:
        return f"{member.vault.pins} pins"
    if len(member.tickets):
        return f"{len(member.tickets)} tickets"
    if member.memory.claimed_bytes != member.log.held_bytes:
        return f"{member.memory.claimed_bytes} bytes of memory, of which the log has {member.log.held_bytes}"
    return ""


def _containers_in(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield all containers and counters inside the daemon's own objects, depth first."""
    if id(value) in seen or isinstance(value, Struct):
        return
    if isinstance(value, CONTAINERS):
        seen.add(id(value))
        yield path, value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers_in(item, path, seen)
    elif isinstance(value, MemberHandlers | WatchedTransport | _Counted) or type(value).__module__.startswith(
        SEARCHED
    ):
        seen.add(id(value))
        for name, inside in vars(value).items():
            if name in COUNTERS:
                yield f"{path}.{name}", inside
            elif name not in ("_hub", "_world", "_member"):
                yield from _containers_in(inside, f"{path}.{name}", seen)
