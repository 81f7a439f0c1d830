"""Binding to hivemind's p2pd client (`Attachment`) and its DHT (`RecordTable`), made safe.

Only this module imports hivemind. What is different from plain hivemind 1.1.12, and why (all measured):
* sockets lie in our own private folder, with room for 1024 waiting streams instead of 100;
* a call ends when the connection to p2pd ends (there it hangs for ever), and a cancelled call cannot
  break the reading task (there a late reply to a cancelled call kills it, and all later calls hang);
* a message to p2pd is one write, and a peer's id is spelled once, not with every message;
* a refused record no longer shortens the life of the good one; dictionaries of the DHT are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import p2pdiloco.adapters.hivemind_bare  # noqa: F401  # isort: skip (before hivemind)

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import base58
from google.protobuf.message import DecodeError
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
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
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import TimedStorage

from p2pdiloco.adapters import endpoint, multiaddrs
from p2pdiloco.adapters.framing import DirectStream
from p2pdiloco.core.api.types import Crypto
from p2pdiloco.errors import PeerUnreachable, RemoteError, UserError
from p2pdiloco.hashing import content_digest
from p2pdiloco.util import BoundedDict

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
        """Wait for the reply, or for the connection's end."""
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
        """`Attachment` listens."""


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
            task = asyncio.create_task(serve(stream))
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
    """Without addresses of kinds that we do not know."""
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


MAX_KEYS = 4096
MAX_ACCEPTED = 8192
MAX_SUBKEYS = 1024
MAX_DICTIONARY_BYTES = 1024 * 1024
"""Most bytes of a dictionary of the DHT. A reply of 4 MiB or more breaks hivemind's RPC for good; this keeps
far below."""


@dataclass
class RecordTable:
    """DHT of hivemind in our own loop, holding signed records only."""

    _node: DHTNode
    _crypto: Crypto
    _owner: str

    @classmethod
    async def create(
        cls, attachment: Attachment, crypto: Crypto, predecessor: RecordTable | None = None
    ) -> RecordTable:
        """Make a table on this attachment, with the node id and the records of its predecessor, if any.

        Raises:
            PeerUnreachable: p2pd is gone.
        """
        storage = _Storage(maxsize=MAX_KEYS)
        node_id = None
        if predecessor is not None:
            node_id = predecessor._node.node_id
            storage = predecessor._node.protocol.storage
        try:
            node = await DHTNode.create(
                p2p=attachment.p2p,
                node_id=node_id,
                record_validator=_Validator(crypto),
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
            )
        except FAILURES as error:
            raise PeerUnreachable(f"cannot talk to p2pd: {error}") from error
        node.protocol.storage = storage
        return cls(node, crypto, attachment.peer_id)

    async def join(self, peers: Sequence[str]) -> list[str]:
        """Ping peers and look for our neighbours through them; returns those that answered.

        Raises:
            ClockSkew: nobody answered who agrees with us about the time.
        """
        pings = [
            self._node.protocol.call_ping(peer_id_of(peer), validate=True, strict=True) for peer in peers
        ]
        results = await asyncio.gather(*pings, return_exceptions=True)
        answered = [
            p
            for p, r in zip(peers, results, strict=True)
            if r is not None and not isinstance(r, BaseException)
        ]
        skewed = [r for r in results if isinstance(r, ValidationError) and "local time" in str(r)]
        if skewed and not answered:
            raise ClockSkew(str(skewed[0]))
        if answered:
            await self._node.find_nearest_nodes([self._node.node_id])
        return answered

    def knows(self, peer: str) -> bool:
        """Tell whether the peer is in the routing table."""
        return self._node.protocol.routing_table.get(peer_id=peer_id_of(peer)) is not None

    async def ping(self, peer: str) -> None:
        """Put the peer into the routing table if it answers."""
        await self._node.protocol.call_ping(peer_id_of(peer))

    async def clock_ahead_s(self, peer: str) -> float:
        """Measure by how many seconds the clock of a peer is ahead of ours; half the round trip is not known.

        Raises: PeerUnreachable.
        """
        sent_s = time.time()
        try:
            reply = await self._node.protocol.get_stub(peer_id_of(peer)).rpc_ping(dht_pb2.PingRequest())
        except FAILURES as error:
            raise PeerUnreachable(f"it does not say what time it is: {error}") from error
        return float(reply.dht_time) - (sent_s + time.time()) / 2

    async def put(self, key: str, value: bytes, expires: float) -> bool:
        """Store our record here and with the nearest peers; returns whether any of those took it."""
        self._put_here(key, value, expires)
        stored = await self._node.store(key, value, expires, subkey=self._owner, exclude_self=True)
        return bool(stored)

    async def get(self, key: str) -> dict[str, bytes]:
        """Look up the live records under key that we and the nearest peers have."""
        found = await self._node.get(key, latest=True)
        self._bound(key)
        if found is None or not isinstance(found.value, dict):
            return {}
        now = time.time()
        return {owner: item.value for owner, item in found.value.items() if item.expiration_time > now}

    def get_here(self, key: str) -> dict[str, bytes]:
        """List the live records under key that we hold ourselves."""
        found = self._node.protocol.storage.get(DHTID.generate(source=key))
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return {}
        loads = self._node.protocol.serializer.loads
        return {owner: loads(endpoint.stripped(value)) for owner, (value, _) in found.value.items()}

    def close(self) -> None:
        """Stop background work."""
        self._node.is_alive = False

    def _put_here(self, key: str, value: bytes, expires: float) -> None:
        key_id = DHTID.generate(source=key)
        dumps = self._node.protocol.serializer.dumps
        signed = endpoint.signed_value(
            self._crypto, key_id.to_bytes(), dumps(self._owner), dumps(value), expires
        )
        self._node.protocol.storage.store_subkey(key_id, self._owner, signed, expires)

    def _bound(self, key: str) -> None:
        """Drop our own dictionary under key if it is too large: a look-up merges what it finds into it, past
        all bounds."""
        storage = self._node.protocol.storage
        key_id = DHTID.generate(source=key)
        found = storage.get(key_id)
        if found is not None and isinstance(found.value, DictionaryDHTValue) and _too_large(found.value):
            del storage[key_id]


