"""States that are tried on our own data before they are taken, as too few seats stand on them."""

from __future__ import annotations

import pytest
from kit import Solo, branch, child, config, found, reasons, saved, table

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import Restored, Timing
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.versions import MemberList, SignedVersion

TEN = ("me", *(f"p{index}" for index in range(1, 10)))
HERE = TEN[1:5]
"""With us they are half of all seats."""
FAR = 100


def chain(fragment: int = 0, seats: tuple[str, ...] = TEN) -> list[SignedVersion]:
    return branch(FAR, fragment=fragment, learners=seats, seats=seats)


CHAIN, SECOND = chain(), chain(1)


def node(here: tuple[str, ...] = HERE, versions: list[SignedVersion] = CHAIN) -> Solo:
    solo = Solo(config(log_versions=20), here, restored=saved(versions[:71]))
    solo.wait(3.0)
    assert solo.core.shared.confirmed
    return solo


def copied(solo: Solo, version: SignedVersion, peers: tuple[str, ...] = HERE) -> list[ev.Effect]:
    """These stand on a version, and its state comes."""
    effects: list[ev.Effect] = []
    for peer in peers:
        solo.says[peer] = {"heads": (version.header.head(),)}
        effects += solo.hear(peer)
    effects += solo.wait(2.0)
    copy = found(effects, ev.FetchState)[0]
    return solo.answer(copy, ev.StateFetched(version, table(version))) + solo.wait(1.0)


def test_what_half_of_all_seats_have_is_tried_and_taken_if_it_is_no_worse() -> None:
    solo = node()
    effects = copied(solo, CHAIN[FAR])
    assert found(effects, ev.TryStates) == [ev.TryStates((0,))] and not found(effects, ev.CommitVersion)
    effects = solo.answer(ev.TryStates, ev.Tried(True, "loss 2.0"))
    assert found(effects, ev.CommitVersion) and solo.head == CHAIN[FAR].header.head()


def test_what_more_than_half_of_all_seats_have_is_taken_untried() -> None:
    here = TEN[1:7]
    solo = node(here)
    effects = copied(solo, CHAIN[FAR], here)
    assert found(effects, ev.CommitVersion) and not found(effects, ev.TryStates)


def test_where_there_never_were_more_than_six_seats_each_is_trusted() -> None:
    six = TEN[:6]
    versions = chain(seats=six)
    solo = node(six[1:4], versions)
    effects = copied(solo, versions[FAR], six[1:4])
    assert found(effects, ev.CommitVersion) and not found(effects, ev.TryStates)


def test_where_nothing_can_be_measured_it_is_taken_and_that_is_said() -> None:
    solo = node()
    copied(solo, CHAIN[FAR])
    effects = solo.answer(ev.TryStates, ev.Undone("no samples are held out here"))
    assert found(effects, ev.CommitVersion)
    assert "taken untried: no samples are held out here" in reasons(effects, "catchup")
    assert solo.core.untried == "no samples are held out here"


def test_a_worse_one_is_not_taken_nor_fetched_again_and_another_of_its_donor_is_tried_later() -> None:
    solo = node()
    ours = solo.head
    copied(solo, CHAIN[FAR])
    effects = solo.answer(ev.TryStates, ev.Tried(False, "loss 9.0"))
    assert found(effects, ev.DropSpare) and not found(effects, ev.CommitVersion)
    effects = solo.wait(600.0)
    assert not found(effects, ev.FetchState) and not found(effects, ev.FetchUpdate)
    assert solo.head == ours and not solo.fragment.follower.behind(solo.now)
    later = branch(FAR + 1, learners=TEN, seats=TEN)[FAR + 1]
    effects = copied(solo, later)
    assert found(effects, ev.TryStates)
    assert found(solo.answer(ev.TryStates, ev.Tried(True, "loss 2.0")), ev.CommitVersion)


def test_updates_that_lead_to_a_worse_one_are_followed() -> None:
    """They show how it is made. A trial may be wrong, and two members would wait for each other for ever."""
    solo = node(versions=CHAIN[:FAR])
    near = CHAIN[FAR - 20]
    for peer in HERE:
        solo.says[peer] = {"heads": (near.header.head(),)}
        solo.hear(peer)
    solo.answer(ev.FetchUpdate, ev.FetchFailed(FetchFailure.GONE))
    copy = found(solo.wait(5.0), ev.FetchState)[0]
    solo.answer(copy, ev.StateFetched(near, table(near)))
    solo.wait(1.0)
    effects = solo.answer(ev.TryStates, ev.Tried(False, "loss 9.0")) + solo.wait(60.0)
    assert found(effects, ev.FetchUpdate)[0].number == 71 and not found(effects, ev.FetchState)


def test_one_that_was_worse_is_taken_once_most_seats_have_it() -> None:
    """All rest, say, and no newer one comes."""
    solo = node(TEN[1:7])
    copied(solo, CHAIN[FAR])
    solo.answer(ev.TryStates, ev.Tried(False, "loss 9.0"))
    effects: list[ev.Effect] = []
    for peer in TEN[5:7]:
        solo.says[peer] = {"heads": (CHAIN[FAR].header.head(),)}
        effects += solo.hear(peer)
    copies = found(effects + solo.wait(60.0), ev.FetchState)
    effects = solo.answer(copies[0], ev.StateFetched(CHAIN[FAR], table(CHAIN[FAR])))
    assert found(effects, ev.CommitVersion) and not found(effects, ev.TryStates)


