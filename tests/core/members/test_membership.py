"""Membership: its degrees, incarnations, and what members say that counts (docs/protocol/membership.md)."""

from __future__ import annotations

import math

import msgspec
import pytest
from kit import RUN, STEP_S, Solo, branch, child, config, found, progress, reasons, saved, sent, table, vote

from p2pdiloco.core import fork_choice
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment, Timing
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.api.types import UNMEASURED, USUAL_SCORE, Contributor, Reach, Stamp, Watermark
from p2pdiloco.core.api.versions import Roster, SignedVersion, leaf_index
from p2pdiloco.core.chain import FOUNDING_VERSIONS, PROBATION_MERGES, Marks, marks_of
from p2pdiloco.core.delegate import MAX_ASKED, LeafElectorate, UpperElectorate
from p2pdiloco.core.election import Inquiry
from p2pdiloco.core.members import IN_VAIN, LISTEN_S, MAX_KNOWN, NEWCOMERS_A_BEAT, Health, Vanished, View
from p2pdiloco.core.membership import UNPROVEN_OFFICES


def heartbeat(incarnation: int = 1) -> msg.Progress:
    return progress((), incarnation=incarnation)


def test_alive_member_known() -> None:
    timing = Timing()
    view = View("me", timing)
    view.heard("p1", heartbeat(), 0.0)
    view.listed("me", 1, 0.0)

    def degrees(now: float) -> tuple[bool, bool, bool]:
        return view.alive("p1", now), "p1" in view.members(now), "p1" in view.to_greet(now)

    assert degrees(0.0) == (True, True, True)
    assert degrees(timing.suspect_s + 0.1) == (False, True, False), "just greeted: tried again later"
    assert degrees(timing.member_ttl_s - 0.1) == (False, True, True)
    assert degrees(timing.member_ttl_s + 0.1) == (False, False, False)
    view.listed("p1", 1, timing.member_ttl_s)
    assert degrees(timing.member_ttl_s + timing.redial_s) == (False, False, True), "the DHT still lists it"
    view.forget_stale(1000.0)
    assert view.progress("p1") is None


def test_failed_sends_count_as_silence_until_something_is_heard() -> None:
    view = View("me", Timing())
    view.heard("p1", heartbeat(), 0.0)
    assert not view.failed("p1") and view.alive("p1", 0.1)
    assert view.failed("p1") and not view.alive("p1", 0.1) and view.members(0.1) == ["p1"]
    view.heard_message("p1", 0.2)
    assert view.alive("p1", 0.2)
    assert not view.failed("stranger")


def test_incarnations_tell_a_restart_from_an_echo() -> None:
    view = View("me", Timing())
    assert view.heard("p1", heartbeat(5), 0.0)
    assert not view.heard("p1", heartbeat(4), 0.1), "from before its restart"
    view.said_goodbye("p1", 4, 0.15)
    assert view.alive("p1", 0.2), "a good-bye of an earlier life"
    view.said_goodbye("p1", 5, 0.2)
    assert view.has_left("p1") and view.members(0.3) == []
    assert not view.heard("p1", heartbeat(5), 0.4), "overtaken by its own good-bye"
    view.heard_message("p1", 0.4)
    view.listed("p1", 5, 0.4)
    assert view.has_left("p1") and view.to_greet(10.0) == []
    assert view.heard("p1", heartbeat(6), 0.5) and not view.has_left("p1")


@pytest.mark.parametrize("lie", [math.inf, 1e300, math.nan, -1.0, 0.0])
def test_an_absurd_step_time_counts_in_no_average(lie: float) -> None:
    solo = Solo(peers=("p1",))
    solo.learn(step_s=0.2)
    solo.hear("p1", step_time_s=lie)
    assert solo.core.shared.median_step_s(solo.now) == pytest.approx(0.2)
    assert solo.core.shared.fastest_step_s(solo.now) == pytest.approx(0.2)


