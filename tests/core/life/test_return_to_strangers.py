"""Return to those whom our chain does not know: in an open run they are anybody (docs/protocol/trust.md,
section 4)."""

from __future__ import annotations

import pytest
from kit import Solo, branch, certificate, child, config, found, progress, reasons, saved, sent, table

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import FetchFailure

WORKERS = ("me", "p1", "p2")
LOG = branch(2, learners=WORKERS)
STRANGERS_S = config().timing.strangers_s
TERM = 1 << 40


def far(maker: str, learners: tuple[str, ...] = WORKERS) -> list[ef.SignedVersion]:
    """More versions above ours than the update log keeps: only a whole state leads there."""
    made = [LOG[2]]
    for _ in range(9):
        made.append(child(made[-1].header, maker, learners=learners))
    return made[1:]


def meets(*peers: str, maker: str = "s1", mine: tuple[str, ...] = WORKERS) -> Solo:
    """We return, and these say that they hold a heavier chain of that maker's."""
    heads = (far(maker)[-1].header.head(),)
    solo = Solo(peers=peers, restored=saved(branch(2, learners=mine)), heads=heads)
    gone(solo, solo.greeting)
    return solo


def gone(solo: Solo, effects: list[ef.Effect]) -> None:
    """Nobody has the updates that would lead there any more."""
    for pull in found(effects, ef.FetchUpdate):
        solo.feed(ev.FetchFailed(0, pull.number, pull.peer, FetchFailure.GONE))


def wait(solo: Solo, seconds: float) -> list[ef.Effect]:
    """Let time pass."""
    effects, until_s = list[ef.Effect](), solo.now + seconds
    while solo.now < until_s:
        new = solo.wait(min(1.0, until_s - solo.now))
        gone(solo, new)
        effects += new
    return effects


def asked(effects: list[ef.Effect]) -> list[str]:
    return [copy.peer for copy in found(effects, ef.FetchState)]


@pytest.mark.parametrize(
    ("syncer", "voters"), [("s1", ("s1",)), ("s1", ("p1", "s1")), ("p1", ("s1",)), ("p1", ("s1", "s2"))]
)
def test_no_certificate_of_a_strangers_making_counts(syncer: str, voters: tuple[str, ...]) -> None:
    """Who is not confirmed yet cannot tell a majority."""
    solo = meets("s1")
    effects = solo.message("s1", msg.Elected(certificate(syncer, voters, TERM)))
    assert reasons(effects, "refusal") == ["certificate-minority"]
    assert solo.fragment.office.certificate is None and not asked(solo.wait(1.0))


def test_who_has_worked_may_be_in_office() -> None:
    solo = meets("p1", maker="p1")
    solo.message("p1", msg.Elected(certificate("p1", ("p1", "p2", "x9"))))
    assert solo.fragment.office.syncer == "p1"


def test_strangers_are_believed_no_sooner_for_our_own_lack_of_a_mark() -> None:
    """We came with a chain, in which nothing of ours is yet: those of whom there is may come."""
    solo = meets("s1", mine=("p1", "p2"))
    assert not asked(solo.greeting + wait(solo, 30.0)) and not solo.core.confirmed


def test_who_returns_to_strangers_only_believes_them_at_last() -> None:
    """All that it knew have handed the run on to others; till then it goes on from nothing of its own."""
    solo = meets("s1")
    assert not asked(solo.greeting + wait(solo, STRANGERS_S - 1.0)) and not solo.core.confirmed
    assert solo.core.waits_for(solo.now).startswith("a member whom this node's chain knows")
    giver, *_ = asked(wait(solo, 40.0))
    version = far("s1")[-1]
    effects = solo.feed(ev.StateFetched(0, giver, version, table(version)))
    assert found(effects, ef.CommitVersion) and solo.head == version.header.head() and solo.core.confirmed


def test_a_member_that_comes_in_time_is_believed_and_no_stranger() -> None:
    solo = meets("s1")
    wait(solo, 60.0)
    solo.peers = ("s1", "p1")
    solo.says["p1"] = {"heads": (LOG[2].header.head(),)}
    solo.wait(1.0)
    assert solo.core.confirmed and solo.head == LOG[2].header.head()
    assert not asked(wait(solo, STRANGERS_S)), "and that for good"


def test_strangers_that_give_nothing_keep_nobody_waiting_for_ever() -> None:
    solo = meets("s1")
    effects, copies = wait(solo, STRANGERS_S - 1.0), list[str]()
    while not solo.core.confirmed:
        assert solo.now < 1000.0 + 2 * STRANGERS_S + 500.0
        copies += asked(effects)
        for copy in found(effects, ef.FetchState):
            solo.feed(ev.FetchFailed(0, copy.number, copy.peer, FetchFailure.BUSY))
        effects = wait(solo, 5.0)
    assert solo.now >= 1000.0 + 2 * STRANGERS_S and solo.head == LOG[2].header.head() and "s1" in copies


def test_who_voted_alone_believes_no_stranger_when_it_returns() -> None:
    solo = meets("s1", mine=("me",))
    assert not asked(solo.greeting + wait(solo, 25.0)) and solo.core.confirmed


def sides(admits: bool) -> tuple[Solo, list[ef.SignedVersion]]:
    """We began alone and made two versions; s1 did, too, and made more. Then we meet."""
    other = branch(9, syncer="s1", learners=("s1",))
    mine = saved(branch(2, syncer="me", learners=("me",)))
    solo = Solo(config(admits=admits), peers=(), restored=mine, incarnation=2)
    solo.wait(2.0)
    assert solo.core.confirmed
    solo.peers, solo.heard = ("s1",), {"heads": (other[-1].header.head(),)}
    return solo, other


def test_two_sides_that_began_alone_join_by_weight_where_an_owner_admits() -> None:
    solo, other = sides(admits=True)
    (giver,) = asked(solo.hear("s1"))
    effects = solo.feed(ev.StateFetched(0, giver, other[-1], table(other[-1])))
    assert found(effects, ef.CommitVersion) and solo.head == other[-1].header.head()


def test_in_an_open_run_the_heavier_side_may_be_anybodys() -> None:
    solo, _ = sides(admits=False)
    assert not asked(solo.hear("s1") + wait(solo, 30.0))


def test_who_returns_to_an_admitted_newcomer_follows_it_at_once() -> None:
    heads = (far("s1")[-1].header.head(),)
    solo = Solo(config(admits=True), peers=("s1",), restored=saved(LOG), heads=heads)
    assert asked(solo.greeting) == ["s1"]
    assert not sent(solo.message("s1", progress(heads, confirmed=False)), msg.Unbacked)
