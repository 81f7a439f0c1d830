"""Rules of writing that a reader relies on: small pieces, no swallowed errors, nothing executed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from arch_source import ROOT, calls, docstrings, imports, modules, nodes, nowhere, sources

MAX_FILE_LINES = 400
FILES = {
    str(path.relative_to(ROOT))
    for top in ("p2pdiloco", "lab", "tests", "scripts")
    for path in (ROOT / top).rglob("*.py")
}
MAX_FUNCTION_LINES = 70
EXECUTES = {"eval", "exec", "compile", "__import__", "torch.load", "pickle.loads", "pickle.load", "os.system"}
BROAD = {"Exception", "BaseException"}
NO_SUBJECT = """
it its they their them he his she her who whose whom which what that this these those there
of in on at by for from to with without as if when where while whether because since so how why
not nothing nobody both each all or and but same
"""
"""First words with which a docstring answers a question that its reader did not ask."""
NO_SOURCE = re.compile(r"\bdesign \d|\balgorithm\.md\b|\bissues? #?\d")
"""Citations of texts that are not in the repository."""


def test_files_are_short() -> None:
    lines = {file: (ROOT / file).read_bytes().count(b"\n") for file in sorted(FILES)}
    long = {file: count for file, count in lines.items() if count > MAX_FILE_LINES}
    assert not long, "split it along what it is about"


def long_functions(module: str) -> Iterator[str]:
    for node in nodes(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= MAX_FUNCTION_LINES:
                yield f"{module}:{node.lineno} {node.name} has {lines} lines"


def test_functions_are_short() -> None:
    nowhere(long_functions)


def _caught(handler: ast.ExceptHandler) -> set[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) for kind in kinds if kind is not None}


def swallowed(module: str) -> Iterator[str]:
    for node in nodes(modules()[module]):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{module}:{node.lineno}: bare except"
            idle = all(isinstance(s, ast.Pass | ast.Continue | ast.Break) for s in node.body)
            if idle and _caught(node) & BROAD:
                yield f"{module}:{node.lineno}: swallows everything"
    for line, name, call in calls(modules()[module]):
        if name.rpartition(".")[2] == "suppress" and {ast.unparse(a) for a in call.args} & BROAD:
            yield f"{module}:{line}: suppresses everything"


def test_no_error_is_swallowed() -> None:
    nowhere(swallowed)


def executed_or_asleep(module: str) -> Iterator[str]:
    for line, name in imports(modules()[module]):
        top = name.split(".")[0]
        if top in {"pickle", "marshal", "shelve", "dill", "cloudpickle"} or name == "time.sleep":
            yield f"{module}:{line} imports {name}"
    for line, name, node in calls(modules()[module]):
        if name in EXECUTES:
            yield f"{module}:{line} calls {name}"
        if name == "time.sleep":
            yield f"{module}:{line}: wait for an event, not for a while"
        # Before Python 3.12 it loses a cancellation that comes as what it waits for happens.
        if name == "asyncio.wait_for":
            yield f"{module}:{line}: async with asyncio.timeout"
        for keyword in node.keywords:
            if keyword.arg in {"allow_pickle", "shell"} and ast.unparse(keyword.value) != "False":
                yield f"{module}:{line}: {keyword.arg}"


def test_nothing_received_can_be_executed_and_nothing_sleeps() -> None:
    nowhere(executed_or_asleep)


def _first_word(text: str) -> str:
    """The word with which a docstring begins; "same" for "the same"."""
    words = [word.strip("`.,:;()").lower() for word in text.split()]
    return words[1] if words[:1] == ["the"] and words[1:2] == ["same"] else (words or [""])[0]


def _without_subject(tree: ast.Module) -> list[str]:
    """Docstrings that answer a question, with their lines."""
    first = [(line, text.split("\n")[0], _first_word(text)) for line, text in docstrings(tree)]
    return [f"line {line}: {text}" for line, text, word in first if word in NO_SUBJECT.split()]


@pytest.mark.parametrize("folder", ["p2pdiloco", "lab", "scripts"])
def test_docstrings_name_their_subject(folder: str) -> None:
    found = {path: _without_subject(tree) for path, tree in sources(folder).items()}
    assert not {str(path): lines for path, lines in found.items() if lines}, "begin with a verb or a noun"


@pytest.mark.parametrize("folder", ["p2pdiloco", "lab", "scripts", "tests"])
def test_what_docstrings_cite_is_in_the_repository(folder: str) -> None:
    for path, tree in sources(folder).items():
        for line, text in docstrings(tree):
            assert not NO_SOURCE.search(text), f"{path}:{line}: cite the paper or docs/protocol"


def test_test_files_have_different_names() -> None:
    # Test folders are no packages, so that two files of one name would shadow each other.
    names = Counter(p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
