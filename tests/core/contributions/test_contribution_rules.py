"""Contributions: signed labels, forks, an orderly end, and a syncer that leaves work out."""

from __future__ import annotations

import pytest
from kit import (
    PULLS,
    RUN,
    Solo,
    announce,
    branch,
    child,
    config,
    contribution,
    digest,
    found,
    genesis,
    reasons,
    saved,
    signed_part,
    table,
)
from msgspec.structs import replace
from scenes import held_by_p1, with_table, without_ours

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import FetchFailure, Suspicion, Verdict
from p2pdiloco.core.api.types import NEVER, Contributor, Head, SignedContribution, Stamp, Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import Chain, Witnesses, marks_of
from p2pdiloco.core.contributions import ELSEWHERE, LEFT_OUT, MOST_AHEAD, MOST_MISSES
from p2pdiloco.core.distrust import OF_OFFICE
from p2pdiloco.core.pending import (
    IN_MEMORY,
    KEPT_MAX,
    SIGNATURES_CHECKED,
    TakeUp,
    Unmerged,
    signed_by_learners,
    unsigned,
)

HONEST = signed_part(Contributor("p1", Stamp(1, 2), 40, 4, Stamp(1, 1), digest("payload")))


def solo() -> Solo:
    return Solo(config(), ("p1", "p2"))


@pytest.mark.parametrize(
    "odd",
    [
        {"learner": "p2"},
        {"stamp": Stamp(1, 3)},
        {"after": Stamp(1, 0)},
        {"tokens": 41},
        {"inner_steps": 5},
        {"payload_digest": digest("other")},
        {"signature": b""},
    ],
)
def test_nobody_else_can_say_what_a_learner_did(odd: dict[str, object]) -> None:
    shared = solo().core.shared
    assert signed_by_learners(shared, 0, [HONEST])
    assert not signed_by_learners(shared, 0, [HONEST, replace(HONEST, **odd)])
    assert not signed_by_learners(shared, 1, [HONEST]), "it is of another fragment"


def test_a_label_and_its_part_in_a_merge_have_one_signature() -> None:
    one = solo()
    signed = contribution("p1", one.head)
    assert signed_by_learners(one.core.shared, 0, [signed.contributor()])
    assert signed.contributor().work(RUN, 0).payload_digest == signed.header.payload_digest
    late = SignedContribution(replace(signed.header, due=False, base_number=0), signed.signature)
    assert late.contributor() == signed.contributor(), "the rest is not the learner's for ever"


def test_a_follower_checks_some_of_very_many_a_syncer_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = solo().core.shared
    false = [Contributor(f"p{i}", Stamp(1, 1), 40, 4) for i in range(10 * SIGNATURES_CHECKED)]
    assert not signed_by_learners(shared, 0, false) and unsigned(shared, 0, false) is not None
    true = [signed_part(part) for part in false]
    checked: list[str] = []
    honest = shared.signed_by
    monkeypatch.setattr(shared, "signed_by", lambda peer, *what: checked.append(peer) or honest(peer, *what))
    assert signed_by_learners(shared, 0, true) and len(checked) == 10 * SIGNATURES_CHECKED, (
        "it answers for them"
    )
    checked.clear()
    assert unsigned(shared, 0, true) is None and len(set(checked)) == SIGNATURES_CHECKED
    first = set(checked)
    checked.clear()
    assert unsigned(shared, 0, true) is None and set(checked) != first, "nobody knows which"


# Forks: what our chain has merged is kept until beyond doubt, and sent again if the chain loses.

PEERS = ("p1", "p2", "p3", "p4")
OURS = 4
"""Tokens per step and steps of our contributions: 40 tokens each."""


def merged(solo: Solo, count: int, first: int = 1) -> list[ev.Effect]:
    """Our learner's next contributions, each of them merged by the syncer p1 into the next version."""
    effects: list[ev.Effect] = []
    parent = solo.fragment.chain.signed
    for sequence in range(first, first + count):
        effects += solo.ready(ticket=sequence)
        part = (Contributor("me", Stamp(1, sequence), 40, 4),)
        parent = child(parent.header, "p1", contributors=part, tokens=parent.header.tokens + 40)
        effects += solo.announce(parent)
    assert solo.fragment.own.idle and solo.head == parent.header.head()
    return effects


