"""Model, version 0, data, loop, checkpoint: everything that needs no second process."""

import hashlib
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from learner_kit import Bench, alone, corpus

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.config.presets import MICRO, TINY
from p2pdiloco.errors import ConfigError, StorageError, UserError
from p2pdiloco.learner import checkpoint
from p2pdiloco.learner.channel import (
    BaseRef,
    ChannelBroken,
    CopiedOut,
    CopyOut,
    Evaluate,
    Evaluated,
    Install,
    NothingToCopy,
    Save,
    Saved,
    Status,
    Stop,
)
from p2pdiloco.learner.data import Stream, heldout_windows, load_corpus, permuted
from p2pdiloco.learner.evaluate import evaluate, generate
from p2pdiloco.learner.loop import MAX_SKIPPED_IN_A_ROW, Training, TrainingDiverged, train
from p2pdiloco.learner.mailbox import Mailbox
from p2pdiloco.learner.model import Transformer, initial_parameters, specs_of, tensor_specs
from p2pdiloco.learner.optim import learning_rate, make_optimizer, set_learning_rate

GOLDEN = "ec5ee422589dded2ffb844dbbb6857d459c87855157999aca8f423bca5e19f3c"


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


# --- model and version 0 ----------------------------------------------------------------------------


def _digest(parameters):
    digest = hashlib.sha256()
    for name, tensor in parameters.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_version_0_has_the_golden_digest():
    """If this fails, runs that exist can no longer be joined: do not touch the golden digest."""
    assert _digest(initial_parameters(MICRO)) == GOLDEN


def test_version_0_depends_on_the_seed():
    other = msgspec.structs.replace(MICRO, run=msgspec.structs.replace(MICRO.run, seed=1))
    assert _digest(initial_parameters(other)) != GOLDEN


def test_version_0_starts_near_chance():
    model = Transformer(TINY.model)
    model.load_state_dict(initial_parameters(TINY))
    ids = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(0))
    assert evaluate(model, ids)[0] == pytest.approx(math.log(256), abs=0.1)
    stds = {name: p.std().item() for name, p in model.named_parameters()}
    assert stds["tokens.weight"] == pytest.approx(0.02, rel=0.03)
    assert stds["blocks.0.mlp_out.weight"] == pytest.approx(0.02 / math.sqrt(8), rel=0.03)


def test_specs_by_arithmetic_are_the_model_s_own():
    for manifest in (MICRO, TINY):
        assert specs_of(manifest.model) == tensor_specs(Transformer(manifest.model))


def test_the_model_sees_no_future_token():
    model = Transformer(MICRO.model)
    ids = torch.arange(64).view(1, 64)
    changed = ids.clone()
    changed[0, 40:] = 200
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[0, :40], after[0, :40])
    assert not torch.allclose(before[0, 40:], after[0, 40:])


# --- data -------------------------------------------------------------------------------------------


def test_embedded_text_is_there_and_split():
    assert len(corpus().train) > 2_000_000
    assert 0.01 < len(corpus().heldout) / len(corpus().train) < 0.12


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000, 1025])
def test_a_permutation_is_one(size):
    values = permuted(np.arange(size), size, "key")
    assert sorted(values.tolist()) == list(range(size))
    if size >= 100:
        assert values.tolist() != list(range(size))
        assert values.tolist() != permuted(np.arange(size), size, "other").tolist()


def test_streams_repeat_go_on_anywhere_and_differ_between_peers():
    first = Stream(corpus(), 64, seed=3, peer="a")
    whole = torch.cat([first.take(5), first.take(7)])
    again = Stream(corpus(), 64, seed=3, peer="a", position=5).take(7)
    assert torch.equal(whole[5:], again)
    others = [Stream(corpus(), 64, seed, peer).take(12) for seed, peer in ((3, "b"), (4, "a"))]
    for other in others:
        assert not any(torch.equal(a, b) for a in whole for b in other)


