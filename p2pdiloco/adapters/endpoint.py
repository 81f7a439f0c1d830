"""Base of all transports: limits, refusals, and the daemon's handlers behind them.

A concrete transport knows how to carry one message (`_call`) and how to open one byte stream (`_open`).
Everything above that, both the asking and the answering side, is in `Endpoint`, so that the in-memory and the
libp2p transport cannot differ in it. `signed_value` and `acceptable` sign and judge records of the DHT.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import msgpack

from p2pdiloco.adapters import framing, streams
from p2pdiloco.adapters.flow import Flow, Limits
from p2pdiloco.adapters.framing import MAX_REASON_BYTES, RefusedByPeer, encode_refusal, refused_by_peer
from p2pdiloco.adapters.streams import (
    MAX_STREAMS_IN,
    SERVER_KEEPS_S,
    Busy,
    Excess,
    KeptIncoming,
    KeptStreams,
    Places,
    PutOff,
    RequestAllowance,
    Stream,
    StreamRefusal,
    end_stream,
)
from p2pdiloco.core.api.messages import MAX_MESSAGE_BYTES
from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.core.api.types import Crypto
from p2pdiloco.errors import InvariantViolation, RemoteError, TransportError, invariant
from p2pdiloco.identity import SIGNATURE_BYTES
from p2pdiloco.ports import Buffer, PullSink, Refusal, TransportHandlers
from p2pdiloco.util import DAMAGE, Action, BoundedDict, T, cancelled, loop_s

MAX_STREAMS_OUT = 32
MAX_MESSAGES_IN = 256
MAX_MESSAGES_IN_PER_PEER = 64
MAX_RECORD_BYTES = 32 * 1024
SERVE_IDLE_S = 20.0
MUCH_BYTES = 1 << 20
"""Bytes from which a transfer is no request to count: budgets bound what strangers are given of these."""
MAX_REASONS = 64
"""Number of distinct reasons that are counted; more are counted together, so that peers cannot grow the
counter."""

MAX_FLOWS = 256

_OK, _REFUSED = b"\0", b"\1"
logger = logging.getLogger(__name__)


class Endpoint(ABC):
    """Base of the transports; implements send, push and pull of `ports.Transport`."""

    def __init__(self, peer_id: str, limits: Limits | None = None) -> None:
        self.peer_id = peer_id
        self.refusals: dict[str, int] = {}
        self.restarts = 0
        self.restarted = asyncio.Event()
        self._handlers: TransportHandlers | None = None
        self._limits = limits or Limits()
        self._flows: BoundedDict[str, Flow] = BoundedDict(MAX_FLOWS)
        self._slots_out = asyncio.Semaphore(MAX_STREAMS_OUT)
        self._kept, self._kept_in = KeptStreams(), KeptIncoming()
        self._places = Places(lambda: self._count(StreamRefusal.GAVE_WAY.value))
        self._serving: set[asyncio.Task[None]] = set()
        """Tasks that serve one incoming stream each."""
        self._refusing = 0
        self._messages_in: Counter[str] = Counter()
        self._allowance = RequestAllowance(lambda excess: self._count(excess.value), self._disconnect)
        self._introduce: Callable[[str], Awaitable[bool]] | None = None

    def introduce_by(self, introduce: Callable[[str], Awaitable[bool]]) -> None:
        self._introduce = introduce

    async def step_back(self, niceness: int) -> None:  # noqa: B027
        """Nothing to do, unless another process carries the bytes."""

    @abstractmethod
    async def _call(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        """Deliver raw bytes to the peer's `_serve_message`, return its raw reply. Raises: PeerUnreachable."""

    @abstractmethod
    async def _open(self, peer: str, timeout_s: float) -> tuple[framing.ByteReader, framing.ByteWriter]:
        """Open a byte stream to the peer's `_serve_stream`. Raises: PeerUnreachable."""

    @abstractmethod
    def _drop(self, peer: str) -> None:
        """End the connections to a peer, soon; it may dial again. Never raises."""

    def allow(self, upload_bits_per_s: float, download_bits_per_s: float) -> None:
        self._limits.allow(upload_bits_per_s, download_bits_per_s, loop_s)

    def carried_bytes(self) -> tuple[int, int]:
        return self._limits.carried_out_bytes, self._limits.carried_in_bytes

    def payload_bytes(self) -> tuple[int, int]:
        return self._limits.sent_bytes, self._limits.received_bytes

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        invariant(len(data) <= MAX_MESSAGE_BYTES, f"control message of {len(data)} bytes")
        return await self._admitted(peer, lambda: self._send(peer, data, timeout_s))

    async def _send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        reply = await self._call(peer, data, timeout_s)
        self._limits.control(len(data), len(reply))
        status, body = reply[:1], reply[1:]
        if status == _REFUSED:
            raise refused_by_peer(body[:MAX_REASON_BYTES])
        if status != _OK:
            raise self._offence(peer, RemoteError("garbage", "malformed reply"))
        if len(body) > MAX_MESSAGE_BYTES:
            raise self._offence(peer, RemoteError("oversized", f"reply of {len(body)} bytes"))
        return body

    async def push(
        self,
        peer: str,
        header: bytes,
        payload: Sequence[Buffer],
        timeout_s: float,
        before_end: Action | None = None,
    ) -> tuple[bool, bytes]:
        return await self._admitted(
            peer,
            lambda: self._exchange(peer, timeout_s, lambda c: streams.push(c, header, payload, before_end)),
        )

    async def pull(
        self, peer: str, request: bytes, max_payload_bytes: int, timeout_s: float
    ) -> tuple[bytes, bytearray] | Refusal:
        collected = streams.Collected(max_payload_bytes)
        refusal = await self.pull_into(peer, request, collected, timeout_s)
        return refusal or (collected.header, collected.payload)

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:
        return await self._admitted(
            peer, lambda: self._exchange(peer, timeout_s, lambda c: streams.pull(c, request, sink))
        )

    async def _admitted(self, peer: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask a peer for something; where it does not know us as a member, once more after introducing
        ourselves. It says so before it takes anything."""
        try:
            return await ask()
        except RefusedByPeer as error:
            asks = error.unheard in (Unheard.NOT_ADMITTED, Unheard.EXCLUDED)  # or asks for the proof
            unknown = asks and self._introduce is not None
            if not unknown or self._introduce is None or not await self._introduce(peer):
                raise
        return await ask()

    def _flow(self, peer: str) -> Flow:
        """Windows of peers that we had nothing to do with for longest are forgotten."""
        flow = self._flows.get(peer) or Flow(loop_s)
        self._flows[peer] = flow
        return flow

    async def _exchange(
        self, peer: str, timeout_s: float, transfer: Callable[[framing.Channel], Awaitable[T]]
    ) -> T:
        """Make a transfer on a stream to the peer: on one that was kept, or else on a new one. A kept one may
        have died without a word; if nothing came on it, the same goes over a new one."""
        async with self._slots_out:
            stream = self._kept.take(peer)
            if stream is not None:
                channel = self._channel(peer, stream, timeout_s)
                try:
                    return await self._on(peer, stream, transfer(channel))
                except framing.PeerSilent:
                    raise
                except TransportError as error:
                    if channel.heard:
                        raise
                    logger.debug("the stream kept to %s is of no use: %s", peer, error)
            stream = await self._open(peer, timeout_s)
            return await self._on(peer, stream, transfer(self._channel(peer, stream, timeout_s)))

    def _channel(self, peer: str, stream: Stream, idle_s: float) -> framing.Channel:
        reader, writer = stream
        return framing.Channel(reader, writer, idle_s, self._flow(peer), self._limits)

    async def _on(self, peer: str, stream: Stream, transfer: Awaitable[T]) -> T:
        complete = False
        try:
            result = await transfer
            complete = True
            return result
        except RemoteError as error:
            raise self._offence(peer, error) from error.__cause__
        finally:
            if complete:
                self._kept.put(peer, stream)
            else:
                end_stream(stream[1], False)

    async def end_incoming(self) -> None:
        self._handlers = None
        await cancelled(self._serving)

    async def _serve_message(self, sender: str, data: bytes) -> bytes:
        try:
            await self._turn(sender)
            with self._message_slot(sender):
                if self._handlers is None:
                    raise RemoteError(Unheard.NOT_READY.value)
                if len(data) > MAX_MESSAGE_BYTES:
                    raise RemoteError("oversized", f"{len(data)} bytes of at most {MAX_MESSAGE_BYTES}")
                reply = await self._handlers.on_message(sender, data)
                self._limits.control(len(reply), len(data))
                invariant(len(reply) <= MAX_MESSAGE_BYTES, f"reply of {len(reply)} bytes")
                return _OK + reply
        except RemoteError as error:
            self._offence(sender, error)
            return _REFUSED + encode_refusal(error)
        except (Exception, InvariantViolation) as error:  # noqa: BLE001 - our own bug, reported below
            report_bug("message handler", error)
            return _REFUSED + b"internal-error"

    @contextmanager
    def _message_slot(self, sender: str) -> Iterator[None]:
        """Context in which a message is answered: only so many are, in all and of a peer. Raises: Busy."""
        messages = self._messages_in
        if messages.total() >= MAX_MESSAGES_IN or messages[sender] >= MAX_MESSAGES_IN_PER_PEER:
            raise Busy
        messages[sender] += 1
        try:
            yield
        finally:
            self._messages_in -= Counter([sender])

    async def _turn(self, sender: str) -> bool | None:
        """Wait until a request of a peer's may be looked at: not at all if it is a member. Tell whether it is
        one; None: there are none. Raises: Busy."""
        member = None if self._handlers is None else self._handlers.is_member(sender)
        if not member:
            stranger = member is False and self._handlers is not None and self._handlers.is_stranger(sender)
            await self._allowance.turn(sender, stranger)
        return member

    def _disconnect(self, peer: str) -> None:
        self._count(Excess.DISCONNECTED.value)
        logger.debug("disconnected %s, which asks too much", peer)
        self._drop(peer)

    async def _serve_stream(
        self, sender: str, reader: framing.ByteReader, writer: framing.ByteWriter
    ) -> None:
        channel = self._channel(sender, (reader, writer), SERVE_IDLE_S)
        complete, task = False, asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve_one(channel, sender, None)
            while True:
                self._kept_in.put(task, sender, writer)
                try:
                    complete = True
                    kind = (await channel.some(1, SERVER_KEEPS_S))[0]
                finally:
                    mine = self._kept_in.take(task)
                if not mine:
                    return
                complete = False
                await self._serve_one(channel, sender, kind)
        except RemoteError as error:
            self._offence(sender, error)
        except TransportError as error:
            if isinstance(error, framing.TooSlow):
                self._count(StreamRefusal.TOO_SLOW.value)
            logger.debug("stream from %s ended: %s", sender, error)
        except (Exception, InvariantViolation) as error:  # noqa: BLE001 - our own bug, reported below
            report_bug("stream handler", error)
        finally:
            self._serving.discard(task)
            end_stream(writer, complete)

    async def _serve_one(self, channel: framing.Channel, sender: str, kind: int | None) -> None:
        """Raises: as `streams.serve`."""
        try:
            member = await self._turn(sender)
            with self._places.taken(sender, member):
                if self._handlers is None:
                    raise RemoteError(Unheard.NOT_READY.value)
                moved_bytes = await streams.serve(channel, sender, self._handlers, kind, member is False)
            if moved_bytes >= MUCH_BYTES and not member:
                self._allowance.give_back(sender)
        except Busy as error:  # raised before anything was read, so nobody has told the peer yet
            if self._refusing < MAX_STREAMS_IN:  # beyond that a flood: no words, no waiting
                self._refusing += 1
                try:
                    await streams.refuse(channel, error)
                finally:
                    self._refusing -= 1
            raise

    def _offence(self, peer: str, error: RemoteError) -> RemoteError:
        """A peer's refusal of us is none. Returns the error, to be raised."""
        if not isinstance(error, RefusedByPeer):
            self._count(error.counted if isinstance(error, PutOff) else error.reason)
            logger.debug("refused %s: %s", peer, error)
        return error

    def _count(self, reason: str) -> None:
        if reason not in self.refusals and len(self.refusals) >= MAX_REASONS:
            reason = "other"
        self.refusals[reason] = self.refusals.get(reason, 0) + 1


def report_bug(where: str, error: BaseException) -> None:
    """Hand an error of ours to the loop's exception handler; `context["bug"]` tells it from mere noise, so
    that the daemon can end the process."""
    context = {"message": f"bug in the {where}: {error!r}", "exception": error, "bug": True}
    asyncio.get_running_loop().call_exception_handler(context)


def report_end(where: str, task: asyncio.Task[None]) -> None:
    """Report the bug for which a task of ours has ended, if it was one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        report_bug(where, error)


MAX_VALUE_BYTES = 32 * 1024
MAX_LIFETIME_S = 300.0
"""Time for which a record is kept at most: it says where somebody is, who can say so again."""
MAX_CLOCK_SKEW_S = 10.0
_DOMAIN = "p2pdiloco/1/record"
_encoder = msgpack.Encoder()
_bytes = msgpack.Decoder(bytes)
_text = msgpack.Decoder(str)


def signed_value(crypto: Crypto, key: bytes, subkey: bytes, value: bytes, expires: float) -> bytes:
    """Append our signature to the value. key: 20-byte DHT id; subkey, value: msgpack; expires: Unix time, s.

    A record lives under (key, subkey); the subkey is its owner's peer id, so every peer has exactly one
    record under a key and nobody can touch another's. On the wire a value is the msgpack encoding of bytes,
    followed by the owner's 64-byte Ed25519 signature over domain, key, subkey, value and expiration.
    """
    return value + crypto.sign(signed_message(key, subkey, value, expires))


def acceptable(crypto: Crypto, key: bytes, subkey: bytes, signed: bytes, expires: float, now: float) -> bool:
    """Tell whether a record from a peer is well-formed, bounded, and signed by the peer that its subkey
    names.

    Expired records pass (the DHT drops them by itself, and a dictionary is judged as a whole).
    """
    if not (SIGNATURE_BYTES < len(signed) <= MAX_VALUE_BYTES + SIGNATURE_BYTES + 8) or len(subkey) > 96:
        return False
    if not expires <= now + MAX_LIFETIME_S + MAX_CLOCK_SKEW_S:  # so written that NaN fails
        return False
    value, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    try:
        owner = _text.decode(subkey)
        _bytes.decode(value)  # an undecodable value would fail every reader's whole look-up
    except DAMAGE:
        return False
    return crypto.verify(owner, signed_message(key, subkey, value, expires), signature)


def stripped(signed: bytes) -> bytes:
    """Cut the signature off."""
    return signed[:-SIGNATURE_BYTES]


def signed_message(key: bytes, subkey: bytes, value: bytes, expires: float) -> bytes:
    """Encode what a record's owner signs."""
    return _encoder.encode([_DOMAIN, key, subkey, value, float(expires)])