def alone(count: int) -> Solo:
    """A node whose `count` contributions are merged in versions that no other of five seats has reported."""
    solo = Solo(config(term_versions=1000), PEERS, heads=(genesis(0).header.head(),))
    solo.learn()
    solo.elect("p1")
    merged(solo, count)
    return solo


def switch(solo: Solo, heavier: SignedVersion, watermark: Stamp = NEVER) -> list[ev.Effect]:
    """Our chain is replaced by another, which has our contributions up to `watermark`."""
    if watermark != NEVER:
        heavier = with_table(heavier, (Watermark("me", watermark, 2),))
    solo.heard["heads"] = (heavier.header.head(),)
    effects = [x for peer in PEERS[:3] for x in solo.hear(peer, heads=(heavier.header.head(),))]
    if found(effects, ev.FetchUpdate):
        effects = solo.answer(PULLS, ev.FetchFailed(FetchFailure.GONE))
    if not found(effects, ev.FetchState):
        effects = solo.wait(1.0)
    pull = found(effects, ev.FetchState)[0]
    return solo.answer(pull, ev.StateFetched(heavier, table(heavier)))


def answer(solo: Solo, effects: list[ev.Effect], ticket: int) -> list[ev.Effect]:
    """The tensors thread adds up what it was asked to."""
    wanted = found(effects, ev.Combine)[-1]
    return solo.answer(wanted, ev.Combined(ticket, digest("sum", wanted.tickets), 100))


def offered(solo: Solo, effects: list[ev.Effect]) -> ev.Offer:
    """The next contribution that goes out."""
    return found(effects + solo.wait(1.0), ev.Offer)[0]


def test_what_the_winner_lacks_goes_out_as_one() -> None:
    solo = alone(3)
    heavier = branch(5, syncer="p2")[5]
    effects = switch(solo, heavier)
    commit = found(effects, ev.CommitVersion)[0]
    assert (commit.merged_ticket, commit.after, commit.overwrite) == (None, NEVER, False), "a mere rebase"
    assert found(effects, ev.Combine)[0].tickets == (1, 2, 3)
    assert reasons(effects, "fork") == ["our chain lost: 3 contributions are sent again"]
    solo.elect("p1", term=3, start=5)
    again = offered(solo, answer(solo, effects, ticket=50))
    header = again.signed.header
    assert (again.ticket, header.stamp, header.after) == (50, Stamp(1, 3), NEVER)
    assert (header.tokens, header.inner_steps, header.due) == (120, 12, True)
    assert header.base_digest == heavier.header.digest()
    part = (Contributor("me", header.stamp, 120, 12),)
    effects = solo.announce(child(heavier.header, "p1", term=3, contributors=part, tokens=320))
    assert found(effects, ev.CommitVersion)[0].merged_ticket is None, "the learner was taken back already"
    assert [e.ticket for e in found(effects, ev.DiscardContribution)] == [50], "the parts stay"
    assert solo.fragment.own.idle


def test_the_answer_to_an_earlier_offer_says_nothing_of_a_later_one_to_the_same_syncer() -> None:
    solo = Solo(peers=("p1", "p2", "p3"))
    solo.learn()
    solo.elect("p1")
    (first,) = found(solo.ready(), ev.Offer)
    solo.elect("p2", term=2)
    (again,) = found(solo.elect("p1", term=3), ev.Offer)
    assert not found(solo.answer(first, ev.Undone("cut")) + solo.wait(0.5), ev.Offer)
    assert not found(solo.answer(first_of(solo, "p2"), ev.OfferAnswered(Verdict.IN_ROUND, None)), ev.Offer)
    solo.answer(again, ev.Undone("cut"))
    assert found(solo.wait(1.0), ev.Offer)


def first_of(solo: Solo, peer: str) -> ev.Offer:
    """What was offered to that peer, and is not answered."""
    asked = found([ask.effect for ask in solo.unanswered], ev.Offer)
    return next(offer for offer in asked if offer.peer == peer)


def test_new_work_waits_behind_what_is_sent_again() -> None:
    solo = alone(2)
    effects = switch(solo, branch(5, syncer="p2")[5])
    solo.elect("p1", term=3, start=5)
    assert not found(solo.ready(ticket=9), ev.Offer)
    again = offered(solo, answer(solo, effects, ticket=50))
    assert again.ticket == 50
    assert not found(solo.answer(again, ev.OfferAnswered(Verdict.IN_ROUND, None)), ev.Offer)
    part = (Contributor("me", Stamp(1, 2), 80, 8),)
    version = child(branch(5, syncer="p2")[5].header, "p1", term=3, contributors=part, tokens=280)
    following = found(solo.announce(version), ev.Offer)[0]
    assert (following.ticket, following.signed.header.after) == (9, Stamp(1, 2))


