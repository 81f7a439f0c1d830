"""What differs on a GPU from a CPU. Skipped where there is none."""

import msgspec
import pytest
import torch
from learner_kit import DEVICES, alone, losses_of, training_of

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.config.presets import MICRO
from p2pdiloco.learner import inner_step
from p2pdiloco.learner.channel import BaseRef, Install
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.inner_step import TIMED_STEPS, UNTIMED_STEPS, Form
from p2pdiloco.learner.loop import restore_checkpoint, save_checkpoint
from p2pdiloco.learner.optimizer import HeldParameters, moments
from p2pdiloco.learner.ranks import choose_device, computes_in_bf16
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.transformer import Experts, computes_in_groups
from p2pdiloco.tensors.layout import Exchange, TensorSpec, plan_fragments

ACCELERATORS = DEVICES[1:]
STEPS = 2 * (UNTIMED_STEPS + TIMED_STEPS) + 2
"""So many that what is compiled at once has been recorded, and has said so."""
LITTLE_BYTES = 400 << 20
"""Of a GPU's memory, for a process that is to have too little."""

pytestmark = pytest.mark.skipif(not ACCELERATORS, reason="needs a device that is not the CPU")


@pytest.fixture
def kind():
    return ACCELERATORS[0]


def test_the_best_device_is_found(kind):
    assert choose_device("auto").type == kind


@pytest.mark.parametrize(("precision", "within"), [("fp32", 2e-3), ("auto", 2e-2)])
def test_it_learns_there_what_it_learns_on_a_cpu(kind, precision, within):
    _, expected = alone(STEPS)
    training, found = alone(STEPS, precision=precision, device=kind)
    assert training.bf16 == (precision == "auto" and computes_in_bf16(kind))
    assert found == pytest.approx(expected, rel=within)
    assert found[-1] < found[0] - 0.3, "it learns at all"


def test_a_compiled_model_learns_the_same(kind):
    if kind != "cuda":
        pytest.skip("others may have no compiler")
    _, expected = alone(STEPS, device=kind)
    training, found = alone(STEPS, device=kind, compile="always")
    (told,) = training.take_notes()
    assert told.startswith("compiled in ")
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_compiled_after_some_steps_and_recorded_learns_the_same(kind, optimizer, monkeypatch):
    if kind != "cuda":
        pytest.skip("others record nothing")
    monkeypatch.setattr(inner_step, "PAYS_AFTER_S", 0.0)
    inner = msgspec.structs.replace(MICRO.inner, optimizer=optimizer)
    manifest = msgspec.structs.replace(MICRO, inner=inner)
    training = training_of(manifest, kind, compile="auto")
    forms = training._passes.forms
    found, seen = [], []
    while len(found) < 5000 and (forms.form is not Form.RECORDED or training._recorded_update is None):
        found.append(training.step().loss)
        seen += [] if forms.form in seen else [forms.form]
    assert seen == [Form.PLAIN, Form.COMPILED, Form.RECORDED]
    found += losses_of(training, STEPS)
    _, expected = alone(len(found), manifest, device=kind)
    assert found == pytest.approx(expected, rel=2e-2 if optimizer == "muon" else 2e-3)
    (told,) = training.take_notes()
    assert "and recorded as a CUDA graph: inner steps are" in told


@pytest.mark.parametrize("choice", ["never", "always"])
def test_experts_in_groups_learn_what_they_learn_on_a_cpu(kind, choice):
    experts = MICRO.model | {"experts": 4, "experts_per_token": 2}
    manifest = msgspec.structs.replace(MICRO, model=experts)
    if task_of(manifest).shapes_change(torch.device(kind), True):
        pytest.skip("this device multiplies one matrix after the other")
    _, expected = alone(STEPS, manifest)
    training, found = alone(STEPS, manifest, kind, compile=choice, precision="auto")
    assert [told[:12] for told in training.take_notes()] == ["compiled in "] * (choice == "always")
    assert found == pytest.approx(expected, rel=2e-2)