def test_a_stream_takes_every_window_once_an_epoch_in_another_order_each_time(tmp_path):
    (tmp_path / "text").write_text("".join(chr(48 + i % 75) for i in range(8 * 40 + 10)))
    small = load_corpus(_files(heldout_percent=1), str(tmp_path))
    stream = Stream(small, 8, seed=0, peer="a")
    epochs = [[tuple(w.tolist()) for w in stream.take(40)] for _ in range(2)]
    windows = [tuple(small.train[i * 8 : i * 8 + 9].tolist()) for i in range(40)]
    # The walk starts inside an epoch: 40 windows from there are the end of one order, the begin of the next.
    rest = 40 - stream._start
    assert sorted(epochs[0][rest:] + epochs[1][:rest]) == sorted(windows)
    assert epochs[0] != epochs[1]


def _files(**changes):
    return msgspec.structs.replace(MICRO, data=DataSection(source="files", **changes))


def test_files_are_split_by_name_and_heldout_windows_are_fixed(tmp_path):
    for index in range(200):
        (tmp_path / f"f{index}.txt").write_text(f"file {index} " * 30)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\xff" * 100)
    loaded = load_corpus(_files(heldout_percent=20), str(tmp_path))
    assert 0.1 < len(loaded.heldout) / (len(loaded.train) + len(loaded.heldout)) < 0.3
    assert b"PNG" not in loaded.train.tobytes()
    held = heldout_windows(loaded, 64, 640)
    assert held.shape == (10, 65)
    assert torch.equal(held, heldout_windows(loaded, 64, 640))
    (tmp_path / "f0.txt").write_text("x")  # one file changes, no file changes sides
    again = load_corpus(_files(heldout_percent=20), str(tmp_path))
    assert abs(len(again.train) - len(loaded.train)) + abs(len(again.heldout) - len(loaded.heldout)) < 300


def test_one_file_is_split_at_its_end(tmp_path):
    (tmp_path / "book.txt").write_text("a" * 900 + "b" * 101)
    loaded = load_corpus(_files(heldout_percent=10), str(tmp_path / "book.txt"))
    assert set(loaded.heldout.tobytes()) <= set(b"b\n")
    assert len(loaded.heldout) == 100


def test_bad_data_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_corpus(_files(), str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no text file"):
        load_corpus(_files(), str(tmp_path))
    with pytest.raises(UserError, match="none are given"):
        load_corpus(_files(), None)
    with pytest.raises(ConfigError, match="unknown"):
        load_corpus(msgspec.structs.replace(MICRO, data=DataSection(source="web")), None)
    (tmp_path / "short").write_text("too short")
    with pytest.raises(UserError, match="bytes"):
        Stream(load_corpus(_files(), str(tmp_path)), 64, 0, "a")


# --- loop -------------------------------------------------------------------------------------------


def test_loss_falls():
    training, losses = alone(60)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-5:]) / 5 < 3.5
    assert training.tokens_total == 60 * MICRO.inner.tokens_per_step
    text = generate(training.model, b"def ", 20)
    assert len(text) == 20
    assert text == generate(training.model, b"def ", 20)


def test_micro_batches_add_up_to_the_same_step():
    model = Transformer(MICRO.model)
    model.load_state_dict(initial_parameters(MICRO))
    split = Training(MICRO, model, corpus(), "peer-a", micro_batch=64)
    _, losses = alone(3)
    assert [split.step().loss for _ in range(3)] == pytest.approx(losses, abs=1e-4)


def test_learning_rate_warms_up_and_falls_to_its_floor():
    rates = [learning_rate(MICRO.inner, step) for step in range(400)]
    assert rates[0] == pytest.approx(3e-4)
    assert max(rates) == rates[9] == 3e-3
    assert rates[200:] == pytest.approx([3e-4] * 200)


def test_non_finite_steps_are_skipped_counted_and_in_the_end_fatal(bench):
    bench.training.step()
    with torch.no_grad():
        bench.training.model.norm.weight[0] = math.nan
    before = bench.parameters()
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        report = bench.training.step()
        assert report.tokens == 0
        assert bench.mailbox.boundary(report)
    after = bench.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "norm.weight")
    assert bench.fragments.counters[0].unmerged_steps == 0
    with pytest.raises(TrainingDiverged, match="10 inner steps"):
        bench.training.step()


# --- mailbox ----------------------------------------------------------------------------------------


