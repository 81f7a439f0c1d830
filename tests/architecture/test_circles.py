"""No import circle: what a module needs can be read without it, type-only and lazy imports included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from arch_source import PACKAGE, imported_modules, modules

KNOW_EACH_OTHER = ("p2pdiloco.lab.simulation.", "p2pdiloco.lab.bulk_world.")
"""Host or member, world and rules of a simulator are one thing in several files."""
PACKAGES = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.py")}


def one(module: str) -> str:
    """Name of a module, or of the simulator that it is a part of."""
    return next((name for name in KNOW_EACH_OTHER if module.startswith(name)), module)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Find the names of a circle, in order; none: there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()})
    assert not circle({"a": {"b", "d"}, "b": {"c", "d"}, "c": {"d"}})


def test_no_module_imports_what_imports_it() -> None:
    graph: dict[str, set[str]] = {}
    for module in modules():
        graph.setdefault(one(module), set()).update(
            {one(name) for name in imported_modules(module)} - {one(module)}
        )
    assert circle(graph) == []


@pytest.mark.parametrize("module", modules())
def test_names_are_imported_from_where_they_are_defined(module: str) -> None:
    """A package imports nothing for others: a circle through its `__init__` would be seen by nobody."""
    through = {name: line for name, line in imported_modules(module).items() if name in PACKAGES}
    assert not through, f"{module} imports from the __init__ of a package: {through}"


@pytest.mark.parametrize("package", sorted(PACKAGES - {"p2pdiloco"}))
def test_packages_do_nothing_when_they_are_imported(package: str) -> None:
    assert [ast.unparse(node) for node in modules()[package].body if not isinstance(node, ast.Expr)] == []