class ClockSkew(Exception):
    """Error: this machine's clock differs from the peers' by more than 3 s."""


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """Validator of signed records (`adapters.endpoint.acceptable`)."""

    def __init__(self, crypto: Crypto) -> None:
        self._crypto = crypto
        self._accepted: BoundedDict[bytes, None] = BoundedDict(MAX_ACCEPTED)
        """Digests of records that were acceptable: every look-up brings the same ones again, from each peer
        that is asked, and a signature takes far longer than a digest."""

    def validate(self, record: DHTRecord) -> bool:
        digest = content_digest(
            endpoint.signed_message(record.key, record.subkey, record.value, record.expiration_time)
        )
        if digest in self._accepted:
            return True
        accepted = endpoint.acceptable(
            self._crypto, record.key, record.subkey, record.value, record.expiration_time, time.time()
        )
        if accepted:
            self._accepted[digest] = None
        return accepted

    def sign_value(self, record: DHTRecord) -> bytes:
        return endpoint.signed_value(
            self._crypto, record.key, record.subkey, record.value, record.expiration_time
        )

    def strip_value(self, record: DHTRecord) -> bytes:
        return endpoint.stripped(record.value)


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """Every dictionary is bounded in its size; the number of keys is bounded by `maxsize`."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        current = self.get(key)
        if current is not None and isinstance(current.value, DictionaryDHTValue):
            held = current.value
            if held.get(subkey) is None and _too_large(held, len(value)):
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def _too_large(dictionary: DictionaryDHTValue, more_bytes: int = 0) -> bool:
    sizes = [len(item.value) for _, item in dictionary.items()]
    return len(sizes) >= MAX_SUBKEYS or sum(sizes) + more_bytes > MAX_DICTIONARY_BYTES


_original_store = TimedStorage.store


def _store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """Store a value only if it lives longer. hivemind records the expiration of a value that it then refuses,
    and so the good one dies early."""
    current = self.data.get(key)
    if current is not None and current.expiration_time >= expiration_time:
        return False
    return bool(_original_store(self, key, value, expiration_time))


TimedStorage.store = _store
