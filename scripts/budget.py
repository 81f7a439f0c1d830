#!/usr/bin/env python3
"""Counts how much there is to read: code, files, classes and functions of each part, and bytes of documents.

python scripts/budget.py                print the counts
python scripts/budget.py --exceptions   rewrite tests/architecture/exceptions.toml from the code as it is

A code token is a name, a number, an operator or a text (an f-string is one). Imports, docstrings and comments
have none. tests/architecture/budget.toml says how many the product may have.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "tests" / "architecture"
BUDGET, EXCEPTIONS = RULES / "budget.toml", RULES / "exceptions.toml"
SMALL_LINES = 60
"""Lines below which a file of product or lab needs a reason."""
CONVENTIONAL = {"__init__.py", "__main__.py", "setup.py"}
"""File names that mean the same in every folder."""
COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
OPENING, CLOSING = (
    {getattr(tokenize, f"{kind}STRING_{end}") for kind in "FT" if hasattr(tokenize, f"{kind}STRING_{end}")}
    for end in ("START", "END")
)
"""Tokens between which Python 3.12 and later see an f-string's parts. Python 3.11 sees one text."""
STAR = re.compile(r"[(,]\s*\*[\w(]")
"""Something like a starred argument: other files need no closer look."""
HEAD = """# Exceptions from the rules of test_budget.py. One that is needed no more fails: the lists shrink.
# After files have moved, `python scripts/budget.py --exceptions` writes this file and keeps the reasons.
"""


def product() -> list[Path]:
    """Files of the product."""
    return _below("p2pdiloco")


def lab() -> list[Path]:
    """Files of the lab."""
    return _below("lab")


def tests() -> list[Path]:
    """Files of the tests."""
    return _below("tests")


def scripts() -> list[Path]:
    """Files of scripts and benchmarks."""
    return _below("scripts")


def documents() -> list[Path]:
    """Texts for people: docs/, the root and the operators' folders, without their settings and pictures."""
    folders = ("docs/**", ".", "node", "bootstrap")
    return sorted({path for folder in folders for path in ROOT.glob(f"{folder}/*.md")})


def _below(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


@cache
def parsed(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    """Path of a file in the repository."""
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> int:
    """Number of lines of a file."""
    return path.read_bytes().count(b"\n")


# --- counting ---


def code_tokens(path: Path) -> int:
    """Number of code tokens of a file."""
    return tokens_of(path.read_text(encoding="utf-8"))


def tokens_of(text: str) -> int:
    """Number of code tokens of a file's text."""
    left_out = _lines_left_out(ast.parse(text))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        opens, closes = token.type in OPENING, token.type in CLOSING
        if depth == 0 and (token.type in COUNTED or opens):
            count += token.start[0] not in left_out
        depth += opens - closes
    return count


def _lines_left_out(tree: ast.Module) -> set[int]:
    """Lines of imports and docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        statements = body if isinstance(body, list) else []
        texts = [s for s in statements if isinstance(s, ast.Expr) and _is_text(s.value)]
        imports = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for part in (*texts, *imports):
            found.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return found


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Counts(NamedTuple):
    """Figures of one part of the repository."""

    tokens: int
    files: int
    classes: int
    made_once: int
    """Classes with a constructor of their own that one place makes."""
    functions: int
    lines: int


def counts(files: list[Path]) -> Counts:
    """Count what is in these files."""
    found = [node for path in files for node in ast.walk(parsed(path))]
    classes = [node for node in found if isinstance(node, ast.ClassDef)]
    made = Counter(_callee(node) for node in found if isinstance(node, ast.Call))
    return Counts(
        tokens=sum(map(code_tokens, files)),
        files=len(files),
        classes=len(classes),
        made_once=sum(made[node.name] == 1 for node in classes if _has_constructor(node)),
        functions=sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in found),
        lines=sum(map(lines, files)),
    )


def _has_constructor(node: ast.ClassDef) -> bool:
    return any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in node.body)


def _callee(call: ast.Call) -> str:
    """Last part of the name of what is called."""
    called = call.func
    return called.id if isinstance(called, ast.Name) else str(getattr(called, "attr", ""))


def allowed_tokens() -> int:
    """Number of code tokens that the product may have now."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    return int(budget["product_tokens"] + sum(budget["held"].values()))


# --- what the rules allow for now ---


def small_files() -> list[str]:
    """Files of product and lab that are hardly worth opening."""
    found = [path for path in (*product(), *lab()) if path.name not in CONVENTIONAL]
    return sorted(name_of(path) for path in found if lines(path) < SMALL_LINES)


def shared_names() -> dict[str, int]:
    """File names that several files of product and lab have."""
    found = Counter(path.name for path in (*product(), *lab()) if path.name not in CONVENTIONAL)
    return {name: count for name, count in sorted(found.items()) if count > 1}


def packed() -> dict[str, int]:
    """Files with calls of our own constructors that take a packed tuple, `Cls(*where)`, and how many."""
    stars = [path for path in (*product(), *lab()) if STAR.search(path.read_text(encoding="utf-8"))]
    found = {name_of(path): len(list(packed_calls(parsed(path)))) for path in stars}
    return {name: count for name, count in sorted(found.items()) if count}


def packed_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Constructor calls with a starred argument that is not the enclosing function's own `*args`."""
    others = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if not (getattr(node, "module", None) or alias.name).startswith("p2pdiloco")
    }
    yield from _packed_below(tree, frozenset(), others)


def _packed_below(node: ast.AST, own: frozenset[str], others: set[str]) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        given = own
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and child.args.vararg:
            given = own | {child.args.vararg.arg}
        if isinstance(child, ast.Call) and _constructs(child, others):
            stars = [each.value for each in child.args if isinstance(each, ast.Starred)]
            if any(not (isinstance(star, ast.Name) and star.id in own) for star in stars):
                yield child
        yield from _packed_below(child, given, others)


def _constructs(call: ast.Call, others: set[str]) -> bool:
    """Tell whether a call makes an object of a class of ours, by its name in CapWords."""
    name = _callee(call)
    capital = name[:1].isupper() and (len(name) == 1 or not name.isupper())
    return (capital or name == "cls") and ast.unparse(call.func).partition(".")[0] not in others


def write_exceptions() -> None:
    """Write the exceptions of the code as it is. A file that was in the list keeps its reason; a new one
    has none, which the test refuses until somebody writes one."""
    before = (
        tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))["small_files"] if EXCEPTIONS.exists() else {}
    )
    small = {name: before.get(name, "") for name in small_files()}
    text = HEAD
    for title, table in (("small_files", small), ("shared_names", shared_names()), ("packed", packed())):
        rows = (
            f'"{key}" = ' + (f'"{value}"' if title == "small_files" else str(value))
            for key, value in table.items()
        )
        text += "\n".join(["", f"[{title}]", *rows, ""])
    EXCEPTIONS.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Print the counts, or write the exceptions; the exit status."""
    if arguments == ["--exceptions"]:
        write_exceptions()
        return 0
    if arguments:
        print(__doc__)
        return int(arguments[0] not in ("-h", "--help"))
    print(f"{'':8}" + "".join(f"{name.replace('_', ' '):>11}" for name in Counts._fields))
    for part in (product, lab, tests, scripts):
        print(f"{part.__name__:8}" + "".join(f"{figure:11,}" for figure in counts(part())))
    print(f"the product may have {allowed_tokens():,} tokens (tests/architecture/budget.toml)")
    print(f"documents: {sum(path.stat().st_size for path in documents()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
