"""What the daemon needs from the world, as interfaces. Adapters implement them; tests fake them.

Addresses are libp2p multiaddrs as text, peers are libp2p peer ids as base58 text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct

Buffer = bytes | bytearray | memoryview


class Refusal(Struct, frozen=True):
    """A handler's no: `answer` (encoded by the caller's own schema) goes back instead of data."""

    answer: bytes


class PushSink(Protocol):
    """Where an accepted push goes. The transport has bounded and digest-checked everything it hands over."""

    payload_bytes: int
    """The transport refuses more or less than this."""
    offset: int
    """How much of it is here already, from a stream that was cut: the sender goes on from there."""

    async def write(self, offset: int, chunk: memoryview) -> None:
        """Take a chunk (at most 256 KiB); chunks come in order. Waiting here slows the sender down."""

    async def finish(self) -> bytes:
        """All bytes are here: the answer for the sender (sent and acknowledged before the stream closes)."""

    def abort(self, reason: str) -> None:
        """The stream was cut or broke a rule; no `finish` follows."""


class PullSink(Protocol):
    """Where what is pulled goes, chunk by chunk. What has been written stays, also when the stream is cut."""

    def begin(self, header: bytes, payload_bytes: int) -> None:
        """This is coming. Raises: RemoteError (it is not taken)."""

    def write(self, offset: int, chunk: memoryview) -> None:
        """Take a checked chunk; chunks come in order."""


class PullSource(Struct, frozen=True):
    """What a pull gets: a header (at most 4 MiB) and a payload sent in chunks."""

    header: bytes
    payload: Sequence[Buffer]
    """Concatenated on the wire without copying."""
    release: Callable[[], None]
    """Called once when the payload buffers are no longer read, whatever happened."""
    delivered: Callable[[], None] = lambda: None
    """Called before that if the asker acknowledged all of it."""
    pace: Callable[[int], Awaitable[None]] | None = None
    """Awaited before so many bytes are sent: what is less urgent waits there."""


class Link(Struct, frozen=True):
    """The connections to one peer."""

    ips: tuple[str, ...]
    """Where the other ends of the direct ones are; empty: it is connected through a relay only."""


class TransportHandlers(Protocol):
    """What a transport asks of its owner. Must raise only `RemoteError`: refused with its reason, counted."""

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """A control message; the returned bytes are the reply (often empty)."""

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        """A peer offers a payload; only its header has been read."""

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        """A peer asks for a payload."""


class Transport(Protocol):
    """Authenticated messages, bulk streams and signed records between peers."""

    peer_id: str

    async def start(self, handlers: TransportHandlers) -> None:
        """Listen and join.

        Raises:
            UserError: the port is taken, or none of the initial peers can be reached (names them).
        """

    async def end_incoming(self) -> None:
        """End what others push and pull, and refuse whatever else they want: the handlers are not called any
        more."""

    async def close(self) -> None:
        """End everything that was started. Never raises for a peer's or the network's fault; under 3 s."""

    def addresses(self) -> list[str]:
        """Multiaddrs (with /p2p/ID) under which others may reach us, most reachable first, loopback last."""

    async def step_back(self, niceness: int) -> None:
        """Let what carries the bytes, where it is a process of its own, go behind others on this machine."""

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial a peer at known addresses. Raises: PeerUnreachable."""

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember where a peer may be reached: it is dialled when something is sent to it, not before."""

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        """Send a control message (at most 256 KiB), return the reply.

        Raises:
            PeerUnreachable: not delivered within timeout_s, or no connection.
            RemoteError: the peer refused; its reason.
        """

    async def push(
        self,
        peer: str,
        header: bytes,
        payload: Sequence[Buffer],
        timeout_s: float,
        before_end: Callable[[], None] | None = None,
    ) -> tuple[bool, bytes]:
        """Offer header (at most 4 MiB), then stream payload. (delivered, answer): delivered False when
        the receiver refused on sight of the header. timeout_s bounds every pause, not the whole transfer.
        before_end is called before the receiver can have all of it.

        Raises: PeerUnreachable, TransportError (cut).
        """

    async def pull(
        self, peer: str, request: bytes, max_payload_bytes: int, timeout_s: float
    ) -> tuple[bytes, bytearray] | Refusal:
        """Ask for a payload: (header, payload), or the refusal.

        Raises: PeerUnreachable, TransportError (cut), RemoteError (larger than allowed, damaged).
        """

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:
        """The same into a sink. Raises: as `pull`, and what the sink raises."""

    async def put_record(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """Store our own record (at most 32 KiB) under key, signed, for lifetime_s. Other peers' records
        under the same key stay beside it. False when no other peer could be told."""

    async def get_records(self, key: str) -> dict[str, bytes]:
        """All unexpired, correctly signed records under key: peer id -> value."""

    def payload_bytes(self) -> tuple[int, int]:
        """Of all pushes and pulls so far, also of those under way: (sent and acknowledged, received)."""

    def peers_connected(self) -> int:
        """How many peers there is a connection to."""

    def connected(self) -> list[str]:
        """Which, sorted."""

    async def link(self, peer: str) -> Link | None:
        """How that peer is connected to us at this moment; None: it is not."""

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        """Whether that very peer answers there, by a new TCP connection. Never raises."""

    def found_outside(self, addresses: Sequence[str]) -> None:
        """Others reach us at these too: `addresses` names them first."""

    async def hide(self) -> None:
        """Others cannot dial us: look for relays, if that is allowed. Connections may break meanwhile."""

    restarts: int
    """How often what carries the transport died and was replaced."""
    refusals: dict[str, int]
    """Counter of what peers did wrong, by reason."""
