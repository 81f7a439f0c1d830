"""Many seeds over all mixes: no rule broken, everything live again, nothing lost."""

from __future__ import annotations

import pytest
from past_failures import PAST_FAILURES

from p2pdiloco_lab.lab_commands import MIX_NAMES
from p2pdiloco_lab.seed_pool import play
from p2pdiloco_lab.simulation.seed_plan import MIXES
from p2pdiloco_lab.simulation.seed_report import SeedsSummary, replay_command
from p2pdiloco_lab.simulation.sim_world import run_seed

SEEDS, MANY_SEEDS = 6, 60


@pytest.mark.long
@pytest.mark.timeout(300)  # counted in seeds, not in seconds: a busy machine may take its time
@pytest.mark.parametrize("mix", MIX_NAMES)
def test_some_seeds(mix: str) -> None:
    hold(mix, SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mix", MIX_NAMES)
def test_many_seeds(mix: str) -> None:
    hold(mix, MANY_SEEDS)


def hold(mix: str, seeds: int) -> None:
    """Half as many of old runs, which have more nodes and take twice as long. All rules hold in them."""
    summary, seeds = SeedsSummary(), seeds // 2 if MIXES[mix].old else seeds
    for result, seconds in play(range(seeds), mix, None):
        summary.add(result, seconds)
    failed = [f"{r.detail or r.stuck}: {replay_command(r, None, mix)}" for r in summary.failed]
    assert not failed, "\n".join(failed)
    assert summary.seeds == seeds and summary.versions > 20 * seeds
    for kind in ("crash", "partition", "freeze", "blackout", "leave"):
        assert bool(summary.fault_kinds.get(kind)) == bool(getattr(MIXES[mix], kind)), kind
    alone = MIXES[mix].quiet or MIXES[mix].usurpers  # with a liar, or liars with each other
    if MIXES[mix].partition == MIXES[mix].crash == 0.0 and not alone:
        assert summary.lost_to_forks == summary.switches == 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "mix", "nodes", "wrong"),
    [(seed, *world, wrong) for world, seeds in PAST_FAILURES.items() for seed, wrong in seeds.items()],
)
def test_what_once_failed(seed: int, mix: str | None, nodes: int | None, wrong: str) -> None:
    result = run_seed(seed, mix, nodes)
    assert result.ok, f"again? {wrong}: {result.detail or result.stuck}"


def test_mix_names_of_the_command_line_are_those_of_the_simulator() -> None:
    assert set(MIX_NAMES) == set(MIXES)
