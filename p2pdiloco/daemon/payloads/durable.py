"""Durable records: votes and outer updates go onto the disk, in the thread for it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from p2pdiloco.adapters.disk.run_store import RunStore
from p2pdiloco.core.api.effects import UpdateRecord, VoteRecord
from p2pdiloco.core.api.statements import Evidence
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.errors import StorageError
from p2pdiloco.ports import Buffer

logger = logging.getLogger(__name__)
COMPLAIN_EVERY_S = 30.0


class Durable:
    """Writer of the core's records. A full disk is told to the person now and then, not at every try."""

    def __init__(self, store: RunStore, tickets: Tickets, io: Executor) -> None:
        """`io`: the thread for the disk."""
        self._store = store
        self._tickets = tickets
        self._io = io
        self._loop = asyncio.get_running_loop()
        self._complaint, self._complain_again_s = "", 0.0

    async def save(self, record: VoteRecord | UpdateRecord) -> None:
        """Make a record durable. Raises: StorageError (told to the person already)."""
        try:
            if isinstance(record, VoteRecord):
                await self._loop.run_in_executor(self._io, self._store.save_vote, record)
            else:
                payload = self._tickets.get(record.ticket)
                await self._loop.run_in_executor(
                    self._io, lambda: self._store.save_update(record.version, payload, durable=True)
                )
        except StorageError as error:
            self._complain(str(error))
            raise

    async def keep_proofs(self, proofs: tuple[Evidence, ...]) -> None:
        """Save these proofs in the place of those before. After a failure others tell them again."""
        try:
            await self._loop.run_in_executor(self._io, self._store.save_proofs, proofs)
        except StorageError as error:
            self._complain(str(error))

    async def keep(self, version: SignedVersion, update: Buffer) -> None:
        """Save an update of somebody else's version for a replay at the next start.

        A failure costs only that: peers have the update as well.
        """
        try:
            await self._loop.run_in_executor(
                self._io, lambda: self._store.save_update(version, update, durable=False)
            )
        except StorageError as error:
            self._complain(str(error))

    def _complain(self, text: str) -> None:
        """Tell the person, but not every time that a full disk is tried again, for whichever file."""
        now, reason = self._loop.time(), text.rpartition(": ")[2]
        if reason != self._complaint or now >= self._complain_again_s:
            logger.error("%s", text)
            self._complaint, self._complain_again_s = reason, now + COMPLAIN_EVERY_S
