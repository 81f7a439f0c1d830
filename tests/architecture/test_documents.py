"""Links of documents lead somewhere, what they name is there, and references are those of the code."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from arch_source import LAB, PACKAGE, ROOT, docstrings, sources
from markdown_it import MarkdownIt
from markdown_it.token import Token

import references

FOLDERS = (".", ".github", "bootstrap", "docs", "node")
DOCUMENTS = sorted(
    {path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.md" if folder != "." else "*.md")}
)
NAMED = re.compile(r"(?<![\w/.])(?:docs|node|bootstrap)/[\w/.-]*\.md\b")
"""A document that code or a document mentions."""
HISTORY = ("CHANGELOG.md", "docs/moved")
"""Documents that name files as they once were."""
CODE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)`")
"""A file of code that a document names."""
ROOTS = (ROOT, PACKAGE, PACKAGE / "core", LAB, ROOT / "scripts" / "bench", ROOT / "docs")
"""Folders that paths of code begin at."""
CITED = re.compile(r"\b(docs/(?:protocol|reference)/[\w-]+\.md), sections? (\d+)")
SECTION = re.compile(r"^## (\d+)\. \S", re.MULTILINE)
OTHERS = [
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "scripts/check",
    "scripts/setup",
    "scripts/test",
    "bootstrap/bootstrap.toml",
    "node/node.toml",
]


def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Anchors of a document's headings, as forges make them."""
    found: Counter[str] = Counter()
    names = set()
    parsed = tokens(path)
    for opening, inline in pairwise(parsed):
        if opening.type == "heading_open":
            text = "".join(
                each.content for each in inline.children or () if each.type in ("text", "code_inline")
            )
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    return frozenset(names)


def links(path: Path) -> list[str]:
    """Addresses of a document's links and pictures."""
    inline = [child for token in tokens(path) for child in token.children or ()]
    return [str(each.attrs.get("href") or each.attrs.get("src") or "") for each in inline if each.attrs]


def fault(document: Path, link: str) -> str | None:
    """What is wrong with a link within the repository."""
    target, _, anchor = unquote(link).partition("#")
    path = (document.parent / target).resolve() if target else document
    if path.is_dir():
        return "a folder, of which a site has no page: link a file of it"
    if not path.is_file():
        return "no such file"
    if not path.is_relative_to(ROOT):
        return "outside of the repository"
    if anchor and path.suffix == ".md" and anchor not in anchors(path):
        return "no such heading"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    inner = [link for link in links(document) if not re.match(r"[a-z]+:", link)]
    found = {link: why for link in inner if (why := fault(document, link))}
    assert not found


def test_documents_that_are_named_exist() -> None:
    code = [path for top in ("p2pdiloco", "lab", "scripts", "tests") for path in (ROOT / top).rglob("*.py")]
    files = [*DOCUMENTS, *code, *(ROOT / name for name in OTHERS)]
    dead = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if not str(path.relative_to(ROOT)).startswith(HISTORY)
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    }
    assert not dead


def test_code_that_documents_name_is_there() -> None:
    """A bare file name, too, beside the path of another: some file is called so."""
    called = {
        path.name
        for top in ("p2pdiloco", "lab", "scripts", "tests", "docs")
        for path in (ROOT / top).rglob("*.py")
    }
    gone = {
        f"{document.relative_to(ROOT)}: {name}"
        for document in DOCUMENTS
        if not str(document.relative_to(ROOT)).startswith(HISTORY)
        for name in CODE.findall(document.read_text(encoding="utf-8"))
        if name not in called and not any((root / name).exists() for root in ROOTS)
    }
    assert not gone


def test_sections_that_docstrings_cite_are_there() -> None:
    dead = {
        f"{path.relative_to(ROOT)}:{line}: {page}, section {section}"
        for folder in ("p2pdiloco", "scripts", "tests")
        for path, tree in sources(folder).items()
        for line, text in docstrings(tree)
        for page, section in CITED.findall(" ".join(text.split()))
        if section not in SECTION.findall((ROOT / page).read_text(encoding="utf-8"))
    }
    assert not dead


def test_references_are_those_of_the_code() -> None:
    assert references.main(["--check"]) == 0, "run python scripts/references.py"


@pytest.mark.parametrize("name", references.PAGES)
def test_every_row_of_a_reference_says_something(name: str) -> None:
    rows = [line for line in references.PAGES[name]().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.replace(r"\|", "/").strip("|").split("|")] for row in rows]
    assert [row for row in cells if not row[0] or not row[-1]] == []


def test_dead_links_are_found() -> None:
    page = ROOT / "docs" / "reference" / "states.md"
    assert fault(page, "states.md#a-syncers-round") is None and fault(page, "#a-syncers-round") is None
    assert fault(page, "#a-syncer") == "no such heading"
    assert fault(page, "nothing.md") == "no such file"
    assert str(fault(page, "../reference")).startswith("a folder")
    assert fault(page, "/etc/passwd") == "outside of the repository"
