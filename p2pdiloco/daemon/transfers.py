"""The bulk of a run: contributions and partial merges pushed to syncers, updates and states pulled from
holders. What peers push to us: `daemon.arrivals`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from p2pdiloco.core import effects as ef
from p2pdiloco.core import events as ev
from p2pdiloco.core.messages import decode as decode_message
from p2pdiloco.core.types import Head, SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.arrivals import Arrivals
from p2pdiloco.daemon.compute import Compute
from p2pdiloco.daemon.fetching import Fetch, Parts
from p2pdiloco.daemon.memory import Memory
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
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory or Memory()
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
        self._unfinished = Parts()
        self._bytes_pulled = 0
        self.arrivals = Arrivals(compute, tickets, post, head_of, memory=self._memory)
        self.bytes_out = 0

    @property
    def bytes_in(self) -> int:
        """Payload bytes received so far."""
        return self._bytes_pulled + self.arrivals.bytes_in

    @property
    def held_bytes(self) -> int:
        """Of payloads that are arriving, and of what is kept of cut streams; not of fetches under way."""
        return self.arrivals.held_bytes + self._unfinished.held_bytes

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
        offset = _known(pull, version.header.update_digest, memoryview(payload).nbytes)
        rest = memoryview(payload)[offset:]
        self.bytes_out += rest.nbytes
        return PullSource(wire.encode(wire.UpdateHeader(version, offset)), (rest,), lambda: None)

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
        size = sum(b.nbytes for b in pin.buffers)
        offset = _known(pull, header.version.header.state_digest, size)
        self.bytes_out += size - offset
        header = msgspec.structs.replace(header, offset=offset)
        return PullSource(wire.encode(header), _rest(pin.buffers, offset), release)

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
        try:
            fetch = await self._pull(effect, wire.PullUpdate, self._max_update_bytes(effect.fragment))
            payload, version = fetch.payload, fetch.header.version
            header = version.header
            await self._check(effect.fragment, payload, header.codec, header.update_digest)
        except _FETCH_ERRORS as error:
            self._fetch_failed(effect, error)
            return
        ticket = self._tickets.put(payload)
        self._post(ev.UpdateFetched(effect.fragment, effect.peer, version, ticket))

    async def fetch_state(self, effect: ef.FetchState) -> None:
        """Pull a whole fragment into the spare copy."""
        try:
            fetch = await self._pull(effect, wire.PullState, self._state_bytes(effect.fragment))
            header, payload = fetch.header, fetch.payload
            assert isinstance(header, wire.StateHeader)
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

    async def _pull(
        self,
        effect: ef.FetchUpdate | ef.FetchState,
        kind: type[wire.PullUpdate] | type[wire.PullState],
        limit: int,
    ) -> Fetch:
        """All of the payload, as fetched now and before, if there is memory for it.

        Raises:
            TransportError, RemoteError.
        """
        with self._memory.fetching(limit):
            return await self._pull_rest(effect, kind, limit)

    async def _pull_rest(
        self,
        effect: ef.FetchUpdate | ef.FetchState,
        kind: type[wire.PullUpdate] | type[wire.PullState],
        limit: int,
    ) -> Fetch:
        key = (effect.fragment, kind is wire.PullState)
        self._unfinished.forget_old()
        self.arrivals.forget_old()
        before = self._unfinished.take(key)
        request = kind(self._run, effect.fragment, effect.number)
        if before is not None:
            request = kind(self._run, effect.fragment, effect.number, before.have_bytes, before.digest)
        fetch = Fetch(request, limit, before)
        try:
            answer = await self._transport.pull_into(effect.peer, wire.encode(request), fetch, PAUSE_S)
        except TransportError:
            self._unfinished.keep(key, fetch.unfinished)
            raise
        except RemoteError:
            if not fetch.received_bytes:  # busy, say: another holder may have the rest
                self._unfinished.keep(key, before)
            raise
        finally:
            self._bytes_pulled += fetch.received_bytes
        if isinstance(answer, Refusal):
            self._unfinished.keep(key, before)
            raise RemoteError(wire.decode(answer.answer, wire.Refused).reason)
        self._unfinished.forget(effect.fragment)
        return fetch

    def _fetch_failed(self, effect: ef.FetchUpdate | ef.FetchState, error: Exception) -> None:
        if isinstance(error, PeerUnreachable):
            reason = "unreachable"
        else:
            reason = error.reason if isinstance(error, RemoteError) else "cut"
        logger.debug("fragment %d not fetched from %s: %s", effect.fragment, effect.peer, error)
        self._post(ev.FetchFailed(effect.fragment, effect.number, effect.peer, reason[:64]))


def _known(pull: wire.PullUpdate | wire.PullState, digest: bytes, size: int) -> int:
    """How much of what is served the asker has already."""
    return pull.have_bytes if pull.have == digest and pull.have_bytes <= size else 0


def _rest(buffers: Sequence[memoryview], offset: int) -> list[memoryview]:
    """The buffers' bytes from `offset` on."""
    rest = []
    for buffer in buffers:
        rest.append(buffer[min(offset, buffer.nbytes) :])
        offset = max(0, offset - buffer.nbytes)
    return rest


_FETCH_ERRORS = (TransportError, RemoteError)


def refuse(reason: str) -> Refusal:
    """A pull's refusal, encoded."""
    return Refusal(wire.encode(wire.Refused(reason)))
