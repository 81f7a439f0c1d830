"""`p2pdiloco.Session` in programs of two processes: the example, in each of its forms, watched at every step.

Both make the same calls. Whatever a merge puts into one is in the other, and the model computes with it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.process
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import within_s
from system_kit import TAG, Swarm

import p2pdiloco
from p2pdiloco.demo.swarm import of_kind, read_log
from p2pdiloco.errors import UserError
from p2pdiloco.session import Session

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parents[3] / "docs/examples/several_processes/train.py"
PATIENCE_S = 90.0
ENOUGH = 3
"""Merges of a program's life."""
DIED = 3
"""Exit status of a rank that ends without a word."""
HELD_OUT = torch.linspace(-1, 1, 32).view(4, 8)


class Watched(Session):
    """Session that looks at what the model computes before and after each step. Rank by rank the same."""

    def __init__(self, model: Any, optimizer: Any, run: Any, join: Any, **more: Any) -> None:
        self._watched, self._merges, self._found = model, 0, []
        options = ["--eval-every-s", "0.5", "--listen", "/ip4/127.0.0.1/tcp/0"]
        super().__init__(model, optimizer, run, join, evaluate=self._measure, options=options, **more)
        assert self.addresses == same(self.addresses) and self.addresses[0].startswith("/ip4/127.0.0.1/")

    def _measure(self) -> float:
        wrong = self._answers() - HELD_OUT @ (torch.arange(8.0) / 8)
        self._found.append(float(wrong.square().mean()))
        return self._found[-1] + 2 * torch.distributed.get_rank()  # the mean is 1 more

    def step(self, tokens: Any, loss: Any) -> bool:
        """A step, and what is expected of it."""
        before = self._answers()
        before_it = self.inner_step
        goes_on = super().step(tokens, loss)
        after = self._answers()
        assert same(after.tolist()) == after.tolist(), "the ranks part"
        counted = self.inner_step, self.run_tokens, self.schedule_tokens
        assert same(counted) == counted and self.inner_step == before_it + 1
        torch.testing.assert_close(after, self._expected(), msg="what was put in is not what computes")
        self._merges += not torch.equal(before, after)
        return goes_on and not (self._merges >= ENOUGH and self._found and self.watched_enough())

    def watched_enough(self) -> bool:
        """All that was to be seen was seen: what now?"""
        return True

    def _answers(self) -> torch.Tensor:
        """What the model says, as its own evaluation would find it: FSDP2 has whole parameters afterwards."""
        with torch.no_grad():
            return self._watched(HELD_OUT).flatten()

    def _expected(self) -> torch.Tensor:
        """The same, of the parameters that it has by name."""
        self._role.look()
        found = [getattr(p, "full_tensor", p.detach)() for p in self._role.parameters.parameters.values()]
        first, bias, second, last = found
        with torch.no_grad():
            return (torch.tanh(HELD_OUT @ first.T + bias) @ second.T + last).flatten()


class Dies(Watched):
    """Both of its processes are gone at once: the daemon waits for the program to come back."""

    def watched_enough(self) -> bool:
        os._exit(DIED)


class Errs(Watched):
    """What is wrong in one rank is an error in both, and the end of one is the end of both."""

    def watched_enough(self) -> bool:
        second = torch.distributed.get_rank() == 1
        with pytest.raises(UserError, match=r"step: tokens must be a whole number, it is 0\.5"):
            Session.step(self, 0.5 if second else 64, 0.0)
        with pytest.raises(UserError, match="129 tokens in one inner step: this run allows 0 to 128"):
            Session.step(self, 65 if second else 64, 0.0)
        for _ in range(9):
            assert Session.step(self, 1, float("nan") if second else 0.0)
        with pytest.raises(UserError, match="no finite number in 10 steps in a row"):
            Session.step(self, 1, float("nan") if second else 0.0)
        with pytest.raises(
            UserError, match=r"rank 1 of this program is in Session\.close, rank 0 in Session\.s"
        ):
            p2pdiloco.Session.close(self) if second else Session.step(self, 1, 0.0)
        if second:
            os._exit(DIED)
        for _ in range(2):
            with pytest.raises(UserError, match="another process of this program is gone"):
                Session.step(self, 1, 0.0)
        return True


def same(value: Any) -> Any:
    """Rank 0's."""
    found = [value]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def be(
    rank: int, way: str, folder: Path, kind: type[Watched], environment: dict[str, str], log: Path
) -> None:
    """One process of the example."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=sys.stderr)
    torch.manual_seed(rank)
    p2pdiloco.Session = kind
    sys.argv = [str(PROGRAM), way, str(folder)]
    runpy.run_path(str(PROGRAM), run_name="__main__")


@contextmanager
def two(*arguments: Any, folder: Path, tag: str) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Two processes, which have what they do in their logs."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "accelerate", "p2pdiloco.session"]
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    # The server that forks has none of this in its own environment: it stays.
    environment = meeting | {TAG: tag, "TMPDIR": os.environ["TMPDIR"]}
    ranks: list[multiprocessing.process.BaseProcess] = []
    try:
        for rank in range(2):
            log = folder / f"log{rank}"
            ranks.append(forking.Process(target=be, args=(rank, *arguments, environment, log), daemon=True))
            ranks[-1].start()
        yield ranks
    finally:
        for one in ranks:
            one.kill()
            one.join()


def test_every_process_of_a_program_has_what_was_merged(swept_swarm: Swarm, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for way, kind, ends in (
        ("accelerate", Dies, [DIED, DIED]),  # its daemon stays, for the next
        ("fsdp2", Watched, [0, 0]),
        ("ddp", Errs, [0, DIED]),
    ):
        logs = tmp_path / way
        logs.mkdir()
        with two(way, folder, kind, folder=logs, tag=swept_swarm.tag) as ranks:
            for one in ranks:
                one.join(within_s(PATIENCE_S))
            said = "\n".join(path.read_text() for path in sorted(logs.iterdir()))
            assert [one.exitcode for one in ranks] == ends, said
    lines = read_log(folder / "node" / "events.jsonl")
    assert ["left" in line.reason for line in of_kind(lines, "shutdown")] == [True, True]
    losses = [line.loss for line in of_kind(lines, "evaluation")]
    assert 0.0 < losses[-1] - 1.0 < (losses[0] - 1.0) / 2
