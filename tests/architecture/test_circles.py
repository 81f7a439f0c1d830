"""No import circle: what a module needs can be read without it, type-only and lazy imports included."""

from __future__ import annotations

import ast

import pytest
from arch_source import PACKAGE, imported_modules, modules

KNOW_EACH_OTHER = ("p2pdiloco.simulation.", "p2pdiloco.lab.bulk_world.")
"""Host or member, world and rules of a simulator are one thing in several files."""
PACKAGES = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.py")}


def circles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """Sets of nodes of which each reaches each other, the largest such (Tarjan's algorithm). Sorted."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            at = path.index(name)
            if len(path) - at > 1:
                found.append(sorted(path[at:]))
            del path[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found)


def test_circles_are_found() -> None:
    graph: dict[str, dict[str, int]] = {
        "a": {"b": 1}, "b": {"c": 1, "d": 1}, "c": {"a": 1}, "d": {"e": 1}, "e": {"d": 1}, "f": {"a": 1}
    }  # fmt: skip
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_no_module_imports_what_imports_it() -> None:
    graph = {module: imported_modules(module) for module in modules()}
    for names in circles(graph):
        steps = [f"{a}:{graph[a][b]} imports {b}" for a in names for b in graph[a] if b in names]
        assert all(name.startswith(KNOW_EACH_OTHER) for name in names), "a circle:\n" + "\n".join(steps)


@pytest.mark.parametrize("module", modules())
def test_names_are_imported_from_where_they_are_defined(module: str) -> None:
    """A package imports nothing for others: a circle through its `__init__` would be seen by nobody."""
    through = {name: line for name, line in imported_modules(module).items() if name in PACKAGES}
    assert not through, f"{module} imports from the __init__ of a package: {through}"


@pytest.mark.parametrize("package", sorted(PACKAGES - {"p2pdiloco"}))
def test_packages_do_nothing_when_they_are_imported(package: str) -> None:
    assert [ast.unparse(node) for node in modules()[package].body if not isinstance(node, ast.Expr)] == []
