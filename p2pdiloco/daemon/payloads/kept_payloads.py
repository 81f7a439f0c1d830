"""Merged contributions that are not beyond doubt yet: onto the disk, and back as one.

`core/pending.py` decides which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from p2pdiloco.adapters.run_store import KeptFiles
from p2pdiloco.core.api.effects import Combine, Spill
from p2pdiloco.core.api.events import Combined, CombineFailed, Event
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.ports import Buffer

logger = logging.getLogger(__name__)
IN_MEMORY_BYTES = 128 << 20
"""Bytes of what may go to the disk that stay in memory nevertheless: most is beyond doubt 20 s later, and
to write and delete it took a twentieth of a round. Nothing stays where a person bounds memory."""


class KeptPayloads:
    """Payloads of such contributions: carries out `Spill` and `Combine`."""

    def __init__(
        self,
        files: KeptFiles,
        tickets: Tickets,
        compute: Compute,
        io: ThreadPoolExecutor,
        post: Callable[[Event], None],
        in_memory_bytes: int = 0,
    ) -> None:
        self._most_bytes = in_memory_bytes
        self._here_bytes = 0
        """Bytes in memory of what may go to the disk."""
        self._files = files
        self._tickets = tickets
        self._compute = compute
        self._io = io
        self._post = post

    def spill(self, effect: Spill) -> Coroutine[Any, Any, None] | None:
        """Move a payload to the disk, unless there is room for it in memory. Where the disk is full, it stays
        here.

        The payload is taken at once, since the core may release its ticket before the coroutine starts.
        """
        payload = self._tickets.get(effect.ticket)
        size = memoryview(payload).nbytes
        if self._here_bytes + size <= self._most_bytes:
            self._here_bytes += size
            self._tickets.when_released(effect.ticket, lambda: self._left(size))
            return None
        return self._spill(effect, payload)

    def _left(self, size: int) -> None:
        self._here_bytes -= size

    async def _spill(self, effect: Spill, payload: Buffer) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._io, self._files.save, effect.ticket, payload)
        except StorageError as error:
            logger.debug("a merged contribution stays in memory: %s", error)
            return
        if not self._tickets.spilled(effect.ticket, self._forget):
            self._forget(effect.ticket)

    def _forget(self, ticket: int) -> None:
        self._io.submit(self._remove, ticket)

    def _remove(self, ticket: int) -> None:
        try:
            self._files.remove(ticket)
        except StorageError as error:
            logger.warning("%s", error)

    def sources(self, effect: Combine) -> list[Callable[[], Buffer]]:
        """Return functions that get the payloads; asked at once, since the core may release their tickets."""
        return [self._source(ticket) for ticket in effect.tickets]

    def _source(self, ticket: int) -> Callable[[], Buffer]:
        payload = self._tickets.in_memory(ticket)
        return (lambda: self._files.load(ticket)) if payload is None else (lambda: payload)

    async def read(self, ticket: int) -> Buffer | None:
        """Return the payload of a contribution of ours, from the disk if it is there. None: it cannot be
        read."""
        here = self._tickets.in_memory(ticket)
        if here is not None:
            return here
        try:
            return await asyncio.get_running_loop().run_in_executor(self._io, self._files.load, ticket)
        except StorageError as error:
            logger.debug("a merged contribution cannot be given: %s", error)
            return None

    async def run_combine(self, effect: Combine, sources: list[Callable[[], Buffer]]) -> None:
        """Add payloads up in the tensors thread; of those on the disk, one at a time is in memory."""
        key = (effect.fragment, effect.attempt)
        try:
            done = await self._compute.run(self._compute.vault.own.combine, effect.fragment, sources)
        except (RemoteError, StorageError) as error:
            logger.error("contributions that a lost branch had merged cannot be sent again: %s", error)
            self._post(CombineFailed(*key, str(error)[:160]))
            return
        ticket = self._tickets.put(done.payload)
        self._post(Combined(*key, ticket, done.digest, len(done.payload)))
