"""A state that most seats do not have is tried on a node's own data, by real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from system_kit import PACE, Daemon, Swarm
from test_swarm import FRAGMENTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
LIAR = str(Path(__file__).parent / "lies" / "false_node.py")


def begun(swarm: Swarm, *here: str, by: Sequence[str] = ()) -> tuple[Daemon, list[Daemon]]:
    """Start a run of seven seats, of which these train. `by`: a program that runs the first one."""
    absent = ("anna", "ben", "carl", "dora", "emil")[: 7 - len(here)]
    path = swarm.manifest(seats=(*here, *absent))
    text = path.read_text().replace("term_versions = 8\n", "term_versions = 4\n")
    path.write_text(text.replace("log_versions = 16\n", "log_versions = 4\n"))
    bootstrap = swarm.bootstrap("--run", str(path))
    joined = ("--join", bootstrap.address() or "", *PACE, "--name")
    first = swarm.start(here[0], "node", *joined, here[0], "--genesis", by=by)
    others = [swarm.start(name, "node", *joined, name) for name in here[1:]]
    swarm.training(first, *others)
    swarm.advance(others[0], FRAGMENTS, 2)
    return bootstrap, [first, *others]


def tried(swarm: Swarm, node: Daemon) -> str:
    return str(
        swarm.until(
            lambda: [event.reason for event in node.events("catchup") if "ours" in event.reason],
            "others' states to be tried",
        )[0]
    )


def test_who_comes_back_tries_what_one_of_seven_has_made_meanwhile(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap, (one, two) = begun(swarm, "one", "two")
        two.terminate()
        left = [two.number(fragment) for fragment in FRAGMENTS]
        swarm.until(lambda: all(one.number(f) > left[f] + 6 for f in FRAGMENTS), "a night alone", 90.0)

        two = swarm.node("two", bootstrap)
        assert tried(swarm, two).startswith("loss ")
        swarm.training(two)
        swarm.advance(two, FRAGMENTS, 2)
        assert min(two.number(f) - left[f] for f in FRAGMENTS) > 6


def test_nobody_takes_what_one_of_seven_forged_while_it_was_alone(tmp_path: Path) -> None:
    """The first that comes back is half of those that are here, and refuses. With the next one it goes on."""
    sign = tmp_path / "night"
    with Swarm(tmp_path) as swarm:
        bootstrap, (liar, two, three) = begun(swarm, "one", "two", "three", by=(LIAR, "nights", str(sign)))
        two.terminate()
        three.terminate()
        honest = [liar.number(fragment) + 1 for fragment in FRAGMENTS]
        sign.touch()
        swarm.until(lambda: all(liar.number(f) > honest[f] + 6 for f in FRAGMENTS), "a night alone", 90.0)

        two = swarm.node("two", bootstrap)
        tried(swarm, two)
        swarm.training(two)
        three = swarm.node("three", bootstrap)
        swarm.training(three)
        swarm.advance(three, FRAGMENTS, 2)
        made = [line for line in liar.events("publish") if (line.number or 0) > honest[line.fragment or 0]]
        forged = {(line.fragment, line.number, line.digest) for line in made}
        mornings = {(*version, digest) for node in (two, three) for version, digest in node.heads().items()}
        assert forged and forged.isdisjoint(mornings)
