"""Order and distribution of the whole suite.

What starts swarms or has peers mostly waits for processes; the other layers compute. With several workers the
last one takes what computes first, the others what waits, the longest first, and at the end everybody takes
what is left. So two cores are never idle, and no more swarms run at a time than there are other workers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Before huggingface_hub is imported, which reads it once: no test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

# How fast a machine is that has other things to do is no property of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

WAITING = ["system", "net", "daemon", "learner"]
COMPUTING = ["simulation", "tasks", "cli", "disk", "core", "tensors", "daemon_view", "config", "architecture"]


def _folder(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parts[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by layer; folders that are not named here come last."""
    rank = {folder: number for number, folder in enumerate(WAITING + COMPUTING)}
    items.sort(key=lambda item: rank.get(_folder(item.nodeid), len(rank)))


class TwoLanes(LoadScopeScheduling):
    """Test by test, with a preference of each worker.

    xdist's own `--dist loadgroup` has no effect with pytest 9.2, where a test's id cannot be changed.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = node is not self.nodes[-1]
        wanted = next((s for s in self.workqueue if (_folder(s) in WAITING) == waits), None)
        if wanted is not None:
            self.workqueue.move_to_end(wanted, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoLanes:
    config.option.loadscopereorder = False  # the order is that of the items
    return TwoLanes(config, log)  # type: ignore[arg-type]
