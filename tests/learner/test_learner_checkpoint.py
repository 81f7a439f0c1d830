"""Saving and restoring a learner."""

import msgspec
import pytest
import torch
from learner_kit import Bench, alone

from p2pdiloco.config.presets import MICRO
from p2pdiloco.errors import StorageError
from p2pdiloco.learner import loop, optimizer
from p2pdiloco.learner.channel import ChannelBroken, CopiedOut, Save, StateSaved, Stop
from p2pdiloco.learner.loop import train


def test_saved_and_restored_training_goes_on_bit_identically(tmp_path, bench):
    _, expected = alone(20)
    losses = [bench.training.step().loss for _ in range(9)]
    bench.fragments.count_step(1)
    loop.save_checkpoint(tmp_path / "state", bench.training, bench.fragments)
    other = Bench()
    loop.restore_checkpoint(tmp_path / "state", ["all"] * 4, other.training, other.fragments)
    saved, restored = bench.parameters(), other.parameters()
    # base - (base - theta) is theta up to one rounding; make it exact to see that nothing else differs.
    for name in saved:
        torch.testing.assert_close(restored[name], saved[name], rtol=0, atol=1e-7)
    other.training.model.load_state_dict(saved)
    other.training.stream = bench.training.stream  # kept beside the state (test_data_streams)
    losses += [other.training.step().loss for _ in range(11)]
    other.close()
    assert losses == expected


def test_restore_modes_take_all_or_the_rest_or_nothing(tmp_path, bench):
    for _ in range(3):
        bench.mailbox.boundary(bench.training.step())
    copies = [e for e in bench.events() if isinstance(e, CopiedOut)]
    assert [c.fragment for c in copies] == [0]  # due at inner step 2, so one step is not in flight
    loop.save_checkpoint(tmp_path / "state", bench.training, bench.fragments)
    whole, rest = bench.fragments.displacement(0), bench.fragments.not_in_flight(0)
    assert not torch.equal(whole, rest)
    for mode, expected, steps in (("all", whole, 3), ("rest", rest, 1), ("none", whole * 0, 0)):
        other = Bench()
        other.exchange.base(0, 0).add_(1.0)  # the base has moved on meanwhile
        other.fragments.scatter_bases(dict(other.training.model.named_parameters()))
        loop.restore_checkpoint(tmp_path / "state", [mode] * 4, other.training, other.fragments)
        torch.testing.assert_close(other.fragments.displacement(0), expected, rtol=0, atol=1e-6)
        assert other.fragments.counters[0].unmerged_steps == steps
        assert other.fragments.counters[0].unmerged_tokens == steps * 256
        assert not other.fragments.counters[0].slot_in_use
        assert other.training.inner_step == 3
        other.close()


@pytest.mark.parametrize("fast", [True, False])
def test_muon_has_its_own_moments_and_leaves_those_of_another_optimizer(tmp_path, bench, monkeypatch, fast):
    monkeypatch.setattr(optimizer, "multiplies_bf16", lambda kind: fast)
    inner = msgspec.structs.replace(MICRO.inner, optimizer="muon", warmup_tokens=2560)
    manifest = msgspec.structs.replace(MICRO, inner=inner)
    trained, same = (Bench(manifest) for _ in range(2))
    losses = [trained.training.step().loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05
    assert len(trained.training.optimizer.param_groups[-1]["params"]) == 2 * 7  # of two blocks
    loop.save_checkpoint(tmp_path / "state", trained.training, trained.fragments)
    assert loop.restore_checkpoint(tmp_path / "state", [], same.training, same.fragments) == ""
    same.training.model.load_state_dict(trained.parameters())
    same.training.stream.take(12 * 4)
    assert same.training.step() == trained.training.step()
    note = loop.restore_checkpoint(tmp_path / "state", [], bench.training, bench.fragments)
    assert note == "the saved moments are of muon: those of adamw begin anew"
    assert (bench.training.inner_step, bench.training.optimizer_steps) == (12, 0)
    trained.close()
    same.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "missing"])
def test_a_damaged_state_is_refused_and_changes_nothing(tmp_path, bench, damage):
    bench.mailbox.boundary(bench.training.step())
    path = tmp_path / "state"
    loop.save_checkpoint(path, bench.training, bench.fragments)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-1000])
    elif damage == "flip":
        data[-1000] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    other = Bench()
    before = other.parameters()
    with pytest.raises(StorageError):
        loop.restore_checkpoint(path, ["all"] * 4, other.training, other.fragments)
    assert other.training.inner_step == 0
    assert all(torch.equal(before[name], value) for name, value in other.parameters().items())
    other.close()


def test_a_failed_save_is_reported_and_training_goes_on(tmp_path, bench):
    path = tmp_path / "no-such-folder" / "state"
    bench.post(Save(path))
    assert bench.mailbox.boundary(bench.training.step())
    [saved] = [e for e in bench.events() if isinstance(e, StateSaved)]
    assert (saved.path, saved.ok) == (path, False)
    assert "cannot save" in saved.reason


def test_stop_saves_and_ends_the_loop(tmp_path, bench):
    bench.post(Stop(tmp_path / "state"))
    train(bench.training, bench.mailbox.boundary)
    assert bench.training.inner_step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state"]  # no temporary file stays
    with pytest.raises(ChannelBroken):
        bench.daemon.close()
        bench.mailbox.boundary(bench.training.step())


def test_who_diverged_begins_again_at_the_global_parameters(tmp_path, bench):
    for _ in range(3):
        bench.mailbox.boundary(bench.training.step())
    piece = bench.fragments.layouts[0].pieces[0]
    dict(bench.training.model.named_parameters())[piece.tensor].data.view(-1)[piece.tensor_offset] = torch.nan
    loop.save_checkpoint(tmp_path / "state", bench.training, bench.fragments)
    other = Bench()
    loop.restore_checkpoint(tmp_path / "state", ["all"] * 4, other.training, other.fragments)
    assert all(value.isfinite().all() for value in other.parameters().values())
    assert [counters.unmerged_steps for counters in other.fragments.counters] == [0, 3, 3, 3]
    other.close()
