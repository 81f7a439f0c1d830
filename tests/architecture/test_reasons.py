"""Reasons: enumerations that code compares, with texts that it does not."""

from __future__ import annotations

import ast

from arch_source import calls, layer_of, modules, nodes

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
