"""Transport inside one process, for tests and simulations of the daemon, with links that can be cut.

Semantics and errors are those of the real transport because both share `Endpoint` and the stream framing;
only dialing, message delivery and records are simulated. A link is cut at once and without a sound, like a
killed peer: what is under way fails, what comes later is unreachable. `Pipe` is a byte stream in memory; how
long its bytes are on their way, `Delays` say.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from p2pdiloco.adapters.endpoint import MAX_RECORD_BYTES, Endpoint
from p2pdiloco.adapters.flow import CHUNK_BYTES, Limits
from p2pdiloco.adapters.framing import ByteReader, ByteWriter
from p2pdiloco.errors import PeerUnreachable, UserError, invariant
from p2pdiloco.ports import PeerConnections, TransportHandlers

HANDSHAKE_BYTES = 200
Pair = frozenset[str]


class MemoryNetwork:
    """Hub of the transports: who is up, which links are cut, what is under way."""

    def __init__(self, links: Delays | None = None) -> None:
        """Make an empty network; without `links` nothing takes time."""
        self.links = links or AtOnce()
        self._up: dict[str, MemoryTransport] = {}
        self._cut: set[Pair] = set()
        self._under_way: dict[asyncio.Task[Any], tuple[str, str]] = {}
        """Calls and streams that are being served: (client, server)."""
        self._streams: dict[asyncio.Task[Any], PipeWriter] = {}
        """Streams among them, by task: the end at the server."""

    def transport(
        self, peer_id: str, initial_peers: Sequence[str] = (), limits: Limits | None = None
    ) -> MemoryTransport:
        """Make a transport of this network, not started. initial_peers: `/memory/p2p/ID` or bare peer ids."""
        return MemoryTransport(self, peer_id, initial_peers, limits)

    def cut(self, a: str, b: str) -> None:
        """Cut the link between two peers; calls and streams under way between them fail at once."""
        self._cut.add(frozenset((a, b)))
        self.break_off(a, b)

    def break_off(self, a: str, b: str) -> None:
        """End calls and streams under way between two peers; they may begin others."""
        self._break(lambda link: set(link) == {a, b})

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
        for task in self.served_by(peer):
            task.cancel()

    def served_by(self, peer: str) -> list[asyncio.Task[Any]]:
        """Calls and streams that a peer is answering at this moment."""
        return [task for task, (_, server) in self._under_way.items() if server == peer]

    def reachable(self, a: str, b: str) -> bool:
        """Tell whether both are up and the link between them is whole."""
        return a in self._up and b in self._up and frozenset((a, b)) not in self._cut

    def _break(self, concerns: Callable[[tuple[str, str]], bool]) -> None:
        for task, link in list(self._under_way.items()):
            if not concerns(link):
                continue
            if task in self._streams:
                self._streams[task].abort()
            else:
                task.cancel()

    def _begin(self, coroutine: Any, client: str, server: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._under_way[task] = client, server
        task.add_done_callback(lambda done: self._under_way.pop(done, None))
        return task

    def _begin_stream(self, coroutine: Any, client: str, server: str, end: PipeWriter) -> None:
        """Serve a stream; `end` is its end at the server."""
        task = self._begin(coroutine, client, server)
        self._streams[task] = end
        task.add_done_callback(self._stream_over)

    def _stream_over(self, task: asyncio.Task[Any]) -> None:
        end = self._streams.pop(task)
        if task.cancelled():  # it may never have begun
            end.abort()

    async def _shake_hands(self, client: str, server: str, timeout_s: float) -> None:
        """Wait for bytes that go there and back once. Raises: PeerUnreachable."""
        now = asyncio.get_running_loop().time()
        there_s = self.links.arrival_s(client, server, HANDSHAKE_BYTES, now)
        back_s = (
            self.links.arrival_s(server, client, HANDSHAKE_BYTES, there_s) if there_s < math.inf else math.inf
        )
        await asyncio.sleep(min(back_s - now, timeout_s))
        if back_s - now > timeout_s:
            raise PeerUnreachable(f"{server} did not answer within {timeout_s:g} s")


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
        self.hidden = False
        self._hub = hub
        self._initial_peers = [address.rsplit("/", 1)[-1] for address in initial_peers]
        self._records: dict[str, dict[str, tuple[bytes, float]]] = {}

    async def start(self, handlers: TransportHandlers) -> None:
        if self.peer_id in self._hub._up:
            raise UserError(f"The address of {self.peer_id} is in use.", "Stop the other node first.")
        self._handlers = handlers
        self._hub._up[self.peer_id] = self
        if self._initial_peers and not any(self._reaches(peer) for peer in self._initial_peers):
            self._hub.kill(self.peer_id)
            names = ", ".join(self._initial_peers)
            raise UserError(f"None of the initial peers can be reached: {names}.", "Is one of them running?")

    async def close(self) -> None:
        self._kept.clear()
        if self._hub._up.get(self.peer_id) is self:
            tasks = self._hub.served_by(self.peer_id)
            self._hub.kill(self.peer_id)
            await asyncio.gather(*tasks, return_exceptions=True)

    def addresses(self) -> list[str]:
        return [f"/memory/p2p/{self.peer_id}"]

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """The addresses do not matter here."""
        await asyncio.sleep(0)
        self._require(peer)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Everybody up can be reached anyway."""

    def peers_connected(self) -> int:
        return sum(self._reaches(peer) for peer in self._hub._up)

    def connected(self) -> list[str]:
        return sorted(peer for peer in self._hub._up if self._reaches(peer))

    def direct(self) -> list[str]:
        """There are no relays here."""
        return self.connected()

    async def link(self, peer: str) -> PeerConnections | None:
        return PeerConnections(("127.0.0.1",)) if self._reaches(peer) else None

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        """A peer that is up answers everywhere."""
        return self._reaches(peer)

    def found_outside(self, addresses: Sequence[str]) -> None:
        """There is no outside here."""

    async def hide(self) -> None:
        """There are no relays here."""

    async def dial_anew(self, peer: str, addresses: Sequence[str]) -> None:
        """The addresses do not matter here."""
        self._require(peer)

    async def put_record(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """Every reachable peer is a replica."""
        invariant(len(value) <= MAX_RECORD_BYTES, f"record of {len(value)} bytes")
        await asyncio.sleep(0)
        expires = asyncio.get_running_loop().time() + lifetime_s
        replicas = [peer for name, peer in self._hub._up.items() if self._reaches(name)]
        for replica in [self, *replicas]:
            replica._records.setdefault(key, {})[self.peer_id] = (value, expires)
        return bool(replicas)

    async def get_records(self, key: str) -> dict[str, bytes]:
        """The newest of what we and the reachable peers hold."""
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
        self._require(peer)
        await self._hub._shake_hands(self.peer_id, peer, timeout_s)
        target, links = self._require(peer), self._hub.links
        there, back = Pipe(links, self.peer_id, peer), Pipe(links, peer, self.peer_id)
        theirs = PipeWriter(back, there)
        serving = target._serve_stream(self.peer_id, there, theirs)
        self._hub._begin_stream(serving, self.peer_id, peer, theirs)
        return back, PipeWriter(there, back)

    def _drop(self, peer: str) -> None:
        self._hub.break_off(self.peer_id, peer)

    def _reaches(self, peer: str) -> bool:
        return peer != self.peer_id and self._hub.reachable(self.peer_id, peer)

    def _require(self, peer: str) -> MemoryTransport:
        if not self._reaches(peer):
            raise PeerUnreachable(f"no connection to {peer}")
        return self._hub._up[peer]


# Byte streams.

PIPE_BYTES = 2 * CHUNK_BYTES


class Delays(Protocol):
    """Delays between peers."""

    def arrival_s(self, sender: str, receiver: str, nbytes: int, sent_s: float) -> float:
        """Time (of the event loop) when bytes that are sent at a time arrive, behind those sent before;
        infinite: never."""


class AtOnce:
    """Delays on which nothing takes time."""

    def arrival_s(self, sender: str, receiver: str, nbytes: int, sent_s: float) -> float:
        return sent_s


class Pipe:
    """Direction of a stream: a bounded queue of bytes, each with the time when it arrives."""

    def __init__(self, links: Delays, sender: str = "", receiver: str = "") -> None:
        self._links, self._sender, self._receiver = links, sender, receiver
        self._pieces: deque[tuple[float, memoryview]] = deque()
        """An empty one is the end of the stream."""
        self._queued_bytes = 0
        self._closed = self._broken = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def put(self, data: Any) -> None:
        """Send bytes; those after the end are lost."""
        piece = memoryview(bytes(data))
        if piece and not self._closed:
            self._send(piece)

    def _send(self, piece: memoryview) -> None:
        now = self._loop.time()
        arrives_s = self._links.arrival_s(self._sender, self._receiver, piece.nbytes, now)
        self._pieces.append((arrives_s, piece))
        self._queued_bytes += piece.nbytes
        self._changed.set()

    def end(self) -> None:
        """Send the end of the stream."""
        if not self._closed:
            self._closed = True
            self._send(memoryview(b""))

    def break_off(self) -> None:
        """Lose what is on its way, and let nothing arrive any more."""
        self._pieces.clear()
        self._queued_bytes = 0
        self._closed = self._broken = True
        self._changed.set()

    @property
    def idle(self) -> bool:
        """Tell whether the direction is whole and empty, as `DirectStream.idle`."""
        return not self._broken and (not self._pieces or self._pieces[0][0] > self._loop.time())

    async def read(self, n: int) -> bytes:
        """Return between 1 and n bytes; none at the end of the stream."""
        while not self._broken:
            now = self._loop.time()
            if self._pieces and self._pieces[0][0] <= now:
                return self._take(n)
            await self._wait(self._pieces[0][0] if self._pieces else None)
        return b""

    def _take(self, n: int) -> bytes:
        arrived_s, piece = self._pieces[0]
        if not piece:
            return b""  # and stays: whoever reads again meets the end again
        if len(piece) > n:
            self._pieces[0] = arrived_s, piece[n:]
            piece = piece[:n]
        else:
            self._pieces.popleft()
        self._queued_bytes -= len(piece)
        self._changed.set()
        return bytes(piece)

    async def drained(self) -> None:
        """Wait until the queue is short. Raises: ConnectionResetError (the stream is over)."""
        while self._queued_bytes > PIPE_BYTES and not self._closed:
            await self._wait(None)
        if self._closed:
            raise ConnectionResetError("stream cut")

    async def _wait(self, until_s: float | None) -> None:
        self._changed.clear()
        if until_s is None or until_s == float("inf"):
            await self._changed.wait()
            return
        timer = self._loop.call_at(until_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()


class PipeWriter:
    """Writing half of a stream; closing it ends both directions, as closing a libp2p stream here does."""

    def __init__(self, out: Pipe, back: Pipe) -> None:
        self._out, self._back = out, back
        self.transport = self  # what `end_stream` aborts

    def write(self, data: Any) -> None:
        """Queue bytes."""
        self._out.put(data)

    async def drain(self) -> None:
        """Wait until the queue is short again."""
        await asyncio.sleep(0)
        await self._out.drained()

    def close(self) -> None:
        """Flush and end both directions."""
        self._out.end()
        self._back.break_off()

    def abort(self) -> None:
        """End both directions at once; what is queued is lost."""
        self._out.break_off()
        self._back.break_off()