def test_that_our_learner_has_begun_and_how_fast_it_is_are_told_at_once() -> None:
    """A heartbeat later the others' learners have made steps at the learning rate of a swarm without us."""
    solo = Solo(peers=("p1", "p2"))
    for step_s in (0.0, 0.2):
        status = ev.LearnerStatus(True, 1, 10, 0.0, step_s, 3.0)
        told = sent(solo.feed(status), msg.Progress)
        assert [(said.learning, said.step_time_s) for said in told] == [(True, step_s)] * 2
        assert not sent(solo.feed(status), msg.Progress), "the rest is told in time"
    solo.feed(ev.LearnerStatus(False, 1, 10, 0.0, 0.2, 3.0))
    assert solo.core.shared.training(solo.now) == 3, "it is about to say so"
    assert len(sent(solo.feed(status), msg.Progress)) == 2, "it has begun again"
    assert solo.core.shared.training(solo.now) == 3


def test_our_own_name_and_wrong_head_counts_are_refused() -> None:
    solo = Solo()
    assert reasons(solo.message("me", progress(solo.heads())), "refusal") == ["our-own-name"]
    assert solo.core.shared.voters(solo.now) == ["me", "p1", "p2"]
    assert reasons(solo.hear("p3", heads=solo.heads() * 2), "refusal") == ["wrong-heads"]
    assert "p3" not in solo.core.shared.voters(solo.now)


def test_what_waits_for_others_costs_no_ticks() -> None:
    solo = Solo(config(quorum=3), peers=("p1", "p2"))
    solo.take_office()
    solo.learn()
    solo.offer("p1", 1)  # one of three: the round waits, and its hold time passes
    ticks = 0
    end = solo.now + 10.0
    for peer in solo.peers:
        solo.hear(peer)
    while solo.now < end:
        solo.now = max(solo.now, solo.core.next_deadline())
        solo.feed(ev.Tick())
        ticks += 1
    assert ticks < 2.5 * 10.0 / solo.config.timing.heartbeat_s


def test_who_was_heard_long_ago_is_waited_for_like_who_never_was() -> None:
    timing = Timing()
    view = View("me", timing)
    assert view.may_come("p", 0.0), "listed at most"
    heads = ()
    view.heard("p", progress(heads, confirmed=False), 0.0)
    assert not view.may_come("p", 0.1), "known as a newcomer"
    assert view.may_come("p", 60.0), "it may be a member by now"
    view.heard("p", progress(heads), 60.0)
    assert not view.may_come("p", 61.0), "it counts as a member"
    assert view.may_come("p", 60.0 + timing.member_ttl_s), "it does not any more, though it may be here"
    view.said_goodbye("p", 1, 80.0)
    assert not view.may_come("p", 200.0)


def test_of_names_that_were_never_heard_a_few_are_tried_at_a_time() -> None:
    """Every one costs a dial: an attacker lists thousands. All get their turn."""
    timing = Timing()
    view = View("me", timing, lambda peer: peer == "p1")
    names = [f"g{i:02}" for i in range(9)]
    for peer in ("p1", *names):
        view.listed(peer, 1, 0.0)
    tried: list[str] = []
    now = 1.0
    for _ in range(9):
        greeted = view.to_greet(now)
        assert len([peer for peer in greeted if peer != "p1"]) == 1
        tried += greeted
        now += timing.heartbeat_s
    assert "p1" in tried and set(names) <= set(tried)


def crowded() -> View:
    """So many strangers as there is room for, the first of them silent for longest; p1 and p2 have worked."""
    view = View("me", Timing(), lambda peer: peer in ("p1", "p2"))
    for number in range(MAX_KNOWN - 1):
        view.heard(f"s{number:05}", progress(()), number / MAX_KNOWN)
    view.heard("p1", progress(()), 0.0)
    return view


def test_a_crowd_shuts_out_nobody_who_has_worked() -> None:
    view = crowded()
    assert not view.heard("s9999", progress(()), 1.0), "there is no more room"
    assert view.heard("p2", progress(()), 1.0) and view.progress("p2") is not None
    assert view.progress("s00000") is None and view.progress("p1") is not None, "the longest silent gives way"
    assert view.forget_stale(1.0) == ["s00000"] and not view.forget_stale(1.0)


def test_who_has_worked_gives_way_to_nobody() -> None:
    view = View("me", Timing(), lambda peer: True)
    for number in range(MAX_KNOWN):
        view.heard(f"p{number:05}", progress(()), 0.0)
    assert not view.heard("another", progress(()), 1.0)


