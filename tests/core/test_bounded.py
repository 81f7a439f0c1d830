"""A table that forgets what was set longest ago."""

from __future__ import annotations

from p2pdiloco.util import BoundedDict


def test_who_is_set_again_is_kept_longer() -> None:
    table: BoundedDict[str, int] = BoundedDict(2)
    table["a"] = 1
    table["b"] = 2
    table["a"] = 3
    table["c"] = 4
    assert dict(table) == {"a": 3, "c": 4}


def test_a_default_counts_like_what_is_set() -> None:
    table: BoundedDict[str, int] = BoundedDict(1)
    assert table.setdefault("a", 1) == 1
    assert table.setdefault("b", 2) == 2
    assert list(table) == ["b"]
