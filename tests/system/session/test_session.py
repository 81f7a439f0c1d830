"""`p2pdiloco.Session`: programs with a training loop of their own, each with a real daemon. Of a model with
buffers constants are the run's, and statistics are merged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import Deadline
from safetensors.torch import load_file
from system_kit import TAG, Swarm

import p2pdiloco
from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.demo.swarm import Line, of_kind, read_log
from p2pdiloco.errors import UserError

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parents[3] / "docs/examples/own_loop/train.py"
PATIENCE_S = 90.0
torch.set_num_threads(1)


def program(folder: Path) -> subprocess.Popen[bytes]:
    """The example, as the run's first learner."""
    return subprocess.Popen([sys.executable, str(PROGRAM), str(folder)])


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = Deadline(PATIENCE_S)
    while not (found := condition()):
        assert not deadline.over(), f"did not happen: {what}"
        time.sleep(0.02)
    return found


def records(folder: Path, kind: str) -> list[Line]:
    return of_kind(read_log(folder / "node" / "events.jsonl"), kind)


def address(folder: Path) -> str:
    log = folder / "node" / "session.log"
    said = (
        [x for x in log.read_text().splitlines() if x.startswith("p2pdiloco node --join")]
        if log.exists()
        else []
    )
    return said[0].split()[3] if said else ""


@pytest.fixture(autouse=True)
def no_sockets_stay(tmp_path: Path) -> Iterator[None]:
    """Of a daemon that was killed, where its data folder's path is too long for sockets. The last to end."""
    yield
    for folder in (tmp_path / "new" / "theirs", tmp_path / "mine"):
        shutil.rmtree(socket_folder(folder / "node"), ignore_errors=True)


def test_two_programs_train_one_model_and_one_of_them_dies(
    swept_swarm: Swarm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(TAG, swept_swarm.tag)
    theirs, mine = tmp_path / "new" / "theirs", tmp_path / "mine"
    first = program(theirs)
    joined = until(lambda: address(theirs), "an address")

    plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    own = torch.compile(plain, backend="eager")  # theirs is not, and has the same names
    losses: list[float] = []
    truth = torch.arange(8.0).view(8, 1) / 8
    held_out = torch.randn(256, 8)

    def evaluate() -> float:
        with torch.no_grad():
            losses.append((own(held_out) - held_out @ truth).square().mean().item())
        return losses[-1]

    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    options = ["--eval-every-s", "1"]
    with p2pdiloco.Session(
        own, optimizer, "own", [joined], data_dir=mine / "node", evaluate=evaluate, options=options
    ) as session:
        assert session.addresses and session.addresses[0] == address(mine)
        assert f'in the run own; others join with "{address(mine)}"' in capfd.readouterr().err

        told, moved = list[int](), list[int]()
        session.on_merge(lambda: told.append(session.inner_step))

        def step() -> bool:
            inputs = torch.randn(64, 8)
            loss = (own(inputs) - inputs @ truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            goes_on = session.step(tokens=64, loss=loss.item())
            if session.merged:
                moved.append(session.inner_step)
            return goes_on

        def train(condition: Callable[[], Any], what: str) -> None:
            """Inner steps until something has come about."""

            def stepped() -> Any:
                assert step()
                return condition()

            until(stepped, what)

        # The run is open, and its first program alone has a seat: its owner gives us one, too.
        seat = ["seat", "own", address(mine).rpartition("/")[2], "--data-dir", str(theirs / "node"), "--yes"]
        command = [sys.executable, "-m", "p2pdiloco", *seat, "--join", address(mine)]
        assert subprocess.run(command, check=False).returncode == 0

        def together() -> int:
            return sum(m.contributors == 2 for where in (theirs, mine) for m in records(where, "merge"))

        def merged() -> list[dict[str, Any]]:
            return [c for c in records(mine, "contribution") if c.reason == "merged"]

        train(
            lambda: together() > 2 and records(mine, "evaluation"),
            "both are in a merge, and Theta is measured",
        )
        assert records(mine, "evaluation")[-1].loss in losses
        assert told[0] == 0 and told[1:] == moved, "on_merge, and merged"
        for value in plain.parameters():  # other memory under the same names
            value.data = value.data.clone()
        counters = session._role.mailbox._fragments.counters
        train(lambda: not any(c.slot_in_use for c in counters), "nothing of ours is on its way")
        taken = len(merged())
        with session.computing():  # a long inner step: others' versions do not wait for its end
            until(lambda: len(merged()) > taken, "work of the earlier ones is asked for, and merged")
            with pytest.raises(UserError, match=r"Session\.step within Session\.computing"):
                session.step(tokens=64, loss=0.0)
            with pytest.raises(UserError, match=r"Session\.computing within"), session.computing():
                pass
        for tokens, loss, wrong in ((1.5, 0.0, "tokens"), ("a", 0.0, "tokens"), (64, "a", "loss")):
            with pytest.raises(UserError, match=f"step: {wrong} must be a"):
                session.step(tokens, loss)
        assert session.step(tokens=torch.tensor(64), loss=torch.tensor(0.5))
        assert session.step(tokens=np.float32(64), loss=np.float32(0.5))
        for _ in range(9):  # a few are no end, and a finite one begins anew
            assert session.step(tokens=0, loss=float("nan"))
        assert session.step(tokens=0, loss=0.5)
        with pytest.raises(UserError, match="65 tokens in one inner step: this run allows 0 to 64"):
            session.step(tokens=65, loss=0.0)

        first.kill()  # a learner's absence: its daemon stays, and so does the run
        first.wait()
        train(lambda: "training program is gone" in str(records(theirs, "learner")), "its daemon says so")
        before = len(records(mine, "apply"))
        train(lambda: len(records(mine, "apply")) > before + 2, "merges go on")

        again = program(theirs)  # the same daemon takes it
        count = together()
        train(lambda: together() > count + 2, f"both are in a merge again (from {count})")
        assert len([x for x in records(theirs, "learner") if x.reason == "running"]) == 2
        again.terminate()
        again.wait()
        # What is left of the first one: its daemon, which would leave after a while.
        os.kill(int((theirs / "node" / "lock").read_text()), 15)

        # Whoever began the run ends it: then what the program made is merged, and it is told.
        ends = ["--end", "--at-tokens", str(session.run_tokens + 64 * 500), "--join", address(mine)]
        amend = ["run", "amend", "own", "--data-dir", str(theirs / "node"), *ends]
        ending = subprocess.Popen([sys.executable, "-m", "p2pdiloco", *amend])
        train(lambda: ending.poll() is not None, "the owner's word")
        assert ending.returncode == 0
        until(lambda: not step(), "the run's end")
        assert session._role.mailbox._fragments.all_merged
        made = session.inner_step
        assert not step() and session.inner_step == made
    assert "left" in str(records(mine, "shutdown"))
    notes = list((mine / "node").glob("runs/*/resume.json"))
    assert notes and (notes[0].parent / "learner.safetensors").exists(), "for a session that comes back"
    until(lambda: "left" in str(records(theirs, "shutdown")), "the other daemon leaves")
    until(lambda: not list(swept_swarm.processes()), "nothing is left")


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
