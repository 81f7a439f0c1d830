"""Control messages on their way out: bounded per peer, a few at a time, failures become events."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from p2pdiloco.core.api.events import SendFailed
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.membership import in_one
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport

logger = logging.getLogger(__name__)
MAX_QUEUED = 256
IN_FLIGHT = 4
TIMEOUT_S = 5.0


class Outbound:
    """Queues of control messages, one per peer.

    A heartbeat takes in one that still waits; a full queue drops its oldest.
    """

    def __init__(
        self,
        transport: Transport,
        encode: Callable[[Message], bytes],
        post: Callable[[SendFailed], None],
    ) -> None:
        self._transport = transport
        self._encode = encode
        self._post = post
        self._queues: dict[str, deque[Message]] = {}
        self._senders: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0
        self.bytes_sent = 0

    def send(self, peer: str, message: Message) -> None:
        """Queue a message."""
        queue = self._queues.setdefault(peer, deque())
        if isinstance(message, Progress):
            for index, waiting in enumerate(queue):
                if isinstance(waiting, Progress):
                    queue[index] = in_one(waiting, message)
                    return
        if len(queue) >= MAX_QUEUED:
            queue.popleft()
            self.dropped += 1
        queue.append(message)
        if self._senders.get(peer, 0) < IN_FLIGHT:
            self._senders[peer] = self._senders.get(peer, 0) + 1
            task = asyncio.create_task(self._drain(peer), name=f"send-{peer[-6:]}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _drain(self, peer: str) -> None:
        queue = self._queues[peer]
        try:
            while queue:
                data = self._encode(queue.popleft())
                try:
                    await self._transport.send(peer, data, TIMEOUT_S)
                    self.bytes_sent += len(data)
                except TransportError:
                    self._post(SendFailed(peer))
                except RemoteError as error:
                    logger.debug("%s refused a message: %s", peer, error.reason)
        finally:
            self._senders[peer] -= 1
            if not self._senders[peer]:
                del self._senders[peer]
                if not queue:
                    self._queues.pop(peer, None)

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued is sent, at most so long."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def close(self) -> None:
        """Drop what is left."""
        self._queues.clear()
        for task in self._tasks:
            task.cancel()
