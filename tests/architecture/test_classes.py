"""Classes: one name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from arch_source import modules, nodes

TWICE = {
    "Admission": "a paper, beside the judge of offers in a round",
    "Presence": "a wire struct, beside who keeps it up",
}
"""Names that several classes have, and why."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) of the whole package."""
    for module, tree in modules().items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                yield module, node


def test_a_class_name_is_defined_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module, node in classes():
        found[node.name].append(module)
    again = {name: where for name, where in found.items() if len(where) > 1 and name not in TWICE}
    assert not again, "give one of them a name of its own, or say why not"
    assert all(len(found[name]) > 1 for name in TWICE), "an exception that nobody needs any more"
