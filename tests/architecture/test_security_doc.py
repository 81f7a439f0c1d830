"""SECURITY.md: what it names as shown is there."""

from __future__ import annotations

import re

from arch_source import ROOT

NAMED = re.compile(r"`((?:tests|scripts|docs)/[\w./-]+|constraints\.txt)`")


def test_every_file_that_it_names_is_there() -> None:
    for document in ("SECURITY.md", "docs/results.md"):
        named = NAMED.findall((ROOT / document).read_text(encoding="utf-8"))
        assert named
        assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_defence_names_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = text.partition("## What is defended")[2].partition("## What is not")[0].splitlines()
    defences = [row for row in rows if row.startswith("| ") and not row.startswith("| against")]
    assert len(defences) > 10
    assert [row for row in defences if "`tests/" not in row] == []
