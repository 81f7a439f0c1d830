"""Support: of which versions a state is copied, and which of several sides is followed."""

from __future__ import annotations

import pytest
from kit import Solo, branch, child, config, found, reasons, restored_nothing, saved, table
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Restored, Timing
from p2pdiloco.core.api.evidence import two_versions
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.versions import MemberList, SignedVersion
from p2pdiloco.core.fork_choice import STOOD_ON
from p2pdiloco.util import MOST_NOTED

SETTLE_S = Timing().settle_s

PEERS = ("p1", "p2", "p3", "p4")
ALL = ("me", *PEERS)
CHAIN = branch(4, learners=ALL)
NEXT = child(CHAIN[4].header, "p1", ALL)
FAR = branch(40, learners=ALL)[40]
"""Of so many versions nobody has the updates any more."""


def node(peers: tuple[str, ...] = PEERS) -> Solo:
    """We are a member with a seat, as all others are."""
    solo = Solo(config(log_versions=20), peers, restored=saved(CHAIN))
    solo.wait(3.0)
    assert solo.core.shared.confirmed
    return solo


def stand(solo: Solo, peers: tuple[str, ...], version: SignedVersion) -> list[ev.Effect]:
    effects: list[ev.Effect] = []
    for peer in peers:
        solo.says[peer] = {"heads": (version.header.head(),)}
        effects += solo.hear(peer)
    return effects


@pytest.mark.parametrize(("there", "copies"), [(("p1", "p2"), False), (("p1", "p2", "p3"), True)])
def test_a_state_whose_update_nobody_gives_is_copied_once_half_have_it(
    there: tuple[str, ...], copies: bool
) -> None:
    """Of five voices two are less than half."""
    solo = node()
    (pull,) = found(stand(solo, there, NEXT), ev.FetchUpdate)
    effects = solo.answer(pull, ev.FetchFailed(FetchFailure.GONE)) + solo.wait(5.0)
    assert bool(found(effects, ev.FetchState)) is copies
    assert copies or found(effects, ev.FetchUpdate), "it may be busy, so its update is asked for again"


def test_who_alone_says_that_it_is_far_ahead_is_left_alone() -> None:
    solo = node()
    effects = stand(solo, ("p1",), FAR) + solo.wait(2 * SETTLE_S)
    assert not found(effects, ev.FetchState) and not solo.fragment.follower.behind(solo.now)
    assert found(stand(solo, ("p2",), NEXT), ev.FetchUpdate), "nor does it keep us from what others have"


def test_who_fell_far_behind_copies_what_the_others_have() -> None:
    solo = node()
    stand(solo, ("p1",), FAR)
    effects = stand(solo, ("p2", "p3"), FAR) + solo.wait(2.0)
    copy = found(effects, ev.FetchState)[0]
    effects = solo.answer(copy, ev.StateFetched(FAR, table(FAR)))
    assert found(effects, ev.CommitVersion) and solo.head == FAR.header.head()


def test_who_is_asked_for_what_all_have_gives_nothing_else() -> None:
    solo = node()
    effects = stand(solo, PEERS, FAR) + solo.wait(2.0)
    copy, forged = found(effects, ev.FetchState)[0], child(FAR.header, "p1", ALL)
    effects = solo.answer(copy, ev.StateFetched(forged, table(forged)))
    assert not found(effects, ev.CommitVersion) and solo.head == CHAIN[4].header.head()
    assert reasons(effects, "catchup")[0] == "not taken: unsupported"


@pytest.mark.parametrize("versions", [1, 2, 4])
def test_a_young_runs_seats_ask_for_support_like_all_others(versions: int) -> None:
    """Two sides of a split do not differ about who decides, however young the run is."""
    solo = Solo(config(log_versions=20), PEERS, restored=saved(CHAIN[:versions]))
    solo.wait(3.0)
    assert not found(stand(solo, ("p1", "p2"), FAR) + solo.wait(2.0), ev.FetchState)
    assert found(stand(solo, ("p3",), FAR) + solo.wait(5.0), ev.FetchState)


def test_who_was_killed_while_it_began_copies_what_it_lacks_of_no_member_alone() -> None:
    """It has something of the run, so it is none that begins with nothing."""
    settings = config(fragments=2, log_versions=20)
    begun = saved(branch(4, fragment=1, learners=ALL)).fragments
    restored = Restored(fragments=(*restored_nothing(settings).fragments[:1], *begun), saved=True)
    solo = Solo(settings, (), restored=restored)
    solo.peers = PEERS
    solo.feed(ev.PresenceSeen(MemberList(tuple((peer, 1) for peer in ALL))))
    effects = stand(solo, ("p1",), FAR) + solo.wait(1.0)
    assert not found(effects, ev.FetchState)
    assert found(stand(solo, ("p2", "p3"), FAR) + solo.wait(5.0), ev.FetchState)


