"""A state that most seats do not have is tried on a node's own data, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from system_kit import Swarm
from test_swarm import FRAGMENTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
ABSENT = ("anna", "ben", "carl", "dora", "emil")


def test_who_comes_back_tries_what_one_of_seven_has_made_meanwhile(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        path = swarm.manifest(seats=("one", "two", *ABSENT))
        text = path.read_text().replace("term_versions = 8\n", "term_versions = 4\n")
        path.write_text(text.replace("log_versions = 16\n", "log_versions = 4\n"))
        bootstrap = swarm.bootstrap("--run", str(path))
        one = swarm.node("one", bootstrap, "--genesis")
        two = swarm.node("two", bootstrap)
        swarm.training(one, two)
        swarm.advance(two, FRAGMENTS, 2)
        two.terminate()
        left = [two.number(fragment) for fragment in FRAGMENTS]
        swarm.until(lambda: all(one.number(f) > left[f] + 6 for f in FRAGMENTS), "a night alone", 90.0)

        two = swarm.node("two", bootstrap)
        words = swarm.until(
            lambda: [event.reason for event in two.events("catchup") if "ours" in event.reason],
            "others' states to be tried",
        )
        assert words[0].startswith("loss ")
        swarm.training(two)
        swarm.advance(two, FRAGMENTS, 2)
        assert min(two.number(f) - left[f] for f in FRAGMENTS) > 6
