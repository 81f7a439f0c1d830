#!/usr/bin/env python3
"""Prints how long the sentences of each document are: the mean, and the longest one.

python scripts/prose.py [FILE…]           of these, or of all: words a sentence, sentences, the longest
python scripts/prose.py --worst N FILE…   the N longest sentences of each

Counted are paragraphs and list items. Left out are code blocks, tables, headings, pictures and quoted output;
inline code is one word.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("CHANGELOG.md", "docs/reference/tree.md")
"""Records: what was done, and lists that are generated."""
MOST, MOST_OF_GUIDES = 25.0, 20.0
"""Most words a sentence, on the average of a document; README and guides have to be below theirs."""
_END = re.compile(r"(?<=[.!?])[)\"”]*\s+(?=[A-Z0-9`(\"“])|\n\n")
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|No|Fig)\.\s")


def documents() -> list[Path]:
    """Every document of the repository that people read."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("node/*.md"),
        *ROOT.glob("bootstrap/*.md"),
    ]
    return sorted(path for path in found if not str(path.relative_to(ROOT)).startswith(LEFT_OUT))


def most_of(path: Path) -> float:
    """Most words a sentence that this document may have, on the average."""
    guide = path == ROOT / "README.md" or path.parent.name == "guides"
    return MOST_OF_GUIDES if guide else MOST


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown document, as plain text, in their order."""
    found: list[str] = []
    in_table = in_heading = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        in_table = token.type != "table_close" and (in_table or token.type == "table_open")
        in_heading = token.type != "heading_close" and (in_heading or token.type == "heading_open")
        if token.type == "inline" and not in_table and not in_heading:
            plain = _ABBREVIATIONS.sub(r"\1 ", _plain(token))
            found += [part.strip() for part in _END.split(plain) if words(part)]
    return found


def words(sentence: str) -> int:
    """Number of words of a sentence."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def _plain(inline: Token) -> str:
    """Text of an inline token; inline code is one word."""
    parts = []
    for child in inline.children or ():
        if child.type == "code_inline":
            parts.append("`" + "_".join(child.content.split()) + "`")
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif child.type == "text":
            parts.append(child.content)
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Exit status: 1 if a document's sentences are too long on the average."""
    worst = 0
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if arguments[:1] == ["--worst"]:
        worst, arguments = int(arguments[1]), arguments[2:]
    failed = False
    for path in [Path(name).resolve() for name in arguments] or documents():
        found = sorted(sentences(path.read_text(encoding="utf-8")), key=words, reverse=True)
        if not found:
            continue
        average = mean(map(words, found))
        long = average >= most_of(path)
        failed |= long
        name = path.relative_to(ROOT)
        print(f"{average:5.1f} {len(found):4} {words(found[0]):4}  {name}{'  TOO LONG' * long}")
        for sentence in found[:worst]:
            print(f"    {words(sentence):3}  {sentence}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
