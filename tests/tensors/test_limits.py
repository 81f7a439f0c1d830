"""Limits of a merge: what one learner claims, or sends, moves it no further than a generous one's work."""

import math

import pytest
import torch
from kit import config

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api.types import NO_LIMITS, MergeLimits
from p2pdiloco.core.chain import heaviest_units
from p2pdiloco.errors import RemoteError
from p2pdiloco.tensors.codecs import UnusableInputs, codec
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import Accumulator, check_partial, contribution_weight, encode_partial
from p2pdiloco.tensors.outer_update import first_length
from p2pdiloco.tensors.vault import Vault

SPECS = [TensorSpec("emb", (6, 4), True), TensorSpec("a", (5, 4)), TensorSpec("b", (48,))]
(LAYOUT,) = plan_fragments(SPECS, 1)
PERIOD = 4
LIMITS = MergeLimits(160, 8.0)


def unit(seed: int) -> torch.Tensor:
    """A pseudo-gradient of length 1."""
    values = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))
    return values / values.norm()


def merged(deltas: list[torch.Tensor], work: list[tuple[int, int]], limits: MergeLimits) -> torch.Tensor:
    accumulator, out = Accumulator(LAYOUT, PERIOD, limits=limits), torch.empty(LAYOUT.numel)
    for delta, (tokens, steps) in zip(deltas, work, strict=True):
        accumulator.add(delta, tokens, steps)
    accumulator.result(out)
    return out


def vault() -> Vault:
    made = Vault([LAYOUT], OuterSection(), PERIOD, "fp32", "fp32")
    generator = torch.Generator().manual_seed(9)
    made.load_initial({spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS})
    return made