def test_one_damaged_payload_does_not_lose_what_was_merged_once() -> None:
    solo = alone(2)
    effects = switch(solo, branch(5, syncer="p2")[5])
    solo.elect("p1", term=2, start=5)
    offer = offered(solo, answer(solo, effects, ticket=50))
    stamp = offer.signed.header.stamp
    again = offered(solo, solo.answer(offer, ev.OfferAnswered(Verdict.NON_FINITE, None)))
    assert (again.ticket, again.signed.header.stamp) == (50, stamp)


def test_a_second_switch_is_answered_from_the_parts() -> None:
    """The second winner has the first of three, so that the sum of all three fits nowhere."""
    solo = alone(3)
    answer(solo, switch(solo, branch(5, syncer="p2")[5]), ticket=50)
    second = branch(9, syncer="p2", term=2)[9]
    effects = switch(solo, second, watermark=Stamp(1, 1))
    assert [e.ticket for e in found(effects, ev.DiscardContribution)] == [50]
    assert found(effects, ev.Combine)[0].tickets == (2, 3)
    solo.elect("p1", term=3, start=9)
    again = offered(solo, answer(solo, effects, ticket=60))
    assert (again.ticket, again.signed.header.after, again.signed.header.tokens) == (60, Stamp(1, 1), 80)


def test_a_sum_that_comes_too_late_is_dropped() -> None:
    solo = alone(2)
    first = switch(solo, branch(5, syncer="p2")[5])
    switch(solo, branch(9, syncer="p2", term=2)[9], watermark=Stamp(1, 1))
    effects = answer(solo, first, ticket=50)
    assert [e.ticket for e in found(effects, ev.DiscardContribution)] == [50]
    assert not found(effects, ev.Offer)


def test_a_payload_that_cannot_be_read_back_holds_nobody_up() -> None:
    solo = alone(2)
    wanted = found(switch(solo, branch(5, syncer="p2")[5]), ev.Combine)[0]
    solo.elect("p1", term=2, start=5)
    solo.ready(ticket=9)
    effects = solo.answer(wanted, ev.Undone("damaged"))
    assert reasons(effects, "fork") == ["given up: damaged"]
    assert offered(solo, effects).ticket == 9


def test_all_but_the_newest_wait_on_the_disk() -> None:
    solo = Solo(config(term_versions=1000), heads=(genesis(0).header.head(),))
    solo.learn()
    solo.elect("p1")
    effects = merged(solo, 5)
    assert [e.ticket for e in found(effects, ev.Spill)] == list(range(1, 6 - IN_MEMORY))


def test_what_everybody_has_had_for_a_while_is_beyond_doubt() -> None:
    solo = alone(3)
    second = solo.fragment.chain.logged(2)
    assert second is not None
    assert not found(solo.wait(60.0), ev.DiscardContribution), "one of two peers stands at version 0"
    solo.heard["heads"] = (second.header.head(),)
    assert not found(solo.wait(15.0), ev.DiscardContribution), "after a crash it may be back at version 0"
    assert [e.ticket for e in found(solo.wait(30.0), ev.DiscardContribution)] == [1, 2]


def test_who_vanished_may_come_back_with_another_chain() -> None:
    solo = alone(1)
    solo.heard["heads"] = solo.heads()
    effects = solo.wait(600.0, silent=("p2",))
    assert solo.core.shared.view.progress("p2") is None, "it is forgotten otherwise"
    assert not found(effects, ev.DiscardContribution)
    solo.now += 3600.0
    assert found(solo.wait(3.0, silent=("p2",)), ev.DiscardContribution)


def test_who_said_good_bye_holds_nothing_back() -> None:
    solo = alone(1)
    solo.heard["heads"] = solo.heads()
    solo.message("p2", msg.Leaving(1, solo.heads()))
    assert found(solo.wait(60.0, silent=("p2",)), ev.DiscardContribution)


