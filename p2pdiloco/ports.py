"""Interfaces of what the daemon needs from the world. Adapters implement them; tests fake them.

Addresses are libp2p multiaddrs as text, peers are libp2p peer ids as base58 text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from p2pdiloco.core.api.events import Event
from p2pdiloco.util import Action, Frozen

if TYPE_CHECKING:  # `--help` of every command is without an event loop
    import asyncio

PostEvent = Callable[[Event], None]
"""What takes an event for the core."""
Buffer = bytes | bytearray | memoryview


class Refusal(Frozen):
    """Refusal by a handler: `answer` (encoded by the caller's own schema) goes back instead of data."""

    answer: bytes


class PushSink(Protocol):
    """Receiver of an accepted push. The transport has bounded and digest-checked everything it hands over."""

    payload_bytes: int
    """Bytes of the payload; the transport refuses more or less."""
    offset: int
    """Bytes of the payload that are here already, from a stream that was cut: the sender goes on from
    there."""

    async def write(self, offset: int, chunk: memoryview) -> None:
        """Take a chunk (at most 256 KiB); chunks come in order. Waiting here slows the sender down."""

    async def finish(self) -> bytes:
        """Take the end: all bytes are here. Returns the answer for the sender (sent and acknowledged before
        the stream closes)."""

    def abort(self) -> None:
        """Give up: the stream was cut or broke a rule; no `finish` follows."""


class PullSink(Protocol):
    """Receiver of a pull, chunk by chunk. What has been written stays, also when the stream is cut."""

    def begin(self, header: bytes, payload_bytes: int) -> None:
        """Take the header of what is coming. Raises: RemoteError (it is not taken)."""

    def write(self, offset: int, chunk: memoryview) -> None:
        """Take a checked chunk; chunks come in order."""


class PullSource(Frozen):
    """Answer to a pull: a header (at most 4 MiB) and a payload sent in chunks."""

    header: bytes
    payload: Sequence[Buffer]
    """Buffers that are concatenated on the wire without copying."""
    release: Action
    """Function that is called once when the payload buffers are no longer read, whatever happened."""
    delivered: Action = lambda: None
    """Function that is called before that if the asker acknowledged all of it."""
    pace: Callable[[int], Awaitable[None]] | None = None
    """Function that is awaited before so many bytes are sent: what is less urgent waits there."""


class PeerConnections(Frozen):
    """Connections to one peer."""

    ips: tuple[str, ...]
    """IP addresses of the direct connections' other ends; empty: there is one through a relay only."""
    udp: tuple[str, ...] = ()
    """Multiaddrs of the other ends of those that are over UDP, of IPv4."""


class TransportHandlers(Protocol):
    """Handlers that a transport's owner gives it. They must raise only `RemoteError`: refused with its
    reason, counted."""

    def is_member(self, sender: str) -> bool | None:
        """Tell whether the peer is a member of our run, whose streams strangers cannot crowd out; None: we
        have no run."""

    def is_stranger(self, sender: str) -> bool:
        """Tell whether the peer, which is no member, is nobody in particular: the run has admitted it by no
        paper. All strangers together have one allowance of requests."""

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """Take a control message; the returned bytes are the reply (often empty)."""

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        """Accept or refuse a payload that a peer offers; only its header has been read."""

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        """Answer a peer that asks for a payload."""


class Transport(Protocol):
    """Transport of authenticated messages, bulk streams and signed records between peers."""

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
        """List the multiaddrs (with /p2p/ID) under which others may reach us, most reachable first, loopback
        last."""

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
        before_end: Action | None = None,
    ) -> tuple[bool, bytes]:
        """Offer header (at most 4 MiB), then stream payload.

        Returns (delivered, answer); delivered is False when the receiver refused on sight of the header.
        timeout_s bounds every pause, not the whole transfer. before_end is called before the receiver can
        have all of it.

        Raises: PeerUnreachable, TransportError (cut).
        """

    async def pull(
        self, peer: str, request: bytes, max_payload_bytes: int, timeout_s: float
    ) -> tuple[bytes, bytearray] | Refusal:
        """Ask for a payload: (header, payload), or the refusal.

        Raises: PeerUnreachable, TransportError (cut), RemoteError (larger than allowed, damaged).
        """

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:
        """Ask for a payload into a sink. Raises: as `pull`, and what the sink raises."""

    def introduce_by(self, introduce: Callable[[str], Awaitable[bool]]) -> None:
        """Introduce us by this to a peer that refuses us as not admitted; if it returns True, what was
        refused is sent once more."""

    async def put_record(self, key: str, value: bytes, lifetime_s: float) -> bool:
        """Store our own record (at most 32 KiB) under key, signed, for lifetime_s. Other peers' records
        under the same key stay beside it. False when no other peer could be told."""

    async def get_records(self, key: str) -> dict[str, bytes]:
        """Look up all unexpired, correctly signed records under key: peer id -> value."""

    def allow(self, upload_bits_per_s: float, download_bits_per_s: float) -> None:
        """Change the rates that a person permits, for what is under way too; 0 is no limit."""

    def carried_bytes(self) -> tuple[int, int]:
        """Count the bytes that went over the link so far, (out, in): payloads and control messages with what
        encryption and headers add. The DHT's own, and what was relayed for others, are not known here."""

    def payload_bytes(self) -> tuple[int, int]:
        """Count the bytes of all pushes and pulls so far, also of those under way: (sent and acknowledged,
        received)."""

    def peers_connected(self) -> int:
        """Number of peers that there is a connection to."""

    def connected(self) -> list[str]:
        """Peers that there is a connection to, sorted."""

    def direct(self) -> Collection[str]:
        """Peers that there is a connection to which leads through no relay."""

    async def link(self, peer: str) -> PeerConnections | None:
        """Connections to that peer at this moment; None: there is none."""

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        """Tell whether that very peer answers there, by a new TCP connection. Never raises."""

    def found_outside(self, addresses: Sequence[str]) -> None:
        """Take in that others reach us at these addresses too; `addresses` names them first."""

    @property
    def hidden(self) -> bool:
        """True: others cannot dial us."""

    async def hide(self) -> None:
        """Look for relays, if that is allowed, and listen where holes can be punched, as others cannot dial
        us. Connections may break meanwhile."""

    async def dial_anew(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial a peer at these addresses; what leads to it through a relay only ends first. Raises:
        PeerUnreachable (also: no direct connection has come of it)."""

    restarts: int
    """Number of times that the process that carries the transport died and was replaced."""
    restarted: asyncio.Event
    """Set at every such time; whoever waits for it clears it."""
    refusals: dict[str, int]
    """Counter of what peers did wrong, by reason."""
