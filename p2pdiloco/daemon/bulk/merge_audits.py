"""Audits: what a syncer merged is fetched, and merged again; and loss audits, which our learner measures.

`Auditing` makes a merge again: each contribution is asked of its learner, and then of its group's syncer;
each partial merge of the member that made it, and then of the one that added it up (`Asking`). Digest and
content are judged before it counts. What finds no place in a small share of memory lies in scratch on the
disk, as what peers push. `GivingContributions` answers other auditors out of our own contributions and
`MergedPayloads`. `LossAuditing` has the learner measure what one contribution does to the loss.

Rules: docs/protocol/audits.md, sections 2 and 4; docs/protocol/loss-audits.md, section 2.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome, PullRefusal
from p2pdiloco.core.api.types import WHOLE_RUN, Contributor, MergeLimits
from p2pdiloco.core.api.versions import PartOfTree, SignedVersion, sample_seed
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.pushes import ChainView
from p2pdiloco.daemon.bulk.states import Courtesy
from p2pdiloco.daemon.learner_link import Questions
from p2pdiloco.daemon.payloads import Compute, Memory, Tickets
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.errors import RemoteError, StorageError, TransportError
from p2pdiloco.learner import channel as ch
from p2pdiloco.ports import Buffer, PullSource, Refusal, Transport
from p2pdiloco.tensors import vault as appraisal
from p2pdiloco.tensors.codecs import Unsound, UnusableInputs
from p2pdiloco.tensors.merge import Input, Payload, digest_of, memory_bytes, size_of
from p2pdiloco.tensors.outer_update import Correction, Remade, UpdateMaker, merges_as_everywhere
from p2pdiloco.tensors.vault import Vault
from p2pdiloco.util import BoundedDict, Frozen, loop_s

logger = logging.getLogger(__name__)
AUDIT_S = 60.0
"""Time that an audit has to get the contributions, from when the core asks for it."""
STREAMS = 3
"""Number of contributions that are on their way here at one time."""
MAX_WAITING = 4
"""Number of audits that wait for the one under way."""
SHARE_BYTES = 128 << 20
"""Bytes of contributions that stay in memory until they are merged; the others go to the disk."""


class _Fetched:
    """Contributions and partial merges of one audit that are here."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.payloads: dict[bytes, Payload] = {}
        """Payloads by digest."""
        self.memory_bytes = 0
        """Bytes of memory that they take, with those that are arriving."""
        self.withheld = False
        """True: the syncer, which is connected, had time to give what it merged, and did not."""
        self.outcome: AuditOutcome | None = None
        """Outcome, if there is no need to merge."""
        self.true_update: tuple[bytearray, bytes] | None = None
        """Update as it should have been, with its digest, if the version has another one."""
        wanted = subject.wanted()
        if subject.givers:
            random.shuffle(wanted)  # all members ask for them now
        self._wanted = iter(wanted)

    def wanted(self) -> Iterator[Wanted]:
        """Go through those that nobody fetches yet, as long as all others came."""
        for each in self._wanted:
            if self.outcome is not None:
                return
            yield each