@pytest.mark.parametrize("heads", [(), (child(genesis(0).header, "p2").header.head(),)])
def test_who_left_with_what_we_do_not_know_may_come_back_with_it(heads: tuple[Head, ...]) -> None:
    """Two who leave at one time may each make a last version (churn seed 201027)."""
    solo = alone(1)
    solo.message("p2", msg.Leaving(1, heads))
    solo.heard["heads"] = solo.heads()
    assert not found(solo.wait(60.0, silent=("p2",)), ev.DiscardContribution)


def test_a_restarted_peer_may_be_back_at_an_older_version() -> None:
    solo = alone(1)
    solo.heard["heads"] = solo.heads()
    solo.wait(15.0)
    solo.hear("p2", incarnation=2, heads=(genesis(0).header.head(),))
    assert not found(solo.wait(30.0, silent=("p2",)), ev.DiscardContribution)


def test_what_is_kept_is_bounded_and_the_middle_is_combined() -> None:
    solo = alone(KEPT_MAX)
    effects = merged(solo, 1, first=KEPT_MAX + 1)
    tickets = found(effects, ev.Combine)[0].tickets
    effects = answer(solo, effects, ticket=1000)
    assert [e.ticket for e in found(effects, ev.DiscardContribution)] == list(tickets)
    effects = switch(solo, branch(KEPT_MAX + 9, syncer="p2")[KEPT_MAX + 9])
    again = found(effects, ev.Combine)[0].tickets
    assert 1000 in again and not set(again) & set(tickets)
    assert len(again) == KEPT_MAX + 2 - len(tickets)


def test_what_a_seat_has_is_never_combined_with_what_it_may_lack() -> None:
    """One seat has nothing. Three have the first twenty: their chain branches off two later."""
    solo, many = alone(20), KEPT_MAX + 60
    solo.heard["heads"], solo.says["p4"] = solo.heads(), {"heads": (genesis(0).header.head(),)}
    solo.wait(45.0)
    solo.heard["heads"] = (genesis(0).header.head(),)
    combined: list[int] = []
    for sequence in range(21, many + 1):
        for job in found(merged(solo, 1, first=sequence), ev.Combine):
            combined += job.tickets
            solo.answer(job, ev.Combined(1000 + sequence, digest("sum", sequence), 100))
    assert len(solo.fragment.own._kept) <= KEPT_MAX + 1
    assert not {*range(1, 9), *range(21, 29)}.intersection(combined) and {9, 20, 29} <= {*combined}
    effects = switch(solo, branch(many + 9, syncer="p2")[many + 9], watermark=Stamp(1, 22))
    solo.elect("p1", term=40, start=many + 9)
    again = offered(solo, answer(solo, effects, ticket=3000))
    assert again.signed.header.tokens == 40 * (many - 22) and "given up" not in str(effects)


def test_nothing_is_let_go_of_while_the_middle_is_being_combined() -> None:
    solo = alone(KEPT_MAX)
    effects = merged(solo, 1, first=KEPT_MAX + 1)
    solo.message("p2", msg.Leaving(1, solo.heads()))
    solo.heard["heads"] = solo.heads()
    assert not found(solo.wait(60.0, silent=("p2",)), ev.DiscardContribution), "its payloads are being read"
    answer(solo, effects, ticket=1000)
    let_go = {e.ticket for e in found(solo.wait(10.0, silent=("p2",)), ev.DiscardContribution)}
    assert 1000 in let_go, "everybody left has all of it"


def test_nobody_without_a_seat_holds_anything_back() -> None:
    """A side without a seat makes no versions."""
    solo = alone(3)
    solo.heard["heads"] = solo.heads()
    solo.peers = (*solo.peers, "s1")
    solo.says["s1"] = {"heads": ()}
    assert [e.ticket for e in found(solo.wait(60.0), ev.DiscardContribution)] == [1, 2, 3]


def witnesses(log: list[SignedVersion], now: float = 0.0) -> Witnesses:
    """Of the five seats' versions, as we see it."""
    chain = Chain(tuple(log), table(log[-1]), keep=64)
    return Witnesses(chain, "me", config().timing, now)


def say(seen: Witnesses, now: float, **heads: SignedVersion) -> None:
    """They have had that for long."""
    for at_s in (now - 30.0, now - 5.0, now):
        for peer, version in heads.items():
            seen.heard(peer, version.header.head(), at_s)
        seen.review(at_s)


