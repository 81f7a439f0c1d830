"""Two processes of a program: what is wrong in one is an error in both, and nobody waits for ever."""

import math
import multiprocessing
import os
import sys
from contextlib import suppress

import pytest
import torch
from deadlines import within_s
from one_rank import one_rank
from program_kit import TOKENS, PaperDaemon, begin, network, samples, train
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import p2pdiloco.session
from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import Evaluate
from p2pdiloco.learner.program_model import ProgramParameters
from p2pdiloco.learner.program_ranks import ALONE, hold, meet, ranks_of, total
from p2pdiloco.session import Session, new_run
from p2pdiloco.tasks.initial import named_parameters, unwrapped

PATIENCE_S = 60


def same_error(do, words):
    """Both ranks have it, with one sentence."""
    with pytest.raises(UserError, match=words) as caught:
        do()
    found = [None, None]
    distributed.all_gather_object(found, (str(caught.value), caught.value.hint))
    assert found[0] == found[1]


def models_and_arguments_that_differ(rank, folder):
    same_error(lambda: Session(nn.Linear(2, 2 + rank), None), "rank 1 of this program has another model than")
    evaluate = None if rank else lambda: 0.0
    same_error(
        lambda: Session(network(), None, evaluate=evaluate), "rank 0 of this program gives Session eval"
    )
    (folder / "file").touch()
    same_error(lambda: Session(network(), None, "a", data_dir=folder / "file"), "file")


def shares_that_are_not_known(rank, folder):
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(half[0])
    parameters = ProgramParameters(half, named_parameters(half))
    same_error(
        lambda: hold(parameters, ranks_of(None, half)), r"its parameter 1\.weight is whole in every rank"
    )


def copies_that_part(rank, folder):
    model, failing = network(), []

    def evaluate():
        if rank and failing:
            raise ValueError("no such file")
        return float(rank)

    if rank == 0:
        daemon = PaperDaemon(folder, model)
        p2pdiloco.session.SessionDaemon = lambda folder: daemon
        PaperDaemon.addresses = lambda daemon: ("here",)
    session = Session(model, None, "paper", evaluate=evaluate)
    assert session.addresses == ("here",)
    told = []
    session.on_merge(lambda: told.append(session.inner_step))
    for _ in range(40):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        assert session.step(TOKENS // 2, 0.5)
        if rank == 0:
            daemon.serve()
    assert len(told) > 1 and session.run_tokens >= 40 * TOKENS
    for result in (0.5, None):
        if rank == 0:
            daemon.post(Evaluate())
        if result is None:
            failing.append(True)
            with pytest.raises(ValueError if rank else UserError, match="such file" if rank else "in rank 1"):
                session.step(0, 0.5)
        else:
            assert session.step(0, 0.5)
            assert rank or daemon.serve()[-1].loss == result
    if rank:
        with torch.no_grad():
            model[0].bias[0] += 0.1
    same_error(lambda: session.step(0, 0.5), "the parameters of rank 1 of this program are others than those")
    session._role.end()


def one_that_does_not_come(rank, folder):
    if rank == 0:
        with pytest.raises(
            UserError, match=r"not all 2 ranks of this program began their Session within 0\.2 s"
        ):
            Session(network(), None, timeout_s=0.2)
        (folder / "over").touch()
        os._exit(0)
    with suppress(RuntimeError):
        distributed.barrier()  # until the first is gone


STORIES = (
    models_and_arguments_that_differ,
    shares_that_are_not_known,
    copies_that_part,
    one_that_does_not_come,
)


def be(rank, folder, log):
    sys.stderr = log.open("w", buffering=1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.manual_seed(0)
    distributed.init_process_group(init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for story in STORIES:
        story(rank, folder)
    os._exit(0)


@pytest.mark.process
def test_what_is_wrong_in_one_rank_is_an_error_in_both(tmp_path):
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["torch.distributed.fsdp", "p2pdiloco.session"])
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    ranks = [forking.Process(target=be, args=(r, tmp_path, logs[r]), daemon=True) for r in range(2)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(within_s(PATIENCE_S))
        said = "\n".join(log.read_text() for log in logs if log.exists())
        assert [rank.exitcode for rank in ranks] == [0, 0], said
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_a_model_that_one_process_cuts_up_takes_merges(tmp_path, monkeypatch):
    model = network()
    daemon = PaperDaemon(tmp_path, model, others=lambda base: torch.ones_like(base))
    with one_rank(tmp_path, monkeypatch):
        for part in (model[0], model):
            fully_shard(part).set_force_sum_reduction_for_comms(True)
        with pytest.raises(UserError, match="the model is cut up"):
            new_run(model, tmp_path / "again.toml", "again", TOKENS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = begin(monkeypatch, daemon, model, optimizer)

        def step():
            inputs, targets = samples()
            optimizer.zero_grad()
            with session.computing():
                loss = (model(inputs) - targets).square().mean()
                loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(inputs)  # FSDP2 has whole parameters in the model afterwards
            return loss.item()

        before = float(model[2].bias.detach().full_tensor())
        merges = train(session, daemon, step, 40)
        session._role.look()
        moved = before - float(model[2].bias.detach().full_tensor())
        session._role.end()
    assert merges > 2 and moved > 1.0, "by half of 1 at each merge of its fragment"
    assert all(float(work.abs().max()) for work in daemon.contributed)


def test_tokens_are_summed_and_losses_weighted():
    assert total([(64, 0.3)]) == (64, 0.3)
    assert total([(30, 1.0), (10, 5.0)]) == (40, 2.0)
    assert total([(0, math.nan), (10, 5.0)]) == (10, 5.0), "a rank without a token says nothing"
    assert math.isnan(total([(1, math.nan), (10, 5.0)])[1])
    assert total([(0, 1.0), (0, 3.0)]) == (0, 2.0)
    assert meet(ALONE, "Session.step", lambda: (1, 2.0)) == [(1, 2.0)]


def test_wrappers_leave_no_names_behind():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = list(named_parameters(plain))
    model = nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1])
    whole = nn.DataParallel(torch.compile(model, backend="eager"))
    assert unwrapped(whole) is model and list(named_parameters(model)) == names