@dataclass
class Auditing:
    """Auditing: carries out `Audit`, one after the other."""

    _chain: ChainView
    _transport: Transport
    _compute: Compute
    _merged: MergedPayloads
    _true_updates: TrueUpdates
    _memory: Memory
    _spool: Spool | None
    """Place for what finds none in memory; None: an audit of so much does without."""

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._complained = False
        self._held_bytes = 0
        self._asking = Asking(self._chain, self._transport, self._memory, self._is_sound)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of contributions that are being audited."""
        return self._held_bytes + self._asking.held_bytes

    @property
    def bytes_in(self) -> int:
        """Payload bytes received so far."""
        return self._asking.bytes_in

    async def audit(self, effect: ev.Audit) -> ev.Audited:
        """Make a merge again, and see how that compares."""
        subject = Subject(effect)
        outcome, fetched = AuditOutcome.MISSING, _Fetched(subject)
        if self._waiting <= MAX_WAITING:
            self._waiting += 1
            try:
                outcome = await self._in_turn(fetched, loop_s() + AUDIT_S)
            finally:
                self._waiting -= 1
        false = outcome is AuditOutcome.DIFFERENT and subject.group == WHOLE_RUN
        remade = false and self._true_updates.has(effect.version.header.digest())
        return ev.Audited(outcome, remade, fetched.withheld)

    async def _in_turn(self, fetched: _Fetched, until_s: float) -> AuditOutcome:
        subject = fetched.subject
        try:
            async with asyncio.timeout_at(until_s):
                await self._turn.acquire()
        except TimeoutError:
            return AuditOutcome.MISSING
        try:
            if not await self._able():
                return AuditOutcome.UNABLE
            async with asyncio.timeout_at(until_s), asyncio.TaskGroup() as group:
                for _ in range(STREAMS):
                    group.create_task(self._fetch_all(fetched))
            outcome = fetched.outcome or await self._merge(fetched)
            if outcome is AuditOutcome.DIFFERENT:
                # Others are to find the same, and may get it nowhere else.
                self._merged.keep_audited(subject.fragment, fetched.payloads)
                if fetched.true_update is not None:
                    self._true_updates.keep(subject.digest, *fetched.true_update)
            return outcome
        except TimeoutError:
            return fetched.outcome or AuditOutcome.MISSING
        finally:
            self._give_back(fetched, fetched.memory_bytes)
            self._turn.release()

    async def _able(self) -> bool:
        """Tell whether merges of ours have the bits that all others' have; say so, once, if not."""
        able = await self._compute.run(merges_as_everywhere)
        if not able and not self._complained:
            self._complained = True
            logger.error("this machine does not calculate as all others do: it finds no merge false")
        return able

    @asynccontextmanager
    async def contribution(self, version: SignedVersion, part: Contributor) -> AsyncIterator[Payload | None]:
        """Get one contribution that a version names, beside the audit whose turn it is: that is not to wait
        for whoever gives slowly. None: it is not to be had in time, or there is no room. It is kept until the
        end of the context."""
        fetched, payload = _Fetched(Subject(ev.Audit(version.header.fragment, version))), None
        try:
            with suppress(TimeoutError, Unsound):
                async with asyncio.timeout(AUDIT_S):
                    payload = await self._fetch(fetched, Wanted(part.payload_digest, [part.learner]))
            yield payload
        finally:
            self._give_back(fetched, fetched.memory_bytes)

    async def _merge(self, fetched: _Fetched) -> AuditOutcome:
        subject, payloads = fetched.subject, fetched.payloads
        if not subject.can_be_merged():
            return AuditOutcome.DIFFERENT
        correction = None
        if subject.repairs_something:
            correction = await self._true_updates.correction(subject.repairs)
            if correction is None:
                return AuditOutcome.MISSING
        maker = self._compute.vault.maker

        def make() -> Remade | None:
            try:
                return subject.make(maker, payloads, correction)
            except UnusableInputs:
                return None

        def compare() -> AuditOutcome:
            made = make()
            if made is not None and subject.is_stated(made):
                return AuditOutcome.SAME
            # It is about to cost somebody its place: not for a damaged disk or memory of ours.
            intact = all(digest_of(payload) == digest for digest, payload in payloads.items())
            whole = correction is None or correction.is_whole()
            if not intact or not whole or make() != made:
                return AuditOutcome.MISSING
            if made is not None:
                fetched.true_update = subject.true_update(made)
            return AuditOutcome.DIFFERENT

        try:
            return await self._compute.run(compare)
        except StorageError as error:
            logger.warning("%s", error)
            return AuditOutcome.MISSING

    # --- getting what was merged -----------------------------------------------------------------------

    async def _fetch_all(self, fetched: _Fetched) -> None:
        for wanted in fetched.wanted():
            try:
                payload = await self._fetch(fetched, wanted)
            except Unsound:
                # It is what the header names: no honest syncer merges that.
                fetched.outcome = AuditOutcome.DIFFERENT
                return
            if payload is None:
                fetched.outcome = fetched.outcome or AuditOutcome.MISSING
                return
            fetched.payloads[wanted.digest] = payload

    async def _fetch(self, fetched: _Fetched, wanted: Wanted) -> Payload | None:
        """Get what was merged: from here, or from whoever has it. None: nobody gives it, or there is no room.

        Raises: Unsound.
        """
        subject, digest, fragment = fetched.subject, wanted.digest, fetched.subject.fragment
        here = self._merged.get(fragment, digest) or await self._chain.contribution_of(fragment, digest)
        if here is not None and await self._is_sound(subject, wanted, here):
            return here
        maker = self._compute.vault.maker
        size = maker.partial_bytes(fragment) if wanted.partial else maker.contribution_bytes(fragment)
        if not self._memory.fits_push(size):
            self._memory.refuse()
            return None
        fetched.memory_bytes += size
        self._held_bytes += size
        began_s, payload, asked = loop_s(), None, False
        try:
            payload, asked = await self._asking.get(subject, wanted, size), True
        finally:
            waited_s = loop_s() - began_s
            if payload is None and (asked or waited_s >= AUDIT_S / 2):
                fetched.withheld |= subject.syncer in self._transport.connected()
        return None if payload is None else await self._place(fetched, payload, size)

    async def _is_sound(self, subject: Subject, wanted: Wanted, payload: Payload) -> bool:
        """Judge a payload in the tensors thread. False: it is another one, or cannot be read. Raises: Unsound
        (it is the one, and can be none)."""
        vault = self._compute.vault

        def judge() -> bool:
            if digest_of(payload) != wanted.digest:
                return False
            try:
                subject.check(vault, wanted, payload)
            except Unsound:
                if digest_of(payload) != wanted.digest:
                    return False  # damaged here, just now
                raise
            return True

        try:
            return await self._compute.run(judge)
        except StorageError as error:
            logger.warning("%s", error)
            return False

    async def _place(self, fetched: _Fetched, payload: Payload, size: int) -> Payload | None:
        """Leave a payload in memory, or move it to the disk. None: there is no room."""
        if fetched.memory_bytes <= SHARE_BYTES or not memory_bytes(payload):
            return payload
        if self._spool is None or not self._spool.fits(size):
            return None
        assert isinstance(payload, bytearray)
        scratch = self._spool.take(len(payload))
        try:
            await scratch.write(0, memoryview(payload))
        except StorageError as error:
            logger.warning("%s", error)
            return None
        self._give_back(fetched, size)
        return scratch

    def _give_back(self, fetched: _Fetched, size: int) -> None:
        fetched.memory_bytes -= size
        self._held_bytes -= size


