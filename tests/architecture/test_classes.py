"""Classes: one name for one thing, and an object changes its own attributes, others ask it to."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from arch_source import dotted, modules, nodes

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


FREE = ("p2pdiloco_lab.", "p2pdiloco.demo.")
"""Worlds and swarms that are made to be looked at: they set scenes up."""
FOREIGN = {
    "__file__": "Python's modules",
    "__path__": "Python's modules",
    "__spec__": "Python's modules",
    "modules": "Python's table of modules",
    "atexit": "weakref.finalize",
    "stdout": "sys",
    "stderr": "sys",
    "excepthook": "sys and threading",
    "handlers": "logging",
    "default_map": "click",
    "discoverdelay": "miniupnpc",
    "grad": "torch's parameters",
    "training": "torch's modules",
    "like": "torch's contexts of an autograd function",
    "control": "hivemind",
    "PeerID": "hivemind",
    "write_pbmsg": "hivemind",
    "storage": "hivemind",
    "store": "hivemind",
    "is_alive": "hivemind",
    "features": "datasets",
    "_cast_table": "datasets",
    "_generate_tables": "datasets",
}
"""Attributes of other people's objects, which have no words for it."""
FROZEN = {
    "Frozen",
    "Tagged",
    "Row",
    "Section",
    "ModelSection",
    "Command",
    "LearnerEvent",
    "OwnLimits",
    "WatchSettings",
}
"""Bases whose subclasses are frozen without a word."""
SETATTR = {"p2pdiloco.adapters.hivemind_bare"}


def _sealed(node: ast.ClassDef) -> bool:
    """Tell whether a class's fields cannot be set, or are another's: it is frozen, or a protocol."""
    frozen = any(k.arg == "frozen" and ast.unparse(k.value) == "True" for k in node.keywords)
    frozen = frozen or any("frozen=True" in ast.unparse(made) for made in node.decorator_list)
    return frozen or any(ast.unparse(base).split("[")[0] in {"Protocol", *FROZEN} for base in node.bases)


def _own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _fields(tree: ast.Module) -> set[str]:
    """Attributes that the module's own classes have: a record is changed by the module that has it."""
    found: set[str] = set()
    for node in nodes(tree):
        if not isinstance(node, ast.ClassDef) or _sealed(node):
            continue
        for inner in node.body:
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                found.add(inner.target.id)
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _own(part.value):
                found.add(part.attr)
    return found


def set_from_outside(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, attribute, code) of every assignment to another object's attribute, or into such a container."""
    fields = _fields(tree)
    for node in nodes(tree):
        target = node.value if isinstance(node, ast.Subscript) else node
        stored = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        others = isinstance(target, ast.Attribute) and not _own(target.value)
        if stored and others and target.attr not in fields:
            yield node.lineno, target.attr, ast.unparse(node)


@cache
def found() -> list[tuple[str, str]]:
    """(where, attribute) in the whole package."""
    return [
        (f"{module}:{line} sets {code}", name)
        for module, tree in modules().items()
        if not module.startswith(FREE)
        for line, name, code in set_from_outside(tree)
    ]


def test_nobody_sets_anothers_attributes() -> None:
    wrong = [where for where, name in found() if name not in FOREIGN]
    assert not wrong, "give the object a word for it, or what it needs when it is made"


def test_every_exception_is_needed() -> None:
    assert {name for _, name in found()} >= FOREIGN.keys(), "an exception that nobody needs any more"


def test_nothing_is_set_by_a_name_in_a_text() -> None:
    callers = {
        module
        for module, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Call) and dotted(node.func) in {"setattr", "delattr"}
    }
    assert callers == SETATTR


def test_the_rule_sees_what_it_is_for() -> None:
    text = """
class Box(Struct, frozen=True):
    sealed: int
class Own:
    def __init__(self, other):
        self.mine = 0
        other.theirs = other.mine = 1
        self.other.deep += 1
        other.table[0] = 2
        del other.gone
        other.sealed = 3
"""
    assert {name for _, name, _ in set_from_outside(ast.parse(text))} == {
        "theirs", "deep", "table", "gone", "sealed",
    }  # fmt: skip
