"""How the demo's nodes are ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.config.presets import for_run
from p2pdiloco.lab.swarm import swarm as demo_swarm
from p2pdiloco.lab.swarm.swarm import Swarm


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