def test_who_copied_a_state_whose_update_nobody_gives_goes_back_to_what_the_others_have() -> None:
    """They stand on its parent, of which it knows no more than the name, and can never come to it."""
    solo = Solo(config(log_versions=20), PEERS, restored=saved(CHAIN[4:]))
    solo.wait(3.0)
    assert not found(stand(solo, PEERS, CHAIN[3]) + solo.wait(SETTLE_S / 2), ev.FetchState), "they may"
    (copy,) = found(solo.wait(SETTLE_S), ev.FetchState)
    effects = solo.answer(copy, ev.StateFetched(CHAIN[3], table(CHAIN[3])))
    assert found(effects, ev.CommitVersion) and solo.head == CHAIN[3].header.head()


def test_of_two_who_decide_each_has_a_half() -> None:
    two = ("me", "p1")
    chain = branch(4, learners=two, seats=two)
    solo = Solo(config(log_versions=20, seats=two), ("p1", "s1"), restored=saved(chain))
    solo.wait(3.0)
    assert found(stand(solo, ("p1",), branch(40, learners=two, seats=two)[40]), ev.FetchState)


def test_who_comes_back_hears_first_who_else_is_here() -> None:
    """The first that it hears may be a liar."""
    solo = Solo(config(log_versions=20), (), restored=saved(CHAIN))
    solo.peers = PEERS
    solo.feed(ev.PresenceSeen(MemberList(tuple((peer, 1) for peer in ALL))))
    effects = stand(solo, ("p1",), FAR)
    assert not solo.core.shared.confirmed and not found(effects, ev.FetchState)
    effects = stand(solo, ("p2", "p3"), FAR) + solo.wait(5.0)
    assert found(effects, ev.FetchState)


def test_a_boast_of_our_own_number_keeps_us_from_nothing_that_others_have() -> None:
    """It is no proof, and no update of ours leads there."""
    solo = node()
    boast = replace(CHAIN[4].header.head(), tokens=10**9, digest=bytes(32))
    solo.says["p4"] = {"heads": (boast,)}
    (asked,) = found(solo.hear("p4"), ev.FetchUpdate)
    assert asked.number == 4
    effects = solo.answer(asked, ev.UpdateFetched(CHAIN[4], 900)) + stand(solo, ("p1", "p2"), NEXT)
    asked = found(effects + solo.wait(1.0), ev.FetchUpdate)[0]
    assert (asked.peer in ("p1", "p2"), asked.number) == (True, 5)


LIGHTER = child(CHAIN[3].header, "p2", ("p2",))
"""Version that weighs less than ours, of another branch."""


@pytest.mark.parametrize(("there", "follows"), [(PEERS[2:], False), (PEERS[1:], True)])
def test_a_lighter_chain_is_followed_once_ours_has_had_no_support_for_a_while(
    there: tuple[str, ...], follows: bool
) -> None:
    """Of five two are less than half. While too few are heard on either side, nobody moves."""
    solo = node()
    assert LIGHTER.header.tokens < solo.head.tokens
    effects = stand(solo, there, LIGHTER) + solo.wait(SETTLE_S - 1.0)
    assert not found(effects, ev.FetchState), "they may be on their way here"
    copies = found(solo.wait(2.0), ev.FetchState)
    assert bool(copies) is follows
    if copies:
        solo.answer(copies[0], ev.StateFetched(LIGHTER, table(LIGHTER)))
        assert solo.head == LIGHTER.header.head()


def test_who_comes_to_stand_on_ours_meanwhile_keeps_us_here() -> None:
    solo = node()
    stand(solo, PEERS, LIGHTER)
    effects = solo.wait(SETTLE_S - 1.0) + stand(solo, ("p1", "p2"), CHAIN[4]) + solo.wait(2 * SETTLE_S)
    assert not found(effects, ev.FetchState)


