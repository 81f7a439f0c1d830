"""Outer steps of studies (`study.outer.variants`)."""

import msgspec
import pytest
import torch

from study.outer.variants import TopTwoBits, Variant, VariantSwarm
from study.play import play
from study.setting import Setting

replace = msgspec.structs.replace
SMALL = Setting(model="pico", steps=32, inner_steps=4, learners=2, warmup=5, momentum_warmup=4)


def played(setting, variant):
    swarm = VariantSwarm(setting, variant, 512)
    try:
        return swarm.play(setting.steps, 8), swarm.seen
    finally:
        swarm.close()


def test_the_variant_that_changes_nothing_is_production():
    usual = play(SMALL, 512)
    curve, seen = played(SMALL, Variant())
    assert [loss for _, loss in curve] == pytest.approx([loss for _, loss in usual.curve], abs=2e-4)
    assert {one.factor for one in seen} == {1.0}
    first = [one for one in seen if one.number == 1]
    assert [one.gain for one in first] == pytest.approx([1.0] * len(first)), "momentum is not there yet"


def test_a_step_is_never_longer_along_the_update_than_the_usual_one_without_a_past():
    mu = SMALL.momentum
    _, seen = played(SMALL, Variant(gain=True, corrected=True))
    assert any(one.factor < 1 for one in seen)
    assert all(one.gain * one.factor <= 1 + mu + 1e-6 for one in seen)
    first = next(one for one in seen if one.number == 1)
    assert first.gain == pytest.approx(1 + mu / (1 - mu), rel=0.05)


def test_top_of_two_bits_keeps_the_largest_with_their_signs_and_two_magnitudes():
    source = torch.randn(4096 + 100, generator=torch.Generator().manual_seed(3))
    chosen, out = TopTwoBits(0.0625), torch.empty(4096 + 100)
    chosen.decode(chosen.encode(source), out)
    kept = out[:4096] != 0
    assert int(kept.sum()) == 256 and len(out[:4096].abs().unique()) == 3
    assert source[:4096][kept].abs().min() >= source[:4096][~kept].abs().max()
    assert torch.equal(out[kept.nonzero()].sign(), source[kept.nonzero()].sign())


def test_top_of_two_bits_sends_what_it_left_out_later():
    setting = replace(SMALL, momentum=0.0, outer_rate=1.0, merge="mean")
    ends = {share: played(setting, Variant(top=share))[0][-1][1] for share in (0.0, 0.0625)}
    assert ends[0.0] != ends[0.0625] == pytest.approx(ends[0.0], rel=0.1)
