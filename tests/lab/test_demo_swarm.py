"""How the demo's nodes are ended."""

from __future__ import annotations

import signal
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from p2pdiloco.config.presets import for_run
from p2pdiloco.demo import swarm as demo_swarm
from p2pdiloco.demo.demo import Screen
from p2pdiloco.demo.swarm import Swarm

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Slow:
    """A node that has so much to write before it ends."""

    name, exit_status = "slow", 0

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    @property
    def alive(self) -> bool:
        return self.left_s > 0

    def remember_family(self) -> None:
        pass

    def signal(self, number: int) -> None:
        pass


@pytest.mark.process
@pytest.mark.parametrize(("preset", "late"), [("micro", ["slow"]), ("gpt2", [])])
def test_a_node_with_a_large_state_is_given_the_time_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, late: list[str]
) -> None:
    manifest = for_run(preset, "demo")
    swarm, node, now_s = Swarm(tmp_path, tmp_path / "run.toml", manifest, nodes=0), Slow(30.0), 0.0
    swarm.nodes = [node]  # type: ignore[list-item]

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        node.left_s -= seconds

    try:
        with monkeypatch.context() as patch:
            patch.setattr(demo_swarm.time, "monotonic", lambda: now_s)
            assert swarm.leave(pause) == late
    finally:
        swarm.guard.release()


@pytest.mark.process
def test_ctrl_z_stops_the_nodes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `fg` lets them go on."""
    swarm = Swarm(tmp_path, tmp_path / "run.toml", for_run("micro", "demo"), nodes=0)
    sent: list[tuple[str, int]] = []

    class Told(Slow):
        def signal(self, number: int) -> None:
            sent.append((self.name, number))

        def start(self) -> None:
            raise ZeroDivisionError("no bootstrap here")

    swarm.bootstrap = Told(1.0)  # type: ignore[assignment]
    swarm.bootstrap.name = "bootstrap"
    swarm.nodes = [Told(1.0)]  # type: ignore[list-item]
    terminal = StringIO()
    screen = Screen(Console(file=terminal, force_terminal=True), "demo")
    cursors: list[tuple[int, int]] = []

    def kill(_pid: int, number: int) -> None:
        sent.append(("itself", number))
        cursors.append((terminal.getvalue().count(HIDE_CURSOR), terminal.getvalue().count(SHOW_CURSOR)))

    monkeypatch.setattr(demo_swarm.os, "kill", kill)
    screen.start()
    try:
        with pytest.raises(ZeroDivisionError):
            swarm.start_bootstrap(lambda seconds: None, screen.suspend)
        signal.raise_signal(signal.SIGTSTP)
        stop, go_on = signal.SIGSTOP, signal.SIGCONT
        nodes = ("bootstrap", "slow")
        assert sent == [*((n, stop) for n in nodes), ("itself", stop), *((n, go_on) for n in nodes)]
        assert cursors == [(1, 1)], "the shell has one meanwhile"
        assert terminal.getvalue().count(HIDE_CURSOR) == 2
    finally:
        screen.stop()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        swarm.guard.release()
