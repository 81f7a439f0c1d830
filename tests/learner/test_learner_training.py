"""Loop, mailbox, optimizer: everything that needs no second process."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from deadlines import within_s
from learner_kit import BASES, TASK, alone, data, losses_of, training_of
from torch import nn

from p2pdiloco.config.presets import DIGITS, DIGITS_CNN, MICRO, for_run
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.learner import inner_step, loop, optimizer, ranks, training_process
from p2pdiloco.learner.channel import (
    ChannelBroken,
    CopiedOut,
    Install,
    LearnerOptions,
    Learners,
    Note,
    PassOptions,
    Save,
    Start,
    StateSaved,
    Stop,
)
from p2pdiloco.learner.inner_step import (
    CACHE_VARIABLES,
    PAYS_AFTER_S,
    TIMED_STEPS,
    UNTIMED_STEPS,
    Form,
    Forms,
    Passes,
    RecordedUpdate,
    bound_cache,
    use_cache,
)
from p2pdiloco.learner.loop import (
    COMPILING,
    MAX_SKIPPED_IN_A_ROW,
    Training,
    TrainingDiverged,
    evaluate,
    heldout_batch,
    train,
)
from p2pdiloco.learner.optimizer import FusedAdamW, make_optimizer, moments, set_learning_rate
from p2pdiloco.learner.ranks import Distributed, Order, choose_device, count_ranks, device_hints
from p2pdiloco.learner.schedule import learning_rate
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.transformer import generate


def test_loss_falls():
    training, losses = alone(60)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-5:]) / 5 < 3.5
    assert training.tokens_total == 60 * MICRO.inner.tokens_per_step
    text = generate(training.model, b"def ", 20, 64, 256)
    assert len(text) == 20
    assert text == generate(training.model, b"def ", 20, 64, 256)


def test_micro_batches_add_up_to_the_same_step():
    assert alone(3, micro_batch_tokens=64)[1] == pytest.approx(alone(3)[1], abs=1e-4)


def test_where_bf16_is_faster_passes_are_in_it_and_nothing_else_is(monkeypatch):
    monkeypatch.setattr(ranks, "computes_in_bf16", lambda kind: kind == "cpu")
    (half, half_losses), (_, losses) = alone(3, precision="auto"), alone(3, precision="fp32")
    assert half.bf16 and half_losses != losses
    assert half_losses == pytest.approx(losses, rel=5e-3)
    kept = [*half.model.parameters(), *moments(half.model, half.optimizer).values()]
    kept += [parameter.grad for parameter in half.model.parameters()]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    multiplied = []
    half.model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _layer, _inputs, output: multiplied.append(output.dtype)
    )
    half.step()
    evaluate(TASK, half.model, heldout_batch(TASK, data().heldout, 1024))
    assert multiplied == [torch.bfloat16, torch.float32], "held-out loss is a CPU's of any kind"


def test_a_pass_that_does_not_fit_is_halved_and_the_step_is_the_same(bench, monkeypatch):
    _, expected = alone(3)
    passes, loss = [], TASK.loss
    task = bench.training._passes._task

    def loss_in_small_memory(model, batch):
        passes.append(len(batch[0]))
        if len(batch[0]) > 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.18 GiB of "
                "which 9.91 GiB is free. Process 799 has 1004.00 MiB memory in use.\nMore words"
            )
        return loss(model, batch)

    monkeypatch.setattr(task, "loss", loss_in_small_memory)
    assert losses_of(bench.training, 3) == pytest.approx(expected, abs=1e-4)
    assert passes == [4, 2, *[1] * 12]
    why = "(CUDA out of memory. Tried to allocate 20.00 GiB)"
    assert bench.training.take_notes() == [
        f"a pass of 256 tokens does not fit {why}: going on with 128 tokens",
        f"a pass of 128 tokens does not fit {why}: going on with 64 tokens",
    ]
    monkeypatch.setattr(task, "loss", loss_that_never_fits)
    with pytest.raises(UserError, match="a single sample of 64 tokens does not fit"):
        bench.training.step()


def test_a_single_sample_that_only_fits_uncompiled_is_trained_uncompiled(monkeypatch):
    _, expected = alone(2, micro_batch_tokens=64)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: loss_that_never_fits_compiled)
    training, losses = alone(2, micro_batch_tokens=64, compile="always")
    assert losses == expected
    (told,) = training.take_notes()
    assert told.startswith("torch.compile failed (CUDA out of memory") and told.endswith(
        "training without it"
    )


def test_a_compiled_pass_that_does_not_fit_is_halved_and_compiled_anew(monkeypatch):
    _, expected = alone(4)
    sizes: list[int] = []

    def small_compiler(function, dynamic):
        def compiled(*part):
            sizes.append(len(part[0]))
            return loss_that_never_fits_compiled() if len(part[0]) > 2 else function(*part)

        return compiled

    monkeypatch.setattr(torch, "compile", small_compiler)
    training, losses = alone(4, compile="always")
    assert losses == pytest.approx(expected, abs=1e-4)
    assert sizes == [4, *[2] * 6], "the step that did not fit is made as it is, in halves"
    (told,) = training.take_notes()
    assert told.endswith("going on with 128 tokens")
    assert training.tokens_total == 4 * MICRO.inner.tokens_per_step


def test_an_evaluation_that_does_not_fit_goes_on_in_smaller_parts(monkeypatch):
    task = task_of(MICRO)
    heldout = heldout_batch(task, data().heldout, 4096)
    model, parts, metrics = task.model(), [], task.metrics
    whole = evaluate(task, model, heldout)

    def metrics_in_small_memory(model, batch):
        parts.append(len(batch[0]))
        if len(batch[0]) > 16:
            raise RuntimeError("\nout of memory\nof 9 bytes")
        return metrics(model, batch)

    monkeypatch.setattr(task, "metrics", metrics_in_small_memory)
    found = evaluate(task, model, heldout)
    assert parts == [64, 64, 32, 16, 16, 16, 16]
    assert (found.tokens, found.loss) == (whole.tokens, pytest.approx(whole.loss))


def loss_that_never_fits_compiled(*part):
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def loss_that_never_fits(model, batch):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize("at_once", [False, True])
def test_notes_reach_the_daemon_and_a_compiler_that_fails_is_left(bench, monkeypatch, at_once):
    _, expected = alone(2)

    def broken_compiler(function, dynamic):
        def forward(*_):
            # A part of the compiler may be missing, too.
            raise (ModuleNotFoundError if at_once else RuntimeError)("no C++ compiler is installed")

        return forward() if at_once else forward

    monkeypatch.setattr(torch, "compile", broken_compiler)
    training, said = training_of(compile="always"), list[str]()
    training.listen(said.append)
    assert losses_of(training, 2) == expected
    assert said == [COMPILING], "before it takes a minute"
    bench.mailbox._training = training
    bench.mailbox.boundary(training.step())
    words = "torch.compile failed (no C++ compiler is installed): training without it"
    assert bench.events(Note) == [Note(words)]


@pytest.mark.parametrize(("cuda", "why"), [(None, "it is built without"), ("13.0", "its driver may be")])
def test_who_has_a_gpu_that_torch_cannot_use_is_told(monkeypatch, tmp_path, cuda, why):
    driver, gpu, cpu = tmp_path / "version", torch.device("cuda:0"), torch.device("cpu")
    monkeypatch.setattr(ranks, "NVIDIA_DRIVER", str(driver))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert device_hints("auto", cpu) == []
    driver.touch()
    (told,) = device_hints("auto", cpu)
    assert told.startswith(f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use ({why}")
    assert device_hints("cpu", cpu) == device_hints("auto", gpu) == []


def test_a_learner_says_it_at_its_start(bench, monkeypatch):
    asked = []

    def told(*about):
        asked.append(about)
        return ["do this", "do that"]

    monkeypatch.setattr(training_process, "device_hints", told)
    options = LearnerOptions(peer="peer-a", device="cpu", threads=1, evaluation_tokens=1024)
    start = Start(MICRO, options, BASES)
    bench.post(Stop(None))
    training_process._lead(bench.channel, start, os.dup(bench.exchange.fd), training_process._build(start))
    assert [note.text for note in bench.events(Note)] == ["do this", "do that"]
    assert asked == [("cpu", torch.device("cpu"))]


def test_a_device_that_is_not_there_is_one_sentence():
    assert choose_device("cpu") == torch.device("cpu")
    for wanted, name in (("xpu:3", "XPU"), ("mps", "MPS"), ("rocm", "ROCm"), ("cuda:99", "CUDA")):
        with pytest.raises(UserError, match=f"--device {wanted}: torch .* sees .* of {name} here") as caught:
            choose_device(wanted)
        assert "cpu" in caught.value.hint
    with pytest.raises(UserError, match=r"--nproc 64: this machine has .* cuda devices"):
        count_ranks(64, "cuda")
    assert count_ranks(3, "cpu") == 3 and count_ranks(0, "cpu") == 1


def test_learning_rate_warms_up_and_falls_to_its_floor():
    tokens = range(0, 400 * 3 * 256, 3 * 256)  # three learners
    rates = [learning_rate(MICRO.inner, at, optimizer_steps=100) for at in tokens]
    assert rates[0] == pytest.approx(5e-5)
    assert max(rates) == rates[20] == 3e-3
    assert rates[200:] == pytest.approx([3e-4] * 200)
    cautious = msgspec.structs.replace(MICRO.inner, fresh_warmup_steps=20)
    fresh = [learning_rate(cautious, 300_000, step) for step in range(30)]
    assert fresh[:2] == pytest.approx([3e-4 / 20, 3e-4 / 10]) and fresh[19:] == pytest.approx([3e-4] * 11)


def test_the_schedule_is_at_the_runs_place_never_goes_back_and_survives_a_restart(tmp_path, bench, benches):
    training = bench.training
    bench.step()
    assert training.run_tokens == 256, "alone it goes by its own count"
    bench.post(Learners(4))
    bench.step()
    assert training.run_tokens == 4 * 2 * 256, "the others have as much of their own"
    for fragment in range(4):
        bench.post(Install(fragment, 9, 1, "rebase", tokens=60_000))
    bench.post(Learners(1))
    bench.step()
    assert training.run_tokens == 60_000 + 3 * 256
    training.step()
    assert bench.mailbox._status().learning_rate == learning_rate(MICRO.inner, 60_000 + 3 * 256, 3)
    path = tmp_path / "state"
    loop.save_checkpoint(path, training, bench.fragments)
    other = benches()
    loop.restore_checkpoint(path, [], other.training, other.fragments)
    for fragment in range(4):  # what its daemon restored
        other.post(Install(fragment, 9, 1, "rebase", tokens=60_000))
    other.step()
    assert other.training.run_tokens == 60_000 + 5 * 256


def test_the_schedule_goes_back_with_the_chain_and_after_a_crowd_that_was_none(bench):
    training = bench.training
    interval = MICRO.sync.inner_steps * 256
    for fragment in range(4):
        bench.post(Install(fragment, 9, 1, "rebase", tokens=1 << 40))
    bench.step()
    assert training.run_tokens > 1 << 40
    for fragment in range(4):  # a chain with fewer tokens won
        bench.post(Install(fragment, 10, 0, "rebase", tokens=60_000))
    for learners, least, most in ((1, 0, 1), (10_000, 8, 1 << 20), (1, 0, 1)):
        bench.post(Learners(learners))
        bench.step()
        assert 60_000 + least * interval < training.run_tokens < 60_000 + most * interval


def test_non_finite_steps_are_skipped_counted_and_in_the_end_fatal(bench):
    bench.training.step()
    with torch.no_grad():
        bench.training.model.model.norm.weight[0] = math.nan
    before = bench.parameters()
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        report = bench.training.step()
        assert report.tokens == 0
        assert bench.mailbox.boundary(report)
    after = bench.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "model.norm.weight")
    assert bench.fragments.counters[0].unmerged_steps == 0
    with pytest.raises(TrainingDiverged, match="10 inner steps"):
        bench.training.step()


@pytest.mark.process
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
        for stepped, layer in ((a, ours), (b, theirs)):
            set_learning_rate(stepped, 0.01 * (step + 1))
            layer.zero_grad()
            batch = torch.arange(7.0).reshape(1, 7) + step
            torch.autograd.backward(layer(batch).square().sum())
            stepped.step()
        assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    code = (
        "import sys, torch\n"
        "from p2pdiloco.config.presets import MICRO\n"
        "from p2pdiloco.learner.optimizer import make_optimizer\n"
        "layer = torch.nn.Linear(3, 3); optimizer = make_optimizer(layer, MICRO.inner)\n"
        "layer(torch.ones(1, 3)).sum().backward(); optimizer.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=within_s(120)).returncode == 0


# Passes that torch's compiler really compiles, here for the CPU.

MANIFEST = msgspec.structs.replace(MICRO, model=MICRO.model | {"layers": 1})
PASS_TOKENS = 192
"""Of a step of four samples: passes of three samples and of one."""


def go_elsewhere(training: Training) -> None:
    """Write other parameters in place, as a version does that is gone over to."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.copy_(parameter * 0.5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(300)
