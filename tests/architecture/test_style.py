"""Rules of writing that a reader relies on: small pieces, no swallowed errors, nothing executed."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from arch_source import PACKAGE, ROOT, calls, imports, modules

MAX_FILE_LINES = 520
MAX_FUNCTION_LINES = 70
EXECUTES = {"eval", "exec", "compile", "__import__", "torch.load", "pickle.loads", "pickle.load", "os.system"}
BROAD = {"Exception", "BaseException"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short(path: object) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")  # type: ignore[attr-defined]
    assert lines < MAX_FILE_LINES


@pytest.mark.parametrize("module", modules())
def test_functions_are_short(module: str) -> None:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, f"{module}:{node.lineno} {node.name} has {lines} lines"


def _caught(handler: ast.ExceptHandler) -> set[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) for kind in kinds if kind is not None}


@pytest.mark.parametrize("module", modules())
def test_no_error_is_swallowed(module: str) -> None:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{module}:{node.lineno}: bare except"
            idle = all(isinstance(s, ast.Pass | ast.Continue | ast.Break) for s in node.body)
            assert not (idle and _caught(node) & BROAD), f"{module}:{node.lineno}: swallows everything"
    for line, name, node in calls(modules()[module]):
        if name.rpartition(".")[2] == "suppress":
            assert not {ast.unparse(a) for a in node.args} & BROAD, f"{module}:{line}: suppresses everything"


@pytest.mark.parametrize("module", modules())
def test_nothing_received_can_be_executed_and_nothing_sleeps(module: str) -> None:
    for line, name in imports(modules()[module]):
        top = name.split(".")[0]
        assert top not in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, (
            f"{module}:{line} imports {name}"
        )
        assert name != "time.sleep", f"{module}:{line} imports {name}"
    for line, name, node in calls(modules()[module]):
        assert name not in EXECUTES, f"{module}:{line} calls {name}"
        assert name != "time.sleep", f"{module}:{line}: wait for an event, not for a while"
        for keyword in node.keywords:
            unsafe = keyword.arg in {"allow_pickle", "shell"} and ast.unparse(keyword.value) != "False"
            assert not unsafe, f"{module}:{line}: {keyword.arg}"


def test_test_files_have_different_names() -> None:
    # Test folders are no packages, so that two files of one name would shadow each other.
    names = Counter(p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
