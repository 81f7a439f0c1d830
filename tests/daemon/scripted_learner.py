"""A learner in place of the process: inner steps come when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from p2pdiloco.daemon.learner_host import LearnerExited
from p2pdiloco.learner import channel as ch
from p2pdiloco.tensors.layout import Exchange

MOVE = 0.01
_made = count()


class ScriptedLearner:
    """Stands for `LearnerHost`: makes inner steps when the test says so."""

    def __init__(self, exchange: Exchange, on_event: Callable[[Any], None]) -> None:
        self._exchange = exchange
        self._on_event = on_event
        self.pid: int | None = None
        self.running = False
        self.bases: list[ch.BaseRef] = []
        self.slot_in_use: set[int] = set()
        self.commands: list[Any] = []
        self.restored: tuple[str, ...] = ()
        self.save_works = True
        self.steps = True
        """True: it comes to make an inner step."""

    async def prepare(self) -> None:
        self.running, self.pid = True, 1

    async def start(self, bases: list[ch.BaseRef], path: Path | None, restore: tuple[str, ...]) -> None:
        await self.prepare()
        self.bases, self.restored, self.begun_with = list(bases), restore, self.course
        self._on_event(ch.Ready("cpu", 1, 1, 0, path is not None))
        if self.steps:
            self._on_event(ch.Status(1, 256, 1.0, 0.01, 5.0, 0.01, 0.0))

    guest = False
    course = ch.FollowCourse()
    wish = ch.SpareMachine()

    def follow(self, course: ch.FollowCourse | ch.SpareMachine) -> None:
        if isinstance(course, ch.SpareMachine):
            self.wish = course
        else:
            self.course = course

    def close(self) -> None:
        """Close nothing: nothing outlives it."""

    def send(self, command: Any) -> bool:
        self.commands.append(command)
        if self.pid is not None:
            asyncio.get_running_loop().call_soon(self._obey, command)
        return self.pid is not None

    def _obey(self, command: Any) -> None:
        match command:
            case ch.Install(fragment, number, buffer, mode):
                self.bases[fragment] = ch.BaseRef(number, buffer)
                if mode != "rebase":
                    self.slot_in_use.discard(fragment)
                self._on_event(ch.Applied(fragment, number, 1))
            case ch.CopyOut(fragment):
                self._on_event(ch.NothingToCopy(fragment, fragment in self.slot_in_use))
            case ch.FreeSlot(fragment):
                self.slot_in_use.discard(fragment)
            case ch.Evaluate():
                self._on_event(ch.Evaluated(1.5, 64))

    def contribute(self, fragment: int, due: bool = True) -> None:
        """One inner step, and its copy-out."""
        base = self.bases[fragment]
        move = MOVE * (1 + next(_made) / 1000)  # no two are equal: copies are refused
        self._exchange.sent(fragment).copy_(self._exchange.base(fragment, base.buffer) - move)
        self.slot_in_use.add(fragment)
        self._on_event(ch.CopiedOut(fragment, 256, 1, base.number, base.buffer, 1, due))

    def kill(self, reason: str) -> None:
        self.die(reason=reason)

    def die(self, hint: str = "", reason: str = "killed by SIGKILL") -> None:
        self.pid, self.running = None, False
        self.slot_in_use.clear()
        self._on_event(LearnerExited(-9, reason, hint))

    async def stop(self, save_path: Path | None, timeout_s: float) -> int | None:
        if self.pid is None:
            return None
        if save_path is not None:
            if self.save_works:
                save_path.write_bytes(b"state")  # noqa: ASYNC240
            self._on_event(ch.StateSaved(save_path, self.save_works, "" if self.save_works else "full", True))
        self.pid, self.running = None, False
        self._on_event(LearnerExited(0, "stopped"))
        return 0
