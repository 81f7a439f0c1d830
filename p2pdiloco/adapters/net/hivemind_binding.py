"""Binding to hivemind's p2pd client, made safe. Only this module and `hivemind_dht` import hivemind.

What is different from plain hivemind 1.1.12, and why (all measured):
* sockets lie in our own private folder, with room for 1024 waiting streams instead of 100;
* a call ends when the connection to p2pd ends (there it hangs for ever), and a cancelled call cannot
  break the reading task (there a late reply to a cancelled call kills it, and all later calls hang);
* a message to p2pd is one write, and a peer's id is spelled once, not with every message.
"""

from __future__ import annotations

import p2pdiloco.adapters.net.hivemind_bare  # noqa: F401  # isort: skip (before hivemind)

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import base58
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings import control
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import (
    P2PDaemonError,
    P2PHandlerError,
    raise_if_failed,
    read_pbmsg_safe,
)
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from p2pdiloco.adapters.net import multiaddrs
from p2pdiloco.adapters.net.direct_stream import DirectStream
from p2pdiloco.errors import PeerUnreachable, RemoteError, UserError

OnMessage = Callable[[str, bytes], Awaitable[bytes]]
OnStream = Callable[[str, DirectStream, DirectStream], Awaitable[None]]

MESSAGE_PROTOCOL = "p2pdiloco/1/message"
BULK_PROTOCOL = "p2pdiloco/3/bulk"
STREAM_LIMIT_BYTES = 512 * 1024
STREAM_BACKLOG = 1024
MAX_PEERS = 4096
"""Peers whose ids are kept as they are written: spelling one takes as long as sending a message."""

FAILURES = (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError, DecodeError)


def quiet_logs() -> None:
    """Take hivemind's own handler off; its messages go to Python's logging like everybody's."""
    use_hivemind_log_handler("nowhere")
    # Tracebacks of handlers' errors at WARNING: a peer must not be able to fill our log.
    logging.getLogger("hivemind").setLevel(logging.ERROR)


class _Connector(DaemonConnector):  # type: ignore[misc]
    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = self.control_maddr["unix"]
        return await asyncio.open_unix_connection(path, limit=STREAM_LIMIT_BYTES)


