"""Members that lie about work, with real processes: who puts in what nobody signed is excluded by all, who
sends reversed work is expelled by syncers. The others go on."""

from __future__ import annotations

from typing import Any

import pytest
from system_kit import Swarm, asking
from test_false_syncer import with_a_liar

from p2pdiloco.core.api.reasons import LossFinding

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
UNSIGNED = "it put work that its learner did not sign into version"


def excluded(report: dict[str, Any]) -> list[str]:
    """Whom a node excludes, as it answers."""
    return [row["peer"] for row in report["excluded"] if "did not sign" in row["reason"]]


def test_a_syncer_with_a_false_label_is_excluded_and_the_others_go_on(visited_swarm: Swarm) -> None:
    swarm = visited_swarm
    a, b, liar = with_a_liar(swarm, "labels")  # it is told why nobody listens to it, and ends
    for honest in (a, b):
        swarm.until(lambda node=honest: node.events("excluded"), f"{honest.name} to see through it", 120.0)
        assert [line.peer for line in honest.events("excluded")] == [liar.peer_id]
        # The log is written by a thread of its own, which may come later than the line of the event.
        words = f"is excluded: {UNSIGNED}"
        swarm.until(lambda node=honest, words=words: words in node.said(), f"{honest.name} to say so")
    liar.wait_exit(2)
    assert f"the others exclude this node for good: {UNSIGNED}" in liar.said()
    assert "--data-dir" in liar.said()
    swarm.advance(a, [0, 1, 2, 3], 1)
    swarm.kill(b)
    again = swarm.node("b", swarm.all["bootstrap"])
    swarm.until(lambda: again.address() is not None, "b to be back")
    swarm.training(again)  # until it is a member others answer
    with asking(again) as ask, asking(a) as ask_a:
        known = [liar.peer_id]
        swarm.until(lambda: excluded(ask()) == excluded(ask_a()) == known, "b's word on who is excluded")
    assert not again.events("excluded"), "it knows from its disk"


def test_who_sends_reversed_work_is_expelled_and_the_others_go_on(visited_swarm: Swarm) -> None:
    """Of three members: agreement of contributions says nothing there."""
    swarm = visited_swarm
    a, b, liar = with_a_liar(swarm, "reverses", others="hasty", setting="loss_share = 0.5")
    swarm.until(lambda: a.events("expelled") or b.events("expelled"), "one of them to expel it", 150.0)
    honest = a if a.events("expelled") else b
    (line,) = honest.events("expelled")
    assert line.peer == liar.peer_id and line.reason in map(str, LossFinding)
    swarm.until(lambda: "is expelled here: its work" in honest.said(), "it to say so")
    swarm.advance(honest, [0, 1, 2, 3], 1)
