"""The package's source as syntax trees, for rules that are checked rather than remembered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "p2pdiloco"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def layer_of(module: str) -> str:
    """`p2pdiloco.core.api.types` is in layer `core`; the package itself is layer ""; the simulator,
    which is pure, is one of its own in the lab."""
    parts = module.split(".")
    if parts[1:3] == ["lab", "simulation"]:
        return "lab.simulation"
    return parts[1] if len(parts) > 1 else ""


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, at any depth; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


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
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.replace(".", "").replace("_", "").isalnum():
                yield node.lineno, name, node


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of the module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value
