"""The documents as a site: built without a warning, and read without any network."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from arch_source import ROOT

TOOLS = {"furo": "furo", "myst-parser": "myst_parser", "sphinx": "sphinx"}
"""Packages that build the site, and what of them is imported."""
OUTSIDE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)


class Loads(HTMLParser):
    """Addresses of what a page loads: scripts, styles, pictures, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"src", "srcset", "data", "poster"} | ({"href"} if tag in ("link", "use", "image") else set())
        self.found += [value or "" for name, value in attrs if name in names]


def loads(page: Path) -> Iterator[str]:
    """What a page or a style sheet loads."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".html":
        parser = Loads()
        parser.feed(text)
        yield from parser.found
    yield from re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s]+)""", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew; a warning is an error."""
    for module in TOOLS.values():
        pytest.importorskip(module, reason=f"no {module} here")
    folder = tmp_path_factory.mktemp("site")
    words = [
        "-q",
        "-W",
        "--keep-going",
        "-d",
        folder / "doctrees",
        "-c",
        ROOT / "docs",
        ROOT,
        folder / "site",
    ]
    said = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    return folder / "site"


def test_every_document_has_a_page_and_the_folder_a_start(site: Path) -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("node/*.md")]
    pages = [site / path.relative_to(ROOT).with_suffix(".html") for path in documents]
    assert [page for page in pages if not page.is_file()] == []
    assert "docs/index.html" in (site / "index.html").read_text()


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    outside = {(path.name, where) for path in files for where in loads(path) if OUTSIDE.match(where)}
    assert len(files) > 20 and not outside


def test_where_tests_run_the_site_can_be_built() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert TOOLS.keys() <= {line.partition(">")[0] for line in extras["dev"]}


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css'</style>",
        "<style>a { background: url(https://example.org/a.png) }</style>",
    ],
)
def test_what_is_loaded_from_another_host_is_seen(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(text + '<a href="https://example.org">a link</a>')
    assert [bool(OUTSIDE.match(where)) for where in loads(page)] == [True]
