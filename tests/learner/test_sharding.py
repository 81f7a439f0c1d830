"""Processes that share a model out learn what one learns. A server forks them, which imports once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.reduction
import select
import socket
import sys
from contextlib import closing
from copy import deepcopy

import msgspec
import pytest
import torch
from deadlines import within_s
from learner_kit import BASES, LAYOUTS, TASK, alone, data, filled_exchange
from one_rank import assert_same_gradients, one_rank
from torch import nn

from p2pdiloco.config.manifest import CausalLMSection, table
from p2pdiloco.config.presets import DIGITS, DIGITS_CNN, MICRO
from p2pdiloco.errors import UserError
from p2pdiloco.learner import loop, ranks, training_process
from p2pdiloco.learner import optimizer as muon
from p2pdiloco.learner import optimizer as sharding
from p2pdiloco.learner.channel import (
    Applied,
    BaseRef,
    CopiedOut,
    Deframer,
    Evaluate,
    Evaluated,
    Install,
    LearnerEnd,
    LearnerOptions,
    PassOptions,
    Ready,
    SpareMachine,
    Start,
    StateSaved,
    Stop,
    decode_event,
    frame,
)
from p2pdiloco.learner.inner_step import Passes
from p2pdiloco.learner.lifeline import PassTooLarge, exit_status
from p2pdiloco.learner.loop import evaluate, heldout_batch
from p2pdiloco.learner.optimizer import FusedAdamW, HeldParameters, Muon, blocks_of, moments, wants_shards
from p2pdiloco.learner.ranks import ALONE, Distributed, Ranks
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.util import end_with

PATIENCE_S = 60
OPTIONS = LearnerOptions(
    peer="peer-a",
    device="cpu",
    threads=1,
    evaluation_tokens=1024,
    nproc=2,
    shard="always",
    niceness=0,
)
SLOWLY = SpareMachine(min_step_s=0.1)
"""Roundings grow twentyfold in 100 steps: a test that is kept waiting is not far behind."""
TOTAL = sum(layout.numel for layout in LAYOUTS)


class Processes:
    """The ranks of one learner, and the daemon's side of it."""

    def __init__(self, exchange, folder, start, count=2, bf16=None):
        self.exchange = exchange
        self._socket, theirs = socket.socketpair()
        self._deframer, self._events = Deframer(), []
        meeting = folder / f"meeting{count}"
        meeting.mkdir()
        # Not of this process, which may have trained: what torch has started by then does not survive a fork.
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(
            ["torch._dynamo", "torch.distributed.fsdp", "p2pdiloco.learner.training_process"]
        )
        self.ranks, self._logs = [], [folder / f"log{rank}of{count}" for rank in range(count)]
        for rank, log in enumerate(self._logs):
            fd = multiprocessing.reduction.DupFd(exchange.fd)
            arguments = (rank, count, start, theirs, fd, meeting, log, bf16)
            self.ranks.append(forking.Process(target=be, args=arguments, daemon=True))
            self.ranks[-1].start()
        theirs.close()

    def send(self, command):
        self._socket.sendall(frame(command))

    def expect(self, kind, condition=lambda event: True):
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind) and condition(event):
                    return event
            assert select.select([self._socket], [], [], within_s(PATIENCE_S))[0], f"no {kind.__name__}"
            received = self._socket.recv(1 << 20)
            assert received, "the learner ended"
            self._events += map(decode_event, self._deframer.feed(received))

    def stop(self, state):
        """What they save at their end."""
        self.send(Stop(state))
        assert self.expect(StateSaved).ok
        for rank in self.ranks:
            rank.join(within_s(PATIENCE_S))
        assert {rank.exitcode for rank in self.ranks} == {0}
        return loop._read_checkpoint(state)

    def have(self):
        """How many parameters are in each."""
        return [int(log.read_text().split(" has ")[1].split()[0]) for log in self._logs]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.join()
        self._socket.close()


def be(rank, count, start, channel, exchange, meeting, log, bf16):
    """A rank's process. `bf16`: whether passes and Muon's matrices are in it, or as this processor has it."""
    sys.stderr = log.open("w", buffering=1)
    if bf16 is not None:
        muon.multiplies_bf16 = ranks.computes_in_bf16 = in_bf16 if bf16 else in_fp32
    end_with(channel)
    if rank:
        training_process.follow(start, rank, count, meeting)
        return
    parts = training_process._build(start, 0, count, meeting)
    end = LearnerEnd(channel)
    training_process._lead(end, start, exchange.detach(), parts)
    end.drain(within_s(PATIENCE_S))


