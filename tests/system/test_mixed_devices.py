"""Nodes with and without a GPU in one run. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from deadlines import within_s
from system_kit import Daemon, Swarm
from test_swarm import FRAGMENTS, SAVE_OFTEN, assert_agree_at_last, assert_digests_agree

from p2pdiloco.learner.ranks import accelerators

ACCELERATORS = accelerators()

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def learners_of(node: Daemon) -> list[str]:
    """What each of a node's learners has computed on."""
    return [event.device for event in node.events("learner") if event.reason == "running"]


@pytest.mark.skipif(not ACCELERATORS, reason="needs a device that is not the CPU")
def test_a_gpu_and_a_cpu_hold_the_same_bits(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap(seats=("gpu", "cpu"))
        gpu = swarm.node("gpu", bootstrap, "--genesis", "--device", ACCELERATORS[0], *SAVE_OFTEN)
        cpu = swarm.node("cpu", bootstrap, "--device", "cpu")
        swarm.training(gpu, cpu)
        assert all(on.startswith(ACCELERATORS[0]) for on in learners_of(gpu))
        swarm.advance(gpu, FRAGMENTS, 5)
        swarm.until(lambda: gpu.full_merges(2) + cpu.full_merges(2) >= 5, "both to take part")

        learner = gpu.child("p2pdiloco.learner")
        assert learner is not None
        lives = len(learners_of(gpu))
        learner.kill()
        psutil.wait_procs([learner], timeout=within_s(30.0))
        swarm.until(lambda: len(learners_of(gpu)) > lives, "another one")
        assert all(on.startswith(ACCELERATORS[0]) for on in learners_of(gpu))
        before = gpu.full_merges(2) + cpu.full_merges(2)
        swarm.until(lambda: gpu.full_merges(2) + cpu.full_merges(2) >= before + 5, "both to take part again")
        assert_agree_at_last(swarm, gpu, cpu)
        assert assert_digests_agree(gpu, cpu) > 20

        gpu.terminate()
        again = swarm.node("gpu", bootstrap, "--device", ACCELERATORS[0])
        swarm.until(lambda: again.inner_step() > 0, "it to be back")
        assert "all of it in 4 of 4 fragments" in again.said(), again.tail()
