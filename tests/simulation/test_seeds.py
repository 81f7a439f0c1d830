"""A few hundred seeds over all mixes: no rule broken, everything live again, nothing lost."""

from __future__ import annotations

import pytest

from p2pdiloco.cli.simulate import MIX_NAMES
from p2pdiloco.simulation.plan import MIXES
from p2pdiloco.simulation.report import replay_command
from p2pdiloco.simulation.runner import run_seeds


@pytest.mark.timeout(300)  # counted in seeds, not in seconds: a busy machine may take its time
@pytest.mark.parametrize("mix", MIX_NAMES)
def test_fifty_seeds(mix: str) -> None:
    nodes = 3
    summary = run_seeds(range(50), mix, nodes)
    failed = [f"{r.detail or r.stuck}: {replay_command(r, nodes, mix)}" for r in summary.failed]
    assert not failed, "\n".join(failed)
    assert summary.versions > 500
    assert summary.faults > 0 or mix == "calm"
    if MIXES[mix].partition == MIXES[mix].crash == 0.0:
        assert summary.lost_to_forks == summary.switches == 0


def test_mix_names_of_the_command_line_are_those_of_the_simulator() -> None:
    assert set(MIX_NAMES) == set(MIXES)
