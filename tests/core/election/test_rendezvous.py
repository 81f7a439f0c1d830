"""Rendezvous ranking: balanced, stable under churn, the same for everybody (docs/protocol/election.md,
section 3)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from deadlines import within_s
from kit import Solo, branch, certificate, config, found, sent

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.events import FetchUpdate
from p2pdiloco.core.api.types import Reach
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


# Members that others cannot dial: they vote and contribute, and leave the offices to those who can be.

REACHED = ("p1", "p2", "p3", "p4")
HIDDEN = [Reach.UNKNOWN, Reach.RELAYED, Reach.OUTBOUND]


def hide(solo: Solo, *peers: str) -> None:
    for peer in peers:
        solo.says[peer] = {"reach": Reach.OUTBOUND}
        solo.hear(peer)


def stands_within(solo: Solo, wait_s: float) -> bool:
    until = solo.now + wait_s
    while solo.now < until:
        if sent(solo.wait(0.55), msg.VoteRequest):
            return True
    return False


@pytest.mark.parametrize("reach", HIDDEN)
def test_who_cannot_be_dialled_says_so_and_leaves_the_office_to_others_for_a_while(reach: Reach) -> None:
    solo = Solo(peers=REACHED)
    assert sent(solo.feed(ev.ReachChanged(reach)) + solo.wait(0.55), msg.Progress)[-1].reach is reach
    patience_s = solo.config.timing.settle_s
    assert not stands_within(solo, patience_s - 1.5)
    assert stands_within(solo, len(REACHED) * solo.config.timing.stagger_s + 2), "somebody must in the end"


def test_who_cannot_be_dialled_waits_from_when_it_could_be_elected_itself() -> None:
    solo = Solo(peers=("p1",), confirmed=False)
    solo.feed(ev.ReachChanged(Reach.OUTBOUND))
    patience_s = solo.config.timing.settle_s
    solo.wait(patience_s)  # nobody could have been elected: that says nothing of p1
    solo.heard["confirmed"] = True
    assert not stands_within(solo, patience_s - 1.5)
    assert stands_within(solo, 3.0)


def test_where_nobody_can_be_dialled_somebody_stands_at_once() -> None:
    solo = Solo(peers=REACHED, reach=Reach.OUTBOUND)
    solo.feed(ev.ReachChanged(Reach.RELAYED))
    assert stands_within(solo, len(REACHED) * solo.config.timing.stagger_s + 1)


def test_the_rank_of_those_who_cannot_be_dialled_is_not_waited_for() -> None:
    solo = Solo(peers=REACHED)
    candidates = solo.fragment.office._candidates
    assert {candidates.our_rank(term, solo.now) for term in range(40)} == {0, 1, 2, 3, 4}
    hide(solo, *REACHED[:3])
    assert {candidates.our_rank(term, solo.now) for term in range(40)} == {0, 1}
    hide(solo, "p4")
    assert {candidates.our_rank(term, solo.now) for term in range(40)} == {0}


def test_a_syncer_that_cannot_be_dialled_gives_way_but_has_time_for_a_version() -> None:
    solo = Solo(peers=REACHED)
    solo.elect("p1")
    hide(solo, "p1")
    office = solo.fragment.office
    assert not office.why_open(solo.now)
    solo.wait(solo.config.timing.settle_s)
    assert "cannot be dialled" in office.why_open(solo.now)
    solo = Solo(peers=REACHED, reach=Reach.OUTBOUND)
    solo.feed(ev.ReachChanged(Reach.OUTBOUND))
    solo.elect("p1")
    solo.wait(solo.config.timing.settle_s + 0.5)
    assert not solo.fragment.office.why_open(solo.now), "nobody else can be dialled either"


def test_we_lay_an_office_down_when_we_cannot_be_dialled_any_more() -> None:
    solo = Solo(peers=REACHED)
    solo.take_office()
    assert solo.fragment.office.holding
    solo.feed(ev.ReachChanged(Reach.OUTBOUND))
    solo.wait(solo.config.timing.settle_s + 1)
    assert not solo.fragment.office.holding


@pytest.mark.parametrize(("voters", "taken"), [(("p1", "h1", "h2"), True), (("p1", "h1"), False)])
def test_votes_of_members_that_we_cannot_hear_count_if_they_are_of_most_seats(
    voters: tuple[str, ...], taken: bool
) -> None:
    """There is no link between two that cannot be dialled."""
    solo = Solo(config(seats=("me", "p1", "p2", "h1", "h2")), ("p1", "p2"))
    solo.feed(ev.ReachChanged(Reach.OUTBOUND))
    solo.message("p1", msg.Elected(certificate("p1", voters)))
    assert (solo.fragment.office.syncer == "p1") is taken
    solo.wait(4.0)
    assert (solo.fragment.office.syncer == "p1") is taken, "and it stays so"


def test_updates_are_asked_of_those_who_can_be_dialled() -> None:
    version = branch(1)[1]
    solo = Solo(peers=REACHED)
    hide(solo, "p1", "p2", "p3")
    solo.fragment.context.spare.busy = True
    for peer in REACHED:
        solo.hear(peer, heads=(version.header.head(),))
    solo.fragment.context.spare.busy = False
    asked = found(solo.feed(ev.Tick()), FetchUpdate)
    assert [effect.peer for effect in asked] == ["p4"]
