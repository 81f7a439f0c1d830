"""Citations of the protocol's pages: every cited page is there, and has the section."""

from __future__ import annotations

import ast
import re

import pytest
from arch_source import ROOT, docstrings

PAGES = ROOT / "docs/protocol", ROOT / "docs/reference"
CITED = re.compile(r"\bdocs/(?:protocol|reference)/([\w-]+)\.md(?:, sections? (\d+))?")
SECTION = re.compile(r"^## (\d+)\. \S", re.MULTILINE)
OLD = re.compile(r"ARCHITECTURE\.md, |\(ARCHITECTURE\.md\)")
"""Citation of the rules where they were once, under headings without numbers."""
FOLDERS = "p2pdiloco", "scripts", "tests"


def test_sections_are_numbered_without_a_gap() -> None:
    for path in PAGES[0].glob("*.md"):
        text = path.read_text(encoding="utf-8")
        numbers = [int(number) for number in SECTION.findall(text)]
        assert numbers == list(range(1, text.count("\n## ") + 1)), path.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_cited_pages_and_sections_are_there(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            at = f"{path.relative_to(ROOT)}:{line}"
            plain = " ".join(text.split())
            assert not OLD.search(plain), f"{at}: cite a page of docs/protocol and its section"
            for found in CITED.finditer(plain):
                name, section = found[0].partition(",")[0], found[2]
                page = ROOT / name
                assert page.is_file(), f"{at}: there is no {name}"
                sections = SECTION.findall(page.read_text(encoding="utf-8"))
                assert section is None or section in sections, f"{at}: no section {section} in {name}"


def test_pages_name_files_that_are_there() -> None:
    gone = {}
    for folder in PAGES:
        for page in folder.glob("*.md"):
            named = re.findall(r"`([\w-]+(?:/[\w-]+)+\.py)`", page.read_text(encoding="utf-8"))
            roots = [ROOT, ROOT / "p2pdiloco", ROOT / "p2pdiloco/core"]
            missing = [name for name in named if not any((root / name).is_file() for root in roots)]
            if missing:
                gone[page.name] = missing
    assert gone == {}
