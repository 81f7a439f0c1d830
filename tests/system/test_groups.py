"""Rotating groups with real processes: five nodes, two in a group, and the loss of a root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from system_kit import Daemon, Swarm
from test_swarm import FRAGMENTS, assert_agree_at_last, assert_digests_agree

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
GROUP = 2
NODES = ("one", "two", "three", "four", "five")


def grouped_manifest(swarm: Swarm) -> Path:
    path = swarm.manifest("test", "--expected-members", str(len(NODES)), seats=NODES)
    text = path.read_text()
    assert "\nsize = 16\n" in text
    path.write_text(text.replace("\nsize = 16\n", f"\nsize = {GROUP}\n"))
    return path


def leaf_groups(*daemons: Daemon) -> set[str]:
    """Leaf groups whose syncers made partial merges."""
    return {e.group for d in daemons for e in d.events("partial") if e.contributors}


def roots(*daemons: Daemon) -> list[Daemon]:
    """Who published the newest version of a fragment, of the nodes that live."""
    newest: dict[int, tuple[int, Daemon]] = {}
    for daemon in daemons:
        for event in daemon.events("publish"):
            if event.digest and event.number > newest.get(event.fragment, (-1, daemon))[0]:
                newest[event.fragment] = (event.number, daemon)
    return [daemon for _, daemon in newest.values() if daemon.ended() is None]


def held(daemon: Daemon) -> set[tuple[int, int, str]]:
    """Fragment, number and digest of every version that it has had."""
    return {(*version, digest) for version, digest in daemon.heads().items()}


def last_published(daemon: Daemon) -> set[tuple[int, int, str]]:
    """Of every fragment the newest version that it published itself."""
    made = {e.fragment: (e.number, e.digest) for e in daemon.events("publish") if e.digest}
    return {(fragment, *version) for fragment, version in made.items()}


def largest_merge(*daemons: Daemon) -> int:
    """Contributors of the largest version so far."""
    return max((e.contributors for d in daemons for e in d.events("merge")), default=0)


def test_groups_merge_into_one_version_and_outlive_their_root(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap("--run", str(grouped_manifest(swarm)))
        nodes = [
            swarm.node(
                name, bootstrap, *(["--genesis"] if name == "one" else []), "--checkpoint-every-s", "5"
            )
            for name in NODES
        ]
        swarm.training(*nodes)
        for node in nodes:
            swarm.advance(node, FRAGMENTS, 3, timeout_s=120)
        # No group has more than its members, so a version of more contributors is of several groups.
        swarm.until(lambda: largest_merge(*nodes) > GROUP + 1, "a version of several groups", 120)
        assert len(leaf_groups(*nodes)) > 1
        swarm.until(lambda: [e for d in nodes for e in d.events("groups")], "the groups to rotate", 120)

        status = swarm.command("status", "--join", nodes[1].address() or "", "--json")
        assert status.returncode == 0, status.stderr
        rows = json.loads(status.stdout)["fragments"]
        assert all(row["groups"] > 1 and row["levels"] > 1 for row in rows)
        assert {row["root"] for row in rows} <= {d.peer_id for d in nodes}

        root = swarm.until(lambda: next(iter(roots(*nodes)), None), "a root")
        survivors = [d for d in nodes if d is not root]
        swarm.kill(root)
        lost = last_published(root) - {v for d in survivors for v in held(d)}
        for survivor in survivors:
            swarm.advance(survivor, FRAGMENTS, 4, timeout_s=120)
        before = len([e for d in survivors for e in d.events("merge") if e.contributors > GROUP])
        swarm.until(
            lambda: len([e for d in survivors for e in d.events("merge") if e.contributors > GROUP]) > before,
            "a version of several groups of the survivors",
            120,
        )
        again = swarm.node(root.name, survivors[0])
        swarm.until(
            lambda: [e for e in again.events("contribution") if e.reason == "merged"],
            "the root that was killed to take part again",
            120,
        )
        assert_agree_at_last(swarm, *survivors, again)
        assert assert_digests_agree(*nodes, again, lost=lost) > 20
