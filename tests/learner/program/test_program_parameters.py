"""Parameters of a program: whatever it does with its model between two boundaries, what is there counts."""

import re

import pytest
import torch
from torch import nn

from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import BaseRef, Install
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.program_model import ProgramParameters
from p2pdiloco.tasks.initial import tensor_specs
from p2pdiloco.tensors.layout import Exchange, plan_fragments


class Program:
    """A program's model and optimizer, and what its session has of them: one fragment, all of it."""

    def __init__(self, optimizer=True, frozen=()):
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        for name, value in self.model.named_parameters():
            value.requires_grad_(name not in frozen)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5) if optimizer else None
        specs = [spec for spec in tensor_specs(self.model) if spec.name not in frozen]
        layouts = plan_fragments(specs, 1)
        self.exchange = Exchange.create(layouts)
        self.held = ProgramParameters(self.model, [spec.name for spec in specs], self.optimizer)
        self.held.gather(layouts[0], self.exchange.base(0, 0))
        self.fragments = Fragments(self.held, layouts, self.exchange, [BaseRef(0, 0)], 4, 1.0)

    def trains_and_merges(self):
        """Check that what the program has now is copied out, and that what it has then is moved."""
        self.held.look()
        with torch.no_grad():
            for value in self.model.parameters():
                value += 1
        self.fragments.count_step(64)
        contributed = self.fragments.displacement(0)
        assert torch.allclose(contributed, -torch.ones_like(contributed)), contributed
        before = [value.detach().clone() for value in self.model.parameters()]
        self.held.look()
        self.exchange.base(0, 1).copy_(self.exchange.base(0, 0) + 5)
        self.fragments.install(Install(0, 1, 1, "rebase", 0))
        for old, value in zip(before, self.model.parameters(), strict=True):
            assert torch.allclose(value, old + 5)


@pytest.fixture
def program():
    program = Program()
    yield program
    program.exchange.close()


def swap_data(program):
    for value in program.model.parameters():
        value.data = value.data.clone()


def other_layout(program):
    for value in program.model.parameters():
        value.data = value.data.t().contiguous().t()


def assign(program):
    program.model.load_state_dict({n: v.clone() for n, v in program.model.state_dict().items()}, assign=True)


def assign_and_tell_the_optimizer(program):
    assign(program)
    program.optimizer.param_groups[0]["params"] = list(program.model.parameters())


def replace_a_module(program):
    old, program.model[2] = program.model[2], nn.Linear(3, 1)
    program.model[2].load_state_dict(old.state_dict())
    program.optimizer.add_param_group({"params": program.model[2].parameters()})


@pytest.mark.parametrize(
    "change",
    [swap_data, other_layout, assign_and_tell_the_optimizer, replace_a_module],
    ids=lambda c: c.__name__,
)
def test_what_is_under_the_name_now_is_copied_out_and_moved(program, change):
    change(program)
    program.trains_and_merges()


def test_without_an_optimizer_any_parameter_of_that_name_is_taken():
    program = Program(optimizer=False)
    assign(program)
    program.trains_and_merges()
    program.exchange.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_model_may_move_to_another_device(program):
    program.model.to("cuda")
    program.held.look()
    assert program.held.device.type == "cuda"
    program.trains_and_merges()


def lose(program):
    del program.model[2]


def grow(program):
    program.model[0].weight.data = torch.zeros(4, 2)


WRONG = [
    (
        lambda p: p.model.double(),
        "the parameter 0.weight was float32 when the session began, and is float64 now",
        r"model\.to\(torch\.float32\)",
    ),
    (grow, r"the parameter 0\.weight had shape \(3, 2\) when .* and has \(4, 2\) now", "change it back"),
    (lambda p: p.model.to("meta"), r"0\.weight .* (?:no memory|another Parameter)", ""),
    (lose, r"no parameter 2\.weight any more", "keep their names"),
    (
        assign,
        r"0\.weight is another Parameter than before, and the optimizer does not have it",
        "assign=True",
    ),
]


@pytest.mark.parametrize(("change", "sentence", "hint"), WRONG)
def test_a_model_that_is_another_one_now_is_one_sentence_that_says_what_changed(
    program, change, sentence, hint
):
    change(program)
    with pytest.raises(UserError, match=sentence) as caught:
        program.held.look()
    assert re.search(hint, caught.value.hint)


def test_a_parameter_that_is_trained_later_is_not_left_apart_in_silence():
    program = Program(frozen=("0.weight",))
    program.held.look()
    program.model[0].weight.requires_grad_(True)
    with pytest.raises(
        UserError, match=r"0\.weight is trained now \(requires_grad\), but the run does not have"
    ):
        program.held.look()
    program.exchange.close()