def test_compiled_passes_learn_the_same_over_an_odd_last_pass_and_a_version(tmp_path, monkeypatch):
    for variable in CACHE_VARIABLES:
        monkeypatch.setenv(variable, str(tmp_path))
    from torch._dynamo.utils import counters  # imports for seconds

    torch._dynamo.reset()
    counters.clear()
    plain, expected = alone(3, MANIFEST, micro_batch_tokens=PASS_TOKENS)
    training, found = alone(3, MANIFEST, micro_batch_tokens=PASS_TOKENS, compile="always")
    for each, losses in ((plain, expected), (training, found)):
        go_elsewhere(each)
        losses += losses_of(each, 2)
    assert training._passes.made == 2
    assert counters["stats"]["unique_graphs"] == 1, "none of the odd passes, and none anew"
    assert training._passes.forms.form is Form.COMPILED and training.take_notes() == []
    assert found == pytest.approx(expected, rel=1e-4)
    assert training.tokens_total == plain.tokens_total == 5 * MICRO.inner.tokens_per_step


@pytest.mark.parametrize("manifest", [MICRO, DIGITS, DIGITS_CNN], ids=lambda manifest: manifest.run.name)
def test_built_in_models_are_one_graph_from_tokens_to_loss(manifest):
    if manifest is not MICRO:
        pytest.importorskip("sklearn")
    task = task_of(manifest)
    model = task.model()
    part = task.load_data(None).train.batch(np.arange(4))
    # In pieces it would be an error.
    compiled = torch.compile(lambda *part: task.loss(model, part), backend="eager", fullgraph=True)
    # Not the same bits: several threads may add up in another order.
    torch.testing.assert_close(compiled(*part), task.loss(model, part), rtol=1e-5, atol=0)