@pytest.mark.process
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_processes_that_share_a_model_out_learn_what_one_learns(tmp_path, monkeypatch, optimizer):
    # In bf16 Muon's matrices make 2 % of such a rounding in 90 steps.
    monkeypatch.setattr(muon, "multiplies_bf16", in_fp32)
    inner = msgspec.structs.replace(MICRO.inner, optimizer=optimizer)
    manifest = msgspec.structs.replace(MICRO, inner=inner)
    reference, _ = alone(0, manifest)
    start = Start(manifest, OPTIONS, BASES, spare=SLOWLY)
    with (
        closing(filled_exchange(manifest)) as exchange,
        Processes(exchange, tmp_path, start, bf16=False) as pair,
    ):
        saved = the_life_of_a_pair(pair, reference, tmp_path / "state")
        has = pair.have()
    assert sum(has) == TOTAL and max(has) <= 0.51 * TOTAL
    # The saved moments are one process's as well.
    restored, _ = alone(0, manifest)
    loop.restore_training(tmp_path / "state", restored, len(LAYOUTS))
    for name, moment in moments(restored.model, restored.optimizer).items():
        assert torch.equal(moment, saved[name])


def the_life_of_a_pair(pair, reference, state):
    ready = pair.expect(Ready)
    assert ready.device == "2 x cpu, sharded" and not ready.appraises
    copied = pair.expect(CopiedOut, lambda event: event.fragment == 1)
    catch_up(reference, copied.inner_step)
    assert_close(pair.exchange.sent(1), theta_of(reference.model, 1))
    # A version that holds the work of others moves the parameters of both.
    move = torch.linspace(-0.01, 0.01, LAYOUTS[1].numel)
    pair.exchange.base(1, 1).copy_(pair.exchange.sent(1) + move)
    pair.send(Install(1, 1, 1, "merged"))
    pair.send(Evaluate())
    applied = pair.expect(Applied)
    evaluated = pair.expect(Evaluated)
    catch_up(reference, applied.inner_step)
    move += theta_of(reference.model, 1)
    HeldParameters(named_parameters(reference.model)).scatter(move, LAYOUTS[1])
    again = pair.expect(CopiedOut, lambda event: event.fragment == 1)
    catch_up(reference, again.inner_step)
    assert_close(pair.exchange.sent(1), theta_of(reference.model, 1))
    merged = task_of(reference.task.manifest).model()
    for layout in LAYOUTS:
        base = pair.exchange.base(layout.index, int(layout.index == 1))
        HeldParameters(named_parameters(merged)).scatter(base, layout)
    heldout = heldout_batch(TASK, data().heldout, 1024)
    assert evaluated.loss == pytest.approx(evaluate(TASK, merged, heldout).loss, rel=1e-5)
    meta, tensors = pair.stop(state)
    catch_up(reference, meta.inner_step)
    for name, moment in moments(reference.model, reference.optimizer).items():
        assert_close(tensors[name], moment)
    return tensors


def catch_up(training, inner_step):
    while training.inner_step < inner_step:
        training.step()


def theta_of(model, fragment):
    theta = torch.empty(LAYOUTS[fragment].numel)
    HeldParameters(named_parameters(model)).gather(LAYOUTS[fragment], theta)
    return theta


def assert_close(found, expected):
    """Sums of gradients in another order differ by fp32 roundings, 1e-7 of them; AdamW divides by a
    gradient's size, so an element whose gradient is small makes of it a visible part of a step."""
    assert apart(found, expected) < 5e-3, apart(found, expected)


def with_experts(optimizer):
    """Which, of a step's samples, some process has none for. Their balance is that of a process's samples."""
    experts = CausalLMSection(layers=2, heads=2, width=32, context_tokens=64, experts=4, balance_weight=0.0)
    inner = msgspec.structs.replace(MICRO.inner, optimizer=optimizer)
    return msgspec.structs.replace(MICRO, model=table(experts), inner=inner)


def in_fp32(kind):
    return False


def in_bf16(kind):
    return True