class _Running(dict[UUID, asyncio.Task[None]]):
    """Calls of peers that are being answered, each until its task ends. In hivemind one that was cancelled
    stays, and so does one that is cancelled before its task begins."""

    def __setitem__(self, call_id: UUID, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


class _Control(ControlClient):  # type: ignore[misc]
    turn: Callable[[str], Awaitable[None]] | None = None
    """Function that is awaited before a call of the DHT is answered; None: there is nothing to wait for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._handler_tasks = _Running()

    @property
    def lost(self) -> bool:
        return bool(self._read_task.done() or self._write_task.done())

    async def wait_lost(self) -> None:
        await asyncio.wait({self._read_task, self._write_task}, return_when=asyncio.FIRST_COMPLETED)

    async def _handle_persistent_request(self, call_id: UUID, request: Any) -> None:
        """Answer a call of a peer's."""
        try:
            if self.turn is not None and request.proto != MESSAGE_PROTOCOL:
                await self.turn(_peer_of(request.peer).to_base58())
            await super()._handle_persistent_request(call_id, request)
        except RemoteError as error:
            refusal = p2pd_pb2.CallUnaryResponse(error=error.reason.encode())
            answer = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=refusal)
            self._pending_messages.put_nowait(answer)

    async def call_unary_handler(self, peer_id: Any, proto: str, data: bytes) -> bytes:
        request = p2pd_pb2.CallUnaryRequest(peer=peer_id.to_bytes(), proto=proto, data=data)
        message = p2pd_pb2.PersistentConnectionRequest(callId=uuid4().bytes, callUnary=request)
        if message.ByteSize() > self.persistent_conn_max_msg_size:
            raise P2PDaemonError("message too large")
        return await self._exchange(message)

    async def _exchange(self, message: Any) -> bytes:
        """Send a request on the persistent connection and wait for its reply, or for the connection's end."""
        call_id = UUID(bytes=message.callId)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending_calls[call_id] = reply
        try:
            self._pending_messages.put_nowait(message)
            # asyncio.wait, unlike await, leaves the future uncancelled when we are cancelled.
            ends = {reply, self._read_task, self._write_task}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise P2PDaemonError("p2pd is gone")
            return reply.result()
        finally:
            self._pending_calls.pop(call_id, None)
            if not reply.done() and not self.lost:
                cancel = p2pd_pb2.PersistentConnectionRequest(callId=message.callId, cancel=p2pd_pb2.Cancel())
                self._pending_messages.put_nowait(cancel)

    async def request(self, request: Any) -> Any:
        """Send one request on a connection of its own; returns (response, stream), still open."""
        path = self.daemon_connector.control_maddr["unix"]
        _, stream = await asyncio.get_running_loop().create_unix_connection(DirectStream, path)
        try:
            await _write(stream, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(stream, response)
            raise_if_failed(response)
        except BaseException:
            stream.close()
            raise
        return response, stream


class _P2P(P2P):  # type: ignore[misc]
    """P2P of hivemind over a p2pd that is not its child."""

    @classmethod
    async def attach(cls, control_socket: Path, client_socket: Path) -> _P2P:
        self = cls()
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{control_socket}")
        self._client_listen_maddr = Multiaddr(f"/unix{client_socket}")
        self._client = Client(_initialized_with_create=True)
        self._client.control = await _Control.create(
            _Connector(self._daemon_listen_maddr), self._client_listen_maddr
        )
        await self._ping_daemon()
        return self

    def _start_listening(self) -> None:
        """Do nothing: `Attachment` listens."""


class Attachment:
    """Connection of ours to one p2pd process: calls, streams, dialing."""

    def __init__(self, p2p: _P2P) -> None:
        self.p2p = p2p
        self._control: _Control = p2p._client.control
        self._server: asyncio.AbstractServer | None = None
        self._serving: set[asyncio.Task[Any]] = set()
        self.peer_id: str = p2p.peer_id.to_base58()

    @classmethod
    async def open(
        cls,
        control_socket: Path,
        client_socket: Path,
        on_message: OnMessage,
        on_stream: OnStream,
        turn: Callable[[str], Awaitable[None]],
    ) -> Attachment:
        """Connect to p2pd and register our two protocols. `turn`: awaited before a peer's call of the DHT is
        answered; what it raises as RemoteError is the answer. Raises: PeerUnreachable."""
        try:
            self = cls(await _P2P.attach(control_socket, client_socket))
        except FAILURES as error:
            raise PeerUnreachable(f"cannot talk to p2pd: {error}") from error
        self._control.turn = turn
        try:
            await self._register(client_socket, on_message, on_stream)
        except FAILURES as error:
            await self.close()
            raise PeerUnreachable(f"cannot talk to p2pd: {error}") from error
        return self

    async def _register(self, client_socket: Path, on_message: OnMessage, on_stream: OnStream) -> None:
        async def message(data: bytes, sender: Any) -> bytes:
            return await on_message(sender.to_base58(), data)

        async def serve(stream: DirectStream) -> None:
            info = p2pd_pb2.StreamInfo()
            try:
                await read_pbmsg_safe(stream, info)
            except FAILURES:
                stream.close()
                return
            await on_stream(_peer_of(info.peer).to_base58(), stream, stream)

        def connected(stream: DirectStream) -> None:
            task = asyncio.get_running_loop().create_task(serve(stream))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: DirectStream(connected), str(client_socket), backlog=STREAM_BACKLOG
        )
        await self._control.add_unary_handler(MESSAGE_PROTOCOL, message)
        await self._control.stream_handler(BULK_PROTOCOL, serve)

    @property
    def lost(self) -> bool:
        """Tell whether p2pd is gone."""
        return self._control.lost

    async def wait_lost(self) -> None:
        """Wait until the connection to p2pd has ended."""
        await self._control.wait_lost()

    async def call(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        """Deliver one message, return the raw reply. Raises: PeerUnreachable, RemoteError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._control.call_unary_handler(peer_id_of(peer), MESSAGE_PROTOCOL, data)
        except TimeoutError:
            raise PeerUnreachable(f"no reply from {peer} within {timeout_s:g} s") from None
        except P2PHandlerError as error:  # our handlers never raise: whoever answers so is no p2pdiloco
            raise RemoteError("handler-failed", str(error)[:200]) from error
        except FAILURES as error:
            raise PeerUnreachable(f"{peer}: {error}") from error

    async def open_stream(self, peer: str, timeout_s: float) -> tuple[DirectStream, DirectStream]:
        """Open a bulk stream to the peer. Raises: PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer_id_of(peer).to_bytes(), proto=[BULK_PROTOCOL]),
        )
        _, stream = await self._request(request, timeout_s, peer)
        return stream, stream

    async def connect(self, peer: str, addresses: Sequence[str], timeout_s: float) -> None:
        """Dial. Raises: PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=peer_id_of(peer).to_bytes(), addrs=[address_bytes(text) for text in addresses]
            ),
        )
        _, stream = await self._request(request, timeout_s, peer)
        stream.close()

    async def disconnect(self, peer: str, timeout_s: float) -> None:
        """End all connections to a peer, and its streams with them. Raises: PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT,
            disconnect=p2pd_pb2.DisconnectRequest(peer=peer_id_of(peer).to_bytes()),
        )
        _, stream = await self._request(request, timeout_s, peer)
        stream.close()

    async def peers(self, timeout_s: float) -> dict[str, list[str]]:
        """List the peers that there is a connection to, and the other end of each connection as a multiaddr
        (of kinds that we do not know: none). Raises: PeerUnreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response, stream = await self._request(request, timeout_s, "p2pd")
        stream.close()
        found: dict[str, list[str]] = {}
        for peer in response.peers:
            found.setdefault(PeerID(peer.id).to_base58(), []).extend(_texts(peer.addrs))
        return found

    async def observed_addresses(self, timeout_s: float) -> list[str]:
        """Ask libp2p what it believes our addresses to be. Raises: PeerUnreachable."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        response, stream = await self._request(request, timeout_s, "p2pd")
        stream.close()
        return _texts(response.identify.addrs)

    async def close(self) -> None:
        """End our side; p2pd then ends by itself. Never raises."""
        if self._server is not None:
            self._server.close()
        control = self._control
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values(), *self._serving]
        for task in tasks:
            task.cancel()
        self.p2p._terminate()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, request: Any, timeout_s: float, peer: str) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._control.request(request)
        except TimeoutError:
            raise PeerUnreachable(f"{peer}: no answer within {timeout_s:g} s") from None
        except FAILURES as error:
            raise PeerUnreachable(f"{peer}: {error}") from error


