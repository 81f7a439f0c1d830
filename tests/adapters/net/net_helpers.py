"""What the network tests share: handlers that record, a sink, and misbehaving clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deadlines import Deadline

from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import Buffer, PullSource, PushSink, Refusal


async def until(condition: Callable[[], object], what: str = "it") -> None:
    """Wait for another process or peer, which cannot tell us."""
    deadline = Deadline(15)
    while not condition():
        assert not deadline.over(), f"not within {deadline}: {what}"
        await asyncio.sleep(0.01)


class Sink:
    """Collects a push; `done` is set by finish and by abort."""

    def __init__(self, payload_bytes: int, already: bytes = b"") -> None:
        self.payload_bytes = payload_bytes
        self.offset = len(already)
        self.data = bytearray(already)
        self.aborted = False
        self.finished = False
        self.done = asyncio.Event()
        self.started = asyncio.Event()

    async def write(self, offset: int, chunk: memoryview) -> None:
        assert offset == len(self.data) and 0 < len(chunk) <= 256 * 1024
        self.data += chunk
        self.started.set()

    async def finish(self) -> bytes:
        assert not (self.aborted or self.finished)
        self.finished = True
        self.done.set()
        return b"got %d" % len(self.data)

    def abort(self) -> None:
        assert not (self.aborted or self.finished)
        self.aborted = True
        self.done.set()


class Recorder:
    """Handlers whose behaviour follows from the request: `refuse`, `error`, or else business as usual."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.sinks: list[Sink] = []
        self.sink_bytes: int | None = None
        self.already = b""
        """What every sink has of its payload before the push."""
        self.payload: list[Buffer] = []
        self.released = 0
        self.senders: set[str] = set()
        self.members: set[str] | None = None
        self.invited: set[str] = set()
        self.strangers: set[str] = set()
        """Peers that are not admitted to anything."""
        self.before_reply: Callable[[], asyncio.Future[None]] | None = None

    def is_member(self, sender: str) -> bool | None:
        return None if self.members is None else sender in self.members

    def is_stranger(self, sender: str) -> bool:
        return sender not in self.invited

    def _admit(self, sender: str) -> None:
        if sender in self.strangers:
            raise RemoteError(Unheard.NOT_ADMITTED.value)

    async def on_message(self, sender: str, data: bytes) -> bytes:
        self._admit(sender)
        self.messages.append((sender, data))
        if data == b"error":
            raise RemoteError("no-thanks", "not today")
        if self.before_reply is not None:
            await self.before_reply()
        return b"re:" + data

    async def on_push(self, sender: str, header: bytes) -> PushSink | Refusal:
        self._admit(sender)
        self.senders.add(sender)
        if header == b"error":
            raise RemoteError("bad-header")
        if header.startswith(b"refuse"):
            return Refusal(b"stale base")
        sink = Sink(self.sink_bytes if self.sink_bytes is not None else int(header), self.already)
        self.sinks.append(sink)
        return sink

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        self._admit(sender)
        self.senders.add(sender)
        if request == b"error":
            raise RemoteError("bad-request")
        if request == b"refuse":
            return Refusal(b"have it not")
        return PullSource(b"header", self.payload, self._release)

    def _release(self) -> None:
        self.released += 1