class Wanted(NamedTuple):
    """Contribution or partial merge that an audit needs."""

    digest: bytes
    makers: list[str]
    """Members that made it."""
    partial: PartOfTree | None = None
    """Partial merge that it is; None: it is a contribution."""


class Subject:
    """Merge that is made again, of a version or of one of its groups: what went into it, and what its
    syncer states."""

    def __init__(self, effect: ev.Audit) -> None:
        header, part = effect.version.header, effect.part
        self.fragment = header.fragment
        self.digest = header.digest()
        """Digest of the version."""
        self.group = WHOLE_RUN if part is None else part.entry.group
        self.syncer = header.syncer if part is None else part.entry.syncer
        """Syncer that made it."""
        self.givers, self.repairs = effect.givers, effect.repairs
        self.repairs_something = part is None and header.repairs is not None
        self._header, self._part, self._below = header, part, effect.below
        self._limits = header.limits if part is None else part.entry.by(header.limits)
        whole = header.contributors if part is None else part.parts
        self._parts: tuple[Contributor, ...] = () if effect.below else whole
        """Contributions that were added up for it, not for a group below."""

    def wanted(self) -> list[Wanted]:
        """List what it was made of, each once."""
        learners: dict[bytes, list[str]] = {}
        for part in self._parts:
            learners.setdefault(part.payload_digest, []).append(part.learner)
        below = {each.entry.payload_digest: each for each in self._below}
        return [
            *(Wanted(digest, makers) for digest, makers in learners.items()),
            *(Wanted(digest, [each.entry.syncer], each) for digest, each in below.items()),
        ]

    def check(self, vault: Vault, wanted: Wanted, payload: Payload) -> None:
        """Judge what has the digest of something in it: no honest syncer merges what is unsound. In the
        tensors thread. Raises: Unsound, StorageError."""
        if wanted.partial is None:
            vault.check_payload(self.fragment, payload, vault.maker.codec_name)
            return
        work = [(part.tokens, part.inner_steps, part.trust, part.votes) for part in wanted.partial.parts]
        limits = wanted.partial.entry.by(self._header.limits)
        vault.check_partial(self.fragment, payload, work, limits, leaf=not wanted.partial.below)

    def can_be_merged(self) -> bool:
        """Tell whether there is anything to merge, by limits that a merge can have: NaN is none."""
        limits = [self._limits, *(each.entry.by(self._header.limits) for each in self._below)]
        return bool(self._parts or self._below) and all(map(_sane, limits))

    def is_stated(self, made: Remade) -> bool:
        """Tell whether that is what its syncer states: its bytes, and what it says of each contribution."""
        digest = self._header.update_digest if self._part is None else self._part.entry.payload_digest
        stated = [(part.length, part.score) for part in self._parts]
        found = list(zip(made.found.lengths, made.found.scores, strict=True))
        return made.update_digest == digest and stated == found

    def true_update(self, made: Remade) -> tuple[bytearray, bytes] | None:
        """Find the update that a version should have had, and its digest; None: it has that, or is none."""
        other = self._part is None and made.update_digest != self._header.update_digest
        return (made.update, made.update_digest) if other else None

    def make(
        self, maker: UpdateMaker, payloads: Mapping[bytes, Payload], correction: Correction | None
    ) -> Remade:
        """Make it again of these payloads, by digest, in the tensors thread. `correction`: what it makes
        good, if it repairs a version. Raises: UnusableInputs, StorageError."""
        inputs = [
            Input(payloads[part.payload_digest], part.tokens, part.inner_steps, part.trust, votes=part.votes)
            for part in self._parts
        ]
        partials = [payloads[each.entry.payload_digest] for each in self._below]
        limits, seed = self._limits, sample_seed(self._parts)
        if self._part is None:
            return maker.remake(self.fragment, inputs, limits, seed, correction, partials)
        return maker.remake_partial(self.fragment, inputs, limits, seed, partials)


