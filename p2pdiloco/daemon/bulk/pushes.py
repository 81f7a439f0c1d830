"""Receiver of what peers push, and the view of our chain that bulk streams have.

Peers push contributions to a syncer, and groups' partial merges to the one above. The header comes first: the
core decides on sight of it whether the payload is read at all. What has arrived is judged in the tensors
thread before the core hears of it. A small share of memory is for payloads that peers pushed, while they
arrive and until they are merged. What finds no place there lies in scratch on the disk
(`adapters.data_dir.Spool`), so that memory does not grow with the number of contributors. `Rates` and
`failure_of` are for all transfers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from p2pdiloco.adapters.framing import RefusedByPeer
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.adapters.spool import Scratch, Spool
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import ContributionHeader, Head, Reach
from p2pdiloco.core.api.versions import PartialHeader, SignedVersion
from p2pdiloco.core.node import Core
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.payloads import (
    Compute,
    KeptPayloads,
    Memory,
    OutOfBudget,
    Tickets,
    UpdateLog,
    most_update_bytes,
)
from p2pdiloco.daemon.wire import PullRefused
from p2pdiloco.errors import InvariantViolation, PeerUnreachable, RemoteError, StorageError, TransportError
from p2pdiloco.ports import Buffer, PostEvent, PushSink, Refusal
from p2pdiloco.tensors.codecs import Unsound
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.merge import Payload, digest_of, memory_bytes, partial_bytes
from p2pdiloco.util import BoundedDict, Now

logger = logging.getLogger(__name__)
SHARE_BYTES = 128 << 20
"""Share of memory for payloads that peers pushed, as long as the disk takes the others."""
MAX_ARRIVING_BYTES = 1 << 30
"""Bytes of payloads that may arrive in memory, all together, where there is no disk for them."""
ABSURD_BYTES = 16 << 30
"""Size that no payload has: the label of a larger one is the core's to refuse, and to count."""
MAX_UNFINISHED = 16
KEEP_S = 120.0
"""Time for which what came of a payload is kept after its stream was cut."""
Label = ContributionHeader | PartialHeader


class LandingPlace(Enum):
    """Kind of place where a payload may come."""

    MEMORY = auto()
    DISK = auto()


