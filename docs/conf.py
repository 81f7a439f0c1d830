"""The documents as a site: `make docs` writes it to build/site. It is read without any network.

The source folder is the repository, so that links between documents are the same here and on a forge.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from p2pdiloco.release import VERSION

ROOT = Path(__file__).resolve().parent.parent
PROTOCOL = (
    "membership",
    "trust",
    "election",
    "rounds",
    "weights",
    "proofs",
    "audits",
    "loss-audits",
    "following",
    "exactly-once",
    "forks",
    "*",
)
CHAPTERS = {
    "Start": "README docs/*",
    "Guides": "docs/guides/volunteer docs/guides/host docs/guides/run-owner docs/guides/*",
    "Operators": "*/RUNBOOK",
    "Topics": "docs/topics/*",
    "Contributors": "CONTRIBUTING ARCHITECTURE SECURITY *",
    "Protocol": " ".join(f"docs/protocol/{page}" for page in PROTOCOL),
    "Reference": "docs/reference/*",
    "Lab": "docs/lab/*",
    "More": "docs/**/*",
}
"""Headings of the table of contents and their documents, in order; `*` stands for the rest of a folder."""

project = "p2pdiloco"
author = copyright = "the p2pdiloco authors"
version = release = VERSION
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "node/*.md", "bootstrap/*.md"]
exclude_patterns = [".*", "build", "dist", "p2pdiloco*", "scripts", "tests", "docs/examples"]
suppress_warnings = ["misc.highlighting_failure"]  # shortened output is no JSON, say

myst_heading_anchors = 6
myst_fence_as_directive = ["mermaid"]
highlight_language = "none"
smartquotes = False  # -- begins a flag

html_theme = "furo"
html_title = f"p2pdiloco {VERSION}"
html_copy_source = False
html_use_index = False


START = f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={root_doc}.html">'


class Mermaid(SphinxDirective):
    """A diagram, which a forge draws: here its text, or nothing if it is one of a state machine's (a table of
    the same stands beside it). Drawing needs a script of 3 MB."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The nodes in its place."""
        if self.content[0].startswith("stateDiagram"):
            return []
        text = "\n".join(self.content)
        return [nodes.literal_block(text, text, language="none")]


def contents() -> str:
    """Tables of contents, one of each chapter."""
    found, placed = "", {root_doc}
    for chapter, patterns in CHAPTERS.items():
        paths = [path for each in patterns.split() for path in sorted(ROOT.glob(f"{each}.md"))]
        names = [str(path.relative_to(ROOT).with_suffix("")) for path in paths]
        names = [name for name in dict.fromkeys(names) if name not in placed]
        placed |= set(names)
        listed = "".join(f"/{name}\n" for name in names)
        found += f"\n\n```{{toctree}}\n:hidden:\n:caption: {chapter}\n\n{listed}```\n"
    return found


def add_contents(app: Sphinx, document: str, source: list[str]) -> None:
    """Append them to the first document, which shows none on a forge."""
    if document == root_doc:
        source[0] += contents()


def write_start(app: Sphinx, error: Exception | None) -> None:
    """Write a page for who opens the folder: the first document is one folder deeper."""
    if error is None:
        (Path(app.outdir) / "index.html").write_text(START, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("mermaid", Mermaid)
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_start)