# When passes are compiled, and what becomes of it. (On GPUs: test_accelerators.)

STEPS = TIMED_STEPS + UNTIMED_STEPS
LONG = 10 * PAYS_AFTER_S
PART = (torch.ones(4, 3),)


class Compiler:
    """`torch.compile` whose functions count their calls."""

    calls = 0

    def __call__(self, function, dynamic):
        assert not dynamic

        def compiled(*part):
            self.calls += 1
            return function(*part)

        return compiled


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(torch, "compile", made)
    monkeypatch.setattr(inner_step, "compiles_by_itself", lambda device: True)
    return made


class Steps:
    """Inner steps of a linear layer."""

    def __init__(self, choice="auto") -> None:
        self.layer = nn.Linear(3, 2)
        self.forms = Forms(lambda x: self.layer(x).square().mean(), list(self.layer.parameters()), choice)

    def make(self, count=1, step_s=1.0, steps_left=LONG, part=PART) -> None:
        for _ in range(count):
            self.forms.before_step(steps_left)
            self.layer.zero_grad()
            self.forms.make_pass(part, 1.0)
            self.forms.step_took(step_s, passes=1)


def test_it_compiles_after_some_steps_and_says_what_it_gained(compiler):
    steps = Steps()
    steps.make(STEPS)
    assert steps.forms.form is Form.PLAIN and compiler.calls == 0
    gradient = steps.layer.weight.grad.clone()
    assert not steps.forms.compiles_now
    steps.forms.before_step(LONG)
    assert steps.forms.compiles_now, "which is said before it takes a minute"
    steps.make(step_s=34.0)
    assert not steps.forms.compiles_now
    steps.make(STEPS - 1, step_s=0.25)
    assert steps.forms.form is Form.COMPILED and compiler.calls == STEPS
    assert torch.equal(steps.layer.weight.grad, gradient)
    assert steps.forms.take_notes() == []
    steps.make(2)
    assert steps.forms.take_notes() == ["compiled in 34 s: inner steps are 4.0 times as fast"]