def test_what_a_third_of_the_seats_lack_is_in_doubt_however_long_they_are_away() -> None:
    log = branch(9)
    seen = witnesses(log)
    say(seen, 100.0, p1=log[9], p2=log[7], p3=log[5], p4=log[3])
    assert seen.review(100.0) == (3, [3, 5, 7, 9])
    say(seen, 9000.0, p1=log[9], p2=log[7])
    assert seen.review(9000.0) == (5, [3, 5, 7, 9]), "of five, four have it"
    say(seen, 9100.0, p3=log[8])
    assert seen.review(9200.0)[0] == 7
    assert seen.review(99999.0)[0] == 7, "of five, two may be on another side"


def test_who_was_never_heard_may_bring_another_chain_for_a_while() -> None:
    log = branch(9)
    seen = witnesses(log)
    three = dict.fromkeys(("p1", "p2", "p3"), log[9])
    say(seen, 100.0, **three)
    assert seen.review(100.0) == (-1, [-1, 9, 9, 9])
    say(seen, 5000.0, **three)
    assert seen.review(5000.0) == (9, [-1, 9, 9, 9])


def test_of_another_chain_all_are_asked_anew() -> None:
    log, other = branch(3), branch(5, syncer="p2")[5]
    seen = witnesses(log)
    say(seen, 100.0, **dict.fromkeys(PEERS, log[3]))
    assert seen.review(100.0)[0] == 3
    seen._chain.replace(other, table(other))
    assert seen.review(102.0)[0] == -1, "what our chain has now, they have for no time"


def test_a_seat_is_asked_on_when_it_ended_in_a_version_that_is_in_doubt() -> None:
    """Its chain, in which it has a seat, may replace ours."""
    log = branch(3)
    seen = witnesses(log)
    say(seen, 100.0, **dict.fromkeys(PEERS, log[3]))
    left = tuple(replace(m, seat=None) if m.learner == "p1" else m for m in table(log[3]))
    seen._chain.marks = marks_of(left)
    seen.restarted("p1")
    assert seen.review(102.0) == (-1, [-1, 3, 3, 3])
    assert seen.review(9000.0) == (3, [3, 3, 3]), "it was not heard for long"


def test_who_was_merged_lately_has_what_came_before() -> None:
    """All that is known of members of other groups: they do not report their heads to us."""
    seen = witnesses(branch(9, learners=PEERS))
    seen.count_merged(3, 100.0)
    assert seen.review(100.0)[0] == -1, "a crash may take it back"
    seen.count_merged(3, 121.0)
    assert seen.review(121.0)[0] == 9 - 1 - 3


# An orderly end over a bad link loses nothing: what the next life takes up (docs/protocol/exactly-once.md,
# section 6).

OLD, SLOT, NEWER = Stamp(1, 4), Stamp(1, 5), Stamp(2, 1)
FREE = Unmerged((OLD,))
NEVER_SENT = Unmerged((OLD,), SLOT)
UNANSWERED = Unmerged((OLD,), SLOT, doubts=(SLOT,))
SENT = Unmerged((OLD,), SLOT, sent=True, doubts=(SLOT,))
BESIDE = Unmerged((OLD, Stamp(1, 5)), Stamp(1, 6), doubts=(Stamp(1, 6),))


@pytest.mark.parametrize(
    ("left", "mark", "mode", "doubts"),
    [
        (FREE, OLD, "all", ()),
        (FREE, NEWER, "none", ()),  # another life of ours was merged: the displacement may be in it
        (FREE, NEVER, "none", ()),  # on another branch
        (NEVER_SENT, OLD, "all", ()),
        (UNANSWERED, OLD, "all", (SLOT,)),
        (UNANSWERED, SLOT, "rest", ()),  # it got there after all
        (UNANSWERED, NEWER, "none", ()),
        (SENT, OLD, "rest", ()),  # it may still be merged
        (SENT, SLOT, "rest", ()),
        (BESIDE, Stamp(1, 5), "all", (Stamp(1, 6),)),  # an earlier learner's, no part of it
    ],
)
def test_what_is_taken_up(left: Unmerged, mark: Stamp, mode: TakeUp, doubts: tuple[Stamp, ...]) -> None:
    assert left.take_up(mark) == (mode, doubts)