def test_of_many_sides_without_support_the_one_is_followed_on_which_most_stand() -> None:
    nine = ("me", *(f"p{number}" for number in range(1, 9)))
    chain = branch(4, learners=nine, seats=nine)
    sides = [child(chain[3].header, peer, nine[:4]) for peer in ("p1", "p3", "p5", "p6")]
    solo = Solo(config(log_versions=20, seats=nine), nine[1:], restored=saved(chain))
    solo.wait(3.0)
    effects = stand(solo, ("p1", "p2", "p7"), sides[0]) + stand(solo, ("p3", "p4"), sides[1])
    effects += stand(solo, ("p5",), sides[2]) + stand(solo, ("p6", "p8"), sides[3])
    long_s = config().timing.resume_alone_s
    assert not found(effects + solo.wait(long_s - 1.0), ev.FetchState)
    (copy,) = found(solo.wait(2.0), ev.FetchState)
    effects = solo.answer(copy, ev.StateFetched(sides[0], table(sides[0]))) + solo.wait(1.0)
    solo.answer(found(effects, ev.TryStates)[0], ev.Tried(True, "no worse"))
    assert solo.head == sides[0].header.head()


def test_whoever_gives_a_state_gives_one_with_support() -> None:
    """Who lies need not be many for that."""
    solo = node()
    lie = child(CHAIN[3].header, "p4", ("p4",))
    stand(solo, ("p4",), lie)
    stand(solo, ("p1", "p2", "p3"), LIGHTER)
    copy = found(solo.wait(SETTLE_S + 1.0), ev.FetchState)[0]
    assert copy.peer != "p4"
    effects = solo.answer(copy, ev.StateFetched(lie, table(lie)))
    assert not found(effects, ev.CommitVersion) and reasons(effects, "catchup")[0] == "not taken: unsupported"
    copy = found(solo.wait(5.0), ev.FetchState)[0]
    assert copy.peer in ("p1", "p2", "p3")
    solo.answer(copy, ev.StateFetched(LIGHTER, table(LIGHTER)))
    assert solo.head == LIGHTER.header.head()


def seats(*others: str) -> Solo:
    """We are at version 4 of a run with these, of which the last one lies."""
    everybody = ("me", *others)
    chain = branch(4, learners=everybody[:-1], seats=everybody)
    solo = Solo(config(log_versions=6, seats=everybody), others, restored=saved(chain))
    solo.wait(3.0)
    return solo


def of(solo: Solo, number: int) -> SignedVersion:
    """A version of the chain of such a run."""
    everybody = tuple(sorted(solo.fragment.chain.marks.seats, key=["me", *solo.peers].index))
    return branch(number, learners=everybody[:-1], seats=everybody)[number]


def lie(solo: Solo, number: int = 110) -> SignedVersion:
    everybody = ("me", *solo.peers)
    return branch(number, learners=everybody[-1:], seats=everybody, syncer=everybody[-1])[number]


def test_who_is_always_one_version_behind_stands_with_whoever_is_ahead() -> None:
    """Updates take longer than versions; the third one lies."""
    solo = seats("p1", "l")
    stand(solo, ("l",), lie(solo))
    for number in range(5, 9):
        effects = stand(solo, ("p1",), of(solo, number)) + solo.wait(15.0)
        assert not found(effects, ev.FetchState)
        pull = next(pull for pull in found(effects, ev.FetchUpdate) if pull.peer == "p1")
        version = of(solo, number)
        effects = solo.answer(pull, ev.UpdateFetched(version, 900 + number))
        for job in found(effects, ev.ApplyUpdate):
            solo.answer(job, ev.UpdateApplied(version.header.state_digest))
        assert solo.head == version.header.head()


def test_one_voice_alone_moves_no_member_however_long_no_head_has_support() -> None:
    solo = Solo(
        config(log_versions=6, seats=ALL), (), restored=saved(branch(4, learners=ALL[:-1], seats=ALL))
    )
    solo.peers = PEERS
    solo.feed(ev.PresenceSeen(MemberList(tuple((peer, 1) for peer in ALL))))
    effects = stand(solo, ("p4",), lie(solo))
    for number, peer in enumerate(PEERS[:3], 40):
        effects += stand(solo, (peer,), of(solo, number))
    assert not found(effects + solo.wait(60.0), ev.FetchState)