def test_what_is_compiled_at_once_says_how_long_that_took(compiler):
    steps = Steps("always")
    steps.make(step_s=34.0)
    steps.make(STEPS)
    assert steps.forms.take_notes() == ["compiled in 34 s"]
    steps.make(2 * STEPS, step_s=50.0)
    assert steps.forms.form is Form.COMPILED and steps.forms.take_notes() == []


def test_what_is_no_faster_is_left(compiler):
    steps = Steps()
    steps.make(STEPS)
    steps.make(STEPS, step_s=1.5)
    calls = compiler.calls
    steps.make(3 * STEPS)
    assert steps.forms.form is Form.LEFT and compiler.calls == calls
    (told,) = steps.forms.take_notes()
    assert told.endswith("and inner steps are no faster: training without it")


def test_of_a_step_s_passes_the_largest_is_compiled(compiler):
    steps = Steps()
    odd = (torch.ones(2, 3),)
    for _ in range(STEPS + 1):
        steps.forms.before_step(LONG)
        for part in (PART, odd):
            steps.layer.zero_grad()
            steps.forms.make_pass(part, 0.5)
        steps.forms.step_took(1.0, passes=2)
    assert compiler.calls == 1


def test_a_run_that_is_nearly_over_is_not_compiled_for(compiler):
    steps = Steps()
    steps.make(3 * STEPS, step_s=0.1, steps_left=PAYS_AFTER_S / 0.1 - 1)
    assert steps.forms.form is Form.PLAIN
    steps.make(step_s=0.1, steps_left=PAYS_AFTER_S / 0.1 + 1)
    assert steps.forms.form is Form.COMPILED