def at_work(syncer: str = "p1") -> Solo:
    """A node that trains, where somebody is in office."""
    solo = Solo()
    solo.learn()
    solo.elect(syncer)
    return solo


def leave(solo: Solo, sent: bool = False) -> Unmerged:
    """It goes, with whatever is unmerged."""
    solo.feed(ev.LeaveRequested())
    solo.ready(ticket=7)
    if sent:
        solo.feed(ev.ContributionSent(0, FIRST))
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ev.Left)
    return solo.fragment.own.unmerged()


def returned(left: Unmerged, log: list[SignedVersion]) -> tuple[Solo, TakeUp]:
    """The next life, with this chain."""
    again = Solo(restored=saved(log), incarnation=2)
    again.learn()
    return again, again.fragment.own.take_up(left)


def mine(parent: SignedVersion, stamp: Stamp) -> SignedVersion:
    """A version with a contribution of ours."""
    return child(parent.header, contributors=(Contributor("me", stamp, 40, 4),))


def overwrites(effects: list[ev.Effect]) -> list[bool]:
    return [commit.overwrite for commit in found(effects, ev.CommitVersion)]


FIRST = Stamp(1, 1)
"""Of the first life's only contribution."""


def test_what_nobody_was_offered_is_taken_up_and_never_doubted() -> None:
    solo = Solo()
    solo.learn()
    left = leave(solo)  # nobody is in office
    assert left == Unmerged((NEVER,), FIRST)
    assert returned(left, branch(0))[1] == "all"
    assert not found(solo.elect("p1"), ev.Offer), "no longer: the next life will"


def test_what_did_not_get_there_is_taken_up_and_goes_if_it_was_merged_after_all() -> None:
    again, mode = returned(leave(at_work()), branch(0))
    assert mode == "all"
    again.ready(ticket=9)
    effects = again.announce(mine(branch(0)[0], FIRST))
    assert overwrites(effects) == [True]
    assert reasons(effects, "contribution") == ["given up: it contains what was merged"]
    assert again.fragment.own.idle


def test_a_copy_that_contains_it_goes_too_when_the_learner_has_crashed_since() -> None:
    again, _ = returned(leave(at_work()), branch(0))
    again.ready(ticket=9)
    again.feed(ev.LearnerLost())
    effects = again.announce(mine(branch(0)[0], FIRST))
    assert overwrites(effects) == [False], "the new learner has nothing of it"
    assert again.fragment.own.idle and found(effects, ev.DiscardContribution)


def test_once_a_contribution_that_contains_it_is_merged_nothing_is_doubted() -> None:
    again, _ = returned(leave(at_work()), branch(0))
    again.ready(ticket=9)
    again.announce(mine(branch(0)[0], Stamp(2, 1)))
    assert again.fragment.own.unmerged() == Unmerged((Stamp(2, 1),))


def test_on_a_branch_that_has_it_what_contains_it_is_not_sent_again() -> None:
    again, _ = returned(leave(at_work()), branch(0))
    again.ready(ticket=9)
    again.announce(mine(branch(0)[0], Stamp(2, 1)))
    own = again.fragment.own
    assert own.keeps
    assert own._kept.moved(FIRST, 1, replaced=True) == () and not own.keeps


def test_what_a_syncer_may_have_is_left_to_it() -> None:
    left = leave(at_work(), sent=True)
    for versions in (0, 1, 9):
        assert returned(left, branch(versions))[1] == "rest", "it may be held over"
    merged = mine(branch(0)[0], FIRST)
    again, mode = returned(left, [branch(0)[0], merged])
    assert mode == "rest"
    again.ready(ticket=9)
    assert again.fragment.own.unmerged().doubts == ()


def test_that_a_syncer_may_have_it_is_not_forgotten_while_another_is_asked() -> None:
    solo = at_work()
    solo.ready(ticket=7)
    solo.feed(ev.ContributionSent(0, FIRST))
    solo.answer(ev.Offer, ev.Undone("cut"))
    solo.elect("p2", term=2)
    solo.feed(ev.LeaveRequested())
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ev.Left)
    assert returned(solo.fragment.own.unmerged(), branch(0))[1] == "rest"


def test_what_nobody_but_ourselves_holds_is_taken_up() -> None:
    solo = Solo()
    solo.learn()
    solo.take_office()
    solo.feed(ev.LeaveRequested())
    solo.ready(ticket=7)  # into our own inbox; no merge comes about
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ev.Left)
    assert returned(solo.fragment.own.unmerged(), branch(0))[1] == "all"


