"""Parts of outer updates: what came of a stream that was cut is kept, and only the rest asked for.

Of each fragment one unfinished update is kept, by its digest, so that any other holder of the same can go on
with it. It goes when something of the fragment has been fetched, and after a while. States:
`daemon.bulk.states.copying`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.errors import RemoteError, TransportError

Asked = wire.PullUpdate | wire.PullState
KEEP_S = 120.0


class Unfinished:
    """Payload of which a part is here."""

    def __init__(self, digest: bytes, size: int) -> None:
        self.digest = digest
        self.payload = bytearray(size)
        self.have_bytes = 0


class UnfinishedUpdates:
    """Payloads of which a part is here, by fragment."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._kept: dict[int, tuple[Unfinished, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that all of them take."""
        return sum(len(unfinished.payload) for unfinished, _ in self._kept.values())

    def take(self, key: int) -> Unfinished | None:
        """Take the part of a fragment's update to go on with: it is kept no longer."""
        return self._kept.pop(key, (None, 0.0))[0]

    def keep(self, key: int, unfinished: Unfinished | None) -> None:
        """Keep a part for whoever asks next, if there is anything of it."""
        if unfinished is not None and unfinished.have_bytes:
            self._kept[key] = (unfinished, self._now())

    def have_bytes(self, key: int) -> int:
        """Return how much of a fragment's update is kept."""
        return self._kept[key][0].have_bytes if key in self._kept else 0

    def forget(self, fragment: int) -> None:
        """Drop the part of a fragment of which something has come."""
        self._kept.pop(fragment, None)

    def forget_all(self) -> None:
        """Drop all parts, for want of room."""
        self._kept.clear()

    def forget_old(self) -> None:
        """Drop what nobody asked for in a while: the world has moved on."""
        for key, (_, since_s) in list(self._kept.items()):
            if self._now() - since_s > KEEP_S:
                del self._kept[key]


class Watcher(Protocol):
    """Watcher of what arrives, who passes it on (`arriving.Arriving`)."""

    def begun(self, version: SignedVersion, unfinished: Unfinished) -> None:
        """Hear that it begins to come."""

    def grew(self) -> None:
        """Hear that more of it is here."""


class Fetch:
    """Sink of one request for an update. Implements `ports.PullSink`."""

    def __init__(
        self,
        request: wire.PullUpdate,
        most_bytes: int,
        unfinished: Unfinished | None,
        watcher: Watcher | None = None,
        comes: Callable[[], object] = lambda: None,
    ) -> None:
        """`comes`: called when the payload begins to come."""
        self._request = request
        self._most = most_bytes
        self.unfinished = unfinished
        self._header: wire.UpdateHeader | None = None
        self._watcher = watcher
        self.received_bytes = 0
        self.began_s = 0.0
        self._comes = comes

    @property
    def complete(self) -> bool:
        """True: all of the payload is here."""
        return self.unfinished is not None and self.unfinished.have_bytes == len(self.unfinished.payload)

    @property
    def header(self) -> wire.UpdateHeader:
        """Header of the stream: what the payload is."""
        assert self._header is not None
        return self._header

    @property
    def payload(self) -> bytearray:
        """Payload, all of it."""
        assert self.unfinished is not None
        return self.unfinished.payload

    def begin(self, header: bytes, payload_bytes: int) -> None:
        """See `ports.PullSink.begin`."""
        self._header = found = wire.decode(header, wire.UpdateHeader)
        digest, before = found.version.header.update_digest, self.unfinished
        size = payload_bytes + found.offset
        if found.total and found.total < size:
            raise RemoteError("garbage", "a part that is longer than the whole")
        if self._request.version not in (b"", found.version.header.digest()):
            raise RemoteError("wrong-version", "not the version that was asked for")
        size = found.total or size
        if size > self._most:
            raise RemoteError("oversized", f"payload of {size} bytes, at most {self._most}")
        if found.offset:
            if before is None or (digest, found.offset) != (before.digest, before.have_bytes):
                raise RemoteError("garbage", "goes on with something else than was asked for")
            if len(before.payload) != size:
                self.unfinished = None  # who gave the beginning, or who gives the rest: begin anew
                raise TransportError("of another size than what came before")
        else:
            self.unfinished = Unfinished(digest, size)
        self.began_s = asyncio.get_running_loop().time()
        if self._watcher is not None and self.unfinished is not None:
            self._watcher.begun(found.version, self.unfinished)
        self._comes()

    def write(self, offset: int, chunk: memoryview) -> None:
        """See `ports.PullSink.write`."""
        assert self.unfinished is not None
        at = self.header.offset + offset
        self.unfinished.payload[at : at + len(chunk)] = chunk
        self.unfinished.have_bytes = at + len(chunk)
        self.received_bytes += len(chunk)
        if self._watcher is not None:
            self._watcher.grew()


def known_bytes(pull: Asked, digest: bytes, size: int) -> int:
    """Return how much of what is served the asker has already."""
    return pull.have_bytes if pull.have == digest and pull.have_bytes <= size else 0