def test_who_was_chosen_without_support_is_left_once_the_others_agree() -> None:
    """We return. Two name a forged head, and of four others each another version."""
    everybody = ("me", *PEERS, "k", "l")
    start = branch(4, learners=everybody[:-1], seats=everybody)
    solo = Solo(config(log_versions=6, seats=everybody), (), restored=saved(start))
    solo.peers = everybody[1:]
    solo.feed(ev.PresenceSeen(MemberList(tuple((peer, 1) for peer in everybody))))
    stand(solo, ("k", "l"), lie(solo))
    for number, peer in enumerate(PEERS, 40):
        stand(solo, (peer,), of(solo, number))
    copy = found(solo.wait(60.0), ev.FetchState)[0]
    assert copy.peer in ("k", "l")
    solo.answer(copy, ev.FetchFailed(FetchFailure.BUSY))
    stand(solo, PEERS, of(solo, 44))
    true = next(copy for copy in found(solo.wait(60.0), ev.FetchState) if copy.peer in PEERS)
    solo.answer(true, ev.StateFetched(of(solo, 44), table(of(solo, 44))))
    assert solo.head == of(solo, 44).header.head()
    assert not found(solo.wait(60.0), ev.FetchState)


def test_a_copy_of_a_lighter_chain_is_not_taken_if_ours_has_support_again() -> None:
    solo = node()
    stand(solo, PEERS, LIGHTER)
    (copy, *_) = found(solo.wait(SETTLE_S + 1.0), ev.FetchState)
    stand(solo, ("p1", "p2"), CHAIN[4])
    effects = solo.answer(copy, ev.StateFetched(LIGHTER, table(LIGHTER)))
    assert not found(effects, ev.CommitVersion) and solo.head == CHAIN[4].header.head()


def test_no_stranger_moves_a_member_without_a_seat_back_once_no_seat_is_here() -> None:
    others = ("p1", "p2", "p3")
    chain = branch(20, learners=others, seats=others)
    solo = Solo(config(log_versions=6, seats=others), (*others, "x"), restored=saved(chain))
    solo.wait(3.0)
    solo.peers = ("x",)
    solo.says["x"] = {"heads": (chain[5].header.head(),)}
    assert solo.core.shared.confirmed and not found(solo.wait(60.0), ev.FetchState)


def test_what_an_excluded_syncer_makes_in_its_term_is_not_taken_of_a_stranger() -> None:
    solo = Solo(config(log_versions=6), (*PEERS, "x"), restored=saved(branch(4, syncer="p1", learners=ALL)))
    solo.wait(3.0)
    ours = solo.fragment.chain.signed
    solo.core.shared.excluded.found(
        two_versions(ours, child(CHAIN[3].header, "p1", ("p2",), ours.header.term)), "p2"
    )
    solo.feed(ev.Tick())
    solo.peers = (*PEERS[1:], "x")
    version = child(ours.header, "p1", ALL, ours.header.term)
    effects = stand(solo, ("p2", "p3", "x"), version)
    while (pull := found(effects, ev.FetchUpdate)[-1]).peer != "x":
        effects = solo.answer(pull, ev.FetchFailed(FetchFailure.UNREACHABLE)) + solo.wait(3.0)
    effects = solo.answer(pull, ev.UpdateFetched(version, 900))
    assert not found(effects, ev.ApplyUpdate) and reasons(effects, "fork") == ["unelected"]


def test_those_who_decide_do_not_yield_to_one_member_because_it_is_the_oldest() -> None:
    first = child(branch(0)[0].header, "p1", ("p1",))
    chain = [branch(0)[0], first]
    for _ in range(3):
        chain.append(child(chain[-1].header, "p2", ALL))
    solo = Solo(config(log_versions=20), PEERS, restored=saved(chain))
    solo.wait(3.0)
    assert solo.fragment.chain.marks.first("p1") == 1
    stand(solo, ("p1",), child(first.header, "p1", ("p1",)))
    assert not found(solo.wait(2 * SETTLE_S), ev.FetchState)


def test_what_is_remembered_of_members_is_bounded() -> None:
    solo = node()
    heads = solo.fragment.follower.heads
    for version in branch(2 * MOST_NOTED, learners=ALL)[5:]:
        for peer in PEERS:
            heads.heard(peer, version.header.head(), True, False, solo.now)
        heads.look(solo.now)
    assert len(heads._supported) <= MOST_NOTED and len(heads._stances.of("p1")) == STOOD_ON
    for peer in PEERS:
        heads.gone(peer)
    assert not heads._stances._heads


def test_what_had_support_when_its_copy_began_is_taken_however_long_that_takes() -> None:
    versions = branch(60, learners=ALL)
    solo = node()
    copy = found(stand(solo, PEERS, versions[40]) + solo.wait(2.0), ev.FetchState)[0]
    for later in versions[41 : 42 + STOOD_ON]:
        stand(solo, PEERS, later)
    effects = solo.answer(copy, ev.StateFetched(versions[40], table(versions[40])))
    assert found(effects, ev.CommitVersion), "nobody stands on it any more"
