"""A syncer of false merges, one of false states, and a false accuser, with real processes: all others find
out by themselves. A state that most seats do not have is tried on a node's own data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from system_kit import PACE, Daemon, Swarm
from test_swarm import FRAGMENTS

from p2pdiloco.core.api.reasons import VersionFault

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
NODE = str(Path(__file__).with_name("false_node.py"))
FIRST = 4
"""First version that is false (`false_node.FIRST`)."""


def published(*nodes: Daemon) -> list[str]:
    """What they say of the versions that they made."""
    return [line.reason for node in nodes for line in node.events("publish")]


def with_a_liar(
    swarm: Swarm, lie: str, others: str = "honest", setting: str = "term_versions = 2"
) -> tuple[Daemon, Daemon, Daemon]:
    """Start two nodes, and one that tells this lie. `setting`: a line of the run's file."""
    manifest = swarm.manifest(seats=("a", "b", "liar"))
    name = setting.partition(" ")[0]
    manifest.write_text(re.sub(rf"(?m)^{name} = .*", setting, manifest.read_text()))
    bootstrap = swarm.bootstrap("--run", str(manifest))
    joined = ("--join", bootstrap.address() or "", *PACE, "--name")
    by = () if others == "honest" else (NODE, others)
    a = swarm.start("a", "node", *joined, "a", "--genesis", by=by)
    b = swarm.start("b", "node", *joined, "b", by=by)
    liar = swarm.start("liar", "node", *joined, "liar", by=(NODE, lie))
    swarm.until(lambda: liar.address() is not None, "the liar's address")
    liar.expected_to_live = False
    return a, b, liar


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("merges", "is not the merge of what it names"),
        pytest.param("states", "has another state than its update makes", marks=pytest.mark.slow),
        pytest.param("accuses", "which is the merge of what it names", marks=pytest.mark.slow),
    ],
)
def test_whoever_lies_about_a_version_is_excluded_and_the_others_go_on(
    visited_swarm: Swarm, lie: str, words: str
) -> None:
    swarm = visited_swarm
    a, b, liar = with_a_liar(swarm, lie)
    for honest in (a, b):
        swarm.until(lambda node=honest: node.events("excluded"), f"{honest.name} to see through it", 120.0)
        assert [line.peer for line in honest.events("excluded")] == [liar.peer_id]
        swarm.until(lambda node=honest: words in node.said(), f"{honest.name} to say so")
    if lie != "accuses":
        liar.wait_exit(2)
        assert "the others exclude this node for good: version" in liar.said() and words in liar.said()
        assert "test the machine" in liar.said() and "copy of its data folder" not in liar.said()
    if lie == "merges":
        swarm.until(lambda: any("takes false version" in reason for reason in published(a, b)), "the repair")
    if lie == "accuses":
        swarm.kill(liar)  # it excludes one of the two, and one word alone ends nobody
    swarm.advance(a, [0, 1, 2, 3], 1)
    if lie == "states":
        copied = [line for node in (a, b) for line in node.events("catchup") if line.peer == liar.peer_id]
        assert not [line for line in copied if line.number is not None and line.number >= 4]
    assert not [line for line in (*a.events("audit"), *b.events("audit")) if "unable" in line.reason]


@pytest.mark.parametrize("lie", ["histories", "usurps"])
def test_nobody_has_a_version_that_shows_no_state_or_no_office(visited_swarm: Swarm, lie: str) -> None:
    """It cannot be proved a lie, so nobody is excluded: the others go on without those versions."""
    swarm = visited_swarm
    a, b, liar = with_a_liar(swarm, lie)

    def forged() -> set[tuple[int, int, str]]:
        lines = liar.events("publish")
        return {
            (line.fragment, line.number or 0, line.digest) for line in lines if (line.number or 0) >= FIRST
        }

    swarm.until(forged, "a forged version", 120.0)
    swarm.advance(a, [0, 1, 2, 3], 1, 120.0)
    held = {(*version, digest) for node in (a, b) for version, digest in node.heads().items()}
    assert held and not forged() & held
    assert not a.events("excluded") and not b.events("excluded")
    if lie == "usurps":
        reasons = {str(VersionFault.UNELECTED), str(VersionFault.OTHER_HOLDER)}
        refused = [line for node in (a, b) for line in node.events("fork") if line.reason in reasons]
        assert liar.peer_id in {line.peer for line in refused}


# Nights: few of the seats are here.


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
        bootstrap, (liar, two, three) = begun(swarm, "one", "two", "three", by=(NODE, "nights", str(sign)))
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
