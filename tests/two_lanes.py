"""Which worker takes which test: two lanes, and no test is lost or waited for when a worker dies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WAITING = ["system", "adapters/net", "daemon", "learner", "adapters"]
COMPUTING = [
    *("lab/simulation", "bench", "tasks", "cli", "lab", "adapters/disk", "core", "tensors", "daemon/display"),
    *("credits", "web", "config", "architecture", "slow"),
]
"""Long tests first: at the end nobody waits long for the other, and only then two swarms may share the
processors."""
NICENESS = 5
"""Of workers that compute: they take what swarms leave."""


@cache
def folder_of(nodeid: str) -> str:
    """The layer that a test is of, as the lanes name it, such as `adapters/net`."""
    room = Path(nodeid.partition("::")[0]).parent.relative_to("tests")
    return next((str(r) for r in (room, *room.parents) if str(r) in WAITING + COMPUTING), str(room))


class Roles:
    """One worker at a time has the tests that wait: the first, or, when that has died, who replaces it."""

    def __init__(self) -> None:
        self._waits: str | None = None

    def give(self, node: WorkerController) -> None:
        """To a worker that is about to start."""
        mine = self._waits is None
        if mine:
            self._waits = node.gateway.id
        node.workerinput["waits"] = mine

    def gone(self, node: WorkerController) -> None:
        """It died, or is done."""
        if node.gateway.id == self._waits:
            self._waits = None


def computes(config: Any) -> bool:
    """Whether this process is a worker that `Roles` gave the tests that compute."""
    return not getattr(config, "workerinput", {"waits": True})["waits"]


class TwoLanes(LoadScopeScheduling):
    """Test by test, with a preference of each worker.

    xdist's own `--dist loadgroup` has no effect with pytest 9.2, where a test's id cannot be changed.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = node.workerinput["waits"]
        lane = [*WAITING, *reversed(COMPUTING)] if waits else [*COMPUTING, *reversed(WAITING)]
        wanted = min(self.workqueue, key=lambda nodeid: lane.index(folder_of(nodeid)))
        self.workqueue.move_to_end(wanted, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self.workqueue and node not in self.registered_collections:
            return  # it replaces one that died, and is given work once it has collected
        super()._reschedule(node)
        if self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)  # a worker begins with a test when it knows the next one

    def remove_node(self, node: WorkerController) -> str | None:
        """A worker is done, or died: a test that takes too long ends its worker, for one. The test that it
        died of has failed and is not tried again, the others that it had are for whoever is left. xdist hands
        out what it had finished, too: who is given only that reports nothing, and the run never ends."""
        had = self.assigned_work.pop(node)
        left = [nodeid for unit in had.values() for nodeid, completed in unit.items() if not completed]
        if not left:
            return None
        self.workqueue.update({nodeid: {nodeid: False} for nodeid in left[1:]})
        for other in self.nodes:
            self._reschedule(other)
        return left[0]
