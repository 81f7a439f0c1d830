"""The suite's own scheduler: a dead worker costs its test, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from two_lanes import Roles, TwoLanes, computes

TESTS = [f"tests/system/test_a.py::test_{n}" for n in range(4)] + [
    f"tests/core/test_b.py::test_{n}" for n in range(4)
]


class Worker:
    """What a scheduler knows of one; it runs nothing by itself."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.workerinput = {"waits": name == "gw0"}
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        assert indices, "nothing to report: it would never be given more"
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def next(self) -> int | None:
        """What it runs: the last that it was given only once it knows that nothing follows."""
        return self.given.pop(0) if len(self.given) > 1 or (self.given and self.shutting_down) else None


def started(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Worker]]:
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda config: ["popen"] * 3)
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", False, raising=False)
    lanes: Any = TwoLanes(pytestconfig)
    workers = [Worker(f"gw{n}") for n in range(3)]
    for worker in workers:
        lanes.add_node(worker)
        lanes.add_node_collection(worker, TESTS)
    lanes.schedule()
    return lanes, workers


def play(lanes: Any, workers: list[Worker]) -> list[int]:
    """Every worker's tests in turn, until nobody has one to run."""
    ran: list[int] = []
    while True:
        found = [(worker, worker.next()) for worker in workers]
        if all(index is None for _, index in found):
            return ran
        for worker, index in found:
            if index is not None:
                ran.append(index)
                lanes.mark_test_complete(worker, index)
        if lanes.tests_finished:
            for worker in workers:
                worker.shutdown()


def test_waiting_and_computing_tests_have_lanes(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, workers = started(pytestconfig, monkeypatch)
    assert [{index < 4 for index in worker.given} for worker in workers] == [{True}, {False}, {False}]
    assert sorted(play(lanes, workers)) == list(range(8))


def test_long_tests_come_first_and_helpers_take_short_ones(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that compute have nothing of their own left: they take no swarm from the first."""
    folders = ["daemon", *["adapters/net"] * 3, "system", "system", "core", "core"]
    tests = [f"tests/{folder}/test_x.py::test_{n}" for n, folder in enumerate(folders)]
    monkeypatch.setattr("test_two_lanes.TESTS", tests)
    lanes, (waits, computes, also) = started(pytestconfig, monkeypatch)
    assert [folders[n] for n in waits.given] == ["system", "system"]
    assert [folders[n] for n in (*computes.given, *also.given)] == ["core", "daemon", "core", "adapters/net"]
    lanes.mark_test_complete(computes, computes.next())
    assert folders[computes.given[-1]] == "adapters/net"


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_dead_worker_costs_one_test(
    done: int, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, workers = started(pytestconfig, monkeypatch)
    dead, ran = workers[0], []
    for _ in range(done):
        ran.append(dead.given.pop(0))
        lanes.mark_test_complete(dead, ran[-1])
    failed = TESTS.index(lanes.remove_node(dead))
    assert failed == dead.given[0]
    instead = Worker("gw3")
    lanes.add_node(instead)
    ran += play(lanes, workers[1:])
    lanes.add_node_collection(instead, TESTS)
    lanes.schedule()
    ran += play(lanes, [*workers[1:], instead])
    assert sorted([*ran, failed]) == list(range(8))


def test_who_replaces_a_dead_worker_begins_at_once_when_it_has_collected(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, (first, second, third) = started(pytestconfig, monkeypatch)
    lanes.remove_node(first)
    instead = Worker("gw3")
    lanes.add_node(instead)
    lanes.remove_node(second)
    assert not instead.given
    lanes.add_node_collection(instead, TESTS)
    lanes.schedule()
    assert instead.next() is not None and third.next() is not None


def test_one_living_worker_has_the_tests_that_wait() -> None:
    roles: Any = Roles()
    workers = [Worker(f"gw{n}") for n in range(4)]
    for worker in workers[:3]:
        roles.give(worker)
    roles.gone(workers[1])
    roles.gone(workers[0])
    roles.give(workers[3])
    assert [worker.workerinput["waits"] for worker in workers] == [True, False, False, True]
    assert not computes(SimpleNamespace()) and computes(SimpleNamespace(workerinput={"waits": False}))