class Landing:
    """Place where one payload arrives."""

    def __init__(self, size: int, scratch: Scratch | None) -> None:
        self.size = size
        self.payload: bytearray | Scratch = bytearray(size) if scratch is None else scratch
        self.have = 0
        """Bytes of it that are here, from the beginning."""
        self.since_s = 0.0
        """Time at which its stream was cut."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return memory_bytes(self.payload)

    async def write(self, offset: int, chunk: memoryview) -> None:
        """Take a chunk. Raises: TransportError (the disk does not take it)."""
        if isinstance(self.payload, bytearray):
            self.payload[offset : offset + len(chunk)] = chunk
        else:
            try:
                await self.payload.write(offset, chunk)
            except StorageError as error:
                logger.warning("%s", str(error))  # a record of the error would keep the payload
                self.have = 0
                raise TransportError("no place for it on the disk") from error
        self.have = offset + len(chunk)


class PushesIn:
    """Receiver of pushes in one run."""

    def __init__(
        self,
        head: Callable[[int], Head],
        compute: Compute,
        tickets: Tickets,
        post: PostEvent,
        memory: Memory | None = None,
        spool: Spool | None = None,
        now: Now = time.monotonic,
    ) -> None:
        """`head`: finds the newest version of a fragment, which answers tell. `spool`: place for what
        finds none in memory; None: it is refused."""
        self._head = head
        self._spool = spool
        self._memory = memory or Memory()
        self._now = now
        self._compute = compute
        self._tickets = tickets
        self._post = post
        self._next_transfer = 1
        self._decisions: dict[int, ev.Decision] = {}
        """Decisions of the core by transfer, until they are carried out."""
        self._arriving_bytes = 0
        """Bytes in memory of payloads that are arriving, and of cut ones."""
        self._unfinished: dict[tuple[str, bytes], Landing] = {}
        """Landings of payloads whose stream was cut, by (sender, digest); oldest first. They count as
        arriving, and go when there is no room."""
        self.bytes_in = 0

    def on_push(self, sender: str, request: wire.Push) -> PushSink | Refusal:
        """Take a peer's offer of a contribution or a partial merge. Raises: RemoteError (of a size that
        none has)."""
        label = request.signed.header
        if isinstance(label, PartialHeader):
            self._check_size(label)
        size = label.payload_bytes
        self.forget_old()
        key = (sender, label.payload_digest)
        if key in self._unfinished and self._unfinished[key].size != size:
            self._forget(key)
        where = LandingPlace.MEMORY if key in self._unfinished else self._where(size)
        helps = any(other != key for other in self._unfinished)
        if isinstance(where, Verdict) and size <= ABSURD_BYTES and not helps:
            return self._no_place(where)
        transfer = self._next_transfer
        self._next_transfer += 1
        decision = self._ask_core(transfer, ev.Offered(transfer, sender, request.signed))
        if not isinstance(decision, ev.AcceptTransfer):
            return Refusal(self._answer(decision))
        # What is kept of others' goes only for what the core wants: anybody can write a size into a label.
        while isinstance(where, Verdict) and self._forget_oldest(key):
            where = self._where(size)
        if isinstance(where, Verdict):  # after all, or the core knows of larger fragments than we do
            self._post(ev.PayloadBroken(transfer, where))
            return self._no_place(where)
        landing = self._unfinished.pop(key, None)
        if landing is None:
            disk = self._spool if where is LandingPlace.DISK else None
            landing = Landing(size, disk.take(size) if disk else None)
            self._arriving_bytes += landing.memory_bytes
        return _PushSink(self, sender, transfer, label, landing)

    def _where(self, size: int) -> LandingPlace | Verdict:
        """Decide where a payload of this size may come, or why it may not."""
        roomy = self._memory.fits_push(size)
        if roomy and self._arriving_bytes + self._tickets.pushed_bytes + size <= SHARE_BYTES:
            return LandingPlace.MEMORY
        if self._spool is not None and self._spool.fits(size):
            return LandingPlace.DISK
        if not roomy:
            return Verdict.NO_MEMORY
        return LandingPlace.MEMORY if self._arriving_bytes + size <= MAX_ARRIVING_BYTES else Verdict.BUSY

    def _no_place(self, why: Verdict) -> Refusal:
        if why is Verdict.NO_MEMORY:
            self._memory.refuse()
        return Refusal(wire.encode(wire.Answer(why, None)))

    @property
    def held_bytes(self) -> int:
        """Bytes in memory of payloads that are arriving, and of what is kept of cut ones."""
        return self._arriving_bytes

    @property
    def spooled_bytes(self) -> int:
        """Bytes on the disk of what peers pushed."""
        return self._spool.held_bytes if self._spool else 0

    def _check_size(self, label: PartialHeader) -> None:
        """Check the size of a partial merge: the core does not know it, since it follows from the layout."""
        layouts = self._compute.vault.layouts
        if label.fragment >= len(layouts):
            raise RemoteError("unknown-fragment", f"{label.fragment} of {len(layouts)}")
        expected = partial_bytes(layouts[label.fragment])
        if label.payload_bytes != expected:
            raise RemoteError("wrong-size", f"{label.payload_bytes} bytes of a partial, expected {expected}")

    # --- the core's decisions ------------------------------------------------------------------------

    def decided(self, decision: ev.Decision) -> None:
        """Take the core's word on an offer, or on a payload that came."""
        self._decisions[decision.transfer] = decision

    def _ask_core(self, transfer: int, event: ev.Event) -> ev.Decision:
        """Let the core decide while it handles the event. Raises: InvariantViolation (it did not)."""
        self._post(event)
        decision = self._decisions.pop(transfer, None)
        if decision is None:
            raise InvariantViolation(f"the core did not decide on {type(event).__name__}")
        return decision

    def _answer(self, decision: ev.AnswerTransfer) -> bytes:
        return wire.encode(wire.Answer(decision.verdict, self._head(decision.fragment)))

    # --- payloads ------------------------------------------------------------------------------------

    async def payload_arrived(self, transfer: int, label: Label, landing: Landing) -> bytes:
        """Judge the content, let the core know, return its answer."""
        self.bytes_in += landing.size
        fault: Verdict | None = None
        try:
            await self._compute.run(self._judge, label, landing)
        except Unsound as error:
            fault = error.verdict
        except StorageError as error:
            logger.warning("%s", error)
            fault = Verdict.BUSY
        except asyncio.CancelledError:
            # p2pd died under this stream: the learner must not stay locked out behind a half-arrived one.
            self._post(ev.PayloadBroken(transfer, Verdict.CUT))
            raise
        finally:  # until now, or it would count nowhere while it waits to be judged
            self._arriving_bytes -= landing.memory_bytes
        if fault is not None:
            self._post(ev.PayloadBroken(transfer, fault))
            return wire.encode(wire.Answer(fault, self._head(label.fragment)))
        ticket = self._tickets.put(landing.payload, pushed=True)
        decision = self._ask_core(transfer, ev.PayloadReceived(transfer, ticket))
        if isinstance(decision, ev.AcceptTransfer):
            raise InvariantViolation("the core did not answer a received contribution")
        return self._answer(decision)

    def payload_broken(self, transfer: int, key: tuple[str, bytes], landing: Landing) -> None:
        """Keep what came of a stream that was cut, for a while: the same will be offered again."""
        if key in self._unfinished:  # offered twice at once
            self._forget(key)
        if landing.have:
            landing.since_s = self._now()
            self._unfinished[key] = landing
            if len(self._unfinished) > MAX_UNFINISHED:
                self._forget_oldest(key)
        else:
            self._arriving_bytes -= landing.memory_bytes
        self._post(ev.PayloadBroken(transfer, Verdict.CUT))

    def _forget(self, key: tuple[str, bytes]) -> None:
        self._arriving_bytes -= self._unfinished.pop(key).memory_bytes

    def _forget_oldest(self, but: tuple[str, bytes]) -> bool:
        """Forget the oldest beside `but`; return whether there was one."""
        oldest = next((key for key in self._unfinished if key != but), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def forget_all(self) -> None:
        """Drop what came of streams that were cut, for want of room."""
        for key in list(self._unfinished):
            self._forget(key)

    def forget_old(self) -> None:
        """Drop what nobody went on with in a while."""
        for key, landing in list(self._unfinished.items()):
            if self._now() - landing.since_s > KEEP_S:
                self._forget(key)

    def _judge(self, label: Label, landing: Landing) -> None:
        """Judge a payload in the tensors thread: hashing would hold the loop up. Raises: Unsound,
        StorageError."""
        payload = landing.payload
        if digest_of(payload) != label.payload_digest:
            raise Unsound(Verdict.WRONG_DIGEST)
        vault = self._compute.vault
        if isinstance(label, PartialHeader):
            work = [(part.tokens, part.inner_steps, part.trust, part.votes) for part in label.parts]
            vault.check_partial(label.fragment, payload, work, label.limits, leaf=not label.below)
        else:
            vault.check_payload(label.fragment, payload, label.codec)


@dataclass
class _PushSink:
    """Sink of one accepted payload."""

    _pushes_in: PushesIn
    _sender: str
    _transfer: int
    _label: Label
    _landing: Landing

    def __post_init__(self) -> None:
        self.payload_bytes = self._label.payload_bytes
        self.offset = self._landing.have
        self._key = (self._sender, self._label.payload_digest)

    async def write(self, offset: int, chunk: memoryview) -> None:
        await self._landing.write(offset, chunk)

    async def finish(self) -> bytes:
        return await self._pushes_in.payload_arrived(self._transfer, self._label, self._landing)

    def abort(self) -> None:
        self._pushes_in.payload_broken(self._transfer, self._key, self._landing)


class Versions(Protocol):
    """Versions of a run as whoever copies states knows them: from its core, or from members' reports."""

    @property
    def run(self) -> str:
        """Run id."""

    def signed(self, version: SignedVersion) -> bool:
        """Tell whether its syncer signed a version.

        The core looks at that too, but it knows only whom it asked, not which of those that were named gave
        it.
        """

    def holders(self, fragment: int, digest: bytes) -> Sequence[str]:
        """List peers that hold the fragment's version with this digest."""

    def state_bytes(self, fragment: int) -> int:
        """Return the size of a fragment's whole state in bytes."""


class ChainView(Versions, Protocol):
    """Chain of a member, as far as its streams need to know it: their only way to the core's state."""

    @property
    def may_serve(self) -> bool:
        """True: our chain is one that others may get."""

    @property
    def dialable(self) -> bool:
        """True: others can dial us; else nobody is sent to us."""

    def is_member(self, peer: str) -> bool:
        """Tell whether the peer is a member of the run."""

    def head(self, fragment: int) -> Head:
        """Return the newest version."""

    def most_update_bytes(self, fragment: int) -> int:
        """Return a bound of the size of this fragment's updates."""

    async def update_of(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        """Get an outer update of our chain; None: it is not, or no longer, to be had."""

    async def contribution_of(self, fragment: int, digest: bytes) -> Payload | None:
        """Get a contribution of ours by its payload's digest; None: it is not, or no longer, to be had."""


@dataclass
class OwnChain:
    """View of a member's own chain: its core, and the updates that it keeps in memory and on the disk."""

    _core: Core
    _layouts: Sequence[FragmentLayout]
    _updates: UpdateLog
    _store: RunStore
    _io: Executor
    """Thread for the disk."""
    _kept: KeptPayloads
    """Payloads of our own contributions."""

    def __post_init__(self) -> None:
        self.run = self._core.shared.config.run

    @property
    def may_serve(self) -> bool:
        return self._core.may_serve

    @property
    def dialable(self) -> bool:
        return self._core.shared.reach is Reach.DIRECT

    def is_member(self, peer: str) -> bool:
        return self._core.is_member(peer)

    def signed(self, version: SignedVersion) -> bool:
        header = version.header
        return self._core.shared.signed_by(header.syncer, "version", header, version.signature)

    def holders(self, fragment: int, digest: bytes) -> Sequence[str]:
        return self._core.fragments[fragment].follower.heads.holders(digest)

    def head(self, fragment: int) -> Head:
        return self._core.fragments[fragment].chain.head

    def state_bytes(self, fragment: int) -> int:
        """Return the size of parameters and momentum, four bytes each."""
        return 8 * self._layouts[fragment].numel

    def most_update_bytes(self, fragment: int) -> int:
        return most_update_bytes(self._layouts[fragment])

    async def update_of(self, fragment: int, number: int) -> tuple[SignedVersion, Buffer] | None:
        """Get an outer update from memory, or from the disk if it is older."""
        found = self._updates.get(fragment, number)
        wanted = self._core.fragments[fragment].chain.logged(number)
        if found is not None or wanted is None:
            return found
        loop = asyncio.get_running_loop()
        try:
            saved = await loop.run_in_executor(self._io, self._store.load_update, fragment, number)
        except StorageError as error:
            logger.error("%s", error)
            return None
        return saved if saved is not None and saved[0] == wanted else None

    async def contribution_of(self, fragment: int, digest: bytes) -> Payload | None:
        """Get a contribution of ours: merged ones are kept until no fork can lack them."""
        ticket = self._core.fragments[fragment].own.find(digest)
        return None if ticket is None else await self._kept.read(ticket)


MAX_PEERS = 256
FORGET_S = 600.0
"""Time after its last transfer until a peer is unknown again: whoever was slow is tried anew."""


class Rates:
    """Rates at which peers took or gave what was long enough to tell: whom to choose next time.

    They are moving averages of the last 256 peers, in bytes per second; the newest transfer counts half.
    """

    def __init__(self, now: Now) -> None:
        self._now = now
        self._known: BoundedDict[str, tuple[float, float]] = BoundedDict(MAX_PEERS)
        """Rate of each peer, and when it was last measured; the oldest first."""

    def measured(self, peer: str, nbytes: int, seconds: float) -> float:
        """Take a transfer's bytes and time in; return its own rate."""
        rate = nbytes / max(seconds, 1e-6)
        self._known[peer] = (self.of(peer, rate) + rate) / 2, self._now()
        return rate

    def of(self, peer: str, unknown: float) -> float:
        """Return a peer's rate in bytes per second, or `unknown`."""
        rate, at_s = self._known.get(peer, (unknown, self._now()))
        return rate if self._now() - at_s <= FORGET_S else unknown


def failure_of(error: TransportError | RemoteError) -> FetchFailure:
    """Find the failure that the core hears of, by the error with which a fetch ended. One of which nothing
    is known is the holder's fault."""
    match error:
        case PullRefused():
            return error.why.failure
        case RefusedByPeer() if error.unheard is not None:
            return error.unheard.failure
        case OutOfBudget():
            return FetchFailure.BUSY
        case RemoteError():
            return FetchFailure.FALSE
        case PeerUnreachable():
            return FetchFailure.UNREACHABLE
        case _:
            return FetchFailure.CUT
