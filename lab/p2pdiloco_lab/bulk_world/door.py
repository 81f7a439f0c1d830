"""The two ends of a member of a bulk world: what it gives is perhaps a lie, what it takes is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PullSink, PullSource, PushSink, Refusal
from p2pdiloco_lab.bulk_world.ledger import forged
from p2pdiloco_lab.memory_net import MemoryTransport

if TYPE_CHECKING:
    from p2pdiloco_lab.bulk_world.member import BulkMember
    from p2pdiloco_lab.bulk_world.world import BulkWorld

FORGED = 0.3
"""Share of lies that are another version under the same signature; the others are damaged bytes."""


class Door:
    """Handlers of a member: peers reach its transfers, and what they are given may be false. Implements
    `ports.TransportHandlers`."""

    def __init__(self, world: BulkWorld, member: BulkMember) -> None:
        self._world, self._member = world, member

    def is_member(self, sender: str) -> bool:
        """See `ports.TransportHandlers`: all are."""
        return True

    def is_stranger(self, sender: str) -> bool:
        """See `ports.TransportHandlers`: nobody is."""
        return False

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """See `ports.TransportHandlers`: nobody sends messages here."""
        raise RemoteError("garbage")

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        """See `ports.TransportHandlers`."""
        return self._member.transfers.pushes_in.on_push(sender, wire.decode(header, wire.PushContribution))

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        """See `ports.TransportHandlers`."""
        pull = wire.decode(request, cast(Any, wire.PullUpdate | wire.PullState))
        self._world.rules.asked(self._member, sender, pull)
        answer = await self._member.transfers.on_pull(sender, pull)
        if isinstance(answer, PullSource) and self._world.lies(self._member.name):
            return self._lie(sender, pull, answer)
        return answer

    def _lie(self, sender: str, pull: wire.PullUpdate | wire.PullState, source: PullSource) -> PullSource:
        member = self._member
        if member.rng.random() < FORGED:
            header = wire.decode(source.header, cast(Any, wire.UpdateHeader | wire.StateHeader))
            member.say(f"forges a version for {sender}", pull.fragment)
            false = msgspec.structs.replace(header, version=forged(header.version))
            return msgspec.structs.replace(source, header=wire.encode(false))
        member.say(f"damages what it gives {sender}", pull.fragment)
        payload = bytearray().join(source.payload)
        _damage(payload)
        noted = self._world.rules.lied(member, sender, pull)

        def delivered() -> None:
            noted()
            source.delivered()

        return msgspec.structs.replace(source, payload=(payload,), delivered=delivered)

    def as_given(self, payload: bytearray) -> bytearray:
        """Return what the member really pushes of its own contribution."""
        if not self._world.lies(self._member.name):
            return payload
        given = bytearray(payload)
        _damage(given)
        return given


def _damage(payload: bytearray) -> None:
    if payload:
        payload[len(payload) // 2] ^= 1


class WatchedTransport(MemoryTransport):
    """A transport that tells the rules what was pulled over it."""

    def __init__(self, world: BulkWorld, member: BulkMember) -> None:
        super().__init__(world.hub, member.name)
        self._world, self._member = world, member

    async def pull_into(self, peer: str, request: bytes, sink: PullSink, timeout_s: float) -> Refusal | None:
        """See `ports.Transport.pull_into`."""

        def count(version: VersionHeader, nbytes: int) -> None:
            self._world.rules.came(self._member, version, nbytes)
            self._world.moved(self._member.name, peer, nbytes)

        counted = _Counted(sink, count)
        return await super().pull_into(peer, request, counted, timeout_s)


class _Counted:
    """A sink whose bytes are counted by the version that they are said to belong to."""

    def __init__(self, sink: PullSink, count: Callable[[VersionHeader, int], None]) -> None:
        self._sink, self._count = sink, count
        self._version: VersionHeader | None = None

    def begin(self, header: bytes, payload_bytes: int) -> None:
        found = wire.decode(header, cast(Any, wire.UpdateHeader | wire.StateHeader))
        self._version = found.version.header
        self._sink.begin(header, payload_bytes)

    def write(self, offset: int, chunk: memoryview) -> None:
        assert self._version is not None
        self._sink.write(offset, chunk)
        self._count(self._version, len(chunk))
