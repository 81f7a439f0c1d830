"""When passes are compiled, by whom, and what becomes of it. (On GPUs: test_accelerators.)"""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch
from learner_kit import Bench, alone, data
from torch import nn

from p2pdiloco.learner import compiling
from p2pdiloco.learner.channel_messages import Evaluate
from p2pdiloco.learner.compiling import PAYS_AFTER_S, TIMED_STEPS, UNTIMED_STEPS, Form, Forms, use_cache
from p2pdiloco.learner.loop import Training
from p2pdiloco.learner.optimizer.adamw import FusedAdamW
from p2pdiloco.learner.passes import PassOptions
from p2pdiloco.learner.recorded import RecordedUpdate

STEPS = TIMED_STEPS + UNTIMED_STEPS
LONG = 10 * PAYS_AFTER_S
PART = (torch.ones(4, 3),)


class Compiler:
    """`torch.compile` that takes until it is told, and fails if it is told to."""

    def __init__(self) -> None:
        self.may_end, self.began = threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self.backward_failure: Exception | None = None
        self.threads: list[str] = []

    def __call__(self, function, dynamic):
        assert not dynamic

        def compiled(*part):
            self.threads.append(threading.current_thread().name)
            if threading.current_thread().name == "compiling":
                self.began.set()
                assert self.may_end.wait(30)
                if self.failure is not None:
                    raise self.failure
                if self.backward_failure is not None:
                    loss = function(*part)
                    loss.register_hook(self.fail)
                    return loss
            return function(*part)

        return compiled

    def fail(self, gradient):
        raise self.backward_failure


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(torch, "compile", made)
    monkeypatch.setattr(compiling, "compiles_by_itself", lambda device: True)
    yield made
    made.may_end.set()


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
            self.forms.step_took(step_s, computing_s=0.0, passes=1)

    def compile_ends(self) -> None:
        compiling_now = self.forms._compiling
        assert compiling_now is not None
        compiling_now.wait()


def test_it_compiles_beside_the_steps_and_says_what_it_gained(compiler):
    steps = Steps()
    steps.make(STEPS)
    assert steps.forms.form is Form.PLAIN
    steps.make()
    assert compiler.began.wait(30) and steps.forms.form is Form.COMPILING
    gradient = steps.layer.weight.grad.clone()
    steps.make(3)
    assert compiler.threads == ["compiling"], "meanwhile passes are made as they are"
    compiler.may_end.set()
    steps.compile_ends()
    assert torch.equal(steps.layer.weight.grad, gradient), "the compiler's own pass leaves gradients alone"
    steps.make(STEPS, step_s=0.25)
    assert steps.forms.form is Form.COMPILED
    assert compiler.threads == ["compiling"] + ["MainThread"] * STEPS
    assert torch.equal(steps.layer.weight.grad, gradient)
    assert steps.forms.take_notes() == []
    steps.make(2)
    (told,) = steps.forms.take_notes()
    assert told.startswith("compiled after ") and told.endswith(": inner steps are 4.0 times as fast")


def test_what_is_no_faster_is_left(compiler):
    compiler.may_end.set()
    steps = Steps()
    steps.make(STEPS + 1)
    steps.compile_ends()
    steps.make(STEPS + 1, step_s=1.5)
    (told,) = steps.forms.take_notes()
    assert told.endswith("and inner steps are no faster: training without it")
    assert steps.forms.form is Form.LEFT
    steps.make()
    assert compiler.threads == ["compiling"] + ["MainThread"] * STEPS


def test_of_a_step_s_passes_the_largest_is_compiled(compiler):
    compiler.may_end.set()
    steps = Steps()
    for _ in range(STEPS):
        steps.make()
        steps.forms.make_pass((torch.ones(1, 3),), 1.0)
    steps.make()
    steps.compile_ends()
    steps.make(2)
    assert compiler.threads == ["compiling", "MainThread", "MainThread"]


def test_a_parameter_that_changes_under_the_compiler_s_backward_pass_is_no_failure(compiler):
    compiler.backward_failure = RuntimeError("a variable has been modified by an inplace operation")
    compiler.may_end.set()
    steps = Steps()
    steps.make(STEPS + 1)
    steps.compile_ends()
    steps.make()
    assert steps.forms.form is Form.COMPILED and steps.forms.take_notes() == []


