"""Rooms: docs/reference/tree.md is that of the code, and no folder is too large to be read at a glance."""

from __future__ import annotations

import pytest
from arch_source import ROOT

import tree

MOST_FILES = 20
FOLDERS = sorted(
    {path.parent for top in ("p2pdiloco", "lab", "tests", "scripts") for path in (ROOT / top).rglob("*.py")}
)


def test_the_tree_is_that_of_the_code() -> None:
    assert tree.main(["--check"]) == 0, "run python scripts/tree.py"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_are_small(folder: object) -> None:
    names = [path.name for path in folder.glob("*.py")]  # type: ignore[attr-defined]
    assert len(names) <= MOST_FILES, "a room of its own for what belongs together"