def _texts(addresses: Sequence[bytes]) -> list[str]:
    """Write addresses as text, without those of kinds that we do not know."""
    texts = []
    for raw in addresses:
        try:
            texts.append(multiaddrs.join(multiaddrs.parse(multiaddrs.join(multiaddrs.from_bytes(raw)))))
        except (ValueError, UserError):
            continue
    return texts


def address_bytes(text: str) -> bytes:
    """Encode a multiaddr in binary. hivemind's own encoding of /p2p/ID is refused by go-libp2p."""
    codes = {"quic-v1": 461, "webtransport": 465, "p2p-circuit": 290, "tls": 448}
    raw = b""
    for protocol, value in multiaddrs.parse(text):
        if protocol == "p2p":
            peer = base58.b58decode(value)
            raw += _varint(421) + _varint(len(peer)) + peer
        elif protocol in codes:
            raw += _varint(codes[protocol])
        else:
            raw += Multiaddr(multiaddrs.join([(protocol, value)])).to_bytes()
    return raw


def _varint(number: int) -> bytes:
    raw = bytearray()
    while number > 0x7F:
        raw.append(number & 0x7F | 0x80)
        number >>= 7
    raw.append(number)
    return bytes(raw)


async def _write(stream: Any, message: Any) -> None:
    stream.write(_varint(message.ByteSize()) + message.SerializeToString())
    await stream.drain()


@lru_cache(MAX_PEERS)
def _peer_of(raw: bytes) -> Any:
    return PeerID(raw)


control.write_pbmsg, control.PeerID = _write, _peer_of


@lru_cache(MAX_PEERS)
def peer_id_of(peer: str) -> Any:
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise PeerUnreachable(f"'{peer[:80]}' is not a peer id") from error