def _sane(limits: MergeLimits) -> bool:
    return limits.most_tokens > 0 and limits.longest > 0.0 and limits.of_median >= 0.0


KEEP_S = 60.0
"""Time for which they are kept; an audit takes no longer."""
MOST_MEMORY_BYTES = 256 << 20
MOST_SCRATCH_BYTES = 2 << 30
NO_TICKET = -1


class _Kept(Frozen):
    ticket: int
    payload: Payload
    until_s: float


class MergedPayloads:
    """Payloads of what we merged lately, or of a merge that we found false: contributions and partial merges,
    kept for a while for auditors. Use from a running event loop.

    They stay where they are: in memory, or in scratch on the disk. Whatever else wants the memory gets it.
    Later merges do not drive them out before their time: an auditor may have been kept waiting.
    """

    def __init__(self, tickets: Tickets) -> None:
        """`tickets`: as long as one is open, its payload counts there."""
        self._tickets = tickets
        self._kept: dict[tuple[int, bytes], _Kept] = {}
        """Payloads by fragment and digest, oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of payloads that are kept for nothing else."""
        kept = self._kept.values()
        return sum(memory_bytes(each.payload) for each in kept if not self._tickets.is_open(each.ticket))

    def keep(self, fragment: int, merged: Iterable[tuple[bytes, int, Payload]]) -> None:
        """Keep what was merged, (digest, ticket, payload). A ticket may be released already."""
        until_s = loop_s() + KEEP_S
        for digest, ticket, payload in merged:
            self._kept.pop((fragment, digest), None)  # the newest is the last
            self._kept[fragment, digest] = _Kept(ticket, payload, until_s)
        self._bound()
        if self._timer is None and self._kept:
            self._timer = asyncio.get_running_loop().call_at(until_s, self._forget_old)

    def keep_audited(self, fragment: int, payloads: Mapping[bytes, Payload]) -> None:
        """Keep what was merged again, by digest, and gave something else than its syncer says: others are to
        find that, too."""
        here = {digest: self._kept.get((fragment, digest)) for digest in payloads}
        known = {digest: (kept.ticket, kept.payload) for digest, kept in here.items() if kept is not None}
        named = payloads.items()
        self.keep(fragment, [(digest, *known.get(digest, (NO_TICKET, each))) for digest, each in named])

    def get(self, fragment: int, digest: bytes) -> Payload | None:
        """Return a payload; None: it is not, or no longer, kept."""
        kept = self._kept.get((fragment, digest))
        return None if kept is None else kept.payload

    def give_up(self) -> None:
        """Let go of all that is in memory: it is wanted for something else."""
        for key in [key for key, kept in self._kept.items() if memory_bytes(kept.payload)]:
            del self._kept[key]

    def forget(self) -> None:
        """Let go of everything."""
        self._kept.clear()

    def _bound(self) -> None:
        """Let go of the oldest beyond the bounds of memory and of scratch."""
        memory = sum(memory_bytes(each.payload) for each in self._kept.values())
        scratch = sum(size_of(each.payload) for each in self._kept.values()) - memory
        for key, kept in list(self._kept.items()):
            in_memory = memory_bytes(kept.payload)
            if in_memory and memory > MOST_MEMORY_BYTES:
                memory -= in_memory
                del self._kept[key]
            elif not in_memory and scratch > MOST_SCRATCH_BYTES:
                scratch -= size_of(kept.payload)
                del self._kept[key]

    def _forget_old(self) -> None:
        loop = asyncio.get_running_loop()
        for key in [key for key, kept in self._kept.items() if kept.until_s <= loop_s()]:
            del self._kept[key]
        first = next(iter(self._kept.values()), None)
        self._timer = None if first is None else loop.call_at(first.until_s, self._forget_old)


