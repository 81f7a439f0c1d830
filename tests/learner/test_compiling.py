"""When passes are compiled, and what becomes of it. (On GPUs: test_accelerators.)"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import msgspec
import pytest
import torch
from learner_kit import BASES, alone
from torch import nn

from p2pdiloco.config.presets import MICRO, for_run
from p2pdiloco.learner import inner_step, training_process
from p2pdiloco.learner.channel import LearnerOptions, Start
from p2pdiloco.learner.inner_step import (
    PAYS_AFTER_S,
    TIMED_STEPS,
    UNTIMED_STEPS,
    Form,
    Forms,
    Passes,
    PassOptions,
    RecordedUpdate,
    bound_cache,
    use_cache,
)
from p2pdiloco.learner.optimizer import FusedAdamW
from p2pdiloco.learner.ranks import Distributed, Order
from p2pdiloco.tasks.registry import task_of

STEPS = TIMED_STEPS + UNTIMED_STEPS
LONG = 10 * PAYS_AFTER_S
PART = (torch.ones(4, 3),)


class Compiler:
    """`torch.compile` whose functions count their calls, and fail if they are told to."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.calls = 0

    def __call__(self, function, dynamic):
        assert not dynamic

        def compiled(*part):
            self.calls += 1
            if self.failure is not None:
                raise self.failure
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


def test_a_compiler_that_fails_is_left(compiler):
    compiler.failure = RuntimeError("no compiler is installed")
    steps = Steps()
    steps.make(STEPS)
    with pytest.raises(RuntimeError):
        steps.make()
    assert steps.forms.leave("no compiler is installed"), "the pass is made again, by whoever asked for it"
    compiler.failure = None
    steps.make(STEPS)
    assert steps.forms.form is Form.LEFT and compiler.calls == 1
    assert steps.forms.take_notes() == [
        "torch.compile failed (no compiler is installed): training without it"
    ]


def test_models_whose_shapes_change_are_compiled_for_who_insists_only(compiler):
    manifest = for_run("micro", "experts")
    task = task_of(msgspec.structs.replace(manifest, model=manifest.model | {"experts": 2}))
    for choice, form in (("auto", Form.LEFT), ("always", Form.PLAIN)):
        passes = Passes(task, task.model(), 4, PassOptions(compile=choice), together=1, bf16=False)
        assert passes._forms.form is form


def test_never_is_never_and_what_is_not_compiled_cannot_be_left(compiler):
    steps = Steps("never")
    steps.make(3 * STEPS)
    assert steps.forms.form is Form.LEFT and compiler.calls == 0
    assert not steps.forms.leave("whatever")


def test_compiled_code_is_kept_in_a_folder(tmp_path, monkeypatch):
    for variable in inner_step.CACHE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back as it was
        monkeypatch.delenv(variable)
    for unusable in ("", "/my data", "/anna's", 'a"b"', "a\\b"):
        use_cache(unusable)
        assert "TRITON_CACHE_DIR" not in os.environ, "torch would split it into words"
    use_cache(str(tmp_path / "compiled"))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "compiled" / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    use_cache(str(tmp_path / "compiled"))
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

    ranks._distributed, ranks._control = SimpleNamespace(broadcast=broadcast), None
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
