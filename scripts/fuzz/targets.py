"""Decoders of foreign bytes, what each may raise, and bytes to begin from.

Whatever comes in is accepted or refused with the errors that a target names; anything else is a finding.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
from msgspec import Struct

from p2pdiloco.adapters import endpoint, framing, run_store, streams
from p2pdiloco.config.manifest import (
    canonical_bytes,
    decode_signed,
    encode_signed,
    manifest_from_canonical,
    sign_manifest,
    verify,
)
from p2pdiloco.config.presets import for_run
from p2pdiloco.core.api import messages
from p2pdiloco.core.api.types import (
    NEVER,
    ContributionHeader,
    Contributor,
    Head,
    Reach,
    SignedContribution,
    Stamp,
    Watermark,
)
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import StatusReport, decode_status, encode_status
from p2pdiloco.daemon.notice import (
    INVITE,
    SUM_BYTES,
    Invite,
    Notice,
    Vouch,
    _PackedInvite,
    decode_invite,
    decode_notice,
    encode_notice,
    grant,
    pack_peers,
    signed,
)
from p2pdiloco.errors import ConfigError, RemoteError, TransportError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, PushSink, Refusal
from p2pdiloco.release import WIRE_VERSION

RUN, PEER = "r" * 64, "12D3KooWpeer"
HEAD = Head(3, bytes(32), 2048, 2)
VERSION = SignedVersion(
    VersionHeader(
        run=RUN,
        group="all",
        fragment=0,
        number=3,
        parent=bytes(32),
        term=2,
        syncer=PEER,
        tokens=2048,
        state_digest=bytes(32),
        update_digest=bytes(32),
        update_bytes=64,
        codec="int8",
        contributors=(Contributor(PEER, Stamp(1, 1), 2048, 8),),
    ),
    bytes(64),
)
OFFER = SignedContribution(
    ContributionHeader(
        RUN, "all", 0, PEER, Stamp(1, 1), NEVER, 3, bytes(32), 2048, 8, bytes(32), 64, "int8", True
    ),
    bytes(64),
)
WIRE = (
    *get_args(wire.Push),
    *get_args(wire.Pull),
    *get_args(wire.Query),
    wire.Answer,
    wire.UpdateHeader,
    wire.StateHeader,
    wire.Refused,
    wire.Elsewhere,
    wire.RunList,
    wire.Presence,
    wire.Reading,
    wire.ReachAnswer,
    wire.PunchAnswer,
)
"""Types of which the first byte of an input chooses one."""


class Target(Struct, frozen=True):
    """A decoder."""

    decode: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: Sequence[bytes]


class _Deaf:
    """Writer whose other side takes everything and says nothing."""

    def write(self, data: object) -> None:
        """Take it."""

    async def drain(self) -> None:
        """Go on."""

    def close(self) -> None:
        """End."""


class _Script:
    """Reader that plays bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, n: int) -> bytes:
        """Play the next ones."""
        out, self._data = self._data[:n], self._data[n:]
        return out


class _Sink:
    payload_bytes, offset = 8, 0

    async def write(self, offset: int, chunk: memoryview) -> None:
        """Take it."""

    async def finish(self) -> bytes:
        """End."""
        return b"done"

    def abort(self) -> None:
        """Give up."""


class _Handlers:
    """Handlers that accept whatever frames are right."""

    def is_member(self, sender: str) -> bool | None:
        """See `ports.TransportHandlers`."""
        return sender == PEER

    def is_stranger(self, sender: str) -> bool:
        """See `ports.TransportHandlers`."""
        return sender != PEER

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """See `ports.TransportHandlers`."""
        return b""

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        """See `ports.TransportHandlers`."""
        return _Sink() if header else Refusal(b"no")

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        """See `ports.TransportHandlers`."""
        return PullSource(b"header", (b"payload!",), lambda: None)


def frames(data: bytes) -> None:
    """Serve, push and pull on a stream that says this."""

    async def play() -> None:
        for sender in (PEER, "somebody"):
            await _quietly(streams.serve(_channel(data), sender, _Handlers()))
        await _quietly(streams.push(_channel(data), b"header", [b"payload!"]))
        await _quietly(streams.pull(_channel(data), b"request", streams.Collected(64)))

    asyncio.run(play())


async def _quietly(exchange: Any) -> None:
    try:
        await exchange
    except (RemoteError, TransportError):
        return


def _channel(data: bytes) -> framing.Channel:
    return framing.Channel(_Script(data), _Deaf(), idle_s=0.2)


def any_wire(data: bytes) -> None:
    """Decode as one of the wire's types, and encode again what came of it."""
    if data:
        wire.encode(wire.decode(data[1:], WIRE[data[0] % len(WIRE)]))


def update(data: bytes) -> None:
    """Decode a file of the update log, as it is and with the checksum that anybody can put."""
    split = data.find(b"\0\0\0\0")
    head = data[:split] if split >= 0 else data
    for content in (data, head + hashlib.sha256(head).digest() + data[len(head) :]):
        try:
            run_store.decode_update(content)
        except run_store.CorruptFile:
            continue


def record(data: bytes) -> None:
    """Judge a record of the DHT whose signature is good."""
    if len(data) < 12:
        return
    (expires,) = struct.unpack(">d", data[:8])
    cut = 9 + data[8]
    endpoint.acceptable(_Trusting(), b"k" * 20, data[9:cut], data[cut:], expires, 1_700_000_000.0)