@pytest.mark.process
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_processes_learn_what_one_learns_and_two_go_on(tmp_path, monkeypatch, optimizer):
    """Moments and the place in the data are of no number of processes."""
    monkeypatch.setattr(muon, "multiplies_bf16", in_fp32)  # in bf16 few samples' roundings are 1 % of a step
    manifest = with_experts(optimizer)
    reference, _ = alone(0, manifest)
    initial = task_of(manifest).initial_parameters()
    bases = (BaseRef(0, 0),) * manifest.sync.fragments
    options = msgspec.structs.replace(OPTIONS, place_path=tmp_path / "place")
    state = None
    with closing(filled_exchange(manifest)) as exchange:
        for count in (3, 2):
            modes = ("all",) * len(bases) if state else ()
            start = Start(manifest, options, bases, state, modes, spare=SLOWLY)
            state = tmp_path / f"state{count}"
            with Processes(exchange, tmp_path, start, count, bf16=False) as processes:
                assert processes.expect(Ready).restored == (count == 2)
                processes.expect(CopiedOut)
                meta, tensors = processes.stop(state)
                has = processes.have()
            assert sum(has) == sum(value.numel() for value in initial.values())
            assert max(has) < 1.2 / count * sum(has)
    catch_up(reference, meta.inner_step)
    for layout in plan_fragments(reference.task.specs(), len(bases)):
        before, after = torch.empty(layout.numel), torch.empty(layout.numel)
        HeldParameters(initial).gather(layout, before)
        HeldParameters(named_parameters(reference.model)).gather(layout, after)
        assert_close(tensors[f"displacement.{layout.index}"], before - after)
    for name, moment in moments(reference.model, reference.optimizer).items():
        assert_close(tensors[name], moment)


@pytest.mark.process
def test_two_copies_in_bf16_learn_what_one_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "computes_in_bf16", in_bf16)
    options = msgspec.structs.replace(OPTIONS, shard="never", precision="auto")
    # Two passes of half a step, whose gradients are rounded to bf16 before they are added up: as the two do.
    half = MICRO.inner.tokens_per_step // 2
    reference, _ = alone(0, precision="auto", micro_batch_tokens=half)
    in_full, _ = alone(0, micro_batch_tokens=half)
    with (
        closing(filled_exchange()) as exchange,
        Processes(exchange, tmp_path, Start(MICRO, options, BASES, spare=SLOWLY), bf16=True) as pair,
    ):
        ready = pair.expect(Ready)
        assert ready.device == "2 x cpu, bf16" and ready.appraises
        copied = pair.expect(CopiedOut)
        sent = pair.exchange.sent(copied.fragment).clone()
        meta, tensors = pair.stop(tmp_path / "state")
    begun = theta_of(reference.model, copied.fragment)
    for training in (reference, in_full):
        catch_up(training, copied.inner_step)
    one, full = (theta_of(t.model, copied.fragment) - begun for t in (reference, in_full))
    assert apart(sent - begun, one) < 1e-4 < apart(full, one) / 10
    catch_up(reference, meta.inner_step)
    for name, moment in moments(reference.model, reference.optimizer).items():
        assert apart(tensors[name], moment) < 1e-3, name


def apart(found, expected):
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def test_a_pass_that_does_not_fit_ends_processes_that_compute_together(monkeypatch):
    model = TASK.model()
    batch = data().train.batch(torch.arange(8).numpy())

    def never_fits(model, batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TASK, "loss", never_fits)
    with pytest.raises(PassTooLarge, match="half as many") as caught:
        Passes(TASK, model, 8, PassOptions(), together=2, bf16=False).gradients(batch, 16)
    assert exit_status(caught.value) == 75


def test_what_is_sharded_and_when(monkeypatch):
    cpu = torch.device("cpu")
    pair = Ranks(0, 2)
    pair.all_say = lambda yes: yes
    assert isinstance(pair, Ranks) and hasattr(Distributed, "all_say")
    monkeypatch.setattr(sharding, "free_bytes", lambda device, count: 1600)
    assert [wants_shards("auto", numel, cpu, 8, pair) for numel in (75, 76)] == [False, True]
    assert not wants_shards("never", 10**9, cpu, 8, pair)
    with pytest.raises(UserError, match="an inner step of 1 samples is too small"):
        wants_shards("always", 1, cpu, 1, pair)
    with pytest.raises(UserError, match="cannot be sharded on xpu"):
        wants_shards("always", 1, torch.device("xpu"), 8, pair)
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([shared]))
    model.extra = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)])})
    model.again = nn.Linear(2, 2)
    model.again.weight = shared.weight
    assert blocks_of(nn.Module()) == []
    bare = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert blocks_of(bare) == [bare[0], bare[2]]
    assert shared not in blocks_of(model) and model.extra["list"][0] in blocks_of(model)


