"""A session and its program's model: what the program may do with it between two steps, and what ends it."""

import pytest
import torch
from program_kit import INNER_STEPS, PaperDaemon, begin, network, train

from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import Evaluate, Evaluated, FreeSlot

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
