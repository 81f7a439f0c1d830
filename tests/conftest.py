"""Order and distribution of the whole suite.

What starts swarms or has peers mostly waits for processes; the other layers compute. With several workers
one takes what waits, the longest first, the others what computes, at a lower priority, and at the end
everybody takes what is left. So two cores are seldom idle, and until then one swarm runs at a time.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_timeout
from core_coverage import CoreCoverage
from deadlines import within_s
from hypothesis import HealthCheck, settings
from loop_guard import guarded
from tiers import TIERS, Tier
from two_lanes import COMPUTING, NICENESS, WAITING, Roles, TwoLanes, computes, folder_of
from xdist.workermanage import WorkerController

# Before huggingface_hub is imported, which reads it once: no test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

# How fast a machine is that has other things to do is no property of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


roles = Roles()
MOST_PASSES = 5


@pytest.fixture(autouse=True)
def _levels_of_logs() -> Iterator[None]:
    """Levels of logs as they were: commands that a test calls in its own process set them for themselves."""
    logs = (logging.getLogger(), logging.getLogger("p2pdiloco"))
    levels = [log.level for log in logs]
    yield
    for log, level in zip(logs, levels, strict=True):
        log.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _home_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home that is nobody's: commands that a test calls in its own process make a node's identity there."""
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    os.environ.pop("HOME")
    if before is not None:
        os.environ["HOME"] = before


@pytest.fixture(autouse=True)
def waits_of_loops() -> Iterator[list[str]]:
    """Waits for a disk, /proc or a driver in a loop's thread (`loop_guard`): there must be none."""
    found: list[str] = []
    with guarded(found.append):
        yield found
    assert not found, found[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="test", help="which tests: see tests/tiers.py")


def pytest_configure(config: pytest.Config) -> None:
    """Swarms come first."""
    config.pluginmanager.register(Tier(config.getoption("tier")))
    if computes(config):
        os.nice(NICENESS)
    if folder := os.environ.get("CORE_COVERAGE"):
        config.pluginmanager.register(CoreCoverage(Path(folder)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    roles.give(node)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """A test that hangs is ended, not one that is slow on a machine that is."""
    scaled = settings._replace(timeout=within_s(settings.timeout))
    return bool(pytest_timeout.pytest_timeout_set_timer(item, scaled))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by layer; folders that are not named here come last."""
    rank = {folder: number for number, folder in enumerate(WAITING + COMPUTING)}
    items.sort(key=lambda item: rank.get(folder_of(item.nodeid), len(rank)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and so does most of what tests import: with torch a million
    objects. Looking through all of them ten times as seldom, a worker finds young garbage as soon as ever."""
    gc.collect()
    gc.freeze()
    youngest, young, oldest = gc.get_threshold()
    gc.set_threshold(youngest, young, 10 * oldest)


@pytest.hookimpl(optionalhook=True)  # also without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoLanes:
    config.option.loadscopereorder = False  # the order is that of the items
    return TwoLanes(config, log)  # type: ignore[arg-type]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    """What a worker's tests started has inherited its name: who dies cannot clean up after itself."""
    roles.gone(node)
    mine = (node.workerinput["testrunuid"], node.gateway.id)
    for _ in range(MOST_PASSES if error else 0):
        if not (found := started_by(mine)):
            break
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, within_s(5))
        # And once more: one of them may have started another in the meantime.


def started_by(worker: tuple[str, str]) -> list[psutil.Process]:
    """What the tests of that worker, of that test run, have running."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # somebody else's, or gone in this moment
            its = process.environ()
            if (its.get("PYTEST_XDIST_TESTRUNUID"), its.get("PYTEST_XDIST_WORKER")) == worker:
                found.append(process)
    return found