def test_a_crowd_gets_our_heartbeats_in_turns() -> None:
    view, told, now = crowded(), set[str](), 1.0
    for _ in range(MAX_KNOWN // NEWCOMERS_A_BEAT + 1):
        view.heard("p1", progress(()), now)
        greeted = view.to_greet(now)
        assert "p1" in greeted and len(greeted) <= NEWCOMERS_A_BEAT + 1
        told |= {*greeted}
        now += Timing().heartbeat_s
    assert len(told) == MAX_KNOWN


def test_of_a_strangers_offices_a_few_are_kept_and_none_that_there_cannot_be() -> None:
    solo = Solo(peers=("p1", "p2"))
    for version in branch(2, learners=("me", "p1", "p2"))[1:]:
        solo.announce(version)
    many = tuple((f"1/0/{number}", 0, 9) for number in range(2000))
    false = (("x" * 60, 0, 9), ("1/0/0", 7, 9))
    for peer in ("s1", "p1"):
        solo.hear(peer, offices=(*false, *many))
    kept = {peer: solo.core.shared.view.progress(peer) for peer in ("s1", "p1")}
    assert kept["s1"] is not None and kept["s1"].offices == many[: UNPROVEN_OFFICES - len(false)]
    assert kept["p1"] is not None and kept["p1"].offices == many
    claims = solo.core.shared.claims
    assert not claims.of(0, "x" * 60) and not claims.of(0, "1/0/1000").keys() & {"s1"}


# Who decides is read off the chain: words make nobody a voter (docs/protocol/trust.md, section 3).

PEERS = ("p1", "p2", "p3")
WORKERS = ("me", "p1", "p2")
STRANGERS = tuple(f"s{i}" for i in range(9))


def settled(*strangers: str) -> Solo:
    """By our chain we, p1 and p2 vote. p3 and these say that they are confirmed, and were never merged."""
    solo = Solo(peers=(*PEERS, *strangers))
    for version in branch(2, learners=WORKERS)[1:]:
        solo.announce(version)
    return solo


def voters(solo: Solo) -> list[str]:
    return solo.fragment.seats.leaf.electorate.voters(solo.now)


def test_everybody_decides_until_somebody_votes_by_the_chain() -> None:
    solo = Solo(peers=PEERS)
    chain = branch(2, learners=WORKERS)
    solo.announce(chain[1])
    assert voters(solo) == ["me", *PEERS], "one merged version makes no voter"
    solo.announce(chain[2])
    assert voters(solo) == list(WORKERS)


@pytest.mark.parametrize("voting", [1, 2, 3])
def test_while_fewer_than_three_vote_at_first_one_merged_version_is_enough(voting: int) -> None:
    """Else one of them that gives its versions to nobody could never be replaced."""
    solo = Solo(peers=("p1", "p2", "p3", "p4", "s1"))
    first, second = ("p1", "p2", "p3", "me", "p4"), ("p1", "p2", "p3")[:voting]
    solo.announce(child(solo.fragment.chain.header, "p1", first))
    solo.announce(child(solo.fragment.chain.header, "p1", second))
    assert voters(solo) == ["me", "p1", "p2", "p3", "p4"] if voting < 3 else list(second)


def test_work_that_earns_no_vote_decides_nothing_and_later_the_only_voter_does() -> None:
    marks = worked(worked(marks_of(()), 1, "old", "new"), 1, "noise", score=0)
    assert not marks.deciding, "nobody votes yet"
    marks = worked(marks, 2, "old")
    assert marks.voters == {"old"} and marks.deciding == {"old", "new"}
    marks = worked(marks, FOUNDING_VERSIONS, "old")
    assert marks.deciding == {"old", "new"}
    assert worked(marks, FOUNDING_VERSIONS + 1, "old").deciding == {"old"}


def test_who_was_merged_once_and_went_leaves_a_hidden_only_voter_to_no_strangers() -> None:
    solo = Solo(peers=("s1", "s2"))
    for learners in (("me", "gone"), ("me",)):
        solo.announce(child(solo.fragment.chain.header, "s1", learners))
    marks = solo.fragment.chain.marks
    assert marks.voters == {"me"} and marks.deciding == {"me", "gone"}
    solo.core.shared.reached(Reach.OUTBOUND)
    assert voters(solo) == ["me"]


def test_silent_strangers_block_no_election() -> None:
    solo = settled(*STRANGERS)
    requests: list[ev.Send] = []
    while not requests:
        effects = found(solo.wait(0.1), ev.Send)
        requests = [send for send in effects if isinstance(send.message, msg.VoteRequest)]
    assert {send.peer for send in requests} == {"p1", "p2"}
    term = next(iter(sent(list(requests), msg.VoteRequest))).term
    solo.message("p1", msg.VoteGranted(vote("p1", "me", term)))
    assert solo.fragment.office.holding, "two of three, whoever else is here"


def test_a_stranger_gets_no_vote_and_holds_no_office() -> None:
    solo = settled("s1")
    head = solo.head
    request = msg.VoteRequest("all", 0, 2, head, "because")
    refused = sent(solo.message("s1", request), msg.VoteRefused, to="s1")
    assert [r.reason.name for r in refused] == ["NO_VOTER"]
    asks = solo.hear("s1", offices=(("all", 0, 9),))
    assert not sent(asks, msg.OfficeQuery), "its claim is not worth a question"


def test_voters_that_cannot_hear_each_other_decide_with_those_that_can_be_dialled() -> None:
    solo = settled()
    for peer in WORKERS[1:]:
        solo.says[peer] = {"reach": Reach.OUTBOUND}
        solo.hear(peer, reach=Reach.OUTBOUND)
    assert voters(solo) == list(WORKERS), "we can be dialled ourselves"
    solo.core.shared.reached(Reach.OUTBOUND)
    assert voters(solo) == ["me", *PEERS]


def worked(marks: Marks, number: int, *learners: str, score: int = UNMEASURED) -> Marks:
    parts = tuple(Contributor(p, Stamp(1, number), 40, 4, score=score) for p in learners)
    return marks.after(number, parts)


def test_a_newcomer_votes_after_a_probation() -> None:
    marks = marks_of(tuple(Watermark(f"old{i}", Stamp(1, 1), 64, 1, 60, 2) for i in range(3)))
    first = FOUNDING_VERSIONS + 1
    for number in range(first, first + PROBATION_MERGES):
        assert "new" not in marks.voters
        marks = worked(marks, number, "new")
    assert "new" in marks.voters and marks.first("new") == first


@pytest.mark.parametrize("score", [-USUAL_SCORE, 0])
@pytest.mark.parametrize("first", [1, FOUNDING_VERSIONS + 1])
def test_what_nobody_trusts_earns_no_vote(score: int, first: int) -> None:
    marks = marks_of(tuple(Watermark(f"old{i}", Stamp(1, 1), 64, 1, 60, 2) for i in range(3)))
    for number in range(first, first + 40):
        marks = worked(marks, number, "new", score=score)
    assert "new" not in marks.voters
    for number in range(first + 40, first + 40 + 12 + PROBATION_MERGES):
        marks = worked(marks, number, "new", score=USUAL_SCORE)
    assert "new" in marks.voters, "honest work does, once it is trusted again"


def test_copies_earn_no_vote() -> None:
    marks, same = marks_of(()), b"x" * 32
    for number in range(1, 9):
        parts = tuple(
            Contributor(
                p, Stamp(1, number), 40, 4, payload_digest=same if p == "copier" else bytes([number] * 32)
            )
            for p in ("copier", "learner")
        )
        marks = marks.after(number, parts)
    assert marks.voters == {"learner"}


def test_the_probation_is_no_longer_for_one_with_an_odd_contribution() -> None:
    marks = marks_of(tuple(Watermark(f"old{i}", Stamp(1, 1), 64, 1, 60, 2) for i in range(3)))
    for number in range(100, 100 + PROBATION_MERGES):
        assert "new" not in marks.voters
        marks = worked(marks, number, "new", score=0 if number == 104 else USUAL_SCORE // 4)
    assert "new" in marks.voters


@pytest.mark.parametrize(("old", "let_in"), [(3, 1), (16, 2)])
def test_a_crowd_of_newcomers_becomes_voters_one_by_one(old: int, let_in: int) -> None:
    marks = marks_of(tuple(Watermark(f"old{i:02}", Stamp(1, 1), 64, 1, 60, 2) for i in range(old)))
    crowd = [f"new{i}" for i in range(9)]
    first = FOUNDING_VERSIONS + 1
    for number in range(first, first + 40):
        marks = worked(marks, number, *crowd)
    assert len(marks.voters) == old + let_in, "the others wait for some 64 versions"


def test_at_the_beginning_everybody_votes_soon() -> None:
    marks = worked(worked(marks_of(()), 1, "a", "b"), 2, "b", "c")
    assert marks.voters == {"b"}
    assert worked(marks, 3, "a", "c").voters == {"a", "b", "c"}


def forged(solo: Solo, maker: str) -> SignedVersion:
    """A heavier version of our chain's head, signed by its maker."""
    return child(solo.fragment.chain.header, maker, learners=WORKERS)


def test_a_strangers_heavier_head_moves_nobody() -> None:
    solo = settled("s1")
    version, before = forged(solo, "s1"), solo.head
    far = msgspec.structs.replace(version.header.head(), number=1000, tokens=1 << 40)
    effects = solo.hear("s1", heads=(far,))
    assert not found(effects, ev.FetchState), "a whole state is not even asked for"
    (asked,) = found(effects, ev.FetchUpdate)
    effects = solo.feed(ev.UpdateFetched(0, asked.peer, version, 900))
    assert not found(effects, ev.ApplyUpdate) and solo.head == before
    assert reasons(effects, "refusal") == ["unbacked"] and sent(effects, msg.Unbacked, to="s1")
    assert not found(solo.wait(20.0), ev.FetchUpdate), "it is left alone for a while"
    assert not solo.fragment.follower.behind(solo.now)


def test_what_a_member_has_made_may_come_from_anybody() -> None:
    solo = settled("s1")
    version = forged(solo, "p1")
    (asked,) = found(solo.hear("s1", heads=(version.header.head(),)), ev.FetchUpdate)
    effects = solo.feed(ev.UpdateFetched(0, asked.peer, version, 900))
    assert found(effects, ev.ApplyUpdate)


def test_a_stranger_answers_with_another_state_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked because a member named that version; what it gives is its own."""
    monkeypatch.setattr(fork_choice, "FOUNDING_VERSIONS", 0)
    solo = settled("s1")
    solo.announce(forged(solo, "p1"))
    before = solo.head
    far = branch(12, learners=WORKERS)[12].header.head()
    solo.says["p2"] = {"heads": (far,)}
    effects = solo.hear("p2") + solo.hear("p1", heads=(far,))
    (copy,) = found(effects, ev.FetchState)
    false = forged(solo, "s1")
    effects = solo.feed(ev.StateFetched(0, "s1", false, table(false)))
    assert not found(effects, ev.CommitVersion) and solo.head == before and copy.peer == "p1"


def newcomers_alone() -> tuple[Solo, SignedVersion]:
    """We came late; p1 was here from the beginning, and was cut off. We have gone on alone."""
    start = branch(2, learners=("p1", "p2"))
    theirs = child(start[2].header, "p1", learners=("p1",))
    solo = Solo(peers=("p1", "p3"))
    for version in start[1:]:
        solo.announce(version)
    mine = child(start[2].header, "p3", learners=("me", "p3"))

    solo.elect("p3", term=2, start=2)
    (asked,) = found(solo.hear("p3", heads=(mine.header.head(),)), ev.FetchUpdate)
    solo.feed(ev.UpdateFetched(0, asked.peer, mine, 901))
    solo.feed(ev.UpdateApplied(0, 3, 901, mine.header.state_digest))
    assert solo.head == mine.header.head() and theirs.header.tokens < mine.header.tokens
    return solo, theirs


def test_a_side_of_newcomers_yields_to_older_members_that_cannot_know_it() -> None:
    solo, theirs = newcomers_alone()
    heads = (theirs.header.head(),)
    assert not found(solo.hear("p1", heads=heads), ev.FetchState), "it is the lighter chain"
    effects = solo.message("p1", msg.Unbacked(0))
    (copy,) = found(effects, ev.FetchState)
    effects = solo.feed(ev.StateFetched(0, copy.peer, theirs, table(theirs)))
    assert found(effects, ev.CommitVersion) and solo.head == theirs.header.head()


def test_nobody_yields_to_a_newcomer_or_where_older_members_stand() -> None:
    solo, theirs = newcomers_alone()
    solo.hear("p1", heads=(theirs.header.head(),))
    assert not found(solo.message("p3", msg.Unbacked(0)), ev.FetchState)
    assert not found(solo.message("s9", msg.Unbacked(0)), ev.FetchState)
    solo.hear("p2")  # who has been here for as long as p1, and is on our chain
    assert not found(solo.message("p1", msg.Unbacked(0)), ev.FetchState)


def test_a_strangers_word_on_its_pace_changes_nobodys_patience() -> None:
    solo = settled(*STRANGERS)
    solo.says |= {peer: {"step_time_s": 1000.0} for peer in STRANGERS}
    solo.wait(1.0)
    assert solo.core.shared.median_step_s(solo.now) == STEP_S


def test_left_alone_newcomers_decide_with_who_has_worked_on_another_fragment() -> None:
    """All whom fragment 0 knows are gone; p3 was merged into fragment 1."""
    logs = branch(2, learners=("p1", "p2")), branch(2, fragment=1, learners=("p1", "p3"))
    fragments = tuple(RestoredFragment(log=tuple(log), watermarks=table(log[-1])) for log in logs)
    solo = Solo(config(2), ("p3", "s1"), Restored(fragments=fragments))
    for fragment in solo.core.fragments:
        assert fragment.seats.leaf.electorate.voters(solo.now) == ["p3"]


def below_us(solo: Solo) -> UpperElectorate:
    """The group above the leaf groups 1/0/0, which is ours, to 1/0/3."""
    place = (1, 0), "1/0/0"
    return UpperElectorate(solo.core.shared, 0, solo.fragment.context.standing, (1, 4), *place, solo.now)


def of_leaf(index: int, names: tuple[str, ...]) -> str:
    """The first of these that belongs to that leaf group."""
    return next(name for name in names if leaf_index(RUN, 0, 1, 4, name) == index)


def test_who_holds_an_office_below_without_a_mark_is_a_newcomer() -> None:
    solo, newcomer = settled(*STRANGERS), of_leaf(1, STRANGERS)
    group = below_us(solo)
    for peer, child_group in (("p1", "1/0/2"), (newcomer, "1/0/1")):
        solo.core.shared.claims.heard(peer, ((child_group, 0, 5),), solo.now)
    holders = group.holders(solo.now)
    assert holders["1/0/1"] == newcomer, "nobody else claims it, and nobody else is there"
    assert [group.newcomer(child_group) for child_group in ("1/0/2", "1/0/1")] == [False, True]


def test_who_claims_an_office_elsewhere_than_in_its_group_holds_none() -> None:
    solo = settled()
    group = below_us(solo)
    for peer, term in (("p1", 1), ("p2", 1 << 60)):
        solo.core.shared.claims.heard(peer, (("1/0/2", 0, term),), solo.now)
    assert group.holders(solo.now)["1/0/2"] == "p1", "p2 belongs to another group"


def test_what_a_group_remembers_of_names_is_bounded() -> None:
    solo = settled()
    leaf = LeafElectorate(solo.core.shared, 0, solo.fragment.context.standing, (1, 4), 0, solo.now)
    admitted = [leaf.admits(f"n{number}", solo.now) for number in range(MAX_ASKED + 9)]
    assert len(leaf._mine) == MAX_ASKED and leaf.admits("n0", solo.now) == admitted[0]


def test_the_claim_of_who_could_not_be_elected_keeps_nobody_from_standing() -> None:
    solo = settled("s1")
    office = "1/0/0"
    leaf = LeafElectorate(solo.core.shared, 0, solo.fragment.context.standing, (1, 1), 0, solo.now)
    inquiry = Inquiry(solo.fragment.context, office, leaf, solo.now)
    solo.core.shared.claims.heard("s1", ((office, 0, 9),), solo.now)
    assert not inquiry.finds_holder(solo.now)
    solo.core.shared.claims.heard("p1", ((office, 0, 5),), solo.now)
    assert inquiry.finds_holder(solo.now)


def test_a_stranger_takes_no_silent_members_place() -> None:
    many = (*STRANGERS, "s10")
    solo, stranger = settled(*many), of_leaf(2, many)
    solo.wait(4.0, silent=("p1",))
    solo.core.shared.claims.heard(stranger, (("1/0/2", 0, 9),), solo.now)
    group = below_us(solo)
    assert "1/0/2" not in group.holders(solo.now), "p1, which has worked, belongs there"
    solo.core.shared.claims.heard("p1", (("1/0/2", 0, 5),), solo.now)
    assert below_us(solo).holders(solo.now)["1/0/2"] == "p1"


# Newcomers whom all have left go on, though names that answer to nothing stand beside them.

OTHERS = ("old1", "old2")
SILENT_STRANGERS = ("s1", "s2", "s3")


def left_alone(*beside: str) -> Solo:
    """The chain is of two that are gone. We have its newest version, and never worked; nor have those."""
    chain = branch(3, learners=OTHERS)
    assert all(mark.voter for mark in table(chain[-1]))
    solo = Solo(peers=beside, restored=saved(chain))
    for _ in range(2000):
        if solo.core.confirmed:
            return solo
        solo.wait(0.6)
    raise AssertionError("waits for ever for those who are gone")


def asked(solo: Solo, times: int) -> list[msg.VoteRequest]:
    """Let it stand so often."""
    requests: dict[int, msg.VoteRequest] = {}
    for _ in range(200):
        effects = solo.wait(0.6)
        requests |= {r.term: r for r in sent(effects, msg.VoteRequest)}
        if len(requests) >= times:
            return list(requests.values())
    raise AssertionError(f"stood {len(requests)} times")


def test_names_that_answer_to_nothing_keep_no_newcomer_from_the_office() -> None:
    solo = left_alone(*SILENT_STRANGERS)
    assert voters(solo) == ["me", *SILENT_STRANGERS]
    asked(solo, IN_VAIN)
    solo.wait(1.8)
    assert voters(solo) == ["me"]
    for _ in range(20):
        solo.wait(0.6)
    assert solo.fragment.office.holding


def test_who_answers_counts_again() -> None:
    solo = left_alone(*SILENT_STRANGERS)
    asked(solo, IN_VAIN)
    solo.wait(1.8)
    assert voters(solo) == ["me"]
    refused = msg.VoteRefused("all", 0, 1, 1, solo.head, VoteRefusal.CATCHING_UP)
    solo.message("s1", refused)
    assert voters(solo) == ["me", "s1"]


def test_who_answers_now_and_then_is_not_left_out() -> None:
    solo = left_alone("s1")
    for _ in range(2 * IN_VAIN):
        request = asked(solo, 1)[0]
        refused = msg.VoteRefused("all", 0, request.term, 1, solo.head, VoteRefusal.CATCHING_UP)
        solo.message("s1", refused)
    assert voters(solo) == ["me", "s1"] and not solo.fragment.office.holding


def test_who_is_left_out_is_still_asked() -> None:
    solo = left_alone("s1", "s2")
    asked(solo, IN_VAIN)
    solo.wait(1.8)
    solo.message("s1", msg.VoteGranted(vote("s1", "me", 1)))
    assert voters(solo) == ["me", "s1"]
    effects: list[ev.Effect] = []
    while not sent(effects, msg.VoteRequest):
        effects = solo.wait(0.6)
    asked_now = {s.peer for s in found(effects, ev.Send) if isinstance(s.message, msg.VoteRequest)}
    assert asked_now == {"s1", "s2"}


def test_who_has_worked_counts_however_silent_it_is() -> None:
    """Else two sides of a split, which hear each other's heartbeats alone, would have a majority each."""
    solo = Solo(peers=("p1", "p2"), restored=saved(branch(3, learners=("me", "p1", "p2"))))
    asked(solo, 2 * IN_VAIN)
    assert voters(solo) == ["me", "p1", "p2"] and not solo.fragment.office.holding


def test_a_quorum_counts_no_newcomer_beside_newcomers() -> None:
    solo = left_alone(*SILENT_STRANGERS)
    for peer in SILENT_STRANGERS:
        solo.hear(peer, learning=True)
    solo.learn()
    while not solo.fragment.office.holding:
        solo.wait(0.6)
    assert solo.config.quorum == 2
    effects = solo.ready() + solo.wait(30.0)
    assert [merge.number for merge in found(effects, ev.Merge)] == [4]


# Our own lateness is nobody's silence.

TIMING = Timing()


def test_a_lag_is_counted_once() -> None:
    health = Health()
    assert health.lag_s(100.0) == 0.0, "nothing was promised"
    health.promise(100.0)
    assert health.lag_s(100.4) == 0.0
    assert health.lag_s(102.0) == pytest.approx(2.0)
    health.promise(100.1)
    assert health.lag_s(102.0) == 0.0 and health.lag_s(102.3) == 0.0, "counted once"
    assert health.lag_s(103.0) == pytest.approx(1.0), "and again"
    assert health.listens_until_s == 103.0 + LISTEN_S


def stopped(seconds: float) -> tuple[Solo, list[ev.Effect]]:
    """A member that follows p1 stands still, and wakes."""
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    solo.wait(1.0)
    solo.core.next_deadline()
    solo.now += seconds
    return solo, solo.feed(ev.Tick())


@pytest.mark.parametrize("seconds", [2.0, 10.0, 60.0])
def test_who_stood_still_suspects_nobody_on_waking(seconds: float) -> None:
    solo, effects = stopped(seconds)
    assert reasons(effects, "health") and not reasons(effects, "silent")
    assert set(solo.core.shared.view.live(solo.now)) == {"p1", "p2"}
    effects = solo.wait(0.9, silent=("p1", "p2")) + solo.wait(30.0)
    assert not reasons(effects, "silent") and not sent(effects[:20], msg.VoteRequest)
    health = [r for r in found(stopped(seconds)[1], ev.Record) if r.kind == "health"]
    assert abs(dict(health[0].fields)["lag_s"] - seconds) < 0.6  # type: ignore[operator]


def test_calls_that_ran_out_meanwhile_make_nobody_unreachable() -> None:
    solo, _ = stopped(10.0)
    for _ in range(5):
        solo.feed(ev.SendFailed("p1"))
    assert solo.core.shared.view.alive("p1", solo.now)
    solo.wait(LISTEN_S + 0.1)
    for _ in range(TIMING.failures_to_suspect):
        solo.feed(ev.SendFailed("p1"))
    assert not solo.core.shared.view.alive("p1", solo.now)


def test_who_wakes_listens_before_it_stands() -> None:
    """Its term was over long ago: it finds the office open, others may have filled it meanwhile."""
    solo, _ = stopped(10.0)
    solo.message("p1", msg.Leaving(1))
    assert solo.fragment.own.idle is False
    begun_s = solo.now
    effects: list[ev.Effect] = []
    while not sent(effects, msg.VoteRequest) and solo.now < begun_s + 10.0:
        effects = solo.wait(0.05, silent=("p1",))
    assert LISTEN_S <= solo.now - begun_s < 5.0


# Who is not heard any more, in runs of thousands: an answer is kept until something changes.

ROSTER = Roster((("beside", 1), ("elsewhere", 1)))
NEIGHBOURS = {"beside"}


def gone(*peers: str) -> Vanished:
    vanished = Vanished(4)
    for since_s, peer in enumerate(peers):
        vanished.add(peer, float(since_s))
    return vanished


def test_who_is_listed_elsewhere_does_not_count() -> None:
    assert gone("elsewhere", "unlisted", "beside").counting(ROSTER, NEIGHBOURS) == ["unlisted", "beside"]


def test_an_answer_is_kept_until_something_changes() -> None:
    vanished = gone("elsewhere", "unlisted", "beside")
    first = vanished.counting(ROSTER, NEIGHBOURS)
    assert vanished.counting(ROSTER, set(NEIGHBOURS)) is first
    assert vanished.counting(ROSTER, {"elsewhere"}) == ["elsewhere", "unlisted"]
    assert vanished.counting(Roster(()), set()) == ["elsewhere", "unlisted", "beside"]
    vanished.heard("unlisted")
    assert vanished.counting(ROSTER, NEIGHBOURS) == ["beside"]
    vanished.put("stranger", 9.0)
    assert vanished.counting(ROSTER, NEIGHBOURS) == ["beside", "stranger"]
    vanished.expire(5.0)
    assert vanished.counting(ROSTER, NEIGHBOURS) == ["stranger"]


def test_who_is_silent_for_too_long_is_forgotten() -> None:
    vanished = gone("a", "b", "c")
    vanished.put("a", 7.0)
    vanished.add("b", 9.0)
    vanished.expire(1.0)
    assert list(vanished) == ["a", "b", "c"], "whom we already missed was silent before"
    vanished.expire(2.0)
    assert list(vanished) == ["a", "c"]
    vanished.expire(100.0)
    assert not len(vanished)


def test_the_first_are_forgotten_beyond_the_bound() -> None:
    vanished = gone("a", "b", "c", "d", "e")
    assert vanished.full
    assert len(vanished.counting(Roster(()), set())) == 5
    vanished.shrink()
    assert list(vanished) == vanished.counting(Roster(()), set()) == ["b", "c", "d", "e"]
