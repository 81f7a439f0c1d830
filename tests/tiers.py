"""The tiers of the suite: `--tier quick`, `test` (unless something else is said) and `slow`.

Quick tests compute in this process alone, and a guard sees to that. Python itself tells of every socket that
is bound or connected and of every process that is started (its audit events): a quick test that does so
fails. Not quick are tests in other folders, tests marked `net`, `system` or `process` for what they open or
start, and tests marked `long`, which take seconds. Slow tests lie in `tests/slow` or are marked `slow`:
surveys over many seeds or shapes, of which the tier `test` has some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from two_lanes import folder_of

TIERS = ("quick", "test", "slow")
FOLDERS = frozenset(
    {
        *("core", "tensors", "config", "credits", "web", "cli", "daemon", "daemon/display"),
        *("tasks", "learner", "adapters", "adapters/disk", "adapters/net", "lab", "lab/simulation"),
    }
)
"""Of quick tests, as the lanes name them."""
MARKS = ("net", "system", "process", "long")
"""Of tests that are not quick."""
OPENS = frozenset({"socket.bind", "socket.connect", "socket.sendto"})
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})


class OutsideError(RuntimeError):
    """A quick test opens a socket or starts a process."""


class Guard:
    """Refuses both while a test runs."""

    def __init__(self) -> None:
        self._tried: list[str] | None = None
        sys.addaudithook(self._hear)

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        """Context in which both are refused. It gives what was tried, also where that was swallowed."""
        self._tried = tried = []
        try:
            yield tried
        finally:
            self._tried = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._tried is not None and (event in OPENS or event in STARTS):
            self._tried.append(f"{event} {arguments!r:.200}")
            raise OutsideError(f"{event}: no quick test opens a socket or starts a process (tests/tiers.py)")


def tier_of(item: pytest.Item) -> str:
    """The first tier that has it. The tier `test` has those of `quick`, too."""
    folder = folder_of(item.nodeid)
    if folder == "slow" or item.get_closest_marker("slow"):
        return "slow"
    outside = any(item.get_closest_marker(mark) for mark in MARKS)
    return "quick" if folder in FOLDERS and not outside else "test"


class Tier:
    """The plugin: which tests it takes, and the guard over quick ones."""

    def __init__(self, wanted: str) -> None:
        self._has = {"quick", "test"} if wanted == "test" else {wanted}
        self._guard = Guard() if wanted == "quick" else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if tier_of(item) not in self._has]
        items[:] = [item for item in items if tier_of(item) in self._has]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from self._guarded())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from self._guarded())

    def _guarded(self) -> Iterator[None]:
        if self._guard is None:
            return (yield)
        with self._guard.watching() as tried:
            result = yield
        assert not tried, tried[0]
        return result
