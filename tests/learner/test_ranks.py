"""Gradients of several processes, each with its part of a step's samples, are what one process has."""

import multiprocessing
import sys
from contextlib import closing

import pytest
import torch
from deadlines import within_s
from torch import nn

from p2pdiloco.learner.optimizer import FusedAdamW
from p2pdiloco.learner.ranks import ALONE, Distributed

PATIENCE_S = 60
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
        optimizer.zero_grad()
        loss = model(samples[mine], chosen[mine])
        loss.backward()
        ranks.sum_gradients(model, loss.detach())
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def be(rank, meeting, log, answer):
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
            ranks.append(forking.Process(target=be, args=arguments, daemon=True))
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
