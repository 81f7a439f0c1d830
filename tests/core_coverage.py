"""Coverage of `p2pdiloco.core` by its own tests, each worker's in a file; scripts/test adds them up."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage
from two_lanes import folder_of


class CoreCoverage:
    """Plugin that measures while tests of `tests/core` run, and costs all others nothing.

    What chance finds does not count: property tests take most of the time, and none of them says what it ran.
    """

    def __init__(self, folder: Path) -> None:
        self._coverage = Coverage(str(folder / "core"), data_suffix=True)
        self._coverage.start()
        core = importlib.import_module("p2pdiloco.core")  # what runs at imports counts, too
        for module in pkgutil.walk_packages(core.__path__, "p2pdiloco.core."):
            importlib.import_module(module.name)
        self._coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure a test, with its fixtures."""
        if folder_of(item.nodeid) != "core" or item.get_closest_marker("hypothesis"):
            return (yield)
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()

    def pytest_unconfigure(self) -> None:
        """Write down what this process has measured."""
        self._coverage.save()