def test_each_donor_of_a_worse_one_is_left_alone_for_ever_longer() -> None:
    solo, asked = node(), []
    later = branch(FAR + 40, learners=TEN, seats=TEN)
    for number in range(FAR, FAR + 30):
        for peer in HERE:
            solo.says[peer] = {"heads": (later[number].header.head(),)}
        copies: list[ev.FetchState] = []
        while not copies:
            copies = found(solo.wait(1.0), ev.FetchState)
        asked.append((solo.now, copies[0].peer))
        solo.answer(copies[0], ev.StateFetched(later[number], table(later[number])))
        solo.wait(1.0)
        solo.answer(ev.TryStates, ev.Tried(False, "loss 9.0"))
    assert {peer for _, peer in asked[:4]} == {*HERE}
    assert asked[29][0] - asked[0][0] > 240.0, "six times each"


def test_a_version_that_was_found_false_while_it_was_tried_is_not_taken() -> None:
    solo = node()
    copied(solo, CHAIN[FAR])
    header = CHAIN[FAR].header
    solo.fragment.context.false_states._found[header.digest()] = header.syncer, header.number
    assert not found(solo.answer(ev.TryStates, ev.Tried(True, "loss 2.0")), ev.CommitVersion)


def test_who_returns_and_finds_a_worse_one_is_a_full_member_with_its_own() -> None:
    solo = Solo(config(log_versions=20), (), restored=saved(CHAIN[:71]))
    solo.peers = HERE
    solo.feed(ev.PresenceSeen(MemberList(tuple((peer, 1) for peer in (*HERE, "me")))))
    copied(solo, CHAIN[FAR])
    assert not solo.core.confirmed
    solo.answer(ev.TryStates, ev.Tried(False, "loss 9.0"))
    solo.wait(1.0)
    assert solo.core.confirmed and solo.head == CHAIN[70].header.head()


def two_fragments() -> Solo:
    parts = (*saved(CHAIN[:71]).fragments, *saved(SECOND[:71]).fragments)
    solo = Solo(config(fragments=2, log_versions=20), HERE, restored=Restored(fragments=parts, saved=True))
    solo.wait(3.0)
    return solo


def give(solo: Solo, effects: list[ev.Effect], version: SignedVersion) -> list[ev.Effect]:
    copies = found(effects, ev.FetchState)
    (copy,) = [copy for copy in copies if copy.fragment == version.header.fragment][:1]
    return solo.answer(copy, ev.StateFetched(version, table(version)))


@pytest.mark.parametrize("passed", [True, False])
def test_states_of_several_fragments_are_tried_together_and_taken_together_or_not(passed: bool) -> None:
    solo = two_fragments()
    for peer in HERE:
        solo.says[peer] = {"heads": (CHAIN[FAR].header.head(), SECOND[FAR].header.head())}
    effects = solo.wait(2.0)
    more = give(solo, effects, CHAIN[FAR]) + solo.wait(10 * Timing().resume_alone_s)
    assert not found(more, ev.TryStates), "the other is on its way"
    more = give(solo, effects, SECOND[FAR]) + solo.wait(1.0)
    assert found(more, ev.TryStates) == [ev.TryStates((0, 1))]
    effects = solo.answer(ev.TryStates, ev.Tried(passed, "loss 2.0"))
    assert len(found(effects, ev.CommitVersion)) == (2 if passed else 0)


def test_one_that_nobody_gives_keeps_the_other_for_a_while_only() -> None:
    solo = two_fragments()
    for peer in HERE:
        solo.says[peer] = {"heads": (CHAIN[FAR].header.head(), SECOND[FAR].header.head())}
    effects = solo.wait(2.0)
    give(solo, effects, CHAIN[FAR])
    for _ in range(int(Timing().resume_alone_s) + 10):
        for copy in found(effects, ev.FetchState):
            if copy.fragment == 1:
                solo.answer(copy, ev.FetchFailed(FetchFailure.BUSY))
        effects = solo.wait(1.0)
        if found(effects, ev.TryStates):
            break
    assert found(effects, ev.TryStates) == [ev.TryStates((0,))]


def test_what_became_lighter_than_ours_meanwhile_is_not_taken() -> None:
    """Those members were apart from us, and are back."""
    solo = node()
    lighter = child(CHAIN[69].header, "p2", ("p2",))
    assert lighter.header.tokens < solo.head.tokens
    for peer in HERE:
        solo.says[peer] = {"heads": (lighter.header.head(),)}
    copy = found(solo.wait(9.0), ev.FetchState)[0]
    solo.answer(copy, ev.StateFetched(lighter, table(lighter)))
    solo.wait(1.0)
    solo.says = {peer: {"heads": (solo.head,)} for peer in HERE}
    solo.wait(1.0)
    effects = solo.answer(ev.TryStates, ev.Tried(True, "loss 2.0"))
    assert not found(effects, ev.CommitVersion) and solo.head == CHAIN[70].header.head()
