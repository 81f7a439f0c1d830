"""Sentences of documents need not be read twice, and ARCHITECTURE.md is short and names what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import mean

import pytest
from arch_source import LAB, PACKAGE, ROOT, modules, nodes

import prose

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_BYTES = 15_360


@pytest.mark.parametrize("path", prose.documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    lengths = list(map(prose.words, prose.sentences(path.read_text(encoding="utf-8"))))
    assert not lengths or mean(lengths) < prose.most_of(path)


def test_what_counts_is_what_people_read() -> None:
    text = "# A title of five words\n\nOne two `three four` five. Six, e.g. seven.\n\n"
    text += "| a | b |\n|-|-|\n| c | d |\n\n"
    text += "- Eight nine\n- [Ten](eleven.md)\n\n```\nno such words\n```\n"
    assert [prose.words(s) for s in prose.sentences(text)] == [4, 3, 2, 1]


def methods() -> dict[str, set[str]]:
    """What every class of the package defines, by the class's name."""
    found: dict[str, set[str]] = {}
    for tree in modules().values():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                functions = (f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))
                found.setdefault(node.name, set()).update(f.name for f in functions)
    return found


def test_architecture_is_read_in_a_sitting() -> None:
    assert len(ARCHITECTURE.encode()) <= MOST_BYTES


def test_files_that_architecture_names_are_there() -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?)`", ARCHITECTURE))
    assert len(named) > 60
    roots = ROOT, PACKAGE, LAB
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []


def test_methods_that_architecture_names_are_there() -> None:
    there = methods()
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)`", ARCHITECTURE)
    assert len(named) > 50
    assert [f"{owner}.{name}" for owner, name in named if name not in there.get(owner, set())] == []
