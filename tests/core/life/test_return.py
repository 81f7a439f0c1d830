"""Return of nodes when all had died: they agree on the heaviest saved state (docs/protocol/membership.md,
section 5)."""

from __future__ import annotations

import msgspec
from kit import Solo, branch, child, found, genesis, reasons, saved, sent
from scenes import FAR, serve

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.types import Stamp, Watermark


def took_part(restored: Restored, *learners: str) -> Restored:
    """The saved chain has contributions of these too."""
    found = restored.fragments[0]
    number, known = found.log[-1].header.number, {mark.learner: mark for mark in found.watermarks}
    mine = {learner: Watermark(learner, Stamp(1, 1), number) for learner in learners}
    marks = tuple(mark for _, mark in sorted((mine | known).items()))
    return msgspec.structs.replace(
        restored, fragments=(msgspec.structs.replace(restored.fragments[0], watermarks=marks),)
    )


def returning(versions: int, theirs: int, **odd: object) -> Solo:
    """We and two others return, with saved chains of different lengths."""
    restored = took_part(saved(FAR[: versions + 1]), "p1", "p2")
    heads = (FAR[theirs].header.head(),)
    return Solo(restored=restored, confirmed=False, saved=True, heads=heads, **odd)  # type: ignore[arg-type]


def test_one_that_took_part_alone_goes_on_at_once() -> None:
    solo = Solo(peers=(), restored=saved(branch(2, syncer="me", learners=("me",))))
    solo.wait(1.0)
    assert solo.core.confirmed and solo.head.number == 2


def test_who_took_part_lately_is_waited_for_a_while() -> None:
    solo = Solo(peers=(), restored=saved(branch(2)))
    solo.wait(solo.config.timing.resume_alone_s - 1)
    assert not solo.core.confirmed and solo.core.waits_for(solo.now) == "1 that took part before"
    solo.wait(2.0)
    assert solo.core.confirmed and solo.core.waits_for(solo.now) == ""


def test_the_heaviest_goes_on_as_soon_as_all_are_back() -> None:
    solo = returning(5, theirs=3)
    assert not solo.core.confirmed and solo.core.may_serve, "the others may take it"
    assert all(p.saved and not p.confirmed for p in sent(solo.greeting, msg.Progress))
    effects = solo.wait(4.0)
    assert solo.core.confirmed and solo.head.number == 5
    assert reasons(effects, "join") == [
        "full member: goes on from the saved state, the heaviest of 3 that return"
    ]


def test_who_is_confirmed_says_nothing_else_in_the_same_moment() -> None:
    """Messages overtake each other: others would count it out, and elect a syncer without it."""
    head = FAR[2].header.head()
    back = {"confirmed": False, "saved": True, "heads": (head,)}
    solo = Solo(peers=("p1",), restored=took_part(saved(FAR[:3]), "p1", "p9"), **back)
    said: list[msg.Progress] = []
    while not solo.core.confirmed:
        solo.now = solo.core.next_deadline()
        said = sent(solo.feed(ev.Tick()), msg.Progress, "p1")
        solo.hear("p1")
    assert said and all(p.confirmed for p in said)


def test_a_lighter_one_takes_the_heavier_state_first() -> None:
    solo = returning(2, theirs=4)
    assert solo.core.waits_for(solo.now) == "a heavier saved state of others that return"
    effects = serve(solo, solo.greeting)
    assert found(effects, ef.CommitVersion) and solo.head.number == 4 and not solo.core.confirmed
    solo.wait(4.0)
    assert solo.core.confirmed


def test_each_fragment_comes_from_whoever_has_the_heaviest() -> None:
    """It is one state of fragments that differ: p1 has more of fragment 1, we of fragment 0."""
    from kit import config

    logs = (tuple(branch(3)), tuple(branch(1, fragment=1)))
    fragments = tuple(
        msgspec.structs.replace(saved(list(log)).fragments[0], watermarks=(Watermark("p1", Stamp(1, 1), 1),))
        for log in logs
    )
    restored = Restored(fragments=fragments, saved=True)
    heads = (branch(2)[2].header.head(), branch(4, fragment=1)[4].header.head())
    solo = Solo(config(2), ("p1",), restored, confirmed=False, saved=True, heads=heads)
    assert {pull.fragment for pull in found(solo.greeting, ef.FetchUpdate)} == {1}


def test_nobody_confirms_while_a_holder_of_more_is_asked() -> None:
    solo = returning(2, theirs=4)
    solo.wait(40.0)
    assert not solo.core.confirmed
    solo.feed(ev.FetchFailed(0, 3, "p1", FetchFailure.FALSE))
    solo.feed(ev.FetchFailed(0, 3, "p2", FetchFailure.FALSE))
    solo.wait(1.0)
    assert solo.core.confirmed, "they cannot give what they boast of"


def test_a_node_with_nothing_saved_waits_for_those_that_return() -> None:
    solo = Solo(genesis=True, confirmed=False, saved=True, heads=(FAR[3].header.head(),))
    assert not found(solo.wait(60.0), ef.FetchUpdate), "an unconfirmed state is for those that return"
    assert not solo.core.confirmed and not solo.core.may_serve
    assert solo.core.waits_for(solo.now) == "2 members that return with saved state"
    effects = serve(solo, solo.hear("p1", confirmed=True, saved=False))
    assert found(effects, ef.CommitVersion) and solo.core.confirmed and solo.head.number == 3


def test_where_somebody_is_confirmed_saved_heads_count_for_nothing() -> None:
    solo = Solo(restored=took_part(saved(FAR[:3]), "p1", "p2"), peers=("p1",), heads=(FAR[3].header.head(),))
    heavier = FAR[6].header.head()
    solo.hear("p2", confirmed=False, saved=True, heads=(heavier,))
    assert solo.core.waits_for(solo.now) == "the state of the members"
    assert not solo.core.may_serve
    serve(solo, solo.greeting)
    assert solo.core.confirmed and solo.head.number == 3


def test_who_returns_with_a_heavier_chain_than_all_members_is_one_of_them() -> None:
    """They have gone on from an older version; the fork is settled as any other."""
    other = branch(2, syncer="p2", learners=("p2",))
    lighter = child(genesis(0).header, "p1", learners=("p9",)).header.head()
    solo = Solo(restored=took_part(saved(other), "p1"), heads=(lighter,))
    assert solo.core.confirmed and solo.head.number == 2