class Either(nn.Module):
    """One of two, as experts are chosen."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.one(x), x


def test_experts_that_only_another_process_chose_have_a_gradient_too(tmp_path, monkeypatch):
    model = nn.Sequential(Either())
    expected = model(torch.ones(3, 2))[0]
    with one_rank(tmp_path, monkeypatch):
        sharding.shard(model, torch.device("cpu"))
        found, untouched = model(torch.ones(3, 2))
        assert torch.equal(found, expected) and torch.equal(untouched, torch.ones(3, 2))
        found.sum().backward()
        gradients = {name: sharding.own(p.grad) for name, p in model.named_parameters()}
    assert torch.equal(gradients["0.one.bias"], torch.full((2,), 3.0))
    assert not gradients["0.other.weight"].any() and not gradients["0.other.bias"].any()


def test_a_shared_matrix_is_orthogonalised_as_a_whole_one_also_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bf16", in_bf16)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5, bias=False))
    with one_rank(tmp_path, monkeypatch):
        model = deepcopy(plain)
        sharding.shard(model, torch.device("cpu"))
        pair = [Muon(list(m.parameters()), lr=0.01, weight_decay=0.1, momentum=0.95) for m in (plain, model)]
        for step in range(3):
            for layer, optimizer in zip((plain, model), pair, strict=True):
                layer.zero_grad()
                layer(torch.arange(7.0).reshape(1, 7) + step).square().sum().backward()
                optimizer.step()
        assert torch.equal(sharding.own(model[0].weight), plain[0].weight)


@pytest.mark.parametrize(("preset", "blocks"), [(DIGITS, 2), (DIGITS_CNN, 3)], ids=["vit", "cnn"])
def test_models_of_images_have_the_same_gradients(tmp_path, monkeypatch, preset, blocks):
    task = task_of(preset)
    model = task.model()
    batch = (torch.rand(4, 1, 8, 8), torch.tensor([0, 3, 9, 3]))
    with one_rank(tmp_path, monkeypatch):
        assert_same_gradients(task, model, batch, blocks)


# Gradients of several processes, each with its part of a step's samples, are what one process has.

STEPS = 3


class Choosing(nn.Module):
    """Experts, each asked only if a sample is its own, behind a layer that is frozen."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, samples, chosen):
        read = self.frozen(samples)
        asked = sorted(set(chosen.tolist()))
        return torch.stack([self.experts[i](read[chosen == i]).square().sum() for i in asked]).sum()


def trained(ranks):
    """The parameters after some steps: of two samples; nobody's is the third expert's."""
    torch.manual_seed(0)
    model, samples, chosen = Choosing(), torch.randn(2, 4), torch.tensor([0, 1])
    optimizer = FusedAdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], 0.01, (0.9, 0.95))
    mine = slice(ranks.rank, ranks.rank + 1) if ranks.count > 1 else slice(None)
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(samples[mine], chosen[mine])
        loss.backward()
        ranks.sum_gradients(model, loss.detach())
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def be_rank(rank, meeting, log, answer):
    sys.stderr = log.open("w", buffering=1)
    with closing(answer):
        found = trained(Distributed.meet(rank, 2, meeting, torch.device("cpu")))
        answer.send({name: value.tolist() for name, value in found.items()})


@pytest.mark.process
def test_what_has_no_gradient_in_any_process_is_left_alone(tmp_path):
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["p2pdiloco.learner.training_process"])
    answers, ranks = [], []
    try:
        for rank in range(2):
            ours, theirs = forking.Pipe(duplex=False)
            arguments = (rank, tmp_path, tmp_path / f"log{rank}", theirs)
            ranks.append(forking.Process(target=be_rank, args=arguments, daemon=True))
            ranks[-1].start()
            theirs.close()
            answers.append(ours)
        assert all(answer.poll(within_s(PATIENCE_S)) for answer in answers)
        both = [{n: torch.tensor(v) for n, v in answer.recv().items()} for answer in answers]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    torch.manual_seed(0)
    begun = dict(Choosing().named_parameters())
    for name, expected in trained(ALONE).items():
        assert torch.equal(both[0][name], both[1][name])
        torch.testing.assert_close(both[0][name], expected)
        alone = name.startswith(("frozen", "experts.2"))
        assert torch.equal(expected, begun[name]) == alone, name
