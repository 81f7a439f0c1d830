"""`p2pdiloco.Session` of a model with buffers: constants are the run's, statistics are merged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deadlines import Deadline
from safetensors.torch import load_file
from system_kit import TAG, Swarm

import p2pdiloco
from p2pdiloco.errors import UserError

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
PATIENCE_S = 90.0


class Normed(torch.nn.Module):
    """Batch norm behind inputs that are scaled by a constant."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(inputs * self.scale))
        return found


def test_constants_come_from_the_run_and_statistics_are_merged(
    swept_swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TAG, swept_swarm.tag)
    torch.set_num_threads(1)
    toml, node, out = tmp_path / "run.toml", tmp_path / "node", tmp_path / "theta.safetensors"
    p2pdiloco.new_run(
        Normed(2.0),
        toml,
        "own",
        tokens_per_step=64,
        inner_steps=16,
        fragments=1,
        average_statistics=True,
        data_dir=node,
    )
    model = Normed(3.0)  # another constant than the run's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with p2pdiloco.Session(model, optimizer, toml, data_dir=node) as session:
        assert model.scale == 2.0
        deadline = Deadline(PATIENCE_S)
        merges = 0
        while merges < 3:
            assert not deadline.over()
            inputs = torch.randn(64, 8) + 1.5
            loss = model(inputs).sub(inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            before = session._role.mailbox._fragments.bases[0].number
            assert session.step(tokens=64, loss=loss)
            merges += session._role.mailbox._fragments.bases[0].number > before
    command = [sys.executable, "-m", "p2pdiloco", "checkpoint", "--data-dir", str(node), "--out", str(out)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    found = load_file(out)
    assert (
        found["scale"] == 2.0
        and found["norm.running_mean"].min() > 1.0
        and found["norm.running_var"].min() > 0
    )
    again = Normed(2.0)
    assert again.load_state_dict(found, strict=False).unexpected_keys == []
    # Whoever comes back has them all; a constant that training changes is none.
    model = Normed(3.0)
    with p2pdiloco.Session(model, None, toml, data_dir=node) as session:
        assert model.scale == 2.0 and model.norm.running_mean.min() > 1.0
        model.scale.mul_(2)
        with pytest.raises(UserError, match="the buffer scale was changed"):
            session.step(tokens=64, loss=0.5)