def test_doubts_outlive_a_second_end() -> None:
    left = Unmerged((NEVER,), SLOT, doubts=(SLOT,))
    again, mode = returned(left, branch(0))
    assert mode == "all"
    again.feed(ev.LeaveRequested())
    again.wait(again.config.timing.leave_s + 0.1)
    assert again.fragment.own.unmerged() == Unmerged((NEVER,), doubts=(SLOT,))


# A syncer that says that it has our work, and leaves it out of its versions.


def test_whoever_leaves_our_work_out_time_and_again_gets_no_vote_of_ours() -> None:
    solo = held_by_p1()
    effects = without_ours(solo, 2 * MOST_MISSES - 1)
    assert not reasons(effects, "suspicion") and not solo.core.shared.distrust.has("p1", solo.now, *OF_OFFICE)
    assert len(found(effects, ev.Offer)) == MOST_MISSES - 1, "offered again after each miss"
    assert reasons(without_ours(solo, 1), "suspicion") == [LEFT_OUT]
    assert solo.core.shared.distrust.has("p1", solo.now, *OF_OFFICE)
    assert not found(effects, ev.RetireSlot), "nothing of it is lost"


def test_whoever_says_so_again_before_each_version_gets_no_more_time_by_it() -> None:
    """A learner that waits for less than a round lasts asks again before each version."""
    solo = held_by_p1()
    effects: list[ev.Effect] = []
    for _ in range(2 * MOST_MISSES):
        own = solo.fragment.own
        own._withheld.acknowledged(own._queue[0], solo.head)
        effects += without_ours(solo, 1)
    assert reasons(effects, "suspicion") == [LEFT_OUT]


def test_the_version_that_was_in_the_making_is_no_miss() -> None:
    assert not found(without_ours(held_by_p1(), 1), ev.Offer)


def test_versions_that_were_made_before_it_had_our_work_are_no_miss() -> None:
    solo = held_by_p1()
    ahead = replace(solo.head, number=solo.head.number + MOST_AHEAD)
    assert len(found(without_ours(solo, 2, head=ahead), ev.Offer)) == 1
    assert not found(without_ours(solo, MOST_AHEAD - 1), ev.Offer)


def test_whoever_says_that_it_is_far_ahead_is_found_all_the_same() -> None:
    solo = held_by_p1()
    far = replace(solo.head, number=1 << 40)
    effects = without_ours(solo, MOST_MISSES * (MOST_AHEAD + 2), head=far)
    assert reasons(effects, "suspicion") == [LEFT_OUT]


def test_a_syncer_that_had_to_drop_it_says_so_and_is_not_suspected() -> None:
    solo = held_by_p1()
    effects = without_ours(solo, 12, says=Verdict.NO_MEMORY)
    assert not reasons(effects, "suspicion")


def test_a_merged_contribution_ends_the_count() -> None:
    solo = held_by_p1()
    without_ours(solo, 4)
    solo.announce(child(solo.fragment.chain.header, "p1", ("me", "p2")))
    offer = found(solo.ready(ticket=2), ev.Offer)
    assert offer and not solo.core.shared.distrust.has("p1", solo.now, *OF_OFFICE)
    assert not reasons(without_ours(solo, 4), "suspicion")


@pytest.mark.parametrize("verdict", ELSEWHERE)
def test_whoever_is_elsewhere_with_what_nobody_can_have_is_not_counted_on(verdict: Verdict) -> None:
    solo = held_by_p1(says=verdict)
    solo.message("p1", announce(child(solo.fragment.chain.header, "p1", ("p2",))))
    seen, effects = [], solo.answer(PULLS, ev.FetchFailed(FetchFailure.BUSY))
    while not reasons(seen, "suspicion") and len(seen) < 2000:
        seen, asked, effects = seen + effects, effects, []
        for offer in found(asked, ev.Offer):
            effects += solo.answer(offer, ev.OfferAnswered(verdict, None))
        for pull in found(asked, ev.FetchUpdate):
            effects += solo.answer(pull, ev.FetchFailed(FetchFailure.BUSY))
        effects += solo.wait(0.5)
    assert reasons(seen, "suspicion") == [str(Suspicion.NO_VERSION)]
    assert solo.now > 5.0, "not before its patience is over"
