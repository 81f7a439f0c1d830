"""Membership: its degrees, incarnations, and what members say that counts."""

from __future__ import annotations

import math

import msgspec
import pytest
from kit import (
    OWNER,
    RUN,
    STEP_S,
    Solo,
    branch,
    child,
    config,
    found,
    progress,
    reasons,
    saved,
    sent,
    table,
    word,
)

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment, Timing
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.api.types import MAX_PEERS, Reach
from p2pdiloco.core.api.versions import Plan, SignedVersion
from p2pdiloco.core.delegate import LeafElectorate, UpperElectorate
from p2pdiloco.core.members import MUTE_S, NEWCOMERS_A_BEAT, Health, View


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
    assert solo.core.shared.training(solo.now)[0] == 3, "it is about to say so"
    assert len(sent(solo.feed(status), msg.Progress)) == 2, "it has begun again"
    assert solo.core.shared.training(solo.now)[0] == 3


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
    """So many strangers as there is room for, the first of them silent for longest; p1 and p2 have seats."""
    view = View("me", Timing(), lambda peer: peer in ("p1", "p2"))
    for number in range(MAX_PEERS - 1):
        view.heard(f"s{number:05}", progress(()), number / MAX_PEERS)
    view.heard("p1", progress(()), 0.0)
    return view


def test_a_crowd_shuts_out_nobody_who_has_a_seat() -> None:
    view = crowded()
    assert not view.heard("s9999", progress(()), 1.0), "there is no more room"
    assert view.heard("p2", progress(()), 1.0) and view.progress("p2") is not None
    assert view.progress("s00000") is None and view.progress("p1") is not None, "the longest silent gives way"
    assert view.forget_stale(1.0) == ["s00000"] and not view.forget_stale(1.0)


def test_who_has_a_seat_gives_way_to_nobody() -> None:
    view = View("me", Timing(), lambda peer: True)
    for number in range(MAX_PEERS):
        view.heard(f"p{number:05}", progress(()), 0.0)
    assert not view.heard("another", progress(()), 1.0)


