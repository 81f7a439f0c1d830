"""Asking peers for what an audit needs: whom, in which order, and once more where they are busy.

Rules: docs/protocol/audits.md, section 2.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.audits.subject import Subject, Wanted
from p2pdiloco.daemon.bulk.chain_view import ChainView
from p2pdiloco.daemon.payloads.memory import Memory
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.tensors.merge import Payload

logger = logging.getLogger(__name__)
SOURCE_S = 8.0
"""Time that one peer has before another one is asked as well."""
AT_ONCE = 2
"""Number of peers that send the same payload at one time: the first has it, the others are cut."""
PAUSE_S = 10.0
"""Longest pause in a stream before it counts as cut."""
BUSY_S, MOST_BUSY_S = 0.5, 4.0
"""Pause, as a mean, before peers are asked again of whom one was busy: it doubles up to the second."""


class _Arrival:
    """Sink of one payload. Implements `ports.PullSink`."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.payload = bytearray()

    def begin(self, header: bytes, payload_bytes: int) -> None:
        """See `ports.PullSink.begin`."""
        if header or payload_bytes > self._most:
            raise RemoteError("oversized", f"{payload_bytes} bytes of a contribution, at most {self._most}")
        self.payload = bytearray(payload_bytes)

    def write(self, offset: int, chunk: memoryview) -> None:
        """See `ports.PullSink.write`."""
        self.payload[offset : offset + len(chunk)] = chunk


class Asking:
    """Asking for contributions and partial merges."""

    def __init__(
        self,
        chain: ChainView,
        transport: Transport,
        memory: Memory,
        is_sound: Callable[[Subject, Wanted, Payload], Awaitable[bool]],
    ) -> None:
        """`is_sound`: judges what came; raises Unsound where it is what was asked for, and can be none."""
        self._chain, self._transport, self._memory = chain, transport, memory
        self._is_sound = is_sound
        self.held_bytes = 0
        """Bytes of memory for second streams of the same payload."""
        self.bytes_in = 0

    async def get(self, subject: Subject, wanted: Wanted, size: int) -> Payload | None:
        """Get one payload of that size, for which the caller has room. None: nobody gives it. Where somebody
        is busy all are asked again, without end: all members may audit the same version.

        Raises: Unsound.
        """
        pause_s = BUSY_S
        while True:
            found, busy = await self._first(subject, wanted, size)
            if found is not None or not busy:
                return found
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, MOST_BUSY_S)

    def _sources(self, subject: Subject, wanted: Wanted) -> list[str]:
        """List whom to ask: who made it, then the syncer that merged it, then who accuses that, in whatever
        order where somebody does: all members ask then. A maker that there is no connection to comes last,
        since to look for it may take long."""
        connected = set(self._transport.connected())
        near = [peer for peer in wanted.makers if peer in connected]
        far = [peer for peer in wanted.makers if peer not in connected]
        first = [*near, subject.syncer, *subject.givers]
        if subject.givers:
            random.shuffle(first)
        return [peer for peer in dict.fromkeys([*first, *far]) if peer != self._transport.peer_id]

    async def _first(self, subject: Subject, wanted: Wanted, size: int) -> tuple[Payload | None, bool]:
        """Ask one after the other, and the next one as well where one takes long. Returns what came, and
        whether one was busy. Raises: Unsound."""
        left, busy = self._sources(subject, wanted), False
        running: list[asyncio.Task[Payload | PullRefusal | None]] = []
        held_bytes = 0
        try:
            while left or running:
                if left:
                    running.append(asyncio.create_task(self._pull(left.pop(0), subject, wanted, size)))
                extra_bytes = (len(running) - 1) * size
                self.held_bytes += extra_bytes - held_bytes
                held_bytes = extra_bytes
                limit_s = SOURCE_S if left else None
                done, _ = await asyncio.wait(running, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)
                    found = task.result()
                    if isinstance(found, PullRefusal):
                        busy = True
                    elif found is not None:
                        return found, busy
                if not done and (len(running) >= AT_ONCE or not self._memory.fits_push(size)):
                    running.pop(0).cancel()
            return None, busy
        finally:
            self.held_bytes -= held_bytes
            for task in running:
                task.cancel()

    async def _pull(
        self, peer: str, subject: Subject, wanted: Wanted, size: int
    ) -> Payload | PullRefusal | None:
        """Ask one peer. None: it did not give it; a refusal: it is busy. Raises: Unsound."""
        request = wire.PullContribution(self._chain.run, subject.fragment, wanted.digest)
        arrival = _Arrival(size)
        try:
            refusal = await self._transport.pull_into(peer, wire.encode(request), arrival, PAUSE_S)
            if refusal is not None:
                raise wire.refused(refusal)
        except (TransportError, RemoteError, TimeoutError) as error:
            logger.debug("no contribution to audit from %s: %s", peer, error)
            is_busy = isinstance(error, wire.PullRefused) and error.why is PullRefusal.BUSY
            return PullRefusal.BUSY if is_busy else None
        self.bytes_in += len(arrival.payload)
        if await self._is_sound(subject, wanted, arrival.payload):
            return arrival.payload
        logger.debug("not the contribution that was asked for: %s", peer)
        return None
