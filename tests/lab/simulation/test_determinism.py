"""A seed is a bug report: it must mean the same in every process, with every hash seed."""

from __future__ import annotations

import re

import pytest
from sim_kit import in_another_process

from p2pdiloco_lab.simulation.seed_report import brief
from p2pdiloco_lab.simulation.sim_world import run_seed

SEEDS = 5
CODE = f"""
from p2pdiloco_lab.simulation.sim_world import run_seed
for seed in range({SEEDS}):
    print(run_seed(seed, "storm", 4).digest)
"""


@pytest.mark.process
def test_equal_digests_in_two_processes_with_different_hash_seeds() -> None:
    there = in_another_process(CODE).split()
    here = [run_seed(seed, "storm", 4).digest for seed in range(SEEDS)]
    assert len(set(here)) == SEEDS, "different seeds do different things"
    assert there == here


def test_a_trace_changes_nothing_and_says_who_decided_what_and_why() -> None:
    lines: list[str] = []
    digest = run_seed(3, "churn", 3, lines.append).digest
    # virtual time, node, fragment, decision: reason
    decision = re.compile(r" *\d+\.\d{3}  n\d +f\d +publish: version \d+ with \d+ contributions")
    assert any(decision.match(line) for line in lines)
    assert any("fault: " in line for line in lines)
    assert not any("<- " in line or "-> " in line for line in lines), "messages only when asked for"
    assert run_seed(3, "churn", 3).digest == digest
    texts: list[list[str]] = [[], []]
    for text in texts:
        assert run_seed(3, "churn", 3, text.append, verbose=True).digest == digest
    assert any("<- Announce<" in line for line in texts[0]) and len(texts[0]) > len(lines)
    assert texts[0] == texts[1] and any("members=MemberList(" in line for line in texts[0])
    assert not [line for line in texts[0] if " at 0x" in line], "an object's address"


def test_what_a_trace_shows_of_values() -> None:
    assert brief(frozenset({"b", "a"})) == "{a, b}" and brief(object()) == "object"