def test_passes_of_another_shape_are_made_as_they_are(compiler):
    steps = Steps("always")
    steps.make(2)
    assert compiler.calls == 2
    steps.make(part=(torch.ones(3, 3),))
    assert compiler.calls == 2
    steps.forms.begin_anew()
    steps.make(part=(torch.ones(3, 3),))
    assert compiler.calls == 3


def test_models_whose_shapes_change_are_compiled_for_who_insists_only(compiler):
    manifest = for_run("micro", "experts")
    task = task_of(msgspec.structs.replace(manifest, model=manifest.model | {"experts": 2}))
    for choice, form in (("auto", Form.LEFT), ("always", Form.PLAIN)):
        passes = Passes(task, task.model(), 4, PassOptions(compile=choice), together=1, bf16=False)
        assert passes.forms.form is form


def test_never_is_never_and_what_is_not_compiled_cannot_be_left(compiler):
    steps = Steps("never")
    steps.make(3 * STEPS)
    assert steps.forms.form is Form.LEFT and compiler.calls == 0
    assert not steps.forms.leave("whatever")
    compiled = Steps("always")
    compiled.make()
    assert compiled.forms.leave("whatever") and compiled.forms.form is Form.LEFT


def test_compiled_code_is_kept_in_a_folder(tmp_path, monkeypatch):
    for variable in inner_step.CACHE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back as it was
        monkeypatch.delenv(variable)
    for unusable in ("/my data", "/anna's", 'a"b"', "a\\b"):
        use_cache(Path(unusable))
        assert "TRITON_CACHE_DIR" not in os.environ, "torch would split it into words"
    use_cache(tmp_path / "compiled")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "compiled" / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    use_cache(tmp_path / "compiled")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere", "its user's choice stays"


def test_the_folder_of_compiled_code_has_a_bound(tmp_path, monkeypatch):
    folder = tmp_path / "compiled"
    bound_cache(folder)
    (folder / "triton").mkdir(parents=True)
    (folder / "triton" / "kernel").write_bytes(bytes(10))
    bound_cache(folder)
    assert folder.exists()
    monkeypatch.setattr(inner_step, "CACHE_BYTES", 9)
    bound_cache(folder)
    assert not folder.exists()


def test_a_file_that_another_process_removes_meanwhile_is_no_error(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "target")
    bound_cache(tmp_path)
    assert tmp_path.exists()


