"""A process of bench_averaging.py: a node of ours, told by stdin what to do.

It is `p2pdiloco node` without the learner process, in whose place stands a puppet. For every `match`
it fills the shared memory with parameters that it could have come to, and prints `matched`; for every `go` it
says that all fragments are copied out. When all of them were merged, and the new versions handed to it, it
prints `done` and the monotonic time. Ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon import start as program
from p2pdiloco.daemon.member import Member
from p2pdiloco.learner import channel as ch
from p2pdiloco.tensors.layout import Exchange

LISTEN = "/ip4/127.0.0.1/tcp/0"
STEP_S = 1.0
"""Time of an inner step as the puppet says: closing calls are waited for long enough on any machine."""


class Puppet:
    """Stands for `LearnerHost`."""

    def __init__(self, exchange: Exchange, contributed: tuple[int, int], tell: Callable[..., None]) -> None:
        self._exchange, self._tell = exchange, tell
        self._tokens, self._steps = contributed
        self._bases: list[Any] = []
        self._slots: set[int] = set()
        self._missing: set[int] = set()
        self._prepared: list[int] = []
        """Fragments with something to send."""
        self.running, self.pid = False, None
        largest = max(exchange.sent(f).numel() for f in range(exchange.fragments))
        self._move = torch.randn(largest, generator=torch.Generator().manual_seed(os.getpid())).mul_(1e-3)

    async def prepare(self) -> None:
        self.running = True

    async def start(self, bases: list[Any], path: Path | None, restore: tuple[str, ...]) -> None:
        self._bases = list(bases)
        self._tell(ch.Ready("cpu", 1, 1, 0, False))
        self._tell(ch.Status(1, self._tokens, 1.0, STEP_S, 5.0, STEP_S, 0.0))
        asyncio.get_running_loop().add_reader(0, self._read)
        print("trains", flush=True)

    def _read(self) -> None:
        words = os.read(0, 1024)
        if not words:
            asyncio.get_running_loop().remove_reader(0)
            os.kill(os.getpid(), signal.SIGTERM)
        for word in words.split():
            if word == b"match":
                for fragment in range(self._exchange.fragments):
                    self._move_on(fragment)
                self._missing = set(range(self._exchange.fragments))
                self._prepared = sorted(self._missing)
                print("matched", flush=True)
                continue
            for fragment in list(self._prepared):
                self._contribute(fragment)

    def _move_on(self, fragment: int) -> None:
        base, sent = self._bases[fragment], self._exchange.sent(fragment)
        torch.add(self._exchange.base(fragment, base.buffer), self._move[: sent.numel()], out=sent)

    def _contribute(self, fragment: int) -> None:
        base = self._bases[fragment]
        self._prepared.remove(fragment)
        self._slots.add(fragment)
        self._tell(ch.CopiedOut(fragment, self._tokens, self._steps, base.number, base.buffer, 1, True))

    def follow(self, course: object) -> None:
        """Nothing is trained by it."""

    def send(self, command: Any) -> bool:
        asyncio.get_running_loop().call_soon(self._obey, command)
        return True

    def _obey(self, command: Any) -> None:
        match command:
            case ch.Install(fragment, number, buffer, mode):
                self._bases[fragment] = ch.BaseRef(number, buffer)
                self._tell(ch.Applied(fragment, number, 1))
                if mode != "rebase":
                    self._slots.discard(fragment)
                    self._merged(fragment)
            case ch.CopyOut(fragment) if fragment in self._prepared:
                self._contribute(fragment)  # another node was told to go before this one
            case ch.CopyOut(fragment):
                self._tell(ch.NothingToCopy(fragment, fragment in self._slots))
            case ch.FreeSlot(fragment):
                self._slots.discard(fragment)

    def _merged(self, fragment: int) -> None:
        waited = bool(self._missing)
        self._missing.discard(fragment)
        if waited and not self._missing:
            print("done", time.monotonic(), flush=True)

    async def stop(self, save_path: Path | None, timeout_s: float) -> int:
        self.running = False
        return 0


class BenchMember(Member):
    """A member whose learner is the puppet."""

    def _make_host(self, on_event: Callable[..., None]) -> Puppet:  # type: ignore[override]
        manifest = self.run.manifest
        steps = manifest.sync.inner_steps
        contributed = (manifest.inner.tokens_per_step * steps, steps)
        return Puppet(self.holdings.exchange, contributed, on_event)


def main(data_dir: str, join: str, run_file: str, name: str, daemon_nice: str) -> int:
    """Run a node; the first (with `run_file`) owns the run and starts it."""
    torch.set_num_threads(1)
    program.Member = BenchMember  # type: ignore[misc]
    settings = NodeSettings(
        data_dir=Path(data_dir),
        join=(join,) if join else (),
        listen=(LISTEN,),
        name=name,
        genesis=bool(run_file),
        run_file=Path(run_file) if run_file else None,
        log="text",
        checkpoint_every_s=1e5,
        eval_every_s=1e5,
        daemon_nice=daemon_nice,
    )
    return program.run_node(settings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
