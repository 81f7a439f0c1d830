"""`p2pdiloco plan --join` against a real bootstrap."""

from __future__ import annotations

import json

import pytest
from system_kit import PACE, Swarm

from p2pdiloco.daemon.run_files.known_runs import read_link

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def test_the_link_is_measured_and_the_plan_is_of_the_run_that_the_peer_lists(visited_swarm: Swarm) -> None:
    bootstrap = visited_swarm.bootstrap("--run", str(visited_swarm.manifest(seats=("one",))), "--lan")
    address = bootstrap.address() or ""
    asked = visited_swarm.command("plan", "--join", address, "--json", "--step-s", "1")
    assert asked.returncode == 0, asked.stderr
    (row,) = json.loads(asked.stdout)
    measured = row["measured"]
    assert 0 < measured["round_trip_s"] < 1
    assert measured["upload_bits_per_s"] > 1e6 and measured["download_bits_per_s"] > 1e6
    assert row["link"]["upload_bits_per_s"] == measured["upload_bits_per_s"]
    assert row["demand"]["participation"] == 1

    again = visited_swarm.command("plan", "--join", address)
    assert again.returncode == 2 and "measures a link for somebody else just now" in again.stderr
    assert "hint: try again later" in again.stderr and "Traceback" not in again.stderr

    gone = visited_swarm.command("plan", "--join", "/ip4/127.0.0.1/tcp/1" + address[address.index("/p2p/") :])
    assert gone.returncode == 2 and "None of the initial peers can be reached" in gone.stderr

    # The same bootstrap is found in the local network, by a node to whom nobody says whom to join.
    pytest.importorskip("zeroconf")
    word = bootstrap.printed().rpartition("p2pdiloco node ")[2].strip()
    node = visited_swarm.start("one", "node", "--lan", "--run", read_link(word).run, *PACE)
    visited_swarm.until(lambda: "run test (" in node.said(), "the run that it found")
    assert "found in this network: 1 peer of 1 run" in node.said()
