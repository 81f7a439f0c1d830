"""A node's durable writes: one at a time, in order, lost or half done when the node is killed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from p2pdiloco.core.api.effects import Persist, UpdateRecord, VoteRecord
from p2pdiloco.core.api.events import Persisted, PersistFailed
from p2pdiloco_lab.simulation.world.disk import Checkpoint

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host


class DiskWriter:
    """The queue before a node's disk. A continuation happens after its record is durable, never before."""

    def __init__(self, host: Host, rng: random.Random) -> None:
        self._host = host
        self._disk = host.disk
        self._rng = rng
        self._queue: list[Persist | Checkpoint] = []

    def persist(self, effect: Persist) -> None:
        """A record that the core wants to be durable."""
        if isinstance(effect.record, UpdateRecord):
            self._host.tickets.update(effect.record.ticket)
        elif effect.then:  # else it is one that is only tried again: nobody hears of it
            self._host.world.watch.votes_for(self._host, effect.record)
        self.write(effect)

    def write(self, job: Persist | Checkpoint) -> None:
        """One more write."""
        self._queue.append(job)
        if len(self._queue) == 1:
            self._next()

    def _next(self) -> None:
        """Begin the next write; it takes as long as the disk is slow at its turn."""
        factor = 3.0 if isinstance(self._queue[0], Checkpoint) else 1.0
        time_s = self._disk.write_s * self._disk.slow_factor * self._rng.uniform(0.5, 2.0) * factor
        self._host.later(time_s, self._written)

    def _written(self) -> None:
        job = self._queue.pop(0)
        if self._queue:
            self._next()
        if isinstance(job, Checkpoint):
            self._keep(job)
            return
        if self._disk.full:
            self._host.feed(PersistFailed(job.token, "disk full"))
            return
        self._keep(job)
        for following in job.then:
            self._host.carry_out(following)
        self._host.feed(Persisted(job.token))

    def killed(self) -> None:
        """Keep some of the writes under way, in order: the disk got those before the node died. Nobody goes
        on with them."""
        for job in self._queue[: self._rng.randint(0, len(self._queue))]:
            self._keep(job)

    def _keep(self, job: Persist | Checkpoint) -> None:
        if self._disk.full:
            return
        if isinstance(job, Checkpoint):
            self._disk.keep_checkpoint(job)
        elif isinstance(job.record, VoteRecord):
            self._disk.keep_vote(job.record)
        else:
            update = self._host.tickets.update(job.record.ticket)
            self._host.world.exclusion.makes(self._host, job.record.version)
            self._disk.keep_update(job.record.version, update, self._host.config.log_versions)
