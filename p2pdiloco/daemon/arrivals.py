"""What peers push: contributions to a syncer, and partial merges of groups to the syncer of the group above.

Header first: the core decides on sight of it whether the payload is read at all. What has arrived is judged
in the tensors thread before the core hears of it. The one byte budget covers everything that is arriving.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

from p2pdiloco.core import effects as ef
from p2pdiloco.core import events as ev
from p2pdiloco.core.types import ContributionHeader, Head, PartialHeader
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.compute import Compute
from p2pdiloco.daemon.memory import OUT_OF_BUDGET, Memory
from p2pdiloco.daemon.tickets import Tickets
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.ports import PushSink, Refusal
from p2pdiloco.tensors.partial import partial_bytes

MAX_ARRIVING_BYTES = 1 << 30
"""Payloads that are arriving, all together."""
MAX_UNFINISHED = 16
KEEP_S = 120.0
"""What came of a payload is kept so long after its stream was cut."""
Label = ContributionHeader | PartialHeader


class Arrivals:
    """The receiving half of pushes in one run."""

    def __init__(
        self,
        compute: Compute,
        tickets: Tickets,
        post: Callable[[ev.Event], None],
        head_of: Callable[[int], Head],
        now: Callable[[], float] = time.monotonic,
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory or Memory()
        self._now = now
        self._compute = compute
        self._tickets = tickets
        self._post = post
        self._head_of = head_of
        self._next_transfer = 1
        self._decisions: dict[int, wire.Answer | None] = {}
        self._arriving_bytes = 0
        self._unfinished: dict[tuple[str, bytes], tuple[bytearray, int, float]] = {}
        """(sender, digest) of a payload whose stream was cut -> what came of it, how much, and when; oldest
        first. They count as arriving, and go when there is no room."""
        self.bytes_in = 0

    def on_push(self, sender: str, request: wire.Push) -> PushSink | Refusal:
        """A peer offers a contribution or a partial merge. Raises: RemoteError (of a size that none has)."""
        label = request.signed.header
        if isinstance(label, PartialHeader):
            self._check_size(label)
        size = label.payload_bytes
        self.forget_old()
        key = (sender, label.payload_digest)
        more = max(0, size - len(self._unfinished[key][0])) if key in self._unfinished else size
        while self._arriving_bytes + more > MAX_ARRIVING_BYTES and self._forget_oldest(key):
            pass
        if size <= MAX_ARRIVING_BYTES < self._arriving_bytes + more:  # the absurd is the core's to count
            return Refusal(wire.encode(wire.Answer(False, "busy", None)))
        if size <= MAX_ARRIVING_BYTES and not self._has_room(more, key):
            self._memory.refused += 1
            return Refusal(wire.encode(wire.Answer(False, OUT_OF_BUDGET, None)))
        transfer = self._next_transfer
        self._next_transfer += 1
        self._decisions[transfer] = None
        if isinstance(request, wire.PushPartial):
            self._post(ev.PartialOffered(transfer, sender, request.signed))
        else:
            self._post(ev.ContributionOffered(transfer, sender, request.signed))
        decision = self._decisions.pop(transfer)
        if decision is not None:
            return Refusal(wire.encode(decision))
        payload, have, _ = self._unfinished.pop(key, (bytearray(), 0, 0.0))
        if len(payload) != size:
            self._arriving_bytes += size - len(payload)
            payload, have = bytearray(size), 0
        return _Sink(self, sender, transfer, label, payload, have)

    def _has_room(self, size: int, key: tuple[str, bytes]) -> bool:
        """Within --max-memory, if need be without what came of other streams that were cut."""
        while not self._memory.room(size) and self._forget_oldest(key):
            pass
        return self._memory.room(size)

    @property
    def held_bytes(self) -> int:
        """Payloads that are arriving, and what is kept of cut ones."""
        return self._arriving_bytes

    def _check_size(self, label: PartialHeader) -> None:
        """The core does not know sizes of partial merges: they follow from the layout."""
        layouts = self._compute.vault.layouts
        if label.fragment >= len(layouts):
            raise RemoteError("unknown-fragment", f"{label.fragment} of {len(layouts)}")
        expected = partial_bytes(layouts[label.fragment])
        if label.payload_bytes != expected:
            raise RemoteError("wrong-size", f"{label.payload_bytes} bytes of a partial, expected {expected}")

    # --- the core's decisions ------------------------------------------------------------------------

    def accepted(self, effect: ef.AcceptTransfer) -> None:
        """The payload may come."""
        self._decisions[effect.transfer] = None

    def refused(self, effect: ef.RefuseTransfer) -> None:
        """It may not."""
        head = self._head_of(effect.fragment)
        self._decisions[effect.transfer] = wire.Answer(False, effect.reason, head)

    def answered(self, effect: ef.AnswerTransfer) -> None:
        """The last word on a payload that came."""
        head = self._head_of(effect.fragment)
        self._decisions[effect.transfer] = wire.Answer(effect.accepted, effect.reason, head)

    # --- payloads ------------------------------------------------------------------------------------

    async def payload_arrived(self, transfer: int, label: Label, payload: bytearray) -> bytes:
        """Judge the content, let the core know, return its answer."""
        self.bytes_in += len(payload)
        self._arriving_bytes -= len(payload)
        reason = ""
        try:
            await self._compute.run(self._judge, label, payload)
        except RemoteError as error:
            reason = error.reason
        except asyncio.CancelledError:
            # p2pd died under this stream: the learner must not stay locked out behind a half-arrived one.
            self._post(ev.ContributionBroken(transfer, "cut"))
            raise
        if reason:
            self._post(ev.ContributionBroken(transfer, reason))
            return wire.encode(wire.Answer(False, reason, self._head_of(label.fragment)))
        self._decisions[transfer] = None
        self._post(ev.ContributionReceived(transfer, self._tickets.put(payload)))
        answer = self._decisions.pop(transfer)
        if answer is None:
            raise InvariantViolation("the core did not answer a received contribution")
        return wire.encode(answer)

    def payload_broken(self, transfer: int, key: tuple[str, bytes], payload: bytearray, have: int) -> None:
        """The stream was cut. What came is kept for a while: the same will be offered again."""
        if key in self._unfinished:  # offered twice at once
            self._forget(key)
        if have:
            self._unfinished[key] = (payload, have, self._now())
            if len(self._unfinished) > MAX_UNFINISHED:
                self._forget_oldest(key)
        else:
            self._arriving_bytes -= len(payload)
        self._post(ev.ContributionBroken(transfer, "cut"))

    def _forget(self, key: tuple[str, bytes]) -> None:
        payload, _, _ = self._unfinished.pop(key)
        self._arriving_bytes -= len(payload)

    def _forget_oldest(self, but: tuple[str, bytes]) -> bool:
        """Whether there was one beside that."""
        oldest = next((key for key in self._unfinished if key != but), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def forget_all(self) -> None:
        """There is no room for what came of streams that were cut."""
        for key in list(self._unfinished):
            self._forget(key)

    def forget_old(self) -> None:
        """Drop what nobody went on with in a while."""
        for key, (_, _, since_s) in list(self._unfinished.items()):
            if self._now() - since_s > KEEP_S:
                self._forget(key)

    def _judge(self, label: Label, payload: bytearray) -> None:
        """In the tensors thread: hashing would hold the loop up. Raises: RemoteError."""
        if hashlib.sha256(payload).digest() != label.payload_digest:
            raise RemoteError("wrong-digest")
        vault = self._compute.vault
        if isinstance(label, PartialHeader):
            work = [(part.contributor.tokens, part.contributor.inner_steps) for part in label.parts]
            vault.check_partial(label.fragment, payload, work)
        else:
            vault.check_payload(label.fragment, payload, label.codec)


class _Sink:
    """Collects one accepted payload."""

    def __init__(
        self,
        arrivals: Arrivals,
        sender: str,
        transfer: int,
        label: Label,
        payload: bytearray,
        offset: int,
    ) -> None:
        self.payload_bytes = label.payload_bytes
        self.offset = self._have = offset
        self._arrivals = arrivals
        self._key = (sender, label.payload_digest)
        self._transfer = transfer
        self._label = label
        self._payload = payload

    async def write(self, offset: int, chunk: memoryview) -> None:
        self._payload[offset : offset + len(chunk)] = chunk
        self._have = offset + len(chunk)

    async def finish(self) -> bytes:
        return await self._arrivals.payload_arrived(self._transfer, self._label, self._payload)

    def abort(self, reason: str) -> None:
        self._arrivals.payload_broken(self._transfer, self._key, self._payload, self._have)
