"""Sizes: how much code there is, and that it is cut neither too large nor too small."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter

import pytest

import budget

MOST_LINES = 900
"""Of a file. One of 150 or more is usual."""
MOST_FILES = 30
"""Of Python in one folder."""
FILES = [*budget.product(), *budget.lab(), *budget.tests(), *budget.scripts()]
ALLOWED = tomllib.loads(budget.EXCEPTIONS.read_text(encoding="utf-8"))


def test_the_product_keeps_to_its_budget() -> None:
    tokens = sum(map(budget.code_tokens, budget.product()))
    assert tokens <= budget.allowed_tokens(), "write less, or use a grant of budget.toml"


def test_no_issue_holds_more_than_its_grant() -> None:
    figures = tomllib.loads(budget.BUDGET.read_text(encoding="utf-8"))
    grants, held = figures["grants"], figures["held"]
    assert not {name for name in grants.keys() & held.keys() if held[name] > grants[name]}


def test_files_and_folders_are_read_at_a_sitting() -> None:
    assert {budget.name_of(path) for path in FILES if budget.lines(path) > MOST_LINES} == set()
    folders = Counter(budget.name_of(path.parent) for path in FILES)
    assert {name: count for name, count in folders.items() if count > MOST_FILES} == {}


def test_a_small_file_has_a_reason() -> None:
    assert all(ALLOWED["small_files"].values())
    assert sorted(ALLOWED["small_files"]) == budget.small_files(), "put it with what needs it, or say why not"


def test_a_file_name_is_used_once() -> None:
    assert ALLOWED["shared_names"] == budget.shared_names(), "name it by what only this one is about"


def test_constructors_take_what_they_are_made_of_by_name() -> None:
    assert ALLOWED["packed"] == budget.packed(), "pass each argument, or one object that has them"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Box(*parts)", True),
        ("api.Box(1, *self.parts)", True),
        ("def f(*parts): return lambda *more: [Box(*more, *both) for both in parts]", True),
        ("def f(*parts): return Box(*parts)", False),
        ("from rich.console import Group\nGroup(*parts)", False),
        ("import rich.console\nrich.console.Group(*parts)", False),
        ("make(*parts)", False),
        ("Box(**parts)", False),
    ],
)
def test_packed_arguments_are_seen(text: str, found: bool) -> None:
    assert any(budget.packed_calls(ast.parse(text))) == found


def test_code_is_counted_without_what_explains_it() -> None:
    text = '"""Words\nand words."""\nimport ast  # why\nclass A:\n    "Words."\n    a = f"{1 + 1}"  # two\n'
    assert budget.tokens_of(text) == len(["class", "A", ":", "a", "=", "text"])