def test_an_expert_without_a_token_has_a_gradient_of_0(kind):
    section = CausalLMSection(width=32, heads=2, layers=1, context_tokens=64, experts=4, experts_per_token=1)
    if not computes_in_groups(section, torch.device(kind), True):
        pytest.skip("this device multiplies one matrix after the other")
    layer = Experts(section).to(kind)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[[0, 1, 3], [0, 1, 2]] = 20.0
    read = torch.rand(1, 64, 32, device=kind)
    read[0, torch.arange(64), torch.arange(64) % 3] += 2.0
    for _ in range(3):
        layer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            mixed, _ = layer(read)
        mixed.float().square().sum().backward()
        for index, expert in enumerate(layer.experts):
            for parameter in expert.parameters():
                assert parameter.grad.isfinite().all()
                assert bool(parameter.grad.any()) == (index != 2)


def test_a_pass_that_does_not_fit_is_halved_and_the_step_is_the_same(kind):
    if kind != "cuda":
        pytest.skip("only CUDA can be told to have less memory")
    inner = msgspec.structs.replace(MICRO.inner, tokens_per_step=1 << 17)
    manifest = msgspec.structs.replace(MICRO, inner=inner)
    _, (expected,) = alone(1, manifest, kind, micro_batch_tokens=4096)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LITTLE_BYTES / total)
    try:
        training, (found,) = alone(1, manifest, kind, micro_batch_tokens=1 << 17)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (first, *_) = notes = training.take_notes()
    assert first.startswith(f"a pass of {1 << 17} tokens does not fit (") and "out of memory" in first, notes
    assert training.samples_at_once * training.task.tokens_per_sample < 1 << 17
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_versions_are_gone_over_to_in_a_cpu_s_bits(kind, rho):
    """With a copy in flight, through a rebase; the share that a copy held back included."""
    of, layouts = {}, plan_fragments([TensorSpec("a", (64, 33)), TensorSpec("b", (7, 5))], 1)
    for device in ("cpu", kind):
        numbers = torch.Generator().manual_seed(4)
        exchange = Exchange.create(layouts)
        flats = [torch.randn(layouts[0].numel, generator=numbers) for _ in range(7)]
        params = {"a": torch.zeros(64, 33, device=device), "b": torch.zeros(7, 5, device=device)}
        held = HeldParameters(params)
        fragments = Fragments(held, layouts, exchange, [BaseRef(0, 0)], 4, rho)
        of[device] = found = []
        for mode, turn in (("merged", 1), ("rebase", 0), ("merged", 1), ("overwrite", 0)):
            if mode == "merged":
                held.scatter(flats.pop().to(device), layouts[0])
                for _ in range(30 if turn else 3):
                    fragments.count_step(10)
                if not fragments.counters[0].slot_in_use:
                    fragments.copy_out(0, 1)
                found.append(exchange.sent(0).clone())
                held.scatter(flats.pop().to(device), layouts[0])
            exchange.base(0, turn).copy_(flats[0] * (turn + 1))
            fragments.install(Install(0, 1, turn, mode, 0))
            found += [parameter.cpu().clone() for parameter in params.values()]
            found += [fragments.displacement(0)]
            if mode == "merged" and turn:
                for _ in range(4):
                    fragments.count_step(10)
                fragments.copy_out(0, 2)
                found.append(fragments.not_in_flight(0))
        exchange.close()
    for ours, theirs in zip(of[kind], of["cpu"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_state_is_taken_up_on_another_kind_of_device(kind, tmp_path, benches, to_gpu):
    path = tmp_path / "state"
    one, other = (benches(device=device) for device in (("cpu", kind) if to_gpu else (kind, "cpu")))
    for _ in range(3):
        assert one.step()
    save_checkpoint(path, one.training, one.fragments)
    modes = ["all"] * len(one.fragments)
    assert restore_checkpoint(path, modes, other.training, other.fragments) == ""
    assert other.training.inner_step == 3
    for name, parameter in one.parameters().items():
        # base - (base - theta) rounds
        assert torch.allclose(parameter.cpu(), other.parameters()[name].cpu(), atol=1e-7), name
    kept = moments(one.training.model, one.training.optimizer)
    taken = moments(other.training.model, other.training.optimizer)
    assert kept.keys() == taken.keys()
    assert all(torch.equal(kept[name].cpu(), taken[name].cpu()) for name in kept)
    assert other.step()
