"""The page of the rules of the core: what shows each is there, and they become no more."""

from __future__ import annotations

import re

import pytest
from arch_source import PACKAGE, ROOT

PAGE = ROOT / "docs/protocol/rules.md"
MOST = 134
"""Rules that there are at most: this only falls."""
MUTATIONS = "".join(path.read_text() for path in ROOT.glob("scripts/mutation_*.py"))
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
RULES = [row for row in ROWS if row[0] not in ("rule", "---")]
CODE = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))


def test_rules_become_no_more() -> None:
    assert len(RULES) <= MOST and all(len(row) == 3 and all(row) for row in RULES)


@pytest.mark.parametrize("row", RULES, ids=lambda row: row[0][:60])
def test_what_shows_a_rule_is_there(row: list[str]) -> None:
    rule, _, shown = row
    for name in re.findall(r"`([A-Z][A-Z_0-9]+)`", rule):
        assert re.search(rf"^(\w+, )*{name}\b.* = ", CODE, re.M), f"there is no {name}"
    for item in shown.split("; "):
        if item.startswith("M "):
            assert f"def {item[2:].strip('*').replace(' ', '_')}(" in MUTATIONS, item
        elif "::" in item:
            path, _, test = item.strip("`").partition("::")
            folder = ROOT if path.startswith("tests/") else ROOT / "tests/core"
            assert f"def {test}(" in (folder / path).read_text(), item
        else:
            assert item.startswith("[results]"), item
