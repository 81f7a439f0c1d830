"""Durable records: votes and outer updates go onto the disk, in the thread for it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.effects import UpdateRecord, VoteRecord
from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.errors import StorageError
from p2pdiloco.ports import Buffer

logger = logging.getLogger(__name__)
COMPLAIN_EVERY_S = 30.0
SYNC_EVERY_S = 10.0
"""Interval at which updates of others' versions are synced. Others count what we have had for `durable_s` as
safe from a crash of ours: that is 10 s more, for the disk to do it in."""


class Durable:
    """Writer of the core's records. A full disk is told to the person now and then, not at every try."""

    def __init__(self, store: RunStore, tickets: Tickets, io: Executor, durable_s: float) -> None:
        """`io`: the thread for the disk. `durable_s`: see `core.api.config.Timing`."""
        self._store = store
        self._tickets = tickets
        self._io = io
        self._loop = asyncio.get_running_loop()
        self._complaint, self._complain_again_s = "", 0.0
        self._safe_s = durable_s
        self.synced = self.syncs_failed = 0
        """Numbers of updates that were synced after they were written, and of syncs that failed."""

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

    async def sync_regularly(self) -> None:
        """Make durable, every `SYNC_EVERY_S`, what `keep` has written since, for ever."""
        began_s = self._loop.time()
        while True:
            await asyncio.sleep(began_s + SYNC_EVERY_S - self._loop.time())
            before_s, began_s = began_s, self._loop.time()
            await self.sync()
            if (took_s := self._loop.time() - before_s) > self._safe_s:
                self._complain(
                    f"a power cut would take versions that others count on: a sync took {took_s:.0f} s"
                )

    async def sync(self) -> None:
        """Make durable what `keep` has written. A vote waits for one fragment of it at most.

        A failure costs what a power cut may take: it is told, and counted.
        """
        unsynced = self._store.unsynced
        for fragment in await self._loop.run_in_executor(self._io, unsynced.fragments):
            try:
                self.synced += await self._loop.run_in_executor(self._io, unsynced.sync, fragment)
            except StorageError as error:
                self.syncs_failed += 1
                self._complain(
                    f"fragment {fragment} is not safe from a power cut until its next checkpoint: {error}"
                )

    def _complain(self, text: str) -> None:
        """Tell the person, but not every time that a full disk is tried again, for whichever file."""
        now, reason = self._loop.time(), text.rpartition(": ")[2]
        if reason != self._complaint or now >= self._complain_again_s:
            logger.error("%s", text)
            self._complaint, self._complain_again_s = reason, now + COMPLAIN_EVERY_S
