"""Order and distribution of the whole suite.

Fast layers come first, so that a broken basis is known early. Beside them, in a process of their own, run the
layers that start swarms: they mostly wait, and one swarm at a time is what two cores carry.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ORDER = ["architecture", "config", "cli", "core", "tensors", "disk", "daemon_view", "simulation", "learner"]
SWARMS = ["daemon", "net", "system"]


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by layer; folders that are not named here come between the two lists."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        if folder in ORDER:
            return ORDER.index(folder)
        return len(ORDER) + 1 + SWARMS.index(folder) if folder in SWARMS else len(ORDER)

    items.sort(key=rank)
    for item in items:
        if rank(item) > len(ORDER):
            item.add_marker(pytest.mark.xdist_group("swarms"))
