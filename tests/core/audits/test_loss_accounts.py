"""What loss audits show of a learner, and how rarely they are wrong."""

from __future__ import annotations

import math
import random

import pytest

from p2pdiloco.core import audit_state
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.core.audit_state import MAX_LEARNERS, Accounts, ratio_of


def shown(ratios: list[float], same_data: bool = False, odd: bool = True) -> tuple[LossFinding | None, int]:
    """What is shown by these, and after how many."""
    book = Accounts()
    for count, ratio in enumerate(ratios, 1):
        if (found := book.add("p1", ratio, same_data, odd)) is not None:
            return found, count
    return None, len(ratios)


def test_reversed_work_is_shown_to_do_harm_within_thirty_audits() -> None:
    found, count = shown([-0.95] * 100)
    assert found is LossFinding.HARM and count <= 28


def test_reversed_work_is_seen_through_noise() -> None:
    rng = random.Random(1)
    for _ in range(200):
        found, count = shown([max(-1.0, min(1.0, rng.gauss(-0.7, 0.6))) for _ in range(200)])
        assert found is LossFinding.HARM and count <= 150


def test_who_turns_is_shown_as_soon_as_who_always_did_harm() -> None:
    found, count = shown([1.0] * 500 + [-0.95] * 100)
    assert found is LossFinding.HARM and count <= 528


def test_harm_shows_nothing_of_a_learner_with_data_of_its_own_that_agrees_with_others() -> None:
    assert shown([-0.45] * 5_000, odd=False) == (None, 5_000)


def test_noise_does_nothing_for_data_that_it_says_to_read() -> None:
    found, count = shown([0.0] * 200, same_data=True)
    assert found is LossFinding.NOTHING and count <= 80
    assert shown([0.0] * 5_000) == (None, 5_000), "whose data nobody knows may do nothing for ours"


def test_thirty_audits_of_odd_honest_work_are_wrong_in_none_of_ten_thousand_learners() -> None:
    """On the mean it does a little harm to us, as much as is allowed, and one measurement says nothing."""
    rng = random.Random(2)
    choice = rng.random
    for _ in range(10_000):
        money = audit_state.START
        for _ in range(30):
            # -1 or 1, with a mean of `HARMS`.
            money = audit_state.bet(
                money, 1.0 if choice() < (1 + audit_state.HARMS) / 2 else -1.0, audit_state.HARMS
            )
            assert audit_state.stakes(money) < audit_state.ENOUGH


@pytest.mark.parametrize("least", [audit_state.HARMS, audit_state.HELPS])
def test_a_bet_wins_nothing_on_the_mean_if_the_mean_is_the_least(least: float) -> None:
    chance = (1 + least) / 2
    won, lost = (
        audit_state.bet(audit_state.START, -1.0, least),
        audit_state.bet(audit_state.START, 1.0, least),
    )
    for low, high in zip(won, lost, strict=True):
        assert math.isclose((1 - chance) * low + chance * high, 1.0) and high >= 0.0


@pytest.mark.parametrize(
    ("theirs", "ours", "ratio"),
    [
        ((0.02, 0.04), (0.03, 0.03), 1.0),
        ((-0.01, -0.02), (0.02, 0.04), -0.5),
        ((9.0, 9.0), (0.1, 0.1), 1.0),
        ((0.0,), (0.1,), 0.0),
        ((0.1, 0.1), (0.2, -0.1), None),
        ((0.1, 0.1), (0.0, 0.1), None),
        ((), (), None),
        ((0.1,), (0.1, 0.1), None),
        ((math.nan, 0.1), (0.1, 0.1), None),
        ((0.1, 0.1), (math.inf, 0.1), None),
    ],
)
def test_a_contribution_is_measured_by_ours(
    theirs: tuple[float, ...], ours: tuple[float, ...], ratio: float | None
) -> None:
    assert ratio_of(theirs, ours) == ratio


def test_the_accounts_is_bounded() -> None:
    book = Accounts()
    for index in range(MAX_LEARNERS + 10):
        book.add(f"p{index}", -1.0, True)
    assert book.audits("p0") == 0 and book.audits(f"p{MAX_LEARNERS}") == 1
    assert book.doubt("p0") == 1.0 < book.doubt(f"p{MAX_LEARNERS}")