SOURCE_S = 8.0
"""Time that one peer has before another one is asked as well."""
AT_ONCE = 2
"""Number of peers that send the same payload at one time: the first has it, the others are cut."""
PAUSE_S = 10.0
"""Longest pause in a stream before it counts as cut."""
BUSY_S, MOST_BUSY_S = 0.5, 4.0
"""Pause, as a mean, before peers are asked again of whom one was busy: it doubles up to the second."""


@dataclass
class Asking:
    """Asking peers for contributions and partial merges: whom, in which order, and once more where they
    are busy."""

    _chain: ChainView
    _transport: Transport
    _memory: Memory
    _is_sound: Callable[[Subject, Wanted, Payload], Awaitable[bool]]
    """Judge of what came; raises Unsound where it is what was asked for, and can be none."""

    def __post_init__(self) -> None:
        self.held_bytes = 0
        """Bytes of memory for second streams of the same payload."""
        self.bytes_in = 0

    async def get(self, subject: Subject, wanted: Wanted, size: int) -> Payload | None:
        """Get one payload of that size, for which the caller has room. None: nobody gives it. Where somebody
        is busy all are asked again, without end: all members may audit the same version.

        Raises: Unsound.
        """
        pause_s = BUSY_S
        while True:
            found, busy = await self._first(subject, wanted, size)
            if found is not None or not busy:
                return found
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, MOST_BUSY_S)

    def _sources(self, subject: Subject, wanted: Wanted) -> list[str]:
        """List whom to ask: who made it, then the syncer that merged it, then who accuses that, in whatever
        order where somebody does: all members ask then. A maker that there is no connection to comes last,
        since to look for it may take long."""
        connected = set(self._transport.connected())
        near = [peer for peer in wanted.makers if peer in connected]
        far = [peer for peer in wanted.makers if peer not in connected]
        first = [*near, subject.syncer, *subject.givers]
        if subject.givers:
            random.shuffle(first)
        return [peer for peer in dict.fromkeys([*first, *far]) if peer != self._transport.peer_id]

    async def _first(self, subject: Subject, wanted: Wanted, size: int) -> tuple[Payload | None, bool]:
        """Ask one after the other, and the next one as well where one takes long. Returns what came, and
        whether one was busy. Raises: Unsound."""
        left, busy = self._sources(subject, wanted), False
        running: list[asyncio.Task[Payload | PullRefusal | None]] = []
        held_bytes = 0
        try:
            while left or running:
                if left:
                    running.append(asyncio.create_task(self._pull(left.pop(0), subject, wanted, size)))
                extra_bytes = (len(running) - 1) * size
                self.held_bytes += extra_bytes - held_bytes
                held_bytes = extra_bytes
                limit_s = SOURCE_S if left else None
                done, _ = await asyncio.wait(running, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)
                    found = task.result()
                    if isinstance(found, PullRefusal):
                        busy = True
                    elif found is not None:
                        return found, busy
                if not done and (len(running) >= AT_ONCE or not self._memory.fits_push(size)):
                    running.pop(0).cancel()
            return None, busy
        finally:
            self.held_bytes -= held_bytes
            for task in running:
                task.cancel()

    async def _pull(
        self, peer: str, subject: Subject, wanted: Wanted, size: int
    ) -> Payload | PullRefusal | None:
        """Ask one peer. None: it did not give it; a refusal: it is busy. Raises: Unsound."""
        request = wire.PullContribution(self._chain.run, subject.fragment, wanted.digest)
        try:
            answer = await self._transport.pull(peer, wire.encode(request), size, PAUSE_S)
            if isinstance(answer, Refusal):
                raise wire.refused(answer)
        except (TransportError, RemoteError, TimeoutError) as error:
            logger.debug("no contribution to audit from %s: %s", peer, error)
            is_busy = isinstance(error, wire.PullRefused) and error.why is PullRefusal.BUSY
            return PullRefusal.BUSY if is_busy else None
        payload = answer[1]
        self.bytes_in += len(payload)
        if await self._is_sound(subject, wanted, payload):
            return payload
        logger.debug("not the contribution that was asked for: %s", peer)
        return None