class _Trusting:
    """Crypto that believes every signature."""

    def sign(self, message: bytes) -> bytes:
        """Sign with nothing."""
        return bytes(64)

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Believe."""
        return True


def invite(data: bytes) -> None:
    """Decode an invite that says this, with the checksum that anybody can put; and the text as it is."""
    whole = data + INVITE.checksum(data)
    for text in (
        INVITE.prefix + base64.b32encode(whole).decode().lower().rstrip("="),
        data.decode("latin-1"),
    ):
        try:
            decode_invite(text)
        except ConfigError:
            continue


def signed_manifest(data: bytes) -> None:
    """Decode and verify a manifest whose signature is good."""
    verify(decode_signed(data), lambda _peer, _message, _signature: True)


def _message_seeds() -> list[bytes]:
    progress = messages.Progress(
        incarnation=1,
        step_time_s=0.1,
        inner_step=5,
        tokens_total=640,
        tokens_per_s=900.0,
        loss=3.5,
        learning=True,
        confirmed=True,
        stands=True,
        heads=((0, HEAD),),
        offices=(("all", 0, 2),),
        saved=False,
        reach=Reach.DIRECT,
        thin=False,
        votes=True,
    )
    said: list[messages.Message] = [
        progress,
        messages.Leaving(1, (HEAD,)),
        messages.Closing("all", 3, 5, 8, 0.25),
        messages.Announce(0, HEAD, PEER),
        messages.VoteRequest("all", 0, 3, HEAD, "open"),
        messages.OfficeQuery("all", 0, 2),
    ]
    return [messages.encode(RUN, one) for one in said]


def _wire_seeds() -> list[bytes]:
    values: list[Any] = [
        wire.PushContribution(OFFER),
        wire.PullUpdate(RUN, 0, 4),
        wire.PullState(RUN, 0, 4),
        wire.PullContribution(RUN, 0, bytes(32)),
        wire.PullManifest(RUN),
        wire.StatusQuery(RUN),
        wire.NameQuery(RUN, "bob"),
        wire.UpdateHeader(VERSION, 0, 64),
        wire.StateHeader(VERSION, (Watermark(PEER, Stamp(1, 1), 3),)),
        wire.RunList((wire.RunSummary(RUN, "name", PEER),)),
        wire.Presence(WIRE_VERSION, 1, "name", ("/ip4/127.0.0.1/tcp/1/p2p/" + PEER,)),
        wire.Reading("text", 0, b"\x01"),
    ]
    return [bytes([WIRE.index(type(value))]) + wire.encode(value) for value in values]


def _manifest() -> bytes:
    return canonical_bytes(for_run("micro", "fuzz", 1))


def _signed() -> bytes:
    owner = Identity.generate()
    return encode_signed(sign_manifest(for_run("micro", "fuzz", 1), bytes(32), owner, owner.peer_id))


def _notice() -> bytes:
    owner = Identity.generate()
    made = Notice(RUN, 1, (PEER,), (PEER,), (PEER,), (Vouch(0, 3, bytes(32)),))
    return encode_notice(signed(made, owner))


def _invite() -> bytes:
    owner, key = Identity.generate(), Identity.generate()
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{owner.peer_id}"
    made = Invite(grant("0" * 64, key.peer_id, 0, 5, owner), key, (address,))
    given = (made.right.seed, 0, 5, made.right.signature)
    packed = _PackedInvite(bytes(32), *given, pack_peers(made.addresses, INVITE.noun))
    word = INVITE.encode(packed).removeprefix(INVITE.prefix)
    return base64.b32decode(word.upper() + "=" * (-len(word) % 8))[:-SUM_BYTES]


def _joined(parts: Sequence[Any]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def _frame_seeds() -> list[bytes]:
    u32, chunk = framing.U32.pack, b"payload!"
    body = framing.CHUNK_HEAD.pack(len(chunk), framing.checksum(chunk)) + chunk
    end = framing.CHUNK_HEAD.pack(0, bytes(8))
    push = bytes([framing.PUSH]) + u32(6) + b"header" + framing.U64.pack(8) + body + end
    pull = bytes([framing.PULL]) + u32(1 << 20) + u32(7) + b"request" + bytes([framing.ACK])
    give = bytes([framing.GIVE]) + u32(6) + b"header" + framing.U64.pack(8) + body + end
    accept = bytes([framing.ACCEPT]) + u32(12) + u32(64) + framing.U64.pack(0)
    return [push, pull, give, accept, bytes([framing.ERROR]) + u32(4) + b"busy"]


def targets() -> dict[str, Target]:
    """Make the table."""
    report = StatusReport(run_name="n", run_id=RUN, answered_by=PEER, state="training")
    saved = run_store.encode_checkpoint(VERSION, (), bytes(8), bytes(8))
    value = msgspec.msgpack.encode(wire.encode(wire.Presence(WIRE_VERSION, 1, "n", ())))
    peer = msgspec.msgpack.encode(PEER)
    entry = struct.pack(">d", 1_700_000_040.0) + bytes([len(peer)]) + peer + value + bytes(64)
    return {
        "message": Target(lambda data: messages.decode(RUN, data), (RemoteError,), _message_seeds()),
        "wire": Target(any_wire, (RemoteError,), _wire_seeds()),
        "status": Target(decode_status, (RemoteError,), [encode_status(report)]),
        "framing": Target(frames, (), _frame_seeds()),
        "manifest": Target(manifest_from_canonical, (RemoteError,), [_manifest()]),
        "signed": Target(signed_manifest, (RemoteError,), [_signed()]),
        "notice": Target(decode_notice, (RemoteError,), [_notice()]),
        "invite": Target(invite, (), [_invite()]),
        "update": Target(update, (), [_joined(run_store.encode_update(VERSION, bytes(64)))]),
        "checkpoint": Target(run_store.decode_checkpoint, (run_store.CorruptFile,), [_joined(saved)]),
        "record": Target(record, (), [entry]),
    }
