"""What all transports have in common: limits, refusals, and the daemon's handlers behind them.

A concrete transport knows how to carry one message (`_call`) and how to open one byte stream (`_open`).
Everything above that, both the asking and the answering side, is here, so that the in-memory and the
libp2p transport cannot differ in it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from p2pdiloco.adapters import framing, streams
from p2pdiloco.adapters.flow import Flow, Limits
from p2pdiloco.core.messages import MAX_MESSAGE_BYTES
from p2pdiloco.errors import InvariantViolation, RemoteError, TransportError, invariant
from p2pdiloco.ports import Buffer, PullSink, Refusal, TransportHandlers

MAX_STREAMS_OUT = 32
MAX_STREAMS_IN = 64
MAX_STREAMS_IN_PER_PEER = 48  # above MAX_STREAMS_OUT: our slot is free a moment after the peer's
MAX_MESSAGES_IN = 256
MAX_MESSAGES_IN_PER_PEER = 64
MAX_RECORD_BYTES = 32 * 1024
SERVE_IDLE_S = 20.0
MAX_REASONS = 64
"""Distinct reasons counted; more are counted together, so that peers cannot grow the counter."""

MAX_FLOWS = 256

_OK, _REFUSED = b"\0", b"\1"
logger = logging.getLogger(__name__)


class Endpoint(ABC):
    """Base of the transports; implements send, push and pull of `ports.Transport`."""

    def __init__(self, peer_id: str, limits: Limits | None = None) -> None:
        self.peer_id = peer_id
        self.refusals: dict[str, int] = {}
        self.restarts = 0
        self._handlers: TransportHandlers | None = None
        self._limits = limits or Limits()
        self._flows: OrderedDict[str, Flow] = OrderedDict()
        self._slots_out = asyncio.Semaphore(MAX_STREAMS_OUT)
        self._streams_in: Counter[str] = Counter()
        self._serving: set[asyncio.Task[None]] = set()
        """Each serves one incoming stream."""
        self._refusing = 0
        self._messages_in: Counter[str] = Counter()

    async def step_back(self, niceness: int) -> None:  # noqa: B027 - what carries the bytes here is no process
        """See `ports.Transport.step_back`."""

    @abstractmethod
    async def _call(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        """Deliver raw bytes to the peer's `_serve_message`, return its raw reply. Raises: PeerUnreachable."""

    @abstractmethod
    async def _open(self, peer: str, timeout_s: float) -> tuple[framing.Reader, framing.Writer]:
        """A byte stream to the peer's `_serve_stream`. Raises: PeerUnreachable."""

    def payload_bytes(self) -> tuple[int, int]:
        """See `ports.Transport.payload_bytes`."""
        return self._limits.sent_bytes, self._limits.received_bytes

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        """See `ports.Transport.send`."""
        invariant(len(data) <= MAX_MESSAGE_BYTES, f"control message of {len(data)} bytes")
        reply = await self._call(peer, data, timeout_s)
        self._limits.control(len(data), len(reply))
        status, body = reply[:1], reply[1:]
        if status == _REFUSED:
            raise framing.refused_by_peer(body[: framing.MAX_REASON_BYTES])
        if status != _OK:
            raise self._offence(peer, RemoteError("garbage", "malformed reply"))
        if len(body) > MAX_MESSAGE_BYTES:
            raise self._offence(peer, RemoteError("oversized", f"reply of {len(body)} bytes"))
        return body

    async def push(
        self, peer: str, header: bytes, payload: Sequence[Buffer], timeout_s: float
    ) -> tuple[bool, bytes]:
        """See `ports.Transport.push`."""
        async with self._channel(peer, timeout_s) as channel:
            return await streams.push(channel, header, payload)

    async def pull(
        self, peer: str, request: bytes, max_payload_bytes: int, timeout_s: float
    ) -> tuple[bytes, bytearray] | Refusal:
        """See `ports.Transport.pull`."""
        collected = streams.Collected(max_payload_bytes)
        refusal = await self.pull_into(peer, request, collected, timeout_s)
        return refusal or (collected.header, collected.payload)

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:
        """See `ports.Transport.pull_into`."""
        async with self._channel(peer, timeout_s) as channel:
            return await streams.pull(channel, request, sink)

    def _flow(self, peer: str) -> Flow:
        """The window of a peer; those of peers that we had nothing to do with for longest are forgotten."""
        flow = self._flows.pop(peer, None) or Flow(asyncio.get_running_loop().time)
        self._flows[peer] = flow
        while len(self._flows) > MAX_FLOWS:
            self._flows.popitem(last=False)
        return flow

    @asynccontextmanager
    async def _channel(self, peer: str, timeout_s: float) -> AsyncIterator[framing.Channel]:
        async with self._slots_out:
            reader, writer = await self._open(peer, timeout_s)
            complete = False
            try:
                yield framing.Channel(reader, writer, timeout_s, self._flow(peer), self._limits)
                complete = True
            except RemoteError as error:
                raise self._offence(peer, error) from error.__cause__
            finally:
                end_stream(writer, complete)

    async def end_incoming(self) -> None:
        """See `ports.Transport.end_incoming`."""
        self._handlers = None
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_message(self, sender: str, data: bytes) -> bytes:
        """The raw reply to a raw message that arrived on `sender`'s authenticated connection."""
        try:
            with _Slot(self._messages_in, sender, MAX_MESSAGES_IN, MAX_MESSAGES_IN_PER_PEER):
                if self._handlers is None:
                    raise RemoteError("not-ready")
                if len(data) > MAX_MESSAGE_BYTES:
                    raise RemoteError("oversized", f"{len(data)} bytes of at most {MAX_MESSAGE_BYTES}")
                reply = await self._handlers.on_message(sender, data)
                self._limits.control(len(reply), len(data))
                invariant(len(reply) <= MAX_MESSAGE_BYTES, f"reply of {len(reply)} bytes")
                return _OK + reply
        except RemoteError as error:
            self._offence(sender, error)
            return _REFUSED + framing.encode_refusal(error)
        except (Exception, InvariantViolation) as error:  # noqa: BLE001 - our own bug, reported below
            report_bug("message handler", error)
            return _REFUSED + b"internal-error"

    async def _serve_stream(self, sender: str, reader: framing.Reader, writer: framing.Writer) -> None:
        """Answer one incoming stream, and end it."""
        channel = framing.Channel(reader, writer, SERVE_IDLE_S, self._flow(sender), self._limits)
        complete, task = False, asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            try:
                with _Slot(self._streams_in, sender, MAX_STREAMS_IN, MAX_STREAMS_IN_PER_PEER):
                    if self._handlers is None:
                        raise RemoteError("not-ready")
                    await streams.serve(channel, sender, self._handlers)
                complete = True
            except _Busy as error:  # raised before anything was read, so nobody has told the peer yet
                self._offence(sender, error)
                if self._refusing < MAX_STREAMS_IN:  # beyond that a flood: no words, no waiting
                    self._refusing += 1
                    try:
                        await streams.refuse(channel, error)
                    finally:
                        self._refusing -= 1
        except RemoteError as error:
            self._offence(sender, error)
        except TransportError as error:
            logger.debug("stream from %s ended: %s", sender, error)
        except (Exception, InvariantViolation) as error:  # noqa: BLE001 - our own bug, reported below
            report_bug("stream handler", error)
        finally:
            self._serving.discard(task)
            end_stream(writer, complete)

    def _offence(self, peer: str, error: RemoteError) -> RemoteError:
        """Count what a peer did wrong; a peer's refusal of us is none. Returns the error, to be raised."""
        if not isinstance(error, framing.RefusedByPeer):
            reason = error.reason
            if reason not in self.refusals and len(self.refusals) >= MAX_REASONS:
                reason = "other"
            self.refusals[reason] = self.refusals.get(reason, 0) + 1
            logger.debug("refused %s: %s", peer, error)
        return error


