"""What peers push: contributions to a syncer, and partial merges of groups to the syncer of the group above.

Header first: the core decides on sight of it whether the payload is read at all. What has arrived is judged
in the tensors thread before the core hears of it. The one byte budget covers everything that is arriving.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from p2pdiloco.core import effects as ef
from p2pdiloco.core import events as ev
from p2pdiloco.core.types import ContributionHeader, Head, PartialHeader
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.compute import Compute
from p2pdiloco.daemon.tickets import Tickets
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.ports import PushSink, Refusal
from p2pdiloco.tensors.partial import partial_bytes

MAX_ARRIVING_BYTES = 1 << 30
"""Payloads that are arriving, all together."""
Label = ContributionHeader | PartialHeader


class Arrivals:
    """The receiving half of pushes in one run."""

    def __init__(
        self,
        compute: Compute,
        tickets: Tickets,
        post: Callable[[ev.Event], None],
        head_of: Callable[[int], Head],
    ) -> None:
        self._compute = compute
        self._tickets = tickets
        self._post = post
        self._head_of = head_of
        self._next_transfer = 1
        self._decisions: dict[int, wire.Answer | None] = {}
        self._arriving_bytes = 0
        self.bytes_in = 0

    def on_push(self, sender: str, request: wire.Push) -> PushSink | Refusal:
        """A peer offers a contribution or a partial merge. Raises: RemoteError (of a size that none has)."""
        label = request.signed.header
        if isinstance(label, PartialHeader):
            self._check_size(label)
        size = label.payload_bytes
        if size <= MAX_ARRIVING_BYTES < self._arriving_bytes + size:  # the absurd is the core's to count
            return Refusal(wire.encode(wire.Answer(False, "busy", None)))
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
        self._arriving_bytes += size
        return _Sink(self, transfer, label)

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

    def payload_broken(self, transfer: int, size: int) -> None:
        """The stream was cut."""
        self._arriving_bytes -= size
        self._post(ev.ContributionBroken(transfer, "cut"))

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

    def __init__(self, arrivals: Arrivals, transfer: int, label: Label) -> None:
        self.payload_bytes = label.payload_bytes
        self._arrivals = arrivals
        self._transfer = transfer
        self._label = label
        self._payload = bytearray(label.payload_bytes)

    async def write(self, offset: int, chunk: memoryview) -> None:
        self._payload[offset : offset + len(chunk)] = chunk

    async def finish(self) -> bytes:
        return await self._arrivals.payload_arrived(self._transfer, self._label, self._payload)

    def abort(self, reason: str) -> None:
        self._arrivals.payload_broken(self._transfer, self.payload_bytes)
