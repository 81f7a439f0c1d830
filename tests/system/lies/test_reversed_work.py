"""A member whose work is reversed, with real processes: loss audits see it, and syncers refuse it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from system_kit import Daemon, Swarm

from p2pdiloco.core.api.reasons import LossFinding

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
NODE = (str(Path(__file__).with_name("loss_node.py")),)


def test_who_sends_reversed_work_is_expelled_and_the_others_go_on(visited_swarm: Swarm) -> None:
    """Of three members: agreement of contributions says nothing there."""
    swarm = visited_swarm
    manifest = swarm.manifest(seats=("a", "b", "liar"))
    manifest.write_text(re.sub(r"(?m)^loss_share = .*", "loss_share = 0.5", manifest.read_text()))
    bootstrap = swarm.bootstrap("--run", str(manifest))

    def node(name: str, kind: str, *more: str) -> Daemon:
        joined = (
            "--join",
            bootstrap.address() or "",
            "--name",
            name,
            "--threads",
            "1",
            "--min-step-s",
            "0.05",
        )
        return swarm.start(name, "node", *joined, *more, by=(*NODE, kind))

    a, b, liar = node("a", "hasty", "--genesis"), node("b", "hasty"), node("liar", "reverses")
    swarm.until(liar.address, "the liar's address")
    swarm.until(lambda: a.events("expelled") or b.events("expelled"), "one of them to expel it", 150.0)
    honest = a if a.events("expelled") else b
    (line,) = honest.events("expelled")
    assert line.peer == liar.peer_id and line.reason in map(str, LossFinding)
    # The log is written by a thread of its own, which may come later than the line of the event.
    swarm.until(lambda: "is expelled here: its work" in honest.said(), "it to say so")
    swarm.advance(honest, [0, 1, 2, 3], 1)
