"""What merges put into a program's model: it is told of them, and whoever writes over them is found."""

import copy

import pytest
import torch
from program_kit import INNER_STEPS, PaperDaemon, begin, network, samples, train
from torch import nn

from p2pdiloco.errors import UserError

GONE = "is gone after the program's next step: something writes its own copies of the parameters back"


class Masters:
    """Optimizer of a bf16 model with fp32 masters of its own."""

    def __init__(self, parameters, rate=1e-3):
        self._theirs = list(parameters)
        self.param_groups = [{"lr": rate, "params": self._theirs}]
        self._masters = [value.detach().float().clone() for value in self._theirs]
        self._inner = torch.optim.AdamW(self._masters, rate)

    @torch.no_grad()
    def step(self):
        for master, value in zip(self._masters, self._theirs, strict=True):
            master.grad = value.grad.float()
        self._inner.step()
        for master, value in zip(self._masters, self._theirs, strict=True):
            value.copy_(master)

    @torch.no_grad()
    def take_over(self):
        for master, value in zip(self._masters, self._theirs, strict=True):
            master.copy_(value)


class MegatronLike(Masters):
    def reload_model_params(self):
        self.take_over()


class MuonLike(torch.optim.Optimizer):
    """Steps of one length along the matrix's directions, whatever the gradient's length."""

    def __init__(self, parameters, rate):
        super().__init__(list(parameters), {"lr": rate})

    @torch.no_grad()
    def step(self):
        for value in self.param_groups[0]["params"]:
            step = value.grad
            if step.dim() == 2:
                left, _, right = torch.linalg.svd(step.float(), full_matrices=False)
                step = (left @ right).to(value.dtype)
            value.sub_(step, alpha=self.param_groups[0]["lr"])


class Program:
    """A program in a run with another member, who moves along a way of its own."""

    def __init__(self, folder, monkeypatch, make, dtype=torch.float32, begins_at=None):
        torch.manual_seed(0)
        self.model = network().to(dtype)
        self.optimizer = make(self.model.parameters())
        self.daemon = PaperDaemon(folder, begins_at or self.model, lambda base: 0.02 * torch.randn_like(base))
        self.session = begin(monkeypatch, self.daemon, self.model, self.optimizer)
        self.dtype, self.after_step = dtype, lambda: None

    def step(self):
        inputs, wanted = samples()
        loss = (self.model(inputs.to(self.dtype)).float() - wanted).square().mean()
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.after_step()
        return loss.item()

    def train(self, steps):
        return train(self.session, self.daemon, self.step, steps)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Maker of programs; their sessions are over at the end."""
    made = []

    def make(*arguments, **more):
        made.append(Program(tmp_path, monkeypatch, *arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


def adam(parameters):
    return torch.optim.AdamW(parameters, 1e-3)


def test_a_program_hears_of_merges(program):
    told = []
    mine = program(adam)
    mine.session.on_merge(lambda: told.append(mine.session.inner_step))
    assert told == [0], "the session began with the run's parameters"
    assert mine.train(1) == 0 and not mine.session.merged
    merges = mine.train(3 * INNER_STEPS)
    assert merges == len(told) - 1 == len(mine.daemon.contributed)


def test_masters_that_write_over_merges_end_the_session(program, monkeypatch):
    mine = program(Masters, torch.bfloat16)
    with pytest.raises(UserError, match="merges put into the model " + GONE) as caught:
        mine.train(10 * INNER_STEPS)
    assert "fp32 masters" in caught.value.hint and "session.on_merge" in caught.value.hint
    contributed = len(mine.daemon.contributed)
    assert contributed <= 4, "three merges are enough"
    assert mine.daemon.ended and not mine.session.step(64, 0.5)
    mine.daemon.serve()
    assert len(mine.daemon.contributed) == contributed


def test_what_a_program_begins_with_is_taken_over_or_it_ends_before_it_contributes(program):
    torch.manual_seed(1)
    mine = program(Masters, torch.bfloat16, begins_at=network())
    with pytest.raises(UserError, match="the run put into the model when the session began " + GONE):
        mine.train(INNER_STEPS)
    assert not mine.daemon.contributed


@pytest.mark.parametrize("kind", [Masters, MegatronLike])
def test_masters_that_take_merges_over_keep_them(program, kind):
    mine = program(kind, torch.bfloat16)
    if kind is Masters:
        mine.session.on_merge(mine.optimizer.take_over)
    assert mine.train(6 * INNER_STEPS) > 8


def test_an_average_that_is_copied_back_ends_the_session(program):
    mine = program(adam)
    average = copy.deepcopy(mine.model)

    @torch.no_grad()
    def copy_back():
        for kept, value in zip(average.parameters(), mine.model.parameters(), strict=True):
            kept.lerp_(value, 0.1)
            value.data = kept.clone()

    mine.after_step = copy_back
    with pytest.raises(UserError, match=GONE):
        mine.train(10 * INNER_STEPS)


def fast(parameters):
    return torch.optim.SGD(parameters, 0.3, momentum=0.9)


def gentle(parameters):
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, nesterov=True)


def muon(parameters):
    return MuonLike(parameters, 0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [adam, fast, gentle, muon], ids=lambda make: make.__name__)
def test_honest_programs_are_not_accused(program, make, dtype):
    mine = program(make, dtype)
    assert mine.train(6 * INNER_STEPS) > 8


def test_a_rate_that_leaps_is_no_undoing(program):
    mine = program(adam)

    def leap():
        mine.optimizer.param_groups[0]["lr"] = 0.1 if mine.session.inner_step % 5 == 4 else 1e-3

    mine.after_step = leap
    assert mine.train(6 * INNER_STEPS) > 8


@pytest.mark.parametrize("drops_gradients", [True, False])
def test_a_step_that_goes_back_along_its_gradient_is_the_program_s_own(program, drops_gradients):
    """The nearest optimum is where the program was before the merge, and one step reaches it."""
    mine = program(lambda parameters: torch.optim.SGD(parameters, 0.9))

    def step():
        loss = sum(value.square().sum() for value in mine.model.parameters()) / 2
        mine.model.zero_grad()
        loss.backward()
        mine.optimizer.step()
        if drops_gradients:
            mine.model.zero_grad()
        return loss.item()

    mine.step = step
    assert mine.train(8 * INNER_STEPS) > 10


def test_steps_that_a_scaler_leaves_out_undo_nothing(program):
    """Automatic mixed precision: no masters, but steps that do not take place."""
    mine = program(adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    left_out = []

    def step():
        inputs, wanted = samples()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (mine.model(inputs).float() - wanted).square().mean()
        mine.optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        if mine.session.inner_step % 4 == 1:
            mine.model[0].weight.grad[0, 0] = torch.inf
        scaler.step(mine.optimizer)
        scaler.update()
        left_out.append(scaler.get_scale() < before)
        return loss.item()

    mine.step = step
    assert mine.train(8 * INNER_STEPS) > 10
    assert sum(left_out) == 2 * INNER_STEPS


def test_the_optimizer_is_let_go_of(program):
    mine = program(adam)
    assert mine.optimizer._optimizer_step_pre_hooks
    mine.session.close()
    assert not mine.optimizer._optimizer_step_pre_hooks


def test_a_model_of_images_in_channels_last_takes_merges(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    daemon = PaperDaemon(tmp_path, model, lambda base: 0.02 * torch.ones_like(base))

    def step():
        loss = model(torch.randn(8, 3, 8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    with begin(monkeypatch, daemon, model, optimizer) as session:
        assert train(session, daemon, step, 3 * INNER_STEPS) > 3
    assert not model[0].weight.is_contiguous()
