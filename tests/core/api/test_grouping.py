"""Rotating groups: everybody works out the same ones, whatever list of members he has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.api.versions import (
    Roster,
    children,
    group_name,
    leaf_index,
    level_sizes,
    next_plan,
    parent_index,
    parse_group,
)


@given(groups=st.integers(1, 5000), size=st.integers(2, 64))
def test_every_group_has_one_parent_and_no_parent_more_children_than_it_can_hear(
    groups: int, size: int
) -> None:
    sizes = level_sizes(groups, size)
    assert sizes[0] == groups and sizes[-1] == 1
    for level in range(1, len(sizes)):
        seen = []
        for index in range(sizes[level]):
            below = children(sizes, level, index)
            assert 1 <= len(below) <= size
            assert all(parent_index(sizes, level - 1, child) == index for child in below)
            seen += list(below)
        assert seen == list(range(sizes[level - 1]))


def test_names_say_epoch_level_and_index_and_nothing_else_is_one() -> None:
    assert parse_group(group_name(7, 5, 1, 2)) == (7, 1, 2)
    assert group_name(0, 1, 0, 0) == WHOLE_RUN
    for name in (WHOLE_RUN, "", "1/2", "1/2/3/4", "a/1/2", "-1/0/0", "1//2", "²/0/0", "9" * 19 + "/0/0"):
        assert parse_group(name) is None


def test_groups_rotate_with_epoch_and_fragment_and_are_about_equally_large() -> None:
    roster = Roster(tuple((f"peer{i}", 1) for i in range(1600)))
    first, again, other = (roster.leaves("run", *key, 100) for key in ((0, 1), (0, 2), (1, 1)))
    assert first != again and first != other
    for lists in (first, again, other):
        assert sorted(p for peers in lists for p in peers) == sorted(p for p, _ in roster.members)
        assert max(len(peers) for peers in lists) <= 40


def test_a_peer_without_the_list_knows_its_group() -> None:
    roster = Roster((("a", 1), ("b", 1), ("c", 3)))
    lists = roster.leaves("run", 0, 4, 2)
    for peer in "abc":
        assert peer in lists[leaf_index("run", 0, 4, 2, peer)]


@pytest.mark.parametrize(
    ("plan", "number", "members", "expected"),
    [
        ((0, 1), 8, 4, (0, 1)),  # fits into one group: nothing rotates
        ((0, 1), 7, 32, (0, 1)),  # not at the end of an epoch
        ((0, 1), 7, 33, (1, 3)),  # but for groups that are twice too large
        ((4, 2), 9, 64, (4, 2)),
        ((4, 2), 9, 65, (5, 5)),
        ((0, 1), 8, 99, (1, 7)),
        ((1, 7), 16, 99, (2, 7)),
        ((1, 7), 16, 16, (2, 1)),  # shrank
    ],
)
def test_the_plan_changes_at_the_end_of_an_epoch_only(
    plan: tuple[int, int], number: int, members: int, expected: tuple[int, int]
) -> None:
    assert next_plan(*plan, number, members, group_size=16, epoch_versions=8) == expected
