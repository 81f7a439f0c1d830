"""What a program sees of `p2pdiloco.Session`: its names, its types, and the error of losses that are NaN."""

from __future__ import annotations

import fcntl
import inspect
import pydoc
import re
import resource
import socket
import typing
from types import SimpleNamespace

import msgspec
import pytest
import torch
from program_kit import INNER_STEPS, PaperDaemon, begin, network, train
from torch import nn

import p2pdiloco
from p2pdiloco.config.presets import MICRO
from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import BaseRef, Evaluate, Evaluated, FreeSlot, Install, LearnerEnd, Stop, frame
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.program_model import ProgramParameters
from p2pdiloco.learner.program_ranks import ProgramTraining
from p2pdiloco.session import Session, SessionNode
from p2pdiloco.tasks.initial import tensor_specs
from p2pdiloco.tensors.layout import Exchange, plan_fragments

USED = {
    "step",
    "computing",
    "close",
    "merged",
    "on_merge",
    "addresses",
    "inner_step",
    "run_tokens",
    "schedule_tokens",
}


def test_help_shows_what_programs_call_and_nothing_else():
    assert {name for name in vars(Session) if not name.startswith("_")} == USED
    text = pydoc.plain(pydoc.render_doc(p2pdiloco.Session))
    assert all(name in text for name in USED) and "_global_loss" not in text
    assert set(dir(p2pdiloco)) == set(p2pdiloco.__all__)


def test_everything_that_programs_call_is_typed():
    names = {}
    for name in (*USED, "__init__", "__enter__"):
        found = inspect.getattr_static(Session, name)
        call = inspect.unwrap(found.fget if isinstance(found, property) else found)
        hints = typing.get_type_hints(call)
        assert set(hints) == {*inspect.signature(call).parameters, "return"} - {"self"}, name
        assert name.startswith("__") or inspect.getdoc(call), name
        names |= {name: hints["return"]}
    assert names["step"] is bool and names["addresses"] == tuple[str, ...]


def node_of(**said):
    """A session's node without a daemon, at its steps; and its mailbox, which says so."""
    same = {"moved": False, "let_go": False, "stopping": False}
    mailbox = SimpleNamespace(begin_step=lambda: None, boundary=lambda report: True, **same | said)
    node = object.__new__(SessionNode)
    node.stopped, node._lost, node._before, node.mailbox = False, 0, 0, mailbox
    inner = msgspec.structs.replace(MICRO.inner, tokens_per_step=64)
    node._training = ProgramTraining(inner, None, [])
    return node, mailbox


def test_losses_that_are_no_numbers_are_an_error_after_ten_steps():
    node, _ = node_of()
    for _ in range(2):
        for loss in [float("nan"), float("inf"), float("-inf")] * 3:
            assert node.step(64, loss).goes_on
        assert node.step(64, 0.5).goes_on, "a finite one begins anew"
    for _ in range(9):
        assert node.step(64, float("nan")).goes_on
    with pytest.raises(UserError, match="no finite number in 10 steps in a row, the last is nan") as caught:
        node.step(64, float("nan"))
    assert "diverged" in caught.value.hint


def test_a_program_that_heard_the_end_hears_that_the_run_was_made_longer():
    node, mailbox = node_of(let_go=True, attend=lambda timeout_s: None)
    assert not node.step(64, 0.5).goes_on
    mailbox.attend = lambda timeout_s: setattr(mailbox, "let_go", False)
    assert node.step(64, 0.5).goes_on


# Channel of a program that has more descriptors than `select` takes.


