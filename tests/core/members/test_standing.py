"""Who decides is read off the chain: words make nobody a voter (docs/protocol/trust.md, section 3)."""

from __future__ import annotations

import msgspec
import pytest
from kit import RUN, STEP_S, Solo, branch, child, config, found, reasons, sent, table, vote

from p2pdiloco.core import fork_choice
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.types import UNMEASURED, USUAL_SCORE, Contributor, Reach, Stamp, Watermark
from p2pdiloco.core.api.versions import SignedVersion, leaf_index
from p2pdiloco.core.chain import FOUNDING_VERSIONS, PROBATION_MERGES, Marks, marks_of
from p2pdiloco.core.delegate import MAX_ASKED, LeafElectorate, UpperElectorate
from p2pdiloco.core.election import Inquiry

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
    requests: list[ef.Send] = []
    while not requests:
        effects = found(solo.wait(0.1), ef.Send)
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
    assert not found(effects, ef.FetchState), "a whole state is not even asked for"
    (asked,) = found(effects, ef.FetchUpdate)
    effects = solo.feed(ev.UpdateFetched(0, asked.peer, version, 900))
    assert not found(effects, ef.ApplyUpdate) and solo.head == before
    assert reasons(effects, "refusal") == ["unbacked"] and sent(effects, msg.Unbacked, to="s1")
    assert not found(solo.wait(20.0), ef.FetchUpdate), "it is left alone for a while"
    assert not solo.fragment.follower.behind(solo.now)


def test_what_a_member_has_made_may_come_from_anybody() -> None:
    solo = settled("s1")
    version = forged(solo, "p1")
    (asked,) = found(solo.hear("s1", heads=(version.header.head(),)), ef.FetchUpdate)
    effects = solo.feed(ev.UpdateFetched(0, asked.peer, version, 900))
    assert found(effects, ef.ApplyUpdate)


def test_a_stranger_answers_with_another_state_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked because a member named that version; what it gives is its own."""
    monkeypatch.setattr(fork_choice, "FOUNDING_VERSIONS", 0)
    solo = settled("s1")
    solo.announce(forged(solo, "p1"))
    before = solo.head
    far = branch(12, learners=WORKERS)[12].header.head()
    solo.says["p2"] = {"heads": (far,)}
    effects = solo.hear("p2") + solo.hear("p1", heads=(far,))
    (copy,) = found(effects, ef.FetchState)
    false = forged(solo, "s1")
    effects = solo.feed(ev.StateFetched(0, "s1", false, table(false)))
    assert not found(effects, ef.CommitVersion) and solo.head == before and copy.peer == "p1"


def newcomers_alone() -> tuple[Solo, SignedVersion]:
    """We came late; p1 was here from the beginning, and was cut off. We have gone on alone."""
    start = branch(2, learners=("p1", "p2"))
    theirs = child(start[2].header, "p1", learners=("p1",))
    solo = Solo(peers=("p1", "p3"))
    for version in start[1:]:
        solo.announce(version)
    mine = child(start[2].header, "p3", learners=("me", "p3"))

    solo.elect("p3", term=2, start=2)
    (asked,) = found(solo.hear("p3", heads=(mine.header.head(),)), ef.FetchUpdate)
    solo.feed(ev.UpdateFetched(0, asked.peer, mine, 901))
    solo.feed(ev.UpdateApplied(0, 3, 901, mine.header.state_digest))
    assert solo.head == mine.header.head() and theirs.header.tokens < mine.header.tokens
    return solo, theirs


def test_a_side_of_newcomers_yields_to_older_members_that_cannot_know_it() -> None:
    solo, theirs = newcomers_alone()
    heads = (theirs.header.head(),)
    assert not found(solo.hear("p1", heads=heads), ef.FetchState), "it is the lighter chain"
    effects = solo.message("p1", msg.Unbacked(0))
    (copy,) = found(effects, ef.FetchState)
    effects = solo.feed(ev.StateFetched(0, copy.peer, theirs, table(theirs)))
    assert found(effects, ef.CommitVersion) and solo.head == theirs.header.head()


def test_nobody_yields_to_a_newcomer_or_where_older_members_stand() -> None:
    solo, theirs = newcomers_alone()
    solo.hear("p1", heads=(theirs.header.head(),))
    assert not found(solo.message("p3", msg.Unbacked(0)), ef.FetchState)
    assert not found(solo.message("s9", msg.Unbacked(0)), ef.FetchState)
    solo.hear("p2")  # who has been here for as long as p1, and is on our chain
    assert not found(solo.message("p1", msg.Unbacked(0)), ef.FetchState)


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
