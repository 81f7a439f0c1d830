"""Trust weights: slow, never nothing, and the same for everybody who has the parent."""

from __future__ import annotations

import pytest

from p2pdiloco.core.api.types import (
    FULL_TRUST,
    LEAST_SCORE,
    LEAST_TRUST,
    MOST_SCORE,
    NEVER,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    Contributor,
    Stamp,
)
from p2pdiloco.core.api.versions import ALL_AT, BEGINS, Mean, plausible_score, trust_of
from p2pdiloco.core.chain import marks_of


def rounds(*scores: int, begins: int = BEGINS) -> list[int]:
    """Trust weights in these rounds, of a newcomer unless it begins with more."""
    mean, found = Mean(begins, 0 if begins == BEGINS else 100), []
    for score in scores:
        found.append(mean.trust(score))
        mean = Mean(mean.after(score), mean.merges + 1)
    return found


def test_a_newcomer_begins_with_half_and_has_all_soon() -> None:
    assert trust_of(BEGINS) == FULL_TRUST // 2
    assert rounds(USUAL_SCORE) == [FULL_TRUST]


@pytest.mark.parametrize(("score", "within"), [(-USUAL_SCORE, 1), (0, 24)])
def test_who_goes_elsewhere_has_next_to_nothing_soon(score: int, within: int) -> None:
    assert rounds(*[score] * within)[-1] == LEAST_TRUST
    saved = Mean()
    for merges in range(100):
        saved = Mean(saved.after(MOST_SCORE), merges)
    assert rounds(*[score] * (within + 22), begins=saved.agreement)[-1] == LEAST_TRUST


def test_noise_weighs_little_from_its_first_round_on() -> None:
    assert all(weight < FULL_TRUST / 3 for weight in rounds(0, 0, 0, 0))


def test_one_odd_contribution_costs_an_honest_learner_nothing() -> None:
    usual = [USUAL_SCORE] * 20
    assert set(rounds(*usual, 0, *usual)[10:]) == {FULL_TRUST}
    against = rounds(*usual, LEAST_SCORE, *usual)
    assert against[20] < FULL_TRUST / 2 and set(against[22:]) == {FULL_TRUST}, "it has all again soon"


def test_an_honest_learner_that_goes_a_little_against_the_others_now_and_then_keeps_its_weight() -> None:
    found = rounds(*[16, 30, 2, -10, 24, 12, 20] * 20)
    assert sum(found) > 0.9 * FULL_TRUST * len(found), found


def test_who_turns_has_next_to_nothing_from_the_second_round_on() -> None:
    for reversed_by in (USUAL_SCORE, USUAL_SCORE * 3 // 4):
        found = rounds(*[MOST_SCORE] * 100, *[-reversed_by] * 5)[100:]
        assert found[0] < 0.6 * FULL_TRUST and set(found[1:]) == {LEAST_TRUST}, found


def test_who_reverses_three_of_ten_has_little_weight_in_those() -> None:
    in_a_row, spread = (1, 1, 1, 1, 1, 1, 1, -1, -1, -1), (1, 1, -1, 1, 1, -1, 1, 1, -1, 1)
    for ten in (in_a_row, spread):
        weights = rounds(*[USUAL_SCORE * sign for sign in ten] * 20)[100:]
        lies = [weight for weight, sign in zip(weights, ten * 10, strict=True) if sign < 0]
        assert sum(lies) < 0.1 * FULL_TRUST * len(lies), lies


def test_rounds_that_are_too_small_to_be_measured_forgive_slowly_and_up_to_all_only() -> None:
    found = rounds(*[UNMEASURED] * 200, begins=-USUAL_SCORE)
    assert found[5] == LEAST_TRUST and found[-1] == FULL_TRUST and found == sorted(found)
    assert Mean(300, 9).after(UNMEASURED) == 300
    assert Mean(-700, 9).after(UNCLEAR) == -700, "a liar that keeps rounds from being measured gains nothing"
    assert Mean().after(UNCLEAR) == Mean().after(UNMEASURED) > BEGINS, "a newcomer is not kept down"


def test_the_mean_stays_within_what_a_table_can_say() -> None:
    low, high = BEGINS, BEGINS
    for merges in range(1000):
        low, high = Mean(low, merges).after(LEAST_SCORE), Mean(high, merges).after(MOST_SCORE)
    assert -3100 < low < 0 < high <= 2 * ALL_AT
    assert [
        plausible_score(s) for s in (UNMEASURED, LEAST_SCORE - 1, LEAST_SCORE, MOST_SCORE, MOST_SCORE + 1)
    ] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_the_table_keeps_it_and_it_counts_for_the_next_version() -> None:
    marks = marks_of(())
    assert marks.mean("p1") == Mean()
    for number in range(1, 9):
        parts = tuple(
            Contributor(who, Stamp(1, number), 40, 4, NEVER, score=score)
            for who, score in (("liar", -USUAL_SCORE), ("p1", USUAL_SCORE))
        )
        marks = marks.after(number, parts)
    weights = [marks.mean(who).trust(UNMEASURED) for who in ("p1", "liar")]
    assert weights == [FULL_TRUST, LEAST_TRUST] and marks.mean("liar").merges == 8
    assert marks.digest != marks_of(m for m in marks.table if m.learner == "p1").digest