def test_a_program_with_thousands_of_descriptors_can_wait():
    """`select` takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 1200:
        pytest.skip("no such many descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    daemon, mine = socket.socketpair()
    other, woken = socket.socketpair()
    high = [socket.socket(fileno=fcntl.fcntl(one.detach(), fcntl.F_DUPFD, 1100)) for one in (mine, woken)]
    try:
        end = LearnerEnd(high[0])
        assert not end.arrived(0.0)
        end.wait(0.0)
        other.shutdown(socket.SHUT_RDWR)
        assert not end.wait_or(high[1])
        daemon.sendall(frame(Stop(None)))
        assert end.wait_start() is None
    finally:
        for one in (daemon, other, *high):
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# A session and its program's model: what the program may do with it between two steps, and what ends it.

WRONG = "0.weight was float32 when the session began, and is float64 now"


@pytest.fixture
def model():
    return network()


@pytest.fixture
def daemon(tmp_path, model):
    return PaperDaemon(tmp_path, model, lambda base: -0.5 * torch.ones_like(base))


def test_merges_reach_the_memory_that_parameters_have_then(monkeypatch, model, daemon):
    with begin(monkeypatch, daemon, model, None) as session:

        @torch.no_grad()
        def step():
            for value in model.parameters():
                value.data = value.data - 0.01
            return 0.5

        assert train(session, daemon, step, 4 * INNER_STEPS) > 4
        assert all(float(mine.mean()) > 0 for mine in daemon.contributed), "not zeros"
        place = session._role.mailbox._fragments
        assert all(float(place.displacement(index).abs().max()) < 0.2 for index in range(2)), "merges came"


def test_an_adapter_s_base_is_the_program_s_own(tmp_path, monkeypatch, capsys):
    model = network()
    model[0].requires_grad_(False)
    daemon = PaperDaemon(tmp_path, model, lambda base: -0.5 * torch.ones_like(base))
    before = [value.clone() for value in model[0].parameters()]
    with begin(monkeypatch, daemon, model, torch.optim.SGD(model[2].parameters(), 0.1)) as session:
        daemon.post(Evaluate())
        assert train(session, daemon, lambda: 0.5, 3 * INNER_STEPS) > 2
        assert all(map(torch.equal, before, model[0].parameters()))
        assert model[2].bias.item() > 0.1
        model[0].weight.requires_grad_(True)
        with pytest.raises(UserError, match=r"0\.weight is trained now .* the run does not have it"):
            session.step(64, 0.5)
    assert "2 frozen parameters (544 elements) are not in the run" in capsys.readouterr().err


def computing(session):
    with session.computing():
        pytest.fail("not begun")


def step(session):
    session.step(64, 0.5)


def close(session):
    session.close()


@pytest.mark.parametrize("boundary", [step, computing, close], ids=lambda boundary: boundary.__name__)
def test_another_model_ends_the_session_at_any_boundary(monkeypatch, model, daemon, boundary):
    session = begin(monkeypatch, daemon, model, None)
    assert session.step(64, 0.5)
    model.double()
    with pytest.raises(UserError, match=WRONG):
        boundary(session)
    assert daemon.ended and not session.step(64, 0.5)
    session.close()


def test_the_global_parameters_are_measured_in_the_memory_of_now(monkeypatch, model, daemon):
    seen = []

    def evaluate():
        seen.append(model[0].weight.detach().clone())
        return 1.5

    begun = model[0].weight.detach().clone()
    with begin(monkeypatch, daemon, model, None, evaluate=evaluate) as session:
        model[0].weight.data = begun + 1
        daemon.post(Evaluate())
        assert session.step(64, 0.5)
        assert torch.equal(model[0].weight, begun + 1) and torch.equal(seen[0], begun)
        assert any(isinstance(event, Evaluated) and event.loss == 1.5 for event in daemon.serve())


def test_what_is_not_finite_is_kept_out_and_said_once(monkeypatch, model, daemon, capsys):
    def refuse(fragment):
        daemon.post(FreeSlot(fragment, not_finite=True))

    monkeypatch.setattr(daemon, "_merge", refuse)
    with begin(monkeypatch, daemon, model, None) as session:
        model[0].bias.data[3] = torch.nan
        train(session, daemon, lambda: 0.5, 4 * INNER_STEPS + 1)
        counters = session._role.mailbox._fragments.counters
        assert not any(one.slot_in_use for one in counters)
        assert all(one.unmerged_steps == 4 * INNER_STEPS + 1 for one in counters), "nothing is lost"
    said = [line for line in capsys.readouterr().err.splitlines() if "not finite" in line]
    assert len(said) == 1 and "what is made there is kept out of the run" in said[0]


# Parameters of a program: whatever it does with its model between two boundaries, what is there counts.


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
def program(request):
    """A program; `request.param`: how it is another one than most."""
    program = Program(**getattr(request, "param", {}))
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


CHANGES = [swap_data, other_layout, assign_and_tell_the_optimizer, replace_a_module]


@pytest.mark.parametrize(
    ("program", "change"),
    [
        *(pytest.param({}, change, id=change.__name__) for change in CHANGES),
        pytest.param({"optimizer": False}, assign, id="without_an_optimizer"),
    ],
    indirect=["program"],
)
def test_what_is_under_the_name_now_is_copied_out_and_moved(program, change):
    change(program)
    program.trains_and_merges()


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


WRONG_PARAMETERS = [
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


@pytest.mark.parametrize(("change", "sentence", "hint"), WRONG_PARAMETERS)
def test_a_model_that_is_another_one_now_is_one_sentence_that_says_what_changed(
    program, change, sentence, hint
):
    change(program)
    with pytest.raises(UserError, match=sentence) as caught:
        program.held.look()
    assert re.search(hint, caught.value.hint)


@pytest.mark.parametrize("program", [{"frozen": ("0.weight",)}], indirect=True)
def test_a_parameter_that_is_trained_later_is_not_left_apart_in_silence(program):
    program.held.look()
    program.model[0].weight.requires_grad_(True)
    words = r"0\.weight is trained now \(requires_grad\), but the run does not have"
    with pytest.raises(UserError, match=words):
        program.held.look()