def test_one_process_begins_the_folder_anew_before_the_others_may_compile(tmp_path, monkeypatch):
    """All of them compile in the same inner step: who began it anew then would take the others' code away."""
    done = []

    class Met(Exception):
        pass

    def meet(rank, *_):
        done.append(f"rank {rank} meets")
        raise Met

    monkeypatch.setattr(training_process, "bound_cache", lambda folder: done.append(folder))
    monkeypatch.setattr(training_process.Distributed, "meet", meet)
    options = LearnerOptions(peer="", device="cpu", compile="always", compile_cache=tmp_path)
    for rank in (0, 1):
        with pytest.raises(Met):
            training_process._build(Start(MICRO, options, BASES), rank, 2, tmp_path)
    assert done == [tmp_path, "rank 0 meets", "rank 1 meets"]


def test_all_processes_decide_by_the_same_number_of_steps_that_are_left(monkeypatch):
    """A rank that compiled alone, as it knew of no other learner, would hold all of them up."""
    ranks, wire = object.__new__(Distributed), []

    def broadcast(words, src, group):
        if wire:
            words.copy_(wire.pop())
        else:
            wire.append(words.clone())

    monkeypatch.setattr("p2pdiloco.learner.ranks.distributed", SimpleNamespace(broadcast=broadcast))
    ranks._control = None
    ranks.group, ranks._words = None, torch.device("cpu")
    leader, follower = alone(0)[0], alone(0)[0]
    leader.run_is_at(5000, learners=7)
    ranks.order("step", leader.run_tokens, leader.learners)
    told, steps = ranks.next_order(), []
    assert (told.kind, told.number, told.learners) == ("step", 5000, 7)
    monkeypatch.setattr(ranks, "next_order", lambda: Order("end") if steps else told)
    monkeypatch.setattr(follower, "step", lambda: steps.append(follower.steps_left))
    parts = SimpleNamespace(training=follower, ranks=ranks)
    monkeypatch.setattr(training_process, "_build", lambda *_: parts)
    training_process.follow(Start(MICRO, LearnerOptions(peer="", niceness=0), BASES), 1, 2, None)
    assert steps == [leader.steps_left]


class Graph:
    """`torch.cuda.CUDAGraph` that counts."""

    replays = 0

    def replay(self):
        self.replays += 1


def test_a_recorded_update_is_not_replayed_on_gradients_or_moments_of_other_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    layer = nn.Linear(3, 2)
    optimizer = FusedAdamW([{"params": list(layer.parameters()), "weight_decay": 0.0}], 0.1, (0.9, 0.99))
    layer(PART[0]).sum().backward()
    optimizer.step()
    update = RecordedUpdate(optimizer, torch.device("cpu"))
    assert update.replay() and update._graph.replays == 1
    kept = layer.bias.grad
    layer.bias.grad = torch.zeros_like(layer.bias)
    assert not update.replay()
    layer.bias.grad = kept
    assert update.replay()
    optimizer.state[layer.bias]["exp_avg"] = torch.zeros(2)
    assert not update.replay() and update._graph.replays == 2


