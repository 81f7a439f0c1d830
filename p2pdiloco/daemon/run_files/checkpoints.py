"""Regular checkpoints of all fragments, from which a node starts again."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.daemon.diary import Diary
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.wire import StateHeader
from p2pdiloco.errors import StorageError

logger = logging.getLogger(__name__)


class Checkpoints:
    """Writer of checkpoints."""

    def __init__(
        self, compute: Compute, store: RunStore, io: Executor, log_versions: int, diary: Diary
    ) -> None:
        """`io`: the thread for the disk. `log_versions`: number of versions whose updates are kept."""
        self._compute = compute
        self._store = store
        self._io = io
        self._log_versions = log_versions
        self._diary = diary

    async def save(self) -> None:
        """Write every fragment's committed state; a full disk costs this checkpoint only."""
        loop, diary = asyncio.get_running_loop(), self._diary
        for layout in self._compute.vault.layouts:
            header, pin = await self._compute.run(self._compute.pin, layout.index)
            try:
                await loop.run_in_executor(self._io, self._save, header, pin.buffers)
            except StorageError as error:
                logger.error("%s", error)
                diary.write("checkpoint", f"not saved: {error}")
                return
            finally:
                pin.release()
        for problem in self._store.take_problems():
            logger.warning("%s", problem)
            diary.write("checkpoint", problem)
        diary.write("checkpoint", "all fragments are saved")

    def _save(self, header: StateHeader, buffers: list[memoryview]) -> None:
        theta, momentum = buffers
        number = header.version.header.number
        fragment = header.version.header.fragment
        try:
            self._store.save_checkpoint(header.version, header.watermarks, theta, momentum)
        except StorageError:
            # Updates replay from the last checkpoint, but must not fill what is left of the disk meanwhile.
            self._store.prune_updates(fragment, number - 4 * self._log_versions)
            raise
        self._store.prune_updates(fragment, number - self._log_versions)
