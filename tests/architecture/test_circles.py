"""No import circle: what a module needs can be read without it, type-only and lazy imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from arch_source import LAB, PACKAGE, imported_modules, modules, nowhere

KNOW_EACH_OTHER = ("p2pdiloco_lab.simulation.", "p2pdiloco_lab.bulk_world.")
"""Host or member, world and rules of a simulator are one thing in several files."""
PACKAGES = {
    ".".join(path.parent.relative_to(top.parent).parts)
    for top in (PACKAGE, LAB)
    for path in top.rglob("__init__.py")
}


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


def through_packages(module: str) -> Iterator[str]:
    for name, line in imported_modules(module).items():
        if name in PACKAGES:
            yield f"{module}:{line} imports from the __init__ of {name}"


def test_names_are_imported_from_where_they_are_defined() -> None:
    """A package imports nothing for others: a circle through its `__init__` would be seen by nobody."""
    nowhere(through_packages)


def test_packages_do_nothing_when_they_are_imported() -> None:
    done = {
        package: [ast.unparse(node) for node in modules()[package].body if not isinstance(node, ast.Expr)]
        for package in PACKAGES - {"p2pdiloco"}
    }
    assert {package: code for package, code in done.items() if code} == {}
