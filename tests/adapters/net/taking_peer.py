"""What peers do that only take and answer: handlers for real transports in processes of their own."""

from __future__ import annotations

from p2pdiloco.ports import PullSource


class Forgetting:
    """A sink that forgets."""

    offset = 0

    def __init__(self, size: int) -> None:
        self.payload_bytes = size

    async def write(self, offset: int, chunk: memoryview) -> None:
        """See ports."""

    async def finish(self) -> bytes:
        """See ports."""
        return b""

    def abort(self) -> None:
        """See ports."""


class Answering:
    """Takes all that comes, and gives zeros. The header of a push, or a request, is a size in digits."""

    def is_member(self, sender: str) -> None:
        return None

    async def on_message(self, sender: str, data: bytes) -> bytes:
        """See ports."""
        return data[:10]

    async def on_push(self, sender: str, header: bytes) -> Forgetting:
        """See ports."""
        return Forgetting(int(header))

    async def on_pull(self, sender: str, request: bytes) -> PullSource:
        """See ports."""
        return PullSource(b"", (bytes(int(request)),), lambda: None)