MAX_GIVEN, OF_ONE_PEER = 8, 4
"""Number of contributions that go out at one time, and of those to one peer."""
COPIES = 4
"""Number of times that a peer gets the same one."""
MAX_REMEMBERED = 8192


@dataclass
class GivingContributions:
    """Service of contributions for auditors, members only. It is less urgent than anything else that goes
    out."""

    _chain: ChainView
    _merged: MergedPayloads
    _memory: Memory
    _courtesy: Courtesy

    def __post_init__(self) -> None:
        self._to: Counter[str] = Counter()
        """Number of contributions that are going out, by peer."""
        self._had: BoundedDict[tuple[str, bytes], int] = BoundedDict(MAX_REMEMBERED)
        """Number of times that each peer got each of them."""
        self.held_bytes = 0
        """Bytes of memory of what was read from the disk to be given."""
        self.bytes_out = 0

    async def serve(self, sender: str, pull: wire.PullContribution) -> PullSource | Refusal:
        """Serve a payload. The caller has checked run and fragment."""
        if not self._chain.is_member(sender):
            return refuse(PullRefusal.NOT_A_MEMBER)
        key = sender, pull.payload_digest
        busy = self._to.total() >= MAX_GIVEN or self._to[sender] >= OF_ONE_PEER
        if busy or self._had.get(key, 0) >= COPIES:
            return refuse(PullRefusal.BUSY)
        self._to[sender] += 1
        read_bytes = 0

        def release() -> None:
            self._to -= Counter([sender])
            self.held_bytes -= read_bytes

        try:
            found = await self._find(pull)
            if found is None:
                release()
                return refuse(PullRefusal.NOT_HERE)
            if not isinstance(found, Buffer):
                size = size_of(found)
                if not self._memory.fits_push(size):
                    release()
                    return refuse(PullRefusal.BUSY)
                read_bytes = size
                self.held_bytes += size
            payload = await read(found)
        except StorageError:
            release()
            return refuse(PullRefusal.NOT_HERE)
        except BaseException:
            release()
            raise
        self._had[key] = self._had.get(key, 0) + 1
        self.bytes_out += memoryview(payload).nbytes
        return PullSource(b"", (payload,), release, pace=self._courtesy.pace)

    async def _find(self, pull: wire.PullContribution) -> Payload | None:
        merged = self._merged.get(pull.fragment, pull.payload_digest)
        if merged is not None:
            return merged
        return await self._chain.contribution_of(pull.fragment, pull.payload_digest)


async def read(payload: Payload) -> Buffer:
    """Return the bytes of a payload, read from the disk if they are there. Raises: StorageError."""
    if isinstance(payload, Buffer):
        return payload
    room = bytearray(payload.nbytes)
    await asyncio.to_thread(payload.read, 0, memoryview(room))
    return room


MOST_BYTES = 256 << 20
MOST_KEPT = 16


