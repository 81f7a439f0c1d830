"""Order of the whole suite: fast layers first, so that a broken basis is known before sockets open."""

from __future__ import annotations

from pathlib import Path

import pytest

ORDER = ["architecture", "config", "cli", "core", "tensors", "disk", "daemon_view", "simulation", "learner"]
LAST = ["net", "system"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by layer; folders that are not named here come between the two lists."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        if folder in ORDER:
            return ORDER.index(folder)
        return len(ORDER) + 1 + LAST.index(folder) if folder in LAST else len(ORDER)

    items.sort(key=rank)
