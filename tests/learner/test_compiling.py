"""When passes are compiled, by whom, and what becomes of it. (On GPUs: test_accelerators.)"""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from p2pdiloco.learner import compiling
from p2pdiloco.learner.compiling import PAYS_AFTER_S, TIMED_STEPS, UNTIMED_STEPS, Form, Forms, use_cache

STEPS = TIMED_STEPS + UNTIMED_STEPS
LONG = 10 * PAYS_AFTER_S
PART = (torch.ones(4, 3),)


class Compiler:
    """`torch.compile` that takes until it is told, and fails if it is told to."""

    def __init__(self) -> None:
        self.may_end, self.began = threading.Event(), threading.Event()
        self.failure: Exception | None = None
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
            return function(*part)

        return compiled


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


def test_a_lack_of_memory_beside_the_compiler_is_waited_out_once(compiler):
    steps = Steps()
    assert not steps.forms.has_waited_for_compiler()
    steps.make(STEPS + 1)
    compiler.may_end.set()
    assert steps.forms.has_waited_for_compiler()
    assert not steps.forms.has_waited_for_compiler(), "the next lack is not the compiler's"


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