def test_the_thread_compiles_the_backward_pass_with_the_forward_pass(monkeypatch):
    """Left to autograd, its one thread for a GPU would, while the loop waits to make its own."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    done, compile_it = [], torch.compile

    def made(which):
        return lambda graph, _: (done.append(which), make_boxed_func(graph.forward))[1]

    backend = aot_autograd(fw_compiler=made("forward"), bw_compiler=made("backward"))

    def compiler(function, dynamic):
        compiled = compile_it(function, backend=backend, dynamic=dynamic)
        return lambda *part: (compiled(*part), done.append("made"))[0]

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(compiling, "compiles_by_itself", lambda device: True)
    steps = Steps()
    steps.make(STEPS + 1)
    steps.compile_ends()
    assert done == ["forward", "backward", "made"]
    gradient = steps.layer.weight.grad.clone()
    steps.make()
    assert done == ["forward", "backward", "made", "made"]
    torch.testing.assert_close(steps.layer.weight.grad, gradient)


def test_a_run_that_is_nearly_over_is_not_compiled_for(compiler):
    steps = Steps()
    steps.make(3 * STEPS, step_s=0.1, steps_left=PAYS_AFTER_S / 0.1 - 1)
    assert steps.forms.form is Form.PLAIN
    steps.make(step_s=0.1, steps_left=PAYS_AFTER_S / 0.1 + 1)
    assert steps.forms.form is Form.COMPILING


def test_the_loop_leaves_the_interpreter_to_the_compiler(compiler, monkeypatch):
    steps, rests = Steps(), []
    steps.make(STEPS)
    steps.forms.give_way()
    steps.make()
    monkeypatch.setattr(steps.forms._compiling, "wait", rests.append)
    for computing_s in (0.01, 10.0):
        steps.forms.step_took(1.0, computing_s, passes=1)
        steps.forms.give_way()
    assert rests == [0.03, compiling.LONGEST_REST_S]


def test_passes_of_another_shape_are_made_as_they_are(compiler):
    compiler.may_end.set()
    steps = Steps("always")
    steps.make(2)
    assert compiler.threads == ["MainThread"] * 2
    steps.make(part=(torch.ones(3, 3),))
    assert compiler.threads == ["MainThread"] * 2
    steps.forms.begin_anew()
    steps.make(part=(torch.ones(3, 3),))
    assert compiler.threads == ["MainThread"] * 3


@pytest.mark.parametrize("told", ["no compiler is installed", "CUDA out of memory. Tried to allocate"])
def test_a_compiler_that_fails_is_left_and_one_without_room_goes_on_in_the_loop(compiler, told):
    compiler.failure = RuntimeError(told)
    steps = Steps()
    steps.make(STEPS + 1)
    compiler.may_end.set()
    steps.compile_ends()
    steps.make()
    fits = "memory" in told
    assert steps.forms.form is (Form.COMPILED if fits else Form.LEFT)
    assert steps.forms.take_notes() == (
        [] if fits else [f"torch.compile failed ({told}): training without it"]
    )
    assert compiler.threads == ["compiling"] + ["MainThread"] * fits


@pytest.mark.parametrize("told", ["CUDA out of memory", "module is not installed as a submodule"])
def test_a_pass_that_the_compiler_disturbs_waits_for_it_and_is_made_again(compiler, monkeypatch, told):
    """While torch traces in one thread, modules fail in others (`NameError`, `module is not installed`)."""
    monkeypatch.setattr(compiling, "PAYS_AFTER_S", 0.0)
    options = PassOptions(compile="auto", precision="fp32")
    training, expected = alone(STEPS + 2)
    task, model = training.task, training.task.model()
    model.load_state_dict(task.initial_parameters())
    training = Training(task, model, data().train, "peer-a", options=options)
    losses = [training.step().loss for _ in range(STEPS)]
    passes, loss, failed = training._passes, task.loss, []

    def disturbed(model, batch):
        if threading.current_thread().name != "compiling" and not compiler.may_end.is_set():
            assert compiler.began.wait(30)
            compiler.may_end.set()
            failed.append(training.samples_at_once)
            raise NameError(told)
        return loss(model, batch)

    monkeypatch.setattr(task, "loss", disturbed)
    losses += [training.step().loss for _ in range(2)]
    assert len(failed) == 1 and losses == expected
    assert training.samples_at_once == failed[0] and passes.take_notes() == []
    monkeypatch.setattr(task, "loss", loss_without_a_name)
    with pytest.raises(NameError, match="undefined"):
        training.step()


def loss_without_a_name(model, batch):
    raise NameError("undefined")


def test_another_model_computes_when_the_compiler_is_over(compiler):
    steps = Steps()
    steps.forms.wait_for_compiler()
    assert not steps.forms.disturbs
    steps.make(STEPS + 1)
    assert steps.forms.disturbs
    compiler.may_end.set()
    steps.forms.wait_for_compiler()
    assert not steps.forms.disturbs, "the next error is not the compiler's"
    assert steps.forms._compiling.over


def test_an_evaluation_waits_for_the_compiler_before_it_makes_its_model(monkeypatch):
    bench, seen = Bench(), []
    monkeypatch.setattr(bench.training, "wait_for_compiler", lambda: seen.append("waited"))
    make = bench.mailbox._spare_model
    monkeypatch.setattr(bench.mailbox, "_spare_model", lambda: (seen.append("made"), make())[1])
    bench.post(Evaluate(1))
    bench.mailbox.obey()
    assert seen == ["waited", "made"]
    bench.close()


def test_never_is_never_and_what_is_not_compiled_cannot_be_left(compiler):
    steps = Steps("never")
    steps.make(3 * STEPS)
    assert steps.forms.form is Form.LEFT and compiler.threads == []
    assert not steps.forms.leave("whatever")


def test_compiled_code_is_kept_in_a_folder_with_a_bound(tmp_path, monkeypatch):
    for variable in compiling.CACHE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back as it was
        monkeypatch.delenv(variable)
    folder = tmp_path / "compiled"
    use_cache(str(folder))
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    (folder / "triton").mkdir(parents=True)
    (folder / "triton" / "kernel").write_bytes(bytes(10))
    use_cache(str(folder))
    assert folder.exists()
    monkeypatch.setattr(compiling, "CACHE_BYTES", 9)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    use_cache(str(folder))
    assert not folder.exists() and os.environ["TRITON_CACHE_DIR"] == "/elsewhere", "its user's choice stays"


def test_a_file_that_another_process_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    for variable in compiling.CACHE_VARIABLES:
        monkeypatch.setenv(variable, "/elsewhere")
    (tmp_path / "gone").symlink_to(tmp_path / "target")
    use_cache(str(tmp_path))
    assert tmp_path.exists()


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