class TrueUpdates:
    """True updates of versions that we found false, by the version's digest, until a repair needs them.

    The oldest give way, and whatever else wants the memory gets it: then somebody else makes the repair, or
    nobody.
    """

    def __init__(self, chain: ChainView) -> None:
        self._chain = chain
        self._kept: dict[bytes, tuple[bytearray, bytes]] = {}
        """Update, and its digest when it was made."""

    @property
    def held_bytes(self) -> int:
        """Bytes that they take."""
        return sum(len(update) for update, _ in self._kept.values())

    def keep(self, digest: bytes, update: bytearray, update_digest: bytes) -> None:
        """Keep one."""
        self._kept.pop(digest, None)
        self._kept[digest] = update, update_digest
        while len(self._kept) > MOST_KEPT or self.held_bytes > MOST_BYTES:
            del self._kept[next(iter(self._kept))]

    def has(self, digest: bytes) -> bool:
        """Tell whether that one is kept."""
        return digest in self._kept

    def give_up(self) -> None:
        """Let go of all: the memory is wanted for something else."""
        self._kept.clear()

    async def correction(self, repaired: SignedVersion | None) -> Correction | None:
        """Find what makes a version good: its true update and the false one. None: one is not here."""
        if repaired is None:
            return None
        header = repaired.header
        digest = header.digest()
        found = await self._chain.update_of(header.fragment, header.number) if self.has(digest) else None
        kept = self._kept.get(digest)
        if kept is None or found is None or found[0].header.digest() != digest:
            return None
        return Correction(kept[0], found[1], (kept[1], header.update_digest))


FILE = "appraised-"
"""Beginning of the name of a file for the learner; each audit has a file of its own."""
FREE_BYTES = 256 << 20
"""Bytes of the disk that stay free."""
ANSWER_S = 600.0
"""Longest wait for the learner: it answers between two inner steps, when it is not compiling."""


@dataclass
class LossAuditing:
    """Loss auditing: carries out `LossAudit`, of which the core asks for one at a time.

    Our learner measures what a contribution to a version does to the loss. It gets a file: the parameters
    that the version was made from, that contribution, and our own one.
    """

    _chain: ChainView
    _compute: Compute
    _auditing: Auditing
    _learner: Questions
    _folder: Path
    """Folder of the run's data, where the learner finds the file."""
    _manifest: Manifest

    def __post_init__(self) -> None:
        self._count = 0
        """Number of audits so far. Each has a file of its own: a learner that answers late, or only now takes
        up what nobody waits for any more, neither reads nor answers what was asked after it."""
        self._remove()  # of a node that was killed meanwhile

    def _remove(self) -> None:
        try:
            for path in self._folder.glob(f"{FILE}*"):
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s", error)

    async def audit(self, effect: ev.LossAudit) -> ev.LossAudited:
        """Have a contribution measured."""
        found = None
        try:
            found = await self._measured(effect)
        except (StorageError, OSError) as error:
            logger.warning("%s", error)
        finally:
            self._remove()
        if found is None:
            return ev.LossAudited()
        return ev.LossAudited(found.theirs, found.ours, found.same_data, found.took_s)

    async def _measured(self, effect: ev.LossAudit) -> ch.Appraised | None:
        """Raises: StorageError."""
        if not self._learner.appraises:
            return None
        header, fragment = effect.version.header, effect.fragment
        update = await self._chain.update_of(fragment, header.number)
        start = None
        if update is not None:
            start = await self._compute.run(self._start, fragment, header.number, update[1])
        ours = await self._chain.contribution_of(fragment, effect.ours.payload_digest)
        if start is None or ours is None:
            return None
        size = appraisal.appraisal_bytes_on_disk(self._manifest.codec.contribution, len(start))
        if shutil.disk_usage(self._folder).free < size + FREE_BYTES:
            return None
        self._count += 1
        path = self._folder / f"{FILE}{self._count}"
        await asyncio.to_thread(appraisal.begin_appraisal, path, start)
        del start
        async with self._auditing.contribution(effect.version, effect.theirs) as theirs:
            if theirs is None:
                return None
            await asyncio.to_thread(appraisal.add_contributions, path, await read(theirs), await read(ours))
        question = ch.Appraise(fragment, effect.theirs.learner, path)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._learner.appraise(question)
        except TimeoutError:
            return None

    def _start(self, fragment: int, number: int, update: Buffer) -> Tensor | None:
        """Find the parameters that the version was made from; None: the fragment has moved on. Of a version
        of less than an interval they are about right."""
        vault = self._compute.vault
        if vault.version(fragment) != number:
            return None
        codec, rate = self._manifest.codec.update, self._manifest.outer.learning_rate
        return appraisal.start_of_version(vault.result(fragment), update, codec, rate)