def test_rebases_by_zero_do_not_change_the_training(bench):
    _, expected = alone(12)
    losses = []
    for step in range(12):
        report = bench.training.step()
        losses.append(report.loss)
        for layout in bench.fragments._layouts:
            old = bench.fragments.bases[layout.index]
            bench.exchange.base(layout.index, 1 - old.buffer).copy_(
                bench.exchange.base(layout.index, old.buffer)
            )
            bench.post(Install(layout.index, step + 1, 1 - old.buffer, "rebase"))
        assert bench.mailbox.boundary(report)
    assert losses == expected
    assert bench.fragments.bases == [BaseRef(12, 0)] * 4


def test_evaluation_is_of_the_global_parameters_not_of_the_learner_s(bench):
    bench.post(Evaluate(1))
    bench.mailbox.boundary(bench.training.step())
    for _ in range(20):
        bench.training.step()
    bench.post(Evaluate(2))
    bench.mailbox.boundary(bench.training.step())
    first, second = [event for event in bench.events() if isinstance(event, Evaluated)]
    assert (first.tag, second.tag) == (1, 2)
    assert first.loss == second.loss == pytest.approx(math.log(256), abs=0.3)
    bench.exchange.base(0, 0).zero_()
    bench.post(Evaluate(3))
    bench.mailbox.boundary(bench.training.step())
    assert next(e for e in bench.events() if isinstance(e, Evaluated)).loss != first.loss


def test_a_daemon_that_does_not_read_never_blocks_the_learner(bench):
    for step in range(3000):
        bench.channel.emit(Status(step, 0, 0.0, 0.0, None, 2.0 if step == 2990 else 1.0, 0.0))
    seen = []
    while events := bench.events():
        seen += events
        bench.channel.flush()
    assert len(seen) < 3000
    assert seen[-1].inner_step == 2999
    assert max(status.longest_gap_s for status in seen) == 2.0
    with pytest.raises(ChannelBroken, match="does not read"):
        for _ in range(100_000):
            bench.channel.emit(NothingToCopy(0, False))


# --- checkpoint -------------------------------------------------------------------------------------


def test_saved_and_restored_training_goes_on_bit_identically(tmp_path, bench):
    _, expected = alone(20)
    losses = [bench.training.step().loss for _ in range(9)]
    bench.fragments.count_step(1)
    checkpoint.save(tmp_path / "state", bench.training, bench.fragments)
    other = Bench()
    checkpoint.restore(tmp_path / "state", ["all"] * 4, other.training, other.fragments)
    saved, restored = bench.parameters(), other.parameters()
    # base - (base - theta) is theta up to one rounding; make it exact to see that nothing else differs.
    for name in saved:
        torch.testing.assert_close(restored[name], saved[name], rtol=0, atol=1e-7)
    other.training.model.load_state_dict(saved)
    losses += [other.training.step().loss for _ in range(11)]
    other.close()
    assert losses == expected


def test_restore_modes_take_all_or_the_rest_or_nothing(tmp_path, bench):
    for _ in range(3):
        bench.mailbox.boundary(bench.training.step())
    bench.mailbox._channel.poll()
    copies = [e for e in bench.events() if isinstance(e, CopiedOut)]
    assert [c.fragment for c in copies] == [0]  # due at inner step 2, so one step is not in flight
    checkpoint.save(tmp_path / "state", bench.training, bench.fragments)
    whole, rest = bench.fragments.displacement(0), bench.fragments.rest(0)
    assert not torch.equal(whole, rest)
    for mode, expected, steps in (("all", whole, 3), ("rest", rest, 1), ("none", whole * 0, 0)):
        other = Bench()
        other.exchange.base(0, 0).add_(1.0)  # the base has moved on meanwhile
        other.fragments.scatter_bases(dict(other.training.model.named_parameters()))
        checkpoint.restore(tmp_path / "state", [mode] * 4, other.training, other.fragments)
        torch.testing.assert_close(other.fragments.displacement(0), expected, rtol=0, atol=1e-6)
        assert other.fragments.counters[0].unmerged_steps == steps
        assert other.fragments.counters[0].unmerged_tokens == steps * 256
        assert not other.fragments.counters[0].slot_in_use
        assert (other.training.inner_step, other.training.stream.position) == (3, 12)
        other.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "missing"])
def test_a_damaged_state_is_refused_and_changes_nothing(tmp_path, bench, damage):
    bench.mailbox.boundary(bench.training.step())
    path = tmp_path / "state"
    checkpoint.save(path, bench.training, bench.fragments)
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
        checkpoint.restore(path, ["all"] * 4, other.training, other.fragments)
    assert other.training.inner_step == 0
    assert all(torch.equal(before[name], value) for name, value in other.parameters().items())
    other.close()


