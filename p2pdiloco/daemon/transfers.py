"""The bulk of a run: contributions and partial merges pushed to syncers, updates and states pulled from
holders. What peers push to us: `daemon.arrivals`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from p2pdiloco.core import effects as ef
from p2pdiloco.core import events as ev
from p2pdiloco.core.messages import decode as decode_message
from p2pdiloco.core.types import Head, SignedVersion, Wire
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.arrivals import Arrivals
from p2pdiloco.daemon.compute import Compute
from p2pdiloco.daemon.tickets import Tickets
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError
from p2pdiloco.ports import Buffer, PullSource, Refusal, Transport
from p2pdiloco.tensors.state import Pin

logger = logging.getLogger(__name__)
PAUSE_S = 15.0
"""Longest pause in a bulk stream before it counts as cut."""
MAX_PINS = 16
"""States that are being read by others at one time."""


class Transfers:
    """The daemon's side of all streams and queries of one run."""

    def __init__(
        self,
        run: str,
        transport: Transport,
        compute: Compute,
        tickets: Tickets,
        post: Callable[[ev.Event], None],
        may_serve: Callable[[], bool],
        update_of: Callable[[int, int], Awaitable[tuple[SignedVersion, Buffer] | None]],
        head_of: Callable[[int], Head],
        state_bytes: Callable[[int], int],
        max_update_bytes: Callable[[int], int],
    ) -> None:
        self._run = run
        self._transport = transport
        self._compute = compute
        self._tickets = tickets
        self._post = post
        self._may_serve = may_serve
        self._update_of = update_of
        self._state_bytes = state_bytes
        self._max_update_bytes = max_update_bytes
        self._pins = 0
        self._bytes_pulled = 0
        self.arrivals = Arrivals(compute, tickets, post, head_of)
        self.bytes_out = 0

    @property
    def bytes_in(self) -> int:
        """Payload bytes received so far."""
        return self._bytes_pulled + self.arrivals.bytes_in

    # --- what peers ask ------------------------------------------------------------------------------

    def on_message(self, sender: str, data: bytes) -> None:
        """A core message. Raises: RemoteError."""
        self._post(ev.MessageReceived(sender, decode_message(self._run, sender, data)))

    async def on_pull(self, pull: wire.PullUpdate | wire.PullState) -> PullSource | Refusal:
        """A peer wants an update or a state."""
        if isinstance(pull, wire.PullUpdate):
            return await self._serve_update(pull)
        return await self._serve_state(pull)

    def _why_not_serve(self, run: str, fragment: int) -> str:
        if run != self._run:
            return "other-run"
        if not 0 <= fragment < len(self._compute.vault.layouts):
            return "unknown-fragment"
        return "" if self._may_serve() else "not-ready"

    async def _serve_update(self, pull: wire.PullUpdate) -> PullSource | Refusal:
        reason = self._why_not_serve(pull.run, pull.fragment)
        found = None if reason else await self._update_of(pull.fragment, pull.number)
        if found is None:
            return refuse(reason or "gone")
        version, payload = found
        self.bytes_out += memoryview(payload).nbytes
        return PullSource(wire.encode(wire.UpdateHeader(version)), (payload,), lambda: None)

    async def _serve_state(self, pull: wire.PullState) -> PullSource | Refusal:
        reason = self._why_not_serve(pull.run, pull.fragment)
        if not reason and self._pins >= MAX_PINS:
            reason = "busy"
        if reason:
            return refuse(reason)
        self._pins += 1
        pinning = asyncio.ensure_future(self._compute.run(self._compute.pin, pull.fragment))
        try:
            header, pin = await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(self._unpin)
            raise

        def release() -> None:
            self._pins -= 1
            pin.release()

        if header.version.header.number < pull.number:
            release()
            return refuse("behind")
        self.bytes_out += sum(b.nbytes for b in pin.buffers)
        return PullSource(wire.encode(header), pin.buffers, release)

    def _unpin(self, pinning: asyncio.Future[tuple[wire.StateHeader, Pin]]) -> None:
        """Nobody waits for this state any more."""
        self._pins -= 1
        if not pinning.cancelled() and pinning.exception() is None:
            pinning.result()[1].release()

    # --- what the core asks of peers -----------------------------------------------------------------

    async def offer(self, effect: ef.OfferContribution, payload: Buffer) -> None:
        """Stream our contribution to the syncer."""
        header = effect.signed.header
        key = (header.fragment, header.stamp, effect.peer)
        answer = await self._push(effect.peer, wire.PushContribution(effect.signed), payload)
        if answer is None:
            self._post(ev.ContributionUndelivered(*key))
        else:
            self._post(ev.ContributionAnswered(*key, answer.accepted, answer.reason, answer.head))

    async def offer_partial(self, effect: ef.OfferPartial, payload: Buffer) -> None:
        """Stream our group's partial merge to the syncer of the group above."""
        header = effect.signed.header
        key = (header.fragment, header.group, effect.attempt, effect.peer)
        answer = await self._push(effect.peer, wire.PushPartial(effect.signed), payload)
        if answer is None:
            self._post(ev.PartialUndelivered(*key))
        else:
            self._post(ev.PartialAnswered(*key, answer.accepted, answer.reason, answer.head))

    async def _push(self, peer: str, request: wire.Push, payload: Buffer) -> wire.Answer | None:
        """The peer's word; None: not delivered."""
        try:
            delivered, raw = await self._transport.push(peer, wire.encode(request), (payload,), PAUSE_S)
            answer = wire.decode(raw, wire.Answer)
        except (TransportError, RemoteError) as error:
            header = request.signed.header
            logger.debug("payload of fragment %d not delivered to %s: %s", header.fragment, peer, error)
            return None
        if delivered:
            self.bytes_out += memoryview(payload).nbytes
        return answer

    async def fetch_update(self, effect: ef.FetchUpdate) -> None:
        """Pull one outer update."""
        request = wire.PullUpdate(self._run, effect.fragment, effect.number)
        try:
            raw, payload = await self._pull(effect.peer, request, self._max_update_bytes(effect.fragment))
            header = wire.decode(raw, wire.UpdateHeader)
            version = header.version.header
            await self._check(effect.fragment, payload, version.codec, version.update_digest)
        except _FETCH_ERRORS as error:
            self._fetch_failed(effect, error)
            return
        ticket = self._tickets.put(payload)
        self._post(ev.UpdateFetched(effect.fragment, effect.peer, header.version, ticket))

    async def fetch_state(self, effect: ef.FetchState) -> None:
        """Pull a whole fragment into the spare copy."""
        request = wire.PullState(self._run, effect.fragment, effect.number)
        try:
            raw, payload = await self._pull(effect.peer, request, self._state_bytes(effect.fragment))
            header = wire.decode(raw, wire.StateHeader)
            if header.version.header.fragment != effect.fragment:
                raise RemoteError("wrong-fragment")
            digest = await self._compute.run(
                self._compute.load_state, effect.fragment, header.version, payload
            )
            if digest != header.version.header.state_digest:
                raise RemoteError("digest-differs")
        except _FETCH_ERRORS as error:
            await self._compute.run(self._compute.drop_spare, effect.fragment)
            self._fetch_failed(effect, error)
            return
        self._post(ev.StateFetched(effect.fragment, effect.peer, header.version, header.watermarks))

    async def _check(self, fragment: int, payload: bytearray, codec: str, digest: bytes) -> None:
        """Judge a payload in the worker thread: hashing it would hold the loop up. Raises: RemoteError."""

        def check() -> None:
            if hashlib.sha256(payload).digest() != digest:
                raise RemoteError("wrong-digest")
            self._compute.vault.check_payload(fragment, payload, codec)

        await self._compute.run(check)

    async def _pull(self, peer: str, request: Wire, limit: int) -> tuple[bytes, bytearray]:
        answer = await self._transport.pull(peer, wire.encode(request), limit, PAUSE_S)
        if isinstance(answer, Refusal):
            raise RemoteError(wire.decode(answer.answer, wire.Refused).reason)
        self._bytes_pulled += len(answer[1])
        return answer

    def _fetch_failed(self, effect: ef.FetchUpdate | ef.FetchState, error: Exception) -> None:
        if isinstance(error, PeerUnreachable):
            reason = "unreachable"
        else:
            reason = error.reason if isinstance(error, RemoteError) else "cut"
        logger.debug("fragment %d not fetched from %s: %s", effect.fragment, effect.peer, error)
        self._post(ev.FetchFailed(effect.fragment, effect.number, effect.peer, reason[:64]))


_FETCH_ERRORS = (TransportError, RemoteError)


def refuse(reason: str) -> Refusal:
    """A pull's refusal, encoded."""
    return Refusal(wire.encode(wire.Refused(reason)))