class _Busy(RemoteError):
    """A limit of concurrent requests is reached."""


class _Slot:
    """One of a bounded number of concurrent requests, in all and per peer."""

    def __init__(self, counts: Counter[str], peer: str, most: int, most_per_peer: int) -> None:
        self._counts, self._peer = counts, peer
        self._full = counts.total() >= most or counts[peer] >= most_per_peer

    def __enter__(self) -> None:
        if self._full:
            raise _Busy("busy", "too many requests at once")
        self._counts[self._peer] += 1

    def __exit__(self, *_: object) -> None:
        self._counts[self._peer] -= 1
        if not self._counts[self._peer]:
            del self._counts[self._peer]


def end_stream(writer: framing.Writer, complete: bool) -> None:
    """Close after a complete exchange; otherwise drop what is queued, which may point into lent buffers."""
    transport = getattr(writer, "transport", None)
    if complete or transport is None:
        writer.close()
    else:
        transport.abort()


def report_bug(where: str, error: BaseException) -> None:
    """Hand an error of ours to the loop's exception handler; `context["bug"]` tells it from mere noise, so
    that the daemon can end the process."""
    context = {"message": f"bug in the {where}: {error!r}", "exception": error, "bug": True}
    asyncio.get_running_loop().call_exception_handler(context)
