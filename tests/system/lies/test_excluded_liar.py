"""A member that lies so that anybody can check it, with real processes: the others exclude it and go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from system_kit import Swarm, asking

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
LIAR = (str(Path(__file__).with_name("lying_node.py")),)
SENTENCE = "the others exclude this node for good: it put work that its learner did not sign into version"


def excluded(report: dict[str, Any]) -> list[str]:
    """Whom a node excludes, as it answers."""
    return [row["peer"] for row in report["excluded"] if "did not sign" in row["reason"]]


def test_a_syncer_with_a_false_label_is_excluded_and_the_others_go_on(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    manifest = swarm.manifest(seats=("a", "b", "liar"))
    manifest.write_text(re.sub(r"(?m)^term_versions = \d+", "term_versions = 2", manifest.read_text()))
    bootstrap = swarm.bootstrap("--run", str(manifest))
    a = swarm.node("a", bootstrap, "--genesis")
    b = swarm.node("b", bootstrap)
    joined = ("--join", bootstrap.address() or "", "--name", "liar", "--threads", "1", "--min-step-s", "0.05")
    liar = swarm.start("liar", "node", *joined, by=LIAR)
    swarm.until(lambda: liar.address() is not None, "the liar's address")
    peer = liar.peer_id
    liar.expected_to_live = False  # it is told why nobody listens to it, and ends
    for honest in (a, b):
        swarm.until(lambda node=honest: node.events("excluded"), f"{honest.name} to see through it", 120.0)
        assert [line.peer for line in honest.events("excluded")] == [peer]
        # The log is written by a thread of its own, which may come later than the line of the event.
        words = "is excluded: it put work that its learner did not sign into version"
        swarm.until(lambda node=honest, words=words: words in node.said(), f"{honest.name} to say so")
    liar.wait_exit(2)
    assert SENTENCE in liar.said() and "--data-dir" in liar.said()
    swarm.advance(a, [0, 1, 2, 3], 1)
    swarm.kill(b)
    again = swarm.node("b", bootstrap)
    swarm.until(lambda: again.address() is not None, "b to be back")
    swarm.training(again)  # until it is a member others answer
    with asking(again) as ask, asking(a) as ask_a:
        swarm.until(lambda: excluded(ask()) == excluded(ask_a()) == [peer], "b's word on who is excluded")
    assert not again.events("excluded"), "it knows from its disk"