def test_what_is_compiled_at_once_and_recorded_says_so_in_time(compiler, monkeypatch):
    """`test_accelerators` waits for it, on a GPU."""
    recorded = SimpleNamespace(fits=lambda part, share: True, replay=lambda part: part[0].sum())
    monkeypatch.setattr(inner_step, "RecordedPass", lambda *_: recorded)
    steps = Steps("always")
    monkeypatch.setattr(steps.forms, "_device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(inner_step, "give_memory_back", lambda device: None)
    steps.make(step_s=7.0)
    steps.make(2 * STEPS + 1, step_s=0.01)
    assert steps.forms.form is Form.RECORDED
    assert steps.forms.take_notes() == ["compiled in 7 s and recorded as a CUDA graph"]


# Saving and restoring a learner.


def test_saved_and_restored_training_goes_on_bit_identically(tmp_path, bench, benches):
    _, expected = alone(20)
    losses = losses_of(bench.training, 9)
    bench.fragments.count_step(1)
    loop.save_checkpoint(tmp_path / "state", bench.training, bench.fragments)
    other = benches()
    loop.restore_checkpoint(tmp_path / "state", ["all"] * 4, other.training, other.fragments)
    saved, restored = bench.parameters(), other.parameters()
    # base - (base - theta) is theta up to one rounding; make it exact to see that nothing else differs.
    for name in saved:
        torch.testing.assert_close(restored[name], saved[name], rtol=0, atol=1e-7)
    other.training.model.load_state_dict(saved)
    other.training.stream = bench.training.stream  # kept beside the state (test_data_streams)
    assert losses + losses_of(other.training, 11) == expected


def test_restore_modes_take_all_or_the_rest_or_nothing(tmp_path, bench, benches):
    for _ in range(3):
        bench.step()
    # Due at inner step 2, so one step is not in flight.
    assert [copied.fragment for copied in bench.events(CopiedOut)] == [0]
    loop.save_checkpoint(tmp_path / "state", bench.training, bench.fragments)
    whole, rest = bench.fragments.displacement(0), bench.fragments.not_in_flight(0)
    assert not torch.equal(whole, rest)
    for mode, expected, steps in (("all", whole, 3), ("rest", rest, 1), ("none", whole * 0, 0)):
        other = benches()
        other.exchange.base(0, 0).add_(1.0)  # the base has moved on meanwhile
        other.fragments.scatter_bases(dict(other.training.model.named_parameters()))
        loop.restore_checkpoint(tmp_path / "state", [mode] * 4, other.training, other.fragments)
        torch.testing.assert_close(other.fragments.displacement(0), expected, rtol=0, atol=1e-6)
        assert other.fragments.counters[0].unmerged_steps == steps
        assert other.fragments.counters[0].unmerged_tokens == steps * 256
        assert not other.fragments.counters[0].slot_in_use
        assert other.training.inner_step == 3


@pytest.mark.parametrize("fast", [True, False])
def test_muon_has_its_own_moments_and_leaves_those_of_another_optimizer(tmp_path, benches, monkeypatch, fast):
    monkeypatch.setattr(optimizer, "multiplies_bf16", lambda kind: fast)
    inner = msgspec.structs.replace(MICRO.inner, optimizer="muon", warmup_tokens=2560)
    manifest = msgspec.structs.replace(MICRO, inner=inner)
    trained, same, bench = benches(manifest), benches(manifest), benches()
    losses = losses_of(trained.training, 12)
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


def flipped(content):
    return content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:]


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(lambda content: content[:-1000], id="cut"),
        pytest.param(flipped, id="flip"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(None, id="missing"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(tmp_path, bench, benches, damaged):
    bench.step()
    path = tmp_path / "state"
    loop.save_checkpoint(path, bench.training, bench.fragments)
    path.write_bytes(damaged(path.read_bytes())) if damaged else path.unlink()
    other = benches()
    before = other.parameters()
    with pytest.raises(StorageError):
        loop.restore_checkpoint(path, ["all"] * 4, other.training, other.fragments)
    assert other.training.inner_step == 0
    assert all(torch.equal(before[name], value) for name, value in other.parameters().items())


def test_a_failed_save_is_reported_and_training_goes_on(tmp_path, bench):
    path = tmp_path / "no-such-folder" / "state"
    bench.post(Save(path))
    assert bench.step()
    [saved] = bench.events(StateSaved)
    assert (saved.path, saved.ok) == (path, False)
    assert "cannot save" in saved.reason


def test_stop_saves_and_ends_the_loop(tmp_path, bench):
    bench.post(Stop(tmp_path / "state"))
    train(bench.training, bench.mailbox.boundary)
    assert bench.training.inner_step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state"]  # no temporary file stays
    with pytest.raises(ChannelBroken):
        bench.daemon.close()
        bench.step()


def test_who_diverged_begins_again_at_the_global_parameters(tmp_path, bench, benches):
    for _ in range(3):
        bench.step()
    piece = bench.fragments.layouts[0].pieces[0]
    dict(bench.training.model.named_parameters())[piece.tensor].data.view(-1)[piece.tensor_offset] = torch.nan
    loop.save_checkpoint(tmp_path / "state", bench.training, bench.fragments)
    other = benches()
    loop.restore_checkpoint(tmp_path / "state", ["all"] * 4, other.training, other.fragments)
    assert all(value.isfinite().all() for value in other.parameters().values())
    assert [counters.unmerged_steps for counters in other.fragments.counters] == [0, 3, 3, 3]
