"""Real nodes learn to read digits: another task, from the run page to equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from system_kit import Daemon, Swarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

EACH = ("--evaluate", "each", "--eval-every-s", "1", "--min-step-s", "0.02")


def accuracy(daemon: Daemon) -> float:
    """Of the last evaluation of the global parameters; 0 before there is one."""
    found = daemon.events("evaluation")
    return found[-1].metrics["accuracy"] if found else 0.0


def test_two_nodes_learn_digits_and_hold_equal_bits(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap("--run", str(swarm.manifest("digits", "--preset", "digits")))
        one = swarm.node("one", bootstrap, "--genesis", *EACH)
        two = swarm.node("two", bootstrap, *EACH)
        swarm.training(one, two)
        # Chance is 0.1; these are the global parameters, of which each node computes its own copy.
        swarm.until(lambda: min(accuracy(one), accuracy(two)) > 0.4, "both to read digits", 120.0)
        swarm.until(lambda: one.full_merges(2) + two.full_merges(2) > 10, "both to take part")
        # What one has merged last the other may still be applying.
        swarm.until(lambda: len(set(one.heads()) & set(two.heads())) > 10, "both to hold the same versions")
        heads, others = one.heads(), two.heads()
        common = set(heads) & set(others)
        assert {version: heads[version] for version in common} == {v: others[v] for v in common}
