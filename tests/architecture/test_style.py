"""Rules of writing that a reader relies on: small pieces, no swallowed errors, nothing executed; and reasons,
which code compares as members of enumerations, not as texts."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from arch_source import ROOT, calls, docstrings, imports, layer_of, modules, nodes, nowhere, sources

MAX_FUNCTION_LINES = 70
EXECUTES = {"eval", "exec", "compile", "__import__", "torch.load", "pickle.loads", "pickle.load", "os.system"}
BROAD = {"Exception", "BaseException"}
FIGURE = re.compile(r"%[-+ #0]*[\d.]*[diefgGxX]")
NO_SOURCE = re.compile(r"\bdesign \d|\balgorithm\.md\b|\bissues? #?\d")
"""Citations of texts that are not in the repository."""


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


def unnamed_figures(module: str) -> Iterator[str]:
    if layer_of(module) not in {"daemon", "adapters"}:
        return
    for line, name, call in calls(modules()[module]):
        if name.startswith("logger.") and name != "logger.debug":
            texts = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
            for text in texts:
                if isinstance(text, str) and FIGURE.search(text):
                    yield f"{module}:{line}: {text}"


def test_figures_of_log_lines_have_names() -> None:
    """`--log json` has them in `fields`, so that nobody parses sentences."""
    nowhere(unnamed_figures)


@pytest.mark.parametrize("folder", ["p2pdiloco", "lab", "scripts", "tests"])
def test_what_docstrings_cite_is_in_the_repository(folder: str) -> None:
    for path, tree in sources(folder).items():
        for line, text in docstrings(tree):
            assert not NO_SOURCE.search(text), f"{path}:{line}: cite the paper or docs/protocol"


def test_test_files_have_different_names() -> None:
    # Test folders are no packages, so that two files of one name would shadow each other.
    names = Counter(p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


OF_PYTHON = {
    "p2pdiloco.tasks.text": "a decoder of Python's says by text what is wrong",
    "p2pdiloco.daemon.display.timeline": "reads lines of the event log, as people do",
}
"""Modules that compare the text of a reason, and why."""
FREE = ("p2pdiloco_lab.", "p2pdiloco.demo.")
"""Verdicts on swarms read the diaries of nodes, as people do."""
TEXTUAL = ast.Eq | ast.NotEq | ast.In | ast.NotIn


def test_what_a_payload_is_refused_for_has_a_verdict() -> None:
    """Else its sender would not know what to do about it."""
    found = {
        f"{module}:{line}"
        for module, tree in modules().items()
        if layer_of(module) == "tensors"
        for line, name, _ in calls(tree)
        if name == "RemoteError"
    }
    assert not found, "raise Unsound, with a verdict"


def _called_reason(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] == "reason"


def _words(node: ast.expr) -> bool:
    """Tell whether it is a text, a constant, or a few of them written down."""
    written = isinstance(node, ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict)
    return written or (isinstance(node, ast.Name) and node.id.isupper())


def compares_a_reason(node: ast.AST) -> bool:
    """Tell whether something that is called reason is compared with words, or words are looked for in it."""
    if isinstance(node, ast.Compare) and any(isinstance(op, TEXTUAL) for op in node.ops):
        sides = (node.left, *node.comparators)
        return any(_called_reason(side) for side in sides) and any(_words(side) for side in sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in {"startswith", "endswith"} and _called_reason(node.func.value)
    return False


def test_the_rule_sees_what_it_is_for() -> None:
    for text in (
        'e.reason == "busy"',
        "KILLED in reason",
        "e.reason not in LATER",
        'e.reason in ("x",)',
    ):
        assert any(compares_a_reason(node) for node in ast.walk(ast.parse(text))), text
    for text in ("refused.reason is VoteRefusal.LIGHTER", "reason not in self.counts", "reason != before"):
        assert not any(compares_a_reason(node) for node in ast.walk(ast.parse(text))), text


def test_no_reason_is_compared_as_text() -> None:
    found = {
        module
        for module, tree in modules().items()
        if not module.startswith(FREE) and any(map(compares_a_reason, nodes(tree)))
    }
    assert found == OF_PYTHON.keys(), "compare members of an enumeration, or say why not"