def test_claimed_tokens_weigh_no_more_than_the_limit() -> None:
    assert contribution_weight(1 << 32, 1 << 26, 160) == 160 * 64
    honest, liar = [unit(i) for i in range(4)], unit(9)
    both = merged([*honest, liar], [(40, 4)] * 4 + [(1 << 32, (1 << 32) // 10)], LIMITS)
    four_units = merged([*honest, liar], [(40, 4)] * 4 + [(160, 16)], LIMITS)
    torch.testing.assert_close(both, four_units)


@pytest.mark.parametrize("claimed", [40, 400, 1 << 32])
def test_whoever_claims_anything_for_flipped_signs_leaves_the_others_the_direction(claimed: int) -> None:
    """One of four: by its share it takes half of what three say away, and never turns it round."""
    limits = MergeLimits(round(heaviest_units(4, config()) * 40), 8.0)
    true, work = unit(1), [(40, 4)] * 3 + [(claimed, max(4, claimed // 10))]
    out = merged([true, true, true, -true], work, limits)
    assert float(torch.dot(out, true)) > 0.3
    assert claimed == 40 or float(torch.dot(merged([true, true, true, -true], work, LIMITS), true)) < 0


def test_what_is_within_the_limits_is_merged_as_without_any() -> None:
    deltas, work = [3 * unit(i) for i in range(5)], [(30 + 9 * i, 3 + i) for i in range(5)]
    assert torch.equal(merged(deltas, work, LIMITS), merged(deltas, work, NO_LIMITS)), "to the bit"


def test_a_long_contribution_is_cut() -> None:
    honest, work = [unit(i) for i in range(4)], [(40, 4)] * 5
    cut = merged([*honest, 1000 * unit(9)], work, LIMITS)
    torch.testing.assert_close(cut, merged([*honest, 8 * unit(9)], work, LIMITS))
    assert float(cut.norm()) < 3


def test_an_absurd_one_is_refused_before_it_is_in() -> None:
    accumulator = Accumulator(LAYOUT, PERIOD, limits=LIMITS)
    with pytest.raises(RemoteError, match="out-of-range"):
        accumulator.add(4097 * unit(1), 40, 4)
    assert accumulator.contributions == 0 and not accumulator.weight
    accumulator.add(4000 * unit(1), 40, 4)


def test_a_merge_names_who_sent_it() -> None:
    here = vault()
    inputs = [(codec("fp32").encode(delta), 40, 4) for delta in (unit(1), 1e6 * unit(2), unit(3))]
    with pytest.raises(UnusableInputs) as error:
        here.merge(0, 1, inputs, limits=LIMITS)
    assert list(error.value.faults) == [1]


def test_a_partial_merge_is_judged_by_the_limits_that_it_states() -> None:
    accumulator = Accumulator(LAYOUT, PERIOD, limits=LIMITS)
    work = [(40, 4), (1000, 100)]
    for seed, (tokens, steps) in enumerate(work):
        accumulator.add(100 * unit(seed), tokens, steps)
    payload = encode_partial(accumulator)
    check_partial(LAYOUT, payload, work, PERIOD, limits=LIMITS)
    for other in (MergeLimits(80, 8.0), MergeLimits(160, 4.0)):
        with pytest.raises(RemoteError):
            check_partial(LAYOUT, payload, work, PERIOD, limits=other)


def test_limits_are_near_while_a_partial_is_under_way() -> None:
    assert LIMITS.near(MergeLimits(1000, 1.0)) and NO_LIMITS.near(NO_LIMITS)
    assert not LIMITS.near(MergeLimits(160 * 17, 8.0))
    assert not LIMITS.near(MergeLimits(160, 8.0 / 17)) and not LIMITS.near(NO_LIMITS)
    assert not MergeLimits(160, math.nan).near(LIMITS)


def test_an_update_is_as_long_as_its_syncer_says() -> None:
    here, there = vault(), vault()
    made = here.merge(0, 1, [(codec("fp32").encode(2 * unit(1)), 40, 4)], limits=LIMITS)
    assert math.isclose(made.norm, 2.0, rel_tol=1e-5)
    assert there.apply(0, 1, made.update, 4, made.norm) == made.state_digest
    assert there.apply(0, 1, made.update, 4, 1.009 * made.norm) == made.state_digest
    for false in (0.0, 1.02 * made.norm, 20.0, math.nan):
        with pytest.raises(RemoteError, match="out-of-range"):
            there.apply(0, 1, made.update, 4, false)
    assert there.version(0) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_an_update_that_is_cut_is_not_longer_once_it_is_encoded(name: str, seed: int) -> None:
    """A partial merge may be of limits that were sixteen times as large."""
    made = Vault([LAYOUT], OuterSection(), PERIOD, "fp32", name)
    made.load_initial({spec.name: torch.ones(spec.shape) for spec in SPECS})
    long = Accumulator(LAYOUT, PERIOD, limits=MergeLimits(160, 128.0))
    long.add(100 * unit(seed), 40, 4)
    update = made.merge(0, 1, [], [encode_partial(long)], 4, LIMITS)
    assert 0.8 * LIMITS.longest_update < update.norm <= LIMITS.longest_update


def test_what_earlier_updates_left_out_makes_no_update_too_long() -> None:
    here = Vault([LAYOUT], OuterSection(), PERIOD, "fp32", "topk")
    here.load_initial({spec.name: torch.ones(spec.shape) for spec in SPECS})
    for number in range(1, 40):
        limits = MergeLimits(160, 8.0 if number < 20 else 0.01)
        made = here.merge(0, number, [(codec("fp32").encode(unit(1)), 40, 4)], limits=limits)
        assert made.norm <= limits.longest_update * 1.01
        here.commit(0, number)


def test_the_length_of_version_0_is_a_power_of_two() -> None:
    assert first_length(torch.full((100,), 0.3)) == 4.0
    assert first_length(torch.zeros(1024)) == 1.0, "adapters begin with zeros"


@pytest.mark.parametrize("part", [0, 1])
def test_a_state_far_beyond_version_0_is_not_taken(part: int) -> None:
    here = vault()
    absurd = torch.full((LAYOUT.numel,), 1025 * here.first_length(0))
    parts = [torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)]
    parts[part] = absurd
    theta, momentum = (memoryview(values.numpy()).cast("B") for values in parts)
    with pytest.raises(RemoteError, match="out-of-range"):
        here.load_spare(0, 5, theta, momentum)
    loan = here.lend_spare(0)
    for buffer, values in zip(loan.buffers, (theta, momentum), strict=True):
        buffer.cast("B")[:] = values
    with pytest.raises(RemoteError, match="out-of-range"):
        here.take_loan(0, 5, loan)


def test_whose_contribution_was_cut_is_known() -> None:
    made, part = vault(), codec("fp32")
    inputs = [(bytes(part.encode(scale * unit(seed))), 40, 4) for seed, scale in enumerate((1.0, 100.0, 2.0))]
    assert made.merge(0, 1, inputs, limits=LIMITS).found.cut == (1,)
    assert made.merge_partial(0, inputs, [], LIMITS).found.cut == (1,)
    assert made.own.encode(0, torch.zeros(LAYOUT.numel), 100 * unit(1)).length == pytest.approx(100)


def encoded(*lengths: float, steps: int = 4) -> list[tuple[bytes, int, int]]:
    """Inputs of these lengths."""
    made = (codec("fp32").encode(length * unit(seed)) for seed, length in enumerate(lengths))
    return [(bytes(payload), 10 * steps, steps) for payload in made]


def test_while_nothing_is_known_to_be_usual_contributions_are_cut_by_each_other() -> None:
    limits = MergeLimits(1 << 40, 1e6, of_median=3.0)
    made = vault().merge(0, 1, encoded(1.0, 2.0, 100.0, 7.0), limits=limits)
    assert made.found.cut == (2, 3), "of more than three times the lower median, 2"
    assert made.found.lengths == pytest.approx((1.0, 2.0, 100.0, 7.0)), "as they came"
    alike = vault().merge(0, 1, encoded(1.0, 2.0, 6.0, 6.0), limits=limits)
    assert alike.norm == pytest.approx(made.norm, rel=1e-5)
    assert vault().merge(0, 1, encoded(1.0, 100.0), limits=limits).found.cut == (), "of two neither is told"
    zeros = vault().merge(0, 1, encoded(0.0, 0.0, 0.0, 1.0, 2.0, 100.0), limits=limits)
    assert zeros.found.cut == (5,), "zeros are no measure"
    assert vault().merge(0, 1, encoded(1.0, 1.0, 100.0), limits=MergeLimits(1 << 40, 1e6)).found.cut == ()


def test_work_of_few_steps_is_usual_though_it_is_short() -> None:
    limits = MergeLimits(1 << 40, 1e6, of_median=3.0)
    slow = encoded(0.5, 0.5, 0.5, steps=1)
    assert vault().merge(0, 1, [*slow, *encoded(2.9)], limits=limits).found.cut == ()
