"""Muon: torch's, and what is done where bf16 is slow."""

from __future__ import annotations

import pytest
import torch

from p2pdiloco.learner import optimizer as muon
from p2pdiloco.learner.optimizer import Muon, hidden_matrices


def test_our_muon_is_torchs_bit_for_bit(monkeypatch) -> None:
    theirs_class = getattr(torch.optim, "Muon", None)
    if theirs_class is None:
        pytest.skip("this torch has no Muon")
    monkeypatch.setattr(muon, "multiplies_bf16", lambda kind: True)  # as torch's does everywhere
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(7, 5, bias=False)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    a = Muon(list(ours.parameters()), lr=0.01, weight_decay=0.1, momentum=0.95)
    b = theirs_class(
        theirs.parameters(), lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        for optimizer, layer in ((a, ours), (b, theirs)):
            optimizer.zero_grad()
            batch = torch.arange(7.0).reshape(1, 7) + step
            torch.autograd.backward(layer(batch).square().sum())
            optimizer.step()
        assert torch.equal(ours[0].weight, theirs[0].weight)
    two = torch.nn.Sequential(torch.nn.Embedding(3, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    assert [tuple(p.shape) for p in hidden_matrices(two)] == [(5, 7)], "neither embedding nor head"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_where_bf16_is_slow_matrices_are_orthogonalised_in_fp32(monkeypatch, fast, shape) -> None:
    asked = []
    monkeypatch.setattr(muon, "multiplies_bf16", lambda kind: asked.append(kind) or fast)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    found = muon.orthogonal(matrix)
    assert found.dtype == (torch.bfloat16 if fast else torch.float32) and asked == ["cpu"]
    assert found.shape == shape and torch.equal(matrix, before), "a gradient is not written to"
    singular = torch.linalg.svdvals(found.float())
    assert float(singular.min()) > 0.5 and float(singular.max()) < 1.5
