"""Views: one encoding, bounded, public and own part apart."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from page_scene import scene

from p2pdiloco.daemon.display.timeline import MAX_POINTS
from p2pdiloco.web.view import (
    BehindReason,
    Control,
    MarkKind,
    MemberCondition,
    NodeCondition,
    Pulse,
    RunView,
    encode_view,
)


def test_a_view_is_the_same_after_its_journey() -> None:
    assert msgspec.json.decode(encode_view(scene()), type=RunView) == scene()


def test_the_public_part_says_nothing_of_the_machine() -> None:
    shown = json.loads(encode_view(scene(own=False)))
    assert shown["own"] is None
    assert "limits" not in json.dumps(shown["public"]) and "device" not in json.dumps(shown["public"])


def test_the_longest_curve_is_bounded() -> None:
    view = json.loads(encode_view(scene()))
    view["public"]["curve"]["loss"] = [1.0] * (MAX_POINTS + 1)
    try:
        msgspec.json.decode(json.dumps(view), type=RunView)
    except msgspec.ValidationError as error:
        assert "length" in str(error)
    else:
        raise AssertionError("taken")


def test_every_word_is_one_word_and_is_explained() -> None:
    for words in (Control, MarkKind, MemberCondition, NodeCondition, Pulse, BehindReason):
        for word in words:
            assert " " not in word.value and " " in str(word)


def test_the_document_lists_all_words_and_no_others() -> None:
    text = (Path(__file__).parents[2] / "docs" / "topics" / "web.md").read_text()
    tables = [table for table in text.partition("## Words")[2].partition("## The past")[0].split("\n\n")[1:]]
    tables = [table for table in tables if table.startswith("| word")]
    for words, table in zip(
        (NodeCondition, Pulse, MemberCondition, BehindReason, MarkKind, Control), tables, strict=True
    ):
        rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()[2:]]
        assert rows == [(f"`{word.value or '-'}`", str(word)) for word in words]
