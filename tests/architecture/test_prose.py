"""Sentences of documents need not be read twice: below 20 words in README and guides, below 25 elsewhere."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from arch_source import ROOT

import prose


@pytest.mark.parametrize("path", prose.documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    lengths = list(map(prose.words, prose.sentences(path.read_text(encoding="utf-8"))))
    assert not lengths or mean(lengths) < prose.most_of(path)


def test_what_counts_is_what_people_read() -> None:
    text = "# A title of five words\n\nOne two `three four` five. Six, e.g. seven.\n\n"
    text += "| a | b |\n|-|-|\n| c | d |\n\n"
    text += "- Eight nine\n- [Ten](eleven.md)\n\n```\nno such words\n```\n"
    assert [prose.words(s) for s in prose.sentences(text)] == [4, 3, 2, 1]
