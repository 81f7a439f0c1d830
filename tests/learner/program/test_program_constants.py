"""Buffers of a program's model: a change of the run's constants is told from none, statistics are merged."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from p2pdiloco.errors import UserError
from p2pdiloco.learner.program_model import ProgramParameters
from p2pdiloco.learner.program_ranks import total
from p2pdiloco.tasks.description import describe
from p2pdiloco.tensors.layout import plan_fragments

VALUES = torch.tensor([0.0, 1 / 3, torch.nan])


class Block(nn.Module):
    """A module with a constant in a module of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("table", torch.zeros(3))


def held(model):
    names = [name for name, _ in model.named_parameters()]
    plain = [name.replace("_checkpoint_wrapped_module.", "") for name in names]
    return ProgramParameters(model, plain, None, {"0.inner.table": VALUES})


@pytest.mark.parametrize(
    "change",
    [lambda inner: inner.table.add_(1), lambda inner: setattr(inner, "table", torch.ones(3))],
    ids=["in place", "another buffer"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_loaded_again_is_not_changed(dtype, change):
    model = nn.Sequential(Block()).to(dtype)
    parameters = held(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    parameters.look()
    change(model[0].inner)
    with pytest.raises(UserError, match=r"the buffer 0\.inner\.table was changed"):
        parameters.look()


def test_they_are_found_in_a_module_that_was_wrapped():
    model = nn.Sequential(Block())
    inside = model[0].inner
    model[0] = checkpoint_wrapper(model[0])
    held(model).look()
    torch.testing.assert_close(inside.table, VALUES, equal_nan=True)


def test_another_type_of_the_whole_model_is_said_of_a_parameter():
    model = nn.Sequential(Block())
    parameters = held(model)
    model.half()
    with pytest.raises(UserError, match=r"the parameter 0\.inner\.weight was float32"):
        parameters.look()


def test_statistics_that_training_changes_are_merged():
    model = nn.Sequential(nn.BatchNorm1d(4))
    norm, names = model[0], ["0.weight", "0.running_mean", "0.running_var"]
    parameters = ProgramParameters(model, names)
    (layout,) = plan_fragments([spec for spec in describe(model).of_run(names) if spec.name in names], 1)
    parameters.scatter(torch.full((12,), -1.0), layout)
    parameters.settle()
    assert norm.running_mean.tolist() == [-1.0] * 4
    assert norm.running_var.tolist() == [0.0] * 4, "momentum takes no variance below zero"
    norm.bias.requires_grad_(False)  # (the run lacks it)
    norm.train()(torch.randn(8, 4))
    norm.running_mean = torch.ones(4)  # other memory under the name
    parameters = ProgramParameters(model, names)
    norm.running_mean = torch.full((4,), 7.0)
    parameters.look()
    out = torch.empty(12)
    parameters.gather(layout, out)
    assert out.tolist().count(7.0) == 4


def test_statistics_that_are_merged_may_differ_by_rank():
    said = []
    for mean in (0.0, 1.0):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for value in model.parameters():
            nn.init.ones_(value)
        model[1].running_mean.fill_(mean)
        names = [name for name, _ in model.named_parameters()]
        said.append([8, 1.0, *ProgramParameters(model, [*names, "1.running_mean"]).few()])
    assert total(said) == (16, 1.0)
