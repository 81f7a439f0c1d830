"""Loop, mailbox, optimizer: everything that needs no second process."""

import math
import os
import subprocess
import sys

import msgspec
import pytest
import torch
from deadlines import within_s
from learner_kit import BASES, TASK, Bench, alone, data

from p2pdiloco.config.presets import MICRO
from p2pdiloco.errors import UserError
from p2pdiloco.learner import loop, ranks, training_process
from p2pdiloco.learner.channel import Install, LearnerOptions, Learners, Note, Start, Stop
from p2pdiloco.learner.inner_step import PassOptions
from p2pdiloco.learner.loop import (
    COMPILING,
    MAX_SKIPPED_IN_A_ROW,
    Training,
    TrainingDiverged,
    evaluate,
    heldout_batch,
)
from p2pdiloco.learner.optimizer import make_optimizer, moments, set_learning_rate
from p2pdiloco.learner.ranks import choose_device, count_ranks, device_hints
from p2pdiloco.learner.schedule import learning_rate
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.transformer import generate

# --- loop -------------------------------------------------------------------------------------------


def test_loss_falls():
    training, losses = alone(60)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(losses[-5:]) / 5 < 3.5
    assert training.tokens_total == 60 * MICRO.inner.tokens_per_step
    text = generate(training.model, b"def ", 20, 64, 256)
    assert len(text) == 20
    assert text == generate(training.model, b"def ", 20, 64, 256)


def test_micro_batches_add_up_to_the_same_step():
    model = TASK.model()
    model.load_state_dict(TASK.initial_parameters())
    split = Training(TASK, model, data().train, "peer-a", options=PassOptions(64, precision="fp32"))
    _, losses = alone(3)
    assert [split.step().loss for _ in range(3)] == pytest.approx(losses, abs=1e-4)


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
    assert [bench.training.step().loss for _ in range(3)] == pytest.approx(expected, abs=1e-4)
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
    _, expected = alone(2, micro_batch=64)

    def hungry_compiler(function, dynamic):
        return loss_that_never_fits_compiled

    monkeypatch.setattr(torch, "compile", hungry_compiler)
    task = task_of(MICRO)
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    options = PassOptions(64, compile="always", precision="fp32")
    training = Training(task, model, data().train, "peer-a", options=options)
    assert [training.step().loss for _ in range(2)] == expected
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
    task = task_of(MICRO)
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    options = PassOptions(compile="always", precision="fp32")
    training = Training(task, model, data().train, "peer-a", options=options)
    assert [training.step().loss for _ in range(4)] == pytest.approx(expected, abs=1e-4)
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
    training = Training(
        TASK,
        bench.training.model,
        data().train,
        "peer-a",
        options=PassOptions(compile="always", precision="fp32"),
    )
    said: list[str] = []
    training.listen(said.append)
    assert [training.step().loss for _ in range(2)] == expected
    assert said == [COMPILING], "before it takes a minute"
    bench.mailbox._training = training
    bench.mailbox.boundary(training.step())
    words = "torch.compile failed (no C++ compiler is installed): training without it"
    assert [e for e in bench.events() if isinstance(e, Note)] == [Note(words)]


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
    assert [e.text for e in bench.events() if isinstance(e, Note)] == ["do this", "do that"]
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


def test_the_schedule_is_at_the_runs_place_never_goes_back_and_survives_a_restart(tmp_path, bench):
    training, mailbox = bench.training, bench.mailbox
    mailbox.boundary(training.step())
    assert training.run_tokens == 256, "alone it goes by its own count"
    bench.post(Learners(4))
    mailbox.boundary(training.step())
    assert training.run_tokens == 4 * 2 * 256, "the others have as much of their own"
    for fragment in range(4):
        bench.post(Install(fragment, 9, 1, "rebase", tokens=60_000))
    bench.post(Learners(1))
    mailbox.boundary(training.step())
    assert training.run_tokens == 60_000 + 3 * 256
    training.step()
    assert bench.mailbox._status().learning_rate == learning_rate(MICRO.inner, 60_000 + 3 * 256, 3)
    path = tmp_path / "state"
    loop.save_checkpoint(path, training, bench.fragments)
    other = Bench()
    loop.restore_checkpoint(path, [], other.training, other.fragments)
    for fragment in range(4):  # what its daemon restored
        other.post(Install(fragment, 9, 1, "rebase", tokens=60_000))
    other.mailbox.boundary(other.training.step())
    assert other.training.run_tokens == 60_000 + 5 * 256
    other.close()


def test_the_schedule_goes_back_with_the_chain_and_after_a_crowd_that_was_none(bench):
    training, mailbox = bench.training, bench.mailbox
    interval = MICRO.sync.inner_steps * 256
    for fragment in range(4):
        bench.post(Install(fragment, 9, 1, "rebase", tokens=1 << 40))
    mailbox.boundary(training.step())
    assert training.run_tokens > 1 << 40
    for fragment in range(4):  # a chain with fewer tokens won
        bench.post(Install(fragment, 10, 0, "rebase", tokens=60_000))
    for learners, least, most in ((1, 0, 1), (10_000, 8, 1 << 20), (1, 0, 1)):
        bench.post(Learners(learners))
        mailbox.boundary(training.step())
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
        "from p2pdiloco.learner.optimizer import make_optimizer\n"
        "layer = torch.nn.Linear(3, 3); optimizer = make_optimizer(layer, MICRO.inner)\n"
        "layer(torch.ones(1, 3)).sum().backward(); optimizer.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=within_s(120)).returncode == 0
