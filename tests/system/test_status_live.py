"""`p2pdiloco status` against a real bootstrap and a real node."""

from __future__ import annotations

import json

import pytest
from system_kit import Daemon, Swarm

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def _address(daemon: Daemon) -> str:
    return daemon.address() or ""


def test_status_of_a_living_run(visited_swarm: Swarm) -> None:
    bootstrap = visited_swarm.bootstrap()
    empty = visited_swarm.command("status", "--join", _address(bootstrap), "--timeout-s", "6")
    assert empty.returncode == 2 and "no member of run test answered within 6 s" in empty.stderr

    node = visited_swarm.node("one", bootstrap, "--genesis")
    visited_swarm.training(node)
    for joined in (bootstrap, node):  # any live peer is as good as a bootstrap
        asked = visited_swarm.command("status", "--join", _address(joined), "--json", "--timeout-s", "60")
        assert asked.returncode == 0, asked.stderr
        report = json.loads(asked.stdout)
        assert report["run_name"] == "test" and report["answered_by"] == node.peer_id
        assert [m["name"] for m in report["members"]] == ["one"] and len(report["fragments"]) == 4
        assert all(f["number"] <= node.number(f["index"]) for f in report["fragments"])
        assert {f["syncer"] for f in report["fragments"]} <= {node.peer_id, ""}

    shown = visited_swarm.command("status", "--join", _address(bootstrap), "--timeout-s", "60")
    assert shown.returncode == 0 and "as seen by one (training)" in shown.stdout

    unknown = visited_swarm.command(
        "status", "--join", _address(bootstrap), "--run", "nope", "--timeout-s", "8"
    )
    assert unknown.returncode == 2 and 'the peers know no run "nope"' in unknown.stderr
    assert "they know: test (" in unknown.stderr and "Traceback" not in unknown.stderr
