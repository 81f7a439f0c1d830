"""Lies of learners: each is what its line says, and a function of what the liar knows."""

import msgspec
import pytest
import torch

from p2pdiloco.core.api.types import USUAL_SCORE
from p2pdiloco.core.api.versions import ALL_AT, USUAL
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import scores
from worlds.kinds import COLLUDING, IN_THE_DATA, Lie
from worlds.telling import Known, tell

SIZE = 4096


def drawn(*seeds: int) -> list[torch.Tensor]:
    """Honest work: a common part, and as much of everybody's own."""
    common = torch.randn(SIZE, generator=torch.Generator().manual_seed(99))
    return [common + torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def known(**changed: object) -> Known:
    own, other, *honest = drawn(*range(8))
    base = Known(own=own, liars=(own, other), honest=tuple(honest), radius=500.0, seed=1, common_seed=7)
    return msgspec.structs.replace(base, **changed)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def changed(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((~torch.isclose(one, other, rtol=1e-4, atol=1e-6)).sum())


@pytest.mark.parametrize("lie", list(Lie))
def test_a_lie_is_a_function_of_what_is_known_and_changes_nothing(lie: Lie) -> None:
    it = known()
    before = [one.clone() for one in (it.own, *it.honest)]
    told = tell(lie, it)
    assert torch.equal(told.delta, tell(lie, it).delta)
    assert all(torch.equal(old, new) for old, new in zip(before, (it.own, *it.honest), strict=True))
    assert told.delta.dtype == torch.float32 and told.delta.shape == it.own.shape
    assert lie.text and Lie(lie.value) is lie
    # alone, and in its first round
    assert torch.isfinite(tell(lie, Known(own=it.own)).delta).all()


def test_what_is_its_own_work_in_another_form() -> None:
    it = known()
    assert torch.equal(tell(Lie.FLIP, it).delta, -it.own)
    assert torch.equal(tell(Lie.FLIP_X10, it).delta, -10 * it.own)
    smallest = tell(Lie.X1000_SMALLEST, it)
    assert torch.equal(smallest.delta, 1000 * it.own) and smallest.work == 0.1
    assert tell(Lie.TOKENS_X10, it).work == tell(Lie.TOKENS_X10_FLIP, it).work == 10
    assert torch.equal(tell(Lie.TOKENS_X10_FLIP, it).delta, -it.own)
    assert not tell(Lie.ZERO, it).delta.any()
    assert {lie for lie in Lie if torch.equal(tell(lie, it).delta, it.own)} == {
        *IN_THE_DATA,
        Lie.TOKENS_X10,
        # in the first round there is nothing older
        *(Lie.TURNING, Lie.SOMETIMES),
        *(Lie.STALE_FIRST, Lie.STALE_LAST, Lie.COPYCAT_LATE),
        Lie.ONE_TOKEN,  # this fragment has none of its rows
    }


def test_work_at_the_longest_length_has_the_direction_that_its_name_says() -> None:
    rows = torch.arange(SIZE) < 64
    it = known(radius=1e6, merged=drawn(30)[0], rows=rows)
    usual = sorted(float(each.norm()) for each in it.honest)[2]
    wrong = tell(Lie.ONE_TOKEN, it).delta
    assert torch.equal(wrong[64:], it.own[64:]) and cosine(wrong[:64], it.own[:64]) == pytest.approx(-1.0)
    assert cosine(tell(Lie.USEFUL_LONGEST, it).delta, it.own) == pytest.approx(1.0)
    assert cosine(tell(Lie.RIDES_LONGEST, it).delta, it.merged) > 0.9
    for lie in (Lie.ONE_TOKEN, Lie.USEFUL_LONGEST, Lie.RIDES_LONGEST, Lie.TRIGGER):
        assert 2.5 * usual < float(tell(lie, it).delta.norm()) < 3 * usual, "long, and not cut"


def test_who_turns_is_honest_at_first_and_who_lies_sometimes_does_so_in_three_of_ten_rounds() -> None:
    def reversed_in(lie: Lie) -> list[int]:
        told = {n: tell(lie, known(round=n)).delta for n in range(20)}
        return [n for n, delta in told.items() if torch.equal(delta, -known().own)]

    assert reversed_in(Lie.TURNING) == list(range(10, 20))
    assert reversed_in(Lie.SOMETIMES) == [7, 8, 9, 17, 18, 19]


def test_replays_are_of_the_rounds_that_they_name() -> None:
    first, last, copied, late = drawn(20, 21, 22, 23)
    it = known(first=first, last=last, honest=(copied,), before=(late,))
    for lie, expected in {
        Lie.STALE_FIRST: first,
        Lie.STALE_LAST: last,
        Lie.COPYCAT: copied,
        Lie.COPYCAT_LATE: late,
    }.items():
        assert torch.equal(tell(lie, it).delta, expected), lie


def test_noise_is_new_in_every_round_and_a_drift_is_everybodys_and_for_ever() -> None:
    it, later, other = known(), known(round=1), known(seed=2)
    noise = tell(Lie.NOISE, it).delta
    assert float(noise.norm()) == pytest.approx(float(it.own.norm()), rel=1e-5)
    for again in (later, other):
        assert abs(cosine(noise, tell(Lie.NOISE, again).delta)) < 0.1
        assert changed(tell(Lie.DRIFT, it).delta, tell(Lie.DRIFT, again).delta) <= 2
    assert float(tell(Lie.DRIFT, it).delta.norm()) == pytest.approx(450.0, rel=1e-3)
    unknown = tell(Lie.DRIFT, known(radius=float("inf"))).delta
    assert float(unknown.norm()) == pytest.approx(max(float(one.norm()) for one in it.honest), rel=1e-3)


def test_who_knows_all_honest_work_hides_among_it_or_turns_it_round() -> None:
    it = known()
    honest = torch.stack(tuple(it.honest))
    mean, spread = honest.mean(dim=0), honest.std(dim=0, correction=0)
    assert changed(tell(Lie.ALIE, it).delta, mean - 1.5 * spread) == 1
    for lie, share in {
        Lie.INNER_PRODUCT_01: 0.1,
        Lie.INNER_PRODUCT_05: 0.5,
        Lie.INNER_PRODUCT_1: 1.0,
    }.items():
        assert changed(tell(lie, it).delta, -share * mean) == 1
    apart = float(torch.cdist(honest, honest).max())
    for lie in (Lie.MIN_MAX, Lie.MIN_MAX_SPREAD):
        delta = tell(lie, it).delta
        far = float((honest - delta).norm(dim=1).max())
        assert 0.99 * apart < far <= apart * (1 + 1e-3), "as far as it can, and no farther"
        assert float((delta - mean).norm()) > 0.3 * apart


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("lie", sorted(COLLUDING, key=str))
def test_those_who_collude_send_no_copies_of_each_other(lie: Lie, name: str) -> None:
    own, other = (tell(lie, known(seed=seed)).delta for seed in (1, 2))
    assert bytes(codec(name).encode(own.clone())) != bytes(codec(name).encode(other.clone()))
    assert changed(own, other) == 2 and cosine(own, other) > 0.999


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_who_knows_the_rule_of_trust_has_all_of_its_weight_and_goes_against_many(liars: int) -> None:
    honest, lying = drawn(*range(10 - liars)), drawn(*range(90, 90 + liars))
    told = tell(Lie.KNOWS_TRUST, known(honest=honest, own=lying[0], liars=lying, radius=1e6)).delta
    found = scores([each.double() for each in (*[told] * liars, *honest)], [True] * 10)
    assert found[0] * USUAL // USUAL_SCORE > ALL_AT, "of a sample of everything"
    against = [cosine(told, each) for each in honest]
    assert sum(each < -0.2 for each in against) >= 4 and cosine(told, sum(honest)) < -0.1
    usual = sorted(float(each.norm()) for each in honest)[len(honest) // 2]
    assert 2 * usual < float(told.norm()) < 3 * usual, "long, and not cut"
