"""Transport inside one process, for tests of the daemon, with links that can be cut.

Semantics and errors are those of the real transport because both share `Endpoint` and the stream framing;
only dialing, message delivery and records are simulated. A link is cut at once and without a sound, like
a killed peer: what is under way fails, what comes later is unreachable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from p2pdiloco.adapters.net.endpoint import MAX_RECORD_BYTES, Endpoint
from p2pdiloco.adapters.net.flow import CHUNK_BYTES, Limits
from p2pdiloco.adapters.net.framing import ByteReader, ByteWriter
from p2pdiloco.errors import PeerUnreachable, UserError, invariant
from p2pdiloco.ports import Link, TransportHandlers

PIPE_BYTES = 2 * CHUNK_BYTES
Pair = frozenset[str]


class MemoryNetwork:
    """Hub of the transports: who is up, which links are cut, what is under way."""

    def __init__(self) -> None:
        self._up: dict[str, MemoryTransport] = {}
        self._cut: set[Pair] = set()
        self._under_way: dict[asyncio.Task[Any], Pair] = {}

    def transport(
        self, peer_id: str, initial_peers: Sequence[str] = (), limits: Limits | None = None
    ) -> MemoryTransport:
        """Make a transport of this network, not started. initial_peers: `/memory/p2p/ID` or bare peer ids."""
        return MemoryTransport(self, peer_id, initial_peers, limits)

    def cut(self, a: str, b: str) -> None:
        """Cut the link between two peers; calls and streams under way between them fail at once."""
        self._cut.add(frozenset((a, b)))
        self._break(lambda link: link == frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset((a, b)))

    def partition(self, side: Sequence[str], other_side: Sequence[str]) -> None:
        """Cut every link between the two sides."""
        for a in side:
            for b in other_side:
                self.cut(a, b)

    def kill(self, peer: str) -> None:
        """Make the peer vanish without a goodbye; a new transport with its id may be started later."""
        self._up.pop(peer, None)
        self._break(lambda link: peer in link)

    def reachable(self, a: str, b: str) -> bool:
        """Tell whether both are up and the link between them is whole."""
        return a in self._up and b in self._up and frozenset((a, b)) not in self._cut

    def _break(self, concerns: Any) -> None:
        for task, link in list(self._under_way.items()):
            if concerns(link):
                task.cancel()

    def _begin(self, coroutine: Any, a: str, b: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._under_way[task] = frozenset((a, b))
        task.add_done_callback(lambda done: self._under_way.pop(done, None))
        return task


class MemoryTransport(Endpoint):
    """Transport of one peer of a `MemoryNetwork`. Implements `ports.Transport`."""

    def __init__(
        self,
        hub: MemoryNetwork,
        peer_id: str,
        initial_peers: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        super().__init__(peer_id, limits)
        self._hub = hub
        self._initial_peers = [address.rsplit("/", 1)[-1] for address in initial_peers]
        self._records: dict[str, dict[str, tuple[bytes, float]]] = {}

    async def start(self, handlers: TransportHandlers) -> None:
        """See `ports.Transport.start`."""
        if self.peer_id in self._hub._up:
            raise UserError(f"The address of {self.peer_id} is in use.", "Stop the other node first.")
        self._handlers = handlers
        self._hub._up[self.peer_id] = self
        if self._initial_peers and not any(self._reaches(peer) for peer in self._initial_peers):
            self._hub.kill(self.peer_id)
            names = ", ".join(self._initial_peers)
            raise UserError(f"None of the initial peers can be reached: {names}.", "Is one of them running?")

    async def close(self) -> None:
        """See `ports.Transport.close`."""
        self._kept.clear()
        if self._hub._up.get(self.peer_id) is self:
            tasks = [task for task, link in self._hub._under_way.items() if self.peer_id in link]
            self._hub.kill(self.peer_id)
            await asyncio.gather(*tasks, return_exceptions=True)

    def addresses(self) -> list[str]:
        """See `ports.Transport.addresses`."""
        return [f"/memory/p2p/{self.peer_id}"]

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """See `ports.Transport.connect`; the addresses do not matter here."""
        await asyncio.sleep(0)
        self._require(peer)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """See `ports.Transport.learn`; here everybody up can be reached anyway."""

    def peers_connected(self) -> int:
        """See `ports.Transport.peers_connected`."""
        return sum(self._reaches(peer) for peer in self._hub._up)

    def connected(self) -> list[str]:
        """See `ports.Transport.connected`."""
        return sorted(peer for peer in self._hub._up if self._reaches(peer))

    async def link(self, peer: str) -> Link | None:
        """See `ports.Transport.link`."""
        return Link(("127.0.0.1",)) if self._reaches(peer) else None

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        """See `ports.Transport.answers_at`; who is up answers everywhere."""
        return self._reaches(peer)

    def found_outside(self, addresses: Sequence[str]) -> None:
        """See `ports.Transport.found_outside`; there is no outside here."""

    async def hide(self) -> None:
        """See `ports.Transport.hide`; there are no relays here."""

    async def put_record(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """See `ports.Transport.put_record`. Every reachable peer is a replica."""
        invariant(len(value) <= MAX_RECORD_BYTES, f"record of {len(value)} bytes")
        await asyncio.sleep(0)
        expires = asyncio.get_running_loop().time() + lifetime_s
        replicas = [peer for name, peer in self._hub._up.items() if self._reaches(name)]
        for replica in [self, *replicas]:
            replica._records.setdefault(key, {})[self.peer_id] = (value, expires)
        return bool(replicas)

    async def get_records(self, key: str) -> dict[str, bytes]:
        """See `ports.Transport.get_records`: the newest of what we and the reachable peers hold."""
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        newest: dict[str, tuple[bytes, float]] = {}
        for replica in [self, *(peer for name, peer in self._hub._up.items() if self._reaches(name))]:
            for owner, record in replica._records.get(key, {}).items():
                if record[1] > newest.get(owner, (b"", now))[1]:
                    newest[owner] = record
        return {owner: value for owner, (value, _) in newest.items()}

    async def _call(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        await asyncio.sleep(0)
        target = self._require(peer)
        served = self._hub._begin(target._serve_message(self.peer_id, bytes(data)), self.peer_id, peer)
        try:
            await asyncio.wait({served}, timeout=timeout_s)
        except asyncio.CancelledError:
            served.cancel()
            raise
        if not served.done():
            served.cancel()
            raise PeerUnreachable(f"no reply from {peer} within {timeout_s:g} s")
        if served.cancelled():
            raise PeerUnreachable(f"connection to {peer} lost")
        reply: bytes = served.result()
        return reply

    async def _open(self, peer: str, timeout_s: float) -> tuple[ByteReader, ByteWriter]:
        await asyncio.sleep(0)
        target = self._require(peer)
        there, back = _Pipe(), _Pipe()
        ours, theirs = _Writer(there, back), _Writer(back, there)
        task = self._hub._begin(target._serve_stream(self.peer_id, there, theirs), self.peer_id, peer)

        def cut(done: asyncio.Task[Any]) -> None:
            if done.cancelled():
                ours.abort()

        task.add_done_callback(cut)
        return back, ours

    def _reaches(self, peer: str) -> bool:
        return peer != self.peer_id and self._hub.reachable(self.peer_id, peer)

    def _require(self, peer: str) -> MemoryTransport:
        if not self._reaches(peer):
            raise PeerUnreachable(f"no connection to {peer}")
        return self._hub._up[peer]


class _Pipe:
    """Direction of a stream: a bounded queue of bytes."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, data: Any) -> None:
        piece = memoryview(bytes(data))
        if piece and not self._ended:
            self._pieces.append(piece)
            self._queued_bytes += len(piece)
            self._changed.set()

    def end(self, drop: bool = False) -> None:
        if drop:
            self._pieces.clear()
            self._queued_bytes = 0
        self._ended = True
        self._changed.set()

    @property
    def idle(self) -> bool:
        """Tell whether the direction is whole and empty, as `DirectStream.idle`."""
        return not self._ended and not self._pieces

    async def read(self, n: int) -> bytes:
        while not self._pieces and not self._ended:
            await self._wait()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > n:
            self._pieces.appendleft(piece[n:])
            piece = piece[:n]
        self._queued_bytes -= len(piece)
        self._changed.set()
        return bytes(piece)

    async def drained(self) -> None:
        while self._queued_bytes > PIPE_BYTES and not self._ended:
            await self._wait()
        if self._ended:
            raise ConnectionResetError("stream cut")

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _Writer:
    """Writer of a stream; closing it ends both directions, as closing a libp2p stream here does."""

    def __init__(self, out: _Pipe, back: _Pipe) -> None:
        self._out, self._back = out, back
        self.transport = self  # what `end_stream` aborts

    def write(self, data: Any) -> None:
        self._out.put(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)
        await self._out.drained()

    def close(self) -> None:
        self._out.end()
        self._back.end()

    def abort(self) -> None:
        self._out.end(drop=True)
        self._back.end(drop=True)
