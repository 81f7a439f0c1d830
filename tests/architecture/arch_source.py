"""Source of the product and of the lab as syntax trees, for rules that are checked, not remembered."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "p2pdiloco"
LAB = ROOT / "lab" / "p2pdiloco_lab"


@cache
def sources(folder: str) -> dict[Path, ast.Module]:
    """Every file below a folder of the repository."""
    enabled = gc.isenabled()
    gc.disable()  # a million objects, and no garbage among them
    try:
        files = sorted((ROOT / folder).rglob("*.py"))
        return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in files}
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of both packages by dotted name."""
    found = {}
    for package in (PACKAGE, LAB):
        for path, tree in sources(str(package.relative_to(ROOT))).items():
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = tree
    return found


def nowhere(faults: Callable[[str], Iterator[str]]) -> None:
    """Look for faults in every module, and name them all."""
    found = [fault for module in modules() for fault in faults(module)]
    assert not found, "\n".join(found)


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Everything in a tree: most rules look at all of it."""
    return tuple(ast.walk(tree))


def layer_of(module: str) -> str:
    """`p2pdiloco.core.api.types` is in layer `core`; the package itself is layer "". The lab's commands, and
    the simulator, which is pure, are layers of their own in it."""
    top, *rooms = module.split(".")
    if top == LAB.name:
        return (
            {"simulation": "lab.simulation", "lab_commands": "lab.cli"}.get(rooms[0], "lab")
            if rooms
            else "lab"
        )
    return rooms[0] if rooms else ""


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, at any depth; `from a import b` gives a.b."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def imported_modules(module: str) -> dict[str, int]:
    """Modules of the package that this one imports, at any depth and for types alone, too: name -> line."""
    found: dict[str, int] = {}
    for line, name in imports(modules()[module]):
        while name and name not in modules():
            name = name.rpartition(".")[0]
        if name and name != module:
            found.setdefault(name, line)
    return found


def calls(tree: ast.AST) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, dotted callee, node) of every call whose callee is a plain dotted name."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield node.lineno, name, node


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a plain dotted name; empty for everything else."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before else ""  # type: ignore[attr-defined]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of the module, its classes, functions and attributes."""
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value