def test_a_failed_save_is_reported_and_training_goes_on(tmp_path, bench):
    path = str(tmp_path / "no-such-folder" / "state")
    bench.post(Save(path))
    assert bench.mailbox.boundary(bench.training.step())
    [saved] = [e for e in bench.events() if isinstance(e, Saved)]
    assert (saved.path, saved.ok) == (path, False)
    assert "cannot save" in saved.reason


def test_stop_saves_and_ends_the_loop(tmp_path, bench):
    bench.post(Stop(str(tmp_path / "state")))
    train(bench.training, bench.mailbox.boundary)
    assert bench.training.inner_step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state"]  # no temporary file stays
    with pytest.raises(ChannelBroken):
        bench.daemon.close()
        bench.mailbox.boundary(bench.training.step())


def test_a_step_with_a_least_length_waits_for_commands_not_for_time(bench):
    """The clock stands still except while the learner waits; the daemon speaks in the middle of a wait."""
    now, waits = [100.0], []

    def wait(timeout_s):
        waits.append(timeout_s)
        if len(waits) == 2:
            bench.post(CopyOut(0))
            now[0] += 3.0
        else:
            now[0] += timeout_s

    bench.channel.wait = wait
    args = (bench.channel, bench.training, bench.fragments, torch.zeros(1, 33), None, 1000.0)
    mailbox = Mailbox(*args, min_step_s=10.0, clock=lambda: now[0])
    assert mailbox.boundary(bench.training.step()) and mailbox.boundary(bench.training.step())
    bench.events()
    assert (waits, now) == ([10.0], [110.0])
    now[0] += 2.0  # what the step takes itself
    assert mailbox.boundary(bench.training.step())
    assert waits == [10.0, 8.0, 5.0]
    answers = [e for e in bench.events() if isinstance(e, CopiedOut | NothingToCopy)]
    assert answers[-1].fragment == 0, "asked in the wait, answered in it"
    now[0] += 11.5  # 1.5 s too late: made up for by the next one
    assert mailbox.boundary(bench.training.step())
    assert mailbox.boundary(bench.training.step())
    assert waits[3:] == [8.5]
    now[0] += 100.0
    for _ in range(3):
        assert mailbox.boundary(bench.training.step())
    assert waits[4:] == [8.0], "2 s of it are made up for"
    bench.post(Stop(None))
    assert not mailbox.boundary(bench.training.step())
    assert len(waits) == 5


def test_version_0_is_the_same_in_another_process():
    code = (
        "import hashlib\n"
        "from p2pdiloco.config.presets import MICRO\n"
        "from p2pdiloco.learner.model import initial_parameters\n"
        "d = hashlib.sha256()\n"
        "for name, t in initial_parameters(MICRO).items(): d.update(name.encode() + t.numpy().tobytes())\n"
        "print(d.hexdigest())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == _digest(initial_parameters(MICRO))


def test_our_adamw_is_torchs_bit_for_bit_without_its_compiler() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(7, 5) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    a = make_optimizer(ours, MICRO.inner)
    betas = (MICRO.inner.beta1, MICRO.inner.beta2)
    groups = [{"params": [theirs.weight], "weight_decay": MICRO.inner.weight_decay}]
    groups += [{"params": [theirs.bias], "weight_decay": 0.0}]
    b = torch.optim.AdamW(groups, lr=MICRO.inner.learning_rate, betas=betas, fused=True)
    for step in range(5):
        for optimizer, layer in ((a, ours), (b, theirs)):
            set_learning_rate(optimizer, 0.01 * (step + 1))
            optimizer.zero_grad()
            batch = torch.arange(7.0).reshape(1, 7) + step
            torch.autograd.backward(layer(batch).square().sum())
            optimizer.step()
        assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    code = (
        "import sys, torch\n"
        "from p2pdiloco.config.presets import MICRO\n"
        "from p2pdiloco.learner.optim import make_optimizer\n"
        "layer = torch.nn.Linear(3, 3); optimizer = make_optimizer(layer, MICRO.inner)\n"
        "layer(torch.ones(1, 3)).sum().backward(); optimizer.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=120).returncode == 0
