"""Newcomers for which versions wait that would be made alone: for a while."""

from __future__ import annotations

from kit import Solo, branch, child, found, genesis, saved

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.chain import Chain
from p2pdiloco.core.distrust import Cause
from p2pdiloco.core.round import Laggards

IN_VAIN, _ = Cause.ABSENT.value


def lone() -> tuple[Laggards, Chain]:
    """By our chain we and p1 vote, and nobody else has a mark."""
    solo = Solo(peers=("p1", "s1"))
    for version in branch(2, syncer="p1", learners=("me", "p1"))[1:]:
        solo.announce(version)
    return Laggards(solo.core.shared), solo.fragment.chain


def waits(laggards: Laggards, chain: Chain, peer: str, named: Head | None, versions: int) -> list[bool]:
    """Whether each of so many versions waits for that peer, which is asked about twice a version."""
    found = []
    for _ in range(versions):
        found.append(laggards.waits_for(peer, named, chain, 0.0))
        assert laggards.waits_for(peer, named, chain, 0.0) == found[-1]
        chain.extend(child(chain.header, "me", ("me",)))
    return found


def test_a_stranger_that_never_moves_delays_a_few_versions() -> None:
    laggards, chain = lone()
    assert waits(laggards, chain, "s1", genesis(0).header.head(), 5) == [True] * IN_VAIN + [False] * 2


def test_heads_that_are_not_of_our_chain_are_no_way_forward() -> None:
    laggards, chain = lone()
    for more in range(3 * IN_VAIN):
        made_up = Head(chain.head.number + 1, bytes(32), more, 1)
        (waited,) = waits(laggards, chain, "s1", made_up, 1)
        assert waited == (more < IN_VAIN)


def test_nobody_on_another_branch_is_waited_for() -> None:
    """A lone syncer waited sixteen intervals a version for one that had another chain (datacentre 700018)."""
    laggards, chain = lone()
    assert waits(laggards, chain, "p1", Head(1, bytes(32), 1, 1), 3) == [False] * 3


def test_a_newcomer_that_comes_nearer_is_waited_for_but_no_longer() -> None:
    laggards, chain = lone()
    found = []
    for _ in range(IN_VAIN + 3):
        before = chain.head
        found += waits(laggards, chain, "s1", before, 1)
    assert found == [True] * IN_VAIN + [False] * 3


def test_a_seat_that_comes_nearer_is_waited_for_however_long_and_one_that_stands_still_is_not() -> None:
    laggards, chain = lone()
    for _ in range(4 * IN_VAIN):
        assert waits(laggards, chain, "p1", chain.head, 1) == [True]
    assert waits(laggards, chain, "p1", None, IN_VAIN + 1)[-1] is False


def test_a_lone_syncer_goes_on_beside_a_stranger_that_never_moves() -> None:
    solo = Solo(peers=(), restored=saved(branch(3, syncer="me", learners=("me",))), incarnation=2)
    solo.wait(2.0)
    solo.learn()
    solo.peers = ("s1",)
    solo.says = {"s1": {"heads": (genesis(0).header.head(),), "learning": False, "confirmed": False}}
    solo.wait(1.0)
    waited = []
    for ticket in range(1, 7):
        solo.feed(ev.LearnerApplied(0, solo.head.number, 1))
        since_s, merges = solo.now, found(solo.ready(ticket), ev.Merge)
        while not merges and solo.now < since_s + 60.0:
            merges = found(solo.wait(0.5), ev.Merge)
        waited.append(solo.now - since_s > 3.0)
        solo.merged(merges[0])
    assert waited == [True] * IN_VAIN + [False] * 3
