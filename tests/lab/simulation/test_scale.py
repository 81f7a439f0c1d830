"""Large calm worlds: updates come about, everybody is in them, and nobody talks to everybody."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from p2pdiloco_lab.lab_commands import simulate
from p2pdiloco_lab.simulation.scale import run_scale

pytestmark = pytest.mark.long


def test_peers_and_messages_do_not_grow_with_the_swarm() -> None:
    small, large = (run_scale(nodes, group_size=4, updates=3) for nodes in (12, 48))
    for report in (small, large):
        assert report.updates >= 3
        assert report.participation > 0.9
        assert 0 < report.latency_median_s <= report.latency_p95_s
    assert large.levels > small.levels
    assert large.messages_mean < 2 * small.messages_mean
    # The groups rotate once while it is measured: twice a group, and the fellow syncers. One run differs from
    # the next by as much as one peer.
    another = run_scale(48, seed=1, group_size=4, updates=3)
    assert large.peers_mean + another.peers_mean < 2 * 4 * 4 < 2 * 47


def test_groups_of_groups_take_part_and_a_holder_meets_few_others() -> None:
    """Before it was waited for groups, participation was 0.93; a holder that asked everybody had 34 peers."""
    report = run_scale(64, group_size=8, updates=3)
    assert report.participation > 0.97
    # While the groups stay. Hashed groups have up to twice their size, and a holder has fellows besides.
    assert report.peers_epoch_max < 4 * 8


def test_more_nodes_than_a_faulty_world_has_are_measured_instead() -> None:
    result = CliRunner().invoke(simulate, ["--nodes", "65", "--json"], standalone_mode=False)
    assert result.return_value == 0
    report = json.loads(result.stdout)
    assert report["nodes"] == 65 and report["updates"] >= 3 and report["peers_max"] < 64
    assert report["payload_bytes_mean"] > report["control_bytes_mean"] > 0
