"""Order and distribution of the whole suite.

Two processes take groups of tests, the largest group first, then what belongs to none, in the order of
`ORDER`: real swarms one after the other in one process, and beside them what needs a network but few
processes. Both mostly wait. The layers that only compute fill what is left of two cores, until both are done.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before huggingface_hub is imported, which reads it once: no test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

ORDER = ["architecture", "config", "cli", "core", "tensors", "disk", "daemon_view", "simulation", "learner"]
GROUPS = {"daemon": "network", "net": "network", "system": "swarms"}


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by layer; folders that are not named here come between the two lists."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        if folder in ORDER:
            return ORDER.index(folder)
        return len(ORDER) + 1 + list(GROUPS).index(folder) if folder in GROUPS else len(ORDER)

    items.sort(key=rank)
    for item in items:
        group = GROUPS.get(item.path.relative_to(here).parts[0])
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
