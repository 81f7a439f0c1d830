"""docs/reference/events.md knows every kind and field that the code writes into the event log."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from arch_source import ROOT, calls, modules

WRITERS = {"out.record": "core", "report.write": "daemon", "self.write": "daemon", "_events.write": "daemon"}
COMMON = {"t", "mono", "kind", "fragment", "reason"}


def _strings(node: ast.AST) -> Iterator[str]:
    """Literal texts that an expression may evaluate to (both arms of a conditional)."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _strings(node.body)
        yield from _strings(node.orelse)


def written() -> dict[str, set[str]]:
    """Kind -> names of fields, where the kind is a literal."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in modules().items():
        for _, name, call in calls(tree):
            layer = next((layer for end, layer in WRITERS.items() if name.endswith(end)), None)
            if layer is None or f".{layer}." not in module:
                continue
            for kind in _strings(call.args[0]):
                found[kind] |= {keyword.arg for keyword in call.keywords if keyword.arg}
    return found


def documented() -> dict[str, str]:
    """Kind -> its rows of the tables, joined."""
    rows: dict[str, str] = defaultdict(str)
    text = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8").split("## Kinds")[1]
    for kind, row in re.findall(r"^\| `(\w+)` (\|.*)$", text, flags=re.MULTILINE):
        rows[kind] += row
    return rows


def test_every_kind_is_documented_with_its_fields() -> None:
    rows = documented()
    assert len(written()) > 12, "the search finds the records"
    for kind, fields in written().items():
        assert kind in rows, f"{kind} is not in docs/reference/events.md"
        missing = {field for field in fields - COMMON if f"`{field}`" not in rows[kind]}
        assert not missing, f"{kind}: docs/reference/events.md lacks {sorted(missing)}"
