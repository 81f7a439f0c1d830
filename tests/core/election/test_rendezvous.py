"""Rendezvous ranking: balanced, stable under churn, the same for everybody (docs/protocol/election.md,
section 3)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from deadlines import within_s

from p2pdiloco.core.candidates import ranking

PEERS = [f"peer{i}" for i in range(8)]


def firsts(peers: list[str], terms: int = 2000) -> Counter[str]:
    return Counter(ranking("run", "all", 0, term, peers)[0] for term in range(terms))


def test_everybody_is_ranked_once() -> None:
    assert sorted(ranking("run", "all", 0, 1, PEERS)) == PEERS
    assert ranking("run", "all", 0, 1, []) == []


def test_the_office_is_spread_over_members_by_terms() -> None:
    shares = firsts(PEERS)
    assert min(shares.values()) > 0.8 * 250 and max(shares.values()) < 1.2 * 250


def test_fragments_of_one_term_have_different_syncers() -> None:
    assert len({ranking("run", "all", fragment, 1, PEERS)[0] for fragment in range(24)}) >= 6


def test_who_goes_or_comes_changes_nobody_elses_order() -> None:
    fewer = [peer for peer in PEERS if peer != "peer3"]
    for term in range(50):
        order = ranking("run", "all", 0, term, PEERS)
        assert ranking("run", "all", 0, term, fewer) == [p for p in order if p != "peer3"]


def test_the_order_depends_on_run_and_group() -> None:
    def orders(run: str, group: str) -> list[list[str]]:
        return [ranking(run, group, 0, term, PEERS) for term in range(4)]

    assert orders("run", "all") != orders("other", "all")
    assert orders("run", "all") != orders("run", "half")


@pytest.mark.process
def test_another_process_ranks_the_same() -> None:
    code = (
        "from p2pdiloco.core.candidates import ranking;"
        "print(ranking('run', 'all', 1, 2, [f'peer{i}' for i in reversed(range(8))]))"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=within_s(30),
    )
    assert done.stdout.strip() == str(ranking("run", "all", 1, 2, PEERS))