def test_a_crowd_gets_our_heartbeats_in_turns() -> None:
    view, told, now = crowded(), set[str](), 1.0
    for _ in range(MAX_PEERS // NEWCOMERS_A_BEAT + 1):
        view.heard("p1", progress(()), now)
        greeted = view.to_greet(now)
        assert "p1" in greeted and len(greeted) <= NEWCOMERS_A_BEAT + 1
        told |= {*greeted}
        now += Timing().heartbeat_s
    assert len(told) == MAX_PEERS


def test_of_a_strangers_offices_none_is_kept_nor_any_that_there_cannot_be() -> None:
    solo = Solo(peers=("p1", "p2"))
    for version in branch(2, learners=("me", "p1", "p2"))[1:]:
        solo.announce(version)
    many = tuple((f"1/0/{number}", 0, 9) for number in range(2000))
    false = (("x" * 60, 0, 9), ("1/0/0", 7, 9))
    for peer in ("s1", "p1"):
        solo.hear(peer, offices=(*false, *many))
    kept = {peer: solo.core.shared.view.progress(peer) for peer in ("s1", "p1")}
    assert kept["s1"] is not None and not kept["s1"].offices
    assert kept["p1"] is not None and kept["p1"].offices == many
    claims = solo.core.shared.claims
    assert not claims.of(0, "x" * 60) and not claims.of(0, "1/0/0").keys() & {"s1"}


# Who decides is read off the chain's seats: work makes nobody a voter (docs/protocol/seats.md).

PEERS = ("p1", "p2", "p3")
WORKERS = ("me", "p1", "p2")
STRANGERS = tuple(f"s{i}" for i in range(9))


def settled(*strangers: str) -> Solo:
    """By our chain we, p1 and p2 have seats. p3 and these say that they are confirmed."""
    solo = Solo(config(seats=WORKERS), (*PEERS, *strangers))
    for version in branch(2, learners=WORKERS, seats=WORKERS)[1:]:
        solo.announce(version)
    return solo


def voters(solo: Solo) -> list[str]:
    return solo.fragment.posts.leaf.electorate.voters(solo.now)


@pytest.mark.parametrize("versions", [0, 1, 12])
def test_the_seats_decide_from_version_0_on_whoever_works(versions: int) -> None:
    solo = Solo(config(seats=WORKERS), PEERS, genesis=True)
    solo.wait(4.0)
    for version in branch(versions, learners=("p1", "p3"), seats=WORKERS)[1:]:
        solo.announce(version)
    assert solo.head.number == versions and voters(solo) == list(WORKERS)


def test_silent_strangers_block_no_election() -> None:
    solo = settled(*STRANGERS)
    requests: list[ev.Send] = []
    while not requests:
        effects = found(solo.wait(0.1), ev.Send)
        requests = [send for send in effects if isinstance(send.message, msg.VoteRequest)]
    assert {send.peer for send in requests} == {"p1", "p2"}
    term = next(iter(sent(list(requests), msg.VoteRequest))).term
    solo.message("p1", msg.VoteGranted(solo.vote_of("p1", term)))
    assert solo.fragment.office.holding, "two of three, whoever else is here"


def test_a_stranger_gets_no_vote_and_holds_no_office() -> None:
    solo = settled("s1")
    head = solo.head
    request = msg.VoteRequest("all", 0, 2, head, "because")
    refused = sent(solo.message("s1", request), msg.VoteRefused, to="s1")
    assert [r.reason.name for r in refused] == ["NO_VOTER"]
    asks = solo.hear("s1", offices=(("all", 0, 9),))
    assert not sent(asks, msg.OfficeQuery), "its claim is not worth a question"


@pytest.mark.parametrize("reach", [Reach.DIRECT, Reach.OUTBOUND])
def test_seats_that_cannot_be_dialled_let_no_stranger_decide_with_them(reach: Reach) -> None:
    solo = settled("s1")
    for peer in WORKERS[1:]:
        solo.says[peer] = {"reach": Reach.OUTBOUND}
        solo.hear(peer, reach=Reach.OUTBOUND)
    solo.core.shared.reached(reach)
    assert voters(solo) == list(WORKERS)


def forged(solo: Solo, maker: str) -> SignedVersion:
    """A heavier version of our chain's head, signed by its maker."""
    return child(solo.fragment.chain.header, maker, learners=WORKERS)


def test_a_strangers_heavier_head_moves_nobody() -> None:
    solo = settled("s1")
    version, before = forged(solo, "s1"), solo.head
    far = msgspec.structs.replace(version.header.head(), number=1000, tokens=1 << 40)
    effects = (
        solo.hear("s1", heads=(far,)) + solo.hear("s1", heads=(version.header.head(),)) + solo.wait(20.0)
    )
    assert not found(effects, ev.FetchState) and not found(effects, ev.FetchUpdate) and solo.head == before
    assert not solo.fragment.follower.behind(solo.now)


def test_a_stranger_answers_with_another_state_than_was_asked_for() -> None:
    """It was asked because members named that version; what it gives is its own."""
    solo = settled("s1")
    solo.announce(forged(solo, "p1"))
    before = solo.head
    far = branch(12, learners=WORKERS, seats=WORKERS)[12].header.head()
    solo.says["p2"] = {"heads": (far,)}
    effects = solo.hear("p2") + solo.hear("p1", heads=(far,))
    (copy,) = found(effects, ev.FetchState)
    false = forged(solo, "s1")
    effects = solo.answer(ev.FetchState, ev.StateFetched(false, table(false)))
    assert not found(effects, ev.CommitVersion) and solo.head == before and copy.peer == "p1"


def test_a_strangers_word_on_its_pace_changes_nobodys_patience() -> None:
    solo = settled(*STRANGERS)
    solo.says |= {peer: {"step_time_s": 1000.0} for peer in STRANGERS}
    solo.wait(1.0)
    assert solo.core.shared.median_step_s(solo.now) == STEP_S


def test_seats_are_one_fragments() -> None:
    """All who have one in fragment 0 are gone; p3 has one in fragment 1."""
    seats = ("p1", "p2"), ("p1", "p3")
    logs = [branch(2, fragment=f, learners=each, seats=each) for f, each in enumerate(seats)]
    fragments = tuple(RestoredFragment(log=tuple(log), watermarks=table(log[-1])) for log in logs)
    solo = Solo(config(2), ("p3", "s1"), Restored(fragments=fragments))
    found_here = [fragment.posts.leaf.electorate.voters(solo.now) for fragment in solo.core.fragments]
    assert found_here == [[], ["p3"]]


FOUR = Plan(RUN, 0, 1, 4, config().group_size)
"""Four leaf groups."""


def below_us(solo: Solo) -> UpperElectorate:
    """The group above the leaf groups 1/0/0, which is ours, to 1/0/3."""
    place = (1, 0), "1/0/0"
    return UpperElectorate(solo.core.shared, solo.fragment.context.roster, FOUR, *place, solo.now)


def of_leaf(index: int, names: tuple[str, ...]) -> str:
    """The first of these that belongs to that leaf group."""
    return next(name for name in names if FOUR.leaf_of(name) == (0, index))


def test_an_office_is_of_the_claimant_that_has_shown_votes_of_its_group() -> None:
    solo = settled()
    group = below_us(solo)
    for peer, term in (("p1", 1), ("p2", 1 << 60)):
        solo.core.shared.claims.heard(peer, (("1/0/2", 0, term),), solo.now)
    assert "1/0/2" not in group.holders(solo.now), "nobody has shown a certificate"
    group.prove("1/0/2", "p1", (False, 1, 1))
    assert group.holders(solo.now)["1/0/2"] == "p1"
    group.prove("1/0/2", "p2", (True, 2, 2))
    assert group.holders(solo.now)["1/0/2"] == "p1", "of another term than it claims"


def test_what_a_group_remembers_of_names_is_bounded() -> None:
    solo = settled()
    leaf = LeafElectorate(solo.core.shared, solo.fragment.context.roster, FOUR, 0, solo.now)
    admitted = [leaf.admits(f"n{number}", solo.now) for number in range(2 * MAX_PEERS + 9)]
    assert len(leaf._mine) == 2 * MAX_PEERS and leaf.admits("n0", solo.now) == admitted[0]


def test_a_stranger_takes_no_silent_members_place() -> None:
    many = (*STRANGERS, "s10")
    solo, stranger = settled(*many), of_leaf(2, many)
    solo.wait(4.0, silent=("p1",))
    solo.core.shared.claims.heard(stranger, (("1/0/2", 0, 9),), solo.now)
    group = below_us(solo)
    assert "1/0/2" not in group.holders(solo.now), "p1, which has a seat, belongs there"
    solo.core.shared.claims.heard("p1", (("1/0/2", 0, 5),), solo.now)
    group.prove("1/0/2", "p1", (False, 1, 5))
    assert group.holders(solo.now)["1/0/2"] == "p1"


# Members whom all seats have left.

OTHERS = ("old1", "old2")


def left_alone(*beside: str, seats: tuple[str, ...] = OTHERS) -> Solo:
    """The work is of two that are gone. We have its newest version, and never worked; nor have those."""
    chain = branch(3, learners=OTHERS, seats=seats)
    solo = Solo(config(seats=seats, owner=OWNER), beside, restored=saved(chain))
    for _ in range(2000):
        if solo.core.confirmed:
            return solo
        solo.wait(0.6)
    raise AssertionError("waits for ever for those who are gone")


def test_where_no_seat_is_here_nobody_decides() -> None:
    solo = left_alone("s1", "s2", "s3")
    assert not voters(solo) and not sent(solo.wait(60.0), msg.VoteRequest)
    assert not sent(solo.message("s1", msg.VoteRequest("all", 0, 1, solo.head, "open")), msg.VoteGranted)
    solo.feed(ev.Guided(papers=(word("old1", 1, seated=False),)))
    assert not voters(solo), "an end alone seats nobody"
    solo.feed(ev.Guided(papers=(word("me", 2),)))
    assert voters(solo) == ["me"]
    solo.wait(60.0)
    assert solo.fragment.office.holding, "the owner gave us a seat"


def test_whom_the_owner_named_decides_only_while_no_seat_is_here() -> None:
    solo = left_alone("s1")
    solo.feed(ev.Guided(papers=(word("me", 1), word("s1", 2))))
    assert voters(solo) == ["me", "s1"]
    solo.hear("old1")
    assert voters(solo) == ["old1"]


def test_a_seat_that_answers_no_request_for_its_vote_counts_until_it_does_in_no_majority() -> None:
    solo = Solo(peers=("p1", "p2", "s1"), restored=saved(branch(3, learners=("me", "p1", "p2"))))
    assert sent(solo.wait(MUTE_S - 5.0), msg.VoteRequest)
    assert voters(solo) == ["me", "p1", "p2"] and not solo.fragment.office.holding
    solo.wait(20.0)
    assert voters(solo) == ["me"] and solo.fragment.office.holding
    refused = msg.VoteRefused("all", 0, 1, 1, None, VoteRefusal.LIGHTER)
    solo.message("p1", refused)
    assert voters(solo) == ["me", "p1"]


def test_an_answer_that_did_not_come_long_ago_is_forgotten() -> None:
    view, voters_at = View("me", Timing()), []
    for at_s in (0.0, 100.0, 120.0, 131.0):
        view.heard("p1", heartbeat(), at_s)
        view.asked_in_vain(["p1"], at_s)
        voters_at.append(view.voters(at_s))
    assert voters_at == [["p1"], ["p1"], ["p1"], []]


def test_a_quorum_counts_no_newcomer_beside_newcomers() -> None:
    strangers = ("s1", "s2", "s3")
    solo = left_alone(*strangers, seats=("me", *OTHERS))
    for peer in strangers:
        solo.hear(peer, learning=True)
    solo.learn()
    for _ in range(200):
        solo.wait(0.6)
    assert solo.fragment.office.holding and solo.config.quorum == 2
    effects = solo.ready() + solo.wait(30.0)
    assert [merge.number for merge in found(effects, ev.Merge)] == [4]


# Our own lateness is nobody's silence.

TIMING = Timing()


def test_a_lag_is_counted_once() -> None:
    health = Health(TIMING)
    assert health.lag_s(100.0) == 0.0, "nothing was promised"
    health.promise(100.0)
    assert health.lag_s(100.4) == 0.0
    assert health.lag_s(102.0) == pytest.approx(2.0)
    health.promise(100.1)
    assert health.lag_s(102.0) == 0.0 and health.lag_s(102.3) == 0.0, "counted once"
    assert health.lag_s(103.0) == pytest.approx(1.0), "and again"
    assert health.listens_until_s == 103.0 + 2 * TIMING.heartbeat_s


def stopped(seconds: float) -> tuple[Solo, list[ev.Effect]]:
    """A member that follows p1 stands still, and wakes."""
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
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
    solo.wait(2 * TIMING.heartbeat_s + 0.1)
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
    assert 2 * TIMING.heartbeat_s <= solo.now - begun_s < 5.0


def test_of_what_a_claimant_has_shown_the_best_of_its_newest_term_counts() -> None:
    """Anybody may send older certificates of others, and leave votes out."""
    group = below_us(settled())
    for rank in ((True, 5, 5), (False, 1, 5), (True, 4, 4)):
        group.prove("1/0/2", "p1", rank)
        assert group.shown("1/0/2", "p1", 5) == (True, 5, 5)
    group.prove("1/0/2", "p1", (False, 1, 6))
    assert group.shown("1/0/2", "p1", 6) and not group.shown("1/0/2", "p1", 5)
