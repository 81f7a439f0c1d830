"""Commits of new versions: told to vault, log of updates, disk and learner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from p2pdiloco.core.api.effects import CommitVersion
from p2pdiloco.daemon.history.keeping import HistoryKeeper
from p2pdiloco.daemon.learner.learner_link import LearnerLink
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.durable import Durable
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.ports import Buffer


class Committing:
    """Committing of new versions: carries out `CommitVersion`."""

    def __init__(
        self,
        me: str,
        compute: Compute,
        tickets: Tickets,
        log: UpdateLog,
        durable: Durable,
        learner: LearnerLink,
        keeper: HistoryKeeper | None = None,
    ) -> None:
        """`me`: our peer id; our own versions' updates are on the disk already. `keeper`: of the run's
        history."""
        self._me = me
        self._compute = compute
        self._tickets = tickets
        self._log = log
        self._durable = durable
        self._learner = learner
        self._keeper = keeper
        self.done = asyncio.Event()
        """Event that is set with every version that the vault has taken in. Who waits looks, clears it,
        and waits."""

    def commit(self, effect: CommitVersion) -> Coroutine[Any, Any, None]:
        """Take the version into log and plans at once; the rest is work for the background."""
        fragment = effect.version.header.fragment
        if self._keeper is not None:
            self._keeper.note(effect.version)
        own_merged = self._learner.committed(effect)
        payload = None
        if effect.update is None:
            self._log.clear(fragment)
        else:
            payload = self._tickets.get(effect.update)
            self._log.add(effect.version, payload)
            self._tickets.release(effect.update)
        return self._commit(effect, own_merged, payload)

    async def _commit(self, effect: CommitVersion, own_merged: bool, payload: Buffer | None) -> None:
        await self._compute.run(self._compute.commit, effect, own_merged)
        self.done.set()
        header = effect.version.header
        self._learner.after_commit(header.fragment)
        if payload is not None and header.syncer != self._me:
            await self._durable.keep(effect.version, payload)
