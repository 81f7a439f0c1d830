"""Order and distribution of the whole suite.

What starts swarms or has peers mostly waits for processes; the other layers compute. With several workers the
first one takes what waits, the longest first, the others what computes, at a lower priority, and at the end
everybody takes what is left. So two cores are seldom idle, and one swarm runs at a time.
"""

from __future__ import annotations

import os
from contextlib import suppress

import psutil
import pytest
from hypothesis import HealthCheck, settings
from two_lanes import COMPUTING, NICENESS, WAITING, TwoLanes, folder_of
from xdist.workermanage import WorkerController

# Before huggingface_hub is imported, which reads it once: no test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

# How fast a machine is that has other things to do is no property of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """The first worker's swarms come first."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        os.nice(NICENESS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by layer; folders that are not named here come last."""
    rank = {folder: number for number, folder in enumerate(WAITING + COMPUTING)}
    items.sort(key=lambda item: rank.get(folder_of(item.nodeid), len(rank)))


@pytest.hookimpl(optionalhook=True)  # also without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoLanes:
    config.option.loadscopereorder = False  # the order is that of the items
    return TwoLanes(config, log)  # type: ignore[arg-type]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    """What a worker's tests started has inherited its name: who dies cannot clean up after itself."""
    mine = (node.workerinput["testrunuid"], node.gateway.id)
    for process in psutil.process_iter() if error else ():
        with suppress(psutil.Error):  # somebody else's, or gone in this moment
            found = process.environ()
            if (found.get("PYTEST_XDIST_TESTRUNUID"), found.get("PYTEST_XDIST_WORKER")) == mine:
                process.kill()
