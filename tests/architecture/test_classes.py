"""Classes: one name for one thing, and made of few things."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from arch_source import modules, nodes

MOST_PARAMETERS = 8
"""Of a constructor, beside self. Records (dataclasses, structs) have none that is written out."""
MORE = {"Session": "what a program says of model, run, node and ranks, by name, in one call"}
"""Classes that are made of one thing more, and why."""
TWICE = {
    "Admission": "a paper, beside the judge of offers in a round",
    "Link": "a record of ports, beside a socket and a line of a plan",
    "Presence": "a wire struct, beside who keeps it up",
}
"""Names that several classes have, and why."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) of the whole package."""
    for module, tree in modules().items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                yield module, node


def test_constructors_take_few_things() -> None:
    for module, node in classes():
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                given = method.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                where = f"{module}:{method.lineno} {node.name} is made of {count} things"
                assert count <= MOST_PARAMETERS + (node.name in MORE), where


def test_a_class_name_is_defined_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module, node in classes():
        found[node.name].append(module)
    again = {name: where for name, where in found.items() if len(where) > 1 and name not in TWICE}
    assert not again, "give one of them a name of its own, or say why not"
    assert all(len(found[name]) > 1 for name in TWICE), "an exception that nobody needs any more"
