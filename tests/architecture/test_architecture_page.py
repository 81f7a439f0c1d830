"""ARCHITECTURE.md stays short, and names files, classes and methods that there are."""

from __future__ import annotations

import ast
import re

from arch_source import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_BYTES = 15_360


def methods() -> dict[str, set[str]]:
    """What every class of the package defines, by the class's name."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "p2pdiloco").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                functions = (f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))
                found.setdefault(node.name, set()).update(f.name for f in functions)
    return found


def test_it_is_read_in_a_sitting() -> None:
    assert len(PAGE.encode()) <= MOST_BYTES


def test_files_that_it_names_are_there() -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?)`", PAGE))
    assert len(named) > 60
    roots = ROOT, ROOT / "p2pdiloco"
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []


def test_methods_that_it_names_are_there() -> None:
    there = methods()
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)`", PAGE)
    assert len(named) > 50
    assert [f"{owner}.{name}" for owner, name in named if name not in there.get(owner, set())] == []
