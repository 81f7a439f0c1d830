"""Amendments: which one is in force where, and which ones a new one takes back."""

import msgspec
import pytest

from p2pdiloco.core.api.config import MAX_AMENDMENTS, Amendment, Going, amended, in_force, newest

FIRST = Amendment(1, 100, schedule_tokens=1000)
SECOND = Amendment(2, 200, rate_factor=0.5)


def test_the_newest_that_has_come_due_holds_alone() -> None:
    both = (FIRST, SECOND)
    assert [in_force(both, tokens) for tokens in (0, 99, 100, 199, 200, 10**9)] == [
        *(None, None, FIRST, FIRST),
        *(SECOND, SECOND),
    ]
    assert in_force(both[::-1], 200) == SECOND == newest(both)  # whatever their order
    assert newest(()) is None


def test_a_new_one_takes_back_what_was_to_come_after_it() -> None:
    pause = Amendment(3, 200, going=Going.PAUSE)
    assert amended((FIRST, SECOND), pause) == (FIRST, pause)
    assert amended((FIRST, SECOND), Amendment(3, 100)) == (Amendment(3, 100),)
    assert in_force(amended((FIRST, pause), Amendment(4, 150)), 500) == Amendment(4, 150)


def test_there_are_never_too_many() -> None:
    found: tuple[Amendment, ...] = ()
    for number in range(1, 2 * MAX_AMENDMENTS):
        found = amended(found, Amendment(number, number))
    assert len(found) == MAX_AMENDMENTS
    assert newest(found) == Amendment(2 * MAX_AMENDMENTS - 1, 2 * MAX_AMENDMENTS - 1)


@pytest.mark.parametrize(
    "broken",
    [
        [0, 0],
        [1, -1],
        [1, 0, 0, 0.0],
        [1, 0, 0, float("nan")],
        [1, 0, 0, float("inf")],
        [1, 0, 0, 1.0, "dance"],
        [1, 0, 0, 1.0, "end", "x" * 241],
        [1, 0, 0, 1.0, "end", "", 7],
    ],
)
def test_what_says_anything_else_is_no_amendment(broken: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(broken, Amendment)
