"""Roster of a node: who decides and who is believed, by the chain and by the papers that it holds."""

from __future__ import annotations

from itertools import permutations

import pytest
from core_swarm import Swarm
from kit import (
    OWNER,
    RUN,
    SEATS,
    Solo,
    admission,
    child,
    config,
    genesis,
    sent,
    sign,
    word,
)
from scenes import one_round, syncer

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.papers import LEAP, THE_OWNER, Paper, Word
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.core.chain import LATELY_VERSIONS, Chain, Marks, founding
from p2pdiloco.core.roster import Papers, Roster
from p2pdiloco_lab.simulation.lineage import HashCrypto

PEERS = ("p1", "p2", "s1")


def holds(solo: Solo, *papers: Paper) -> None:
    solo.feed(ev.Guided(papers=papers))


def voters(solo: Solo) -> list[str]:
    return solo.fragment.posts.leaf.electorate.voters(solo.now)


def node() -> Solo:
    """A member with a seat, as p1 and p2 are; s1 has none."""
    solo = Solo(config(owner=OWNER), PEERS)
    for number in (1, 2):
        solo.announce(child(solo.fragment.chain.header, learners=("p1", "s1"), term=number))
    return solo


def roster(founders: tuple[str, ...], *papers: Paper, work: tuple[str, ...] = ()) -> Roster:
    """Of a node with these papers. Its chain has one version for each of the learners of `work`, and one
    of its founders was merged in all."""
    chain, held = Chain((genesis(0),), (), 8, founders), Papers(RUN, (OWNER,), HashCrypto("").verify)
    for learner in work:
        learners = (founders[0], learner) if founders else (learner,)
        chain.extend(child(chain.header, learners=learners, seats=founders))
    held.take(papers)
    return Roster(held, chain)


def after(rost: Roster, *learners: str) -> Marks:
    """The table of the next version, into which these learners' work goes, without papers."""
    number = rost._chain.head.number + 1
    return rost.marks.after(number, tuple(Contributor(p, Stamp(1, number), 40, 4) for p in learners))


# --- who decides -----------------------------------------------------------------------------------------


def test_an_end_that_a_node_holds_takes_the_vote_away_at_once_and_there_only() -> None:
    solo, other = node(), node()
    assert voters(solo) == voters(other) == ["me", "p1", "p2"]
    holds(solo, word("p2", 1, seated=False))
    assert voters(solo) == ["me", "p1"] and voters(other) == ["me", "p1", "p2"]
    assert solo.fragment.chain.marks.seats == other.fragment.chain.marks.seats
    request = msg.VoteRequest("all", 0, 9, solo.head, "open")
    assert not sent(solo.message("p2", request), msg.VoteGranted)
    assert sent(other.message("p2", request), msg.VoteGranted)


def test_the_office_of_a_syncer_whose_seat_has_ended_is_open_though_it_is_alive() -> None:
    """Nobody takes a version of its making any more."""
    solo = node()
    solo.elect("p1")
    assert solo.fragment.office.why_open(solo.now) == ""
    holds(solo, word("p1", 1, seated=False))
    assert solo.fragment.office.why_open(solo.now) == "the syncer has no seat any more"


def test_who_lost_its_seat_may_work_on() -> None:
    solo = node()
    holds(solo, word("p1", 1, seated=False))
    assert not solo.core.shared.has_seat("p1") and solo.core.is_member("p1")


def test_whom_a_held_word_replaces_has_no_vote_and_whom_it_seats_has_none_yet() -> None:
    solo = node()
    holds(solo, word("s1", 1, replaces="p1"))
    assert voters(solo) == ["me", "p2"] and solo.core.shared.has_seat("s1")


@pytest.mark.parametrize("paper", [word("s1"), admission("s1")])
def test_whom_a_held_paper_seats_is_known_and_votes_once_a_version_carries_it(paper: Paper) -> None:
    """An invite makes nobody believed by a full member: all of it could stand on a forged head."""
    solo = node()
    heads = solo.fragment.follower.heads
    assert not heads.counts("s1")
    holds(solo, paper)
    assert heads.counts("s1") == isinstance(paper, Word)
    assert "s1" in solo.fragment.context.roster.known
    assert voters(solo) == ["me", "p1", "p2"]
    request = msg.VoteRequest("all", 0, 9, solo.head, "open")
    assert not sent(solo.message("s1", request), msg.VoteGranted)
    solo.announce(child(solo.fragment.chain.header, term=3, papers=(paper,)))
    assert voters(solo) == ["me", "p1", "p2", "s1"] and solo.fragment.chain.marks.seats == {*SEATS, "s1"}
    solo.hear("s1")
    request = msg.VoteRequest("all", 0, 9, solo.head, "open")
    assert sent(solo.message("s1", request), msg.VoteGranted)


def test_papers_that_are_not_signed_are_not_held() -> None:
    forged = word("s1", by="s1"), admission("s1", by="s1"), admission("s1", signer="s1")
    assert roster(("a",), *forged).known == {"a"}
    held = Papers(RUN, (), HashCrypto("").verify)
    assert not held.take([word("s1", by="")]), "a run without an owner has no papers"


def deciding(one: Roster, *here: str) -> list[str]:
    """Who of these decides."""
    return one.of("voters", sorted(here))


def test_held_ends_count_within_the_limits_of_a_version() -> None:
    """A thief of the owner's key cannot end all seats at once."""
    seats = tuple("abcdefghij")
    ends = [word(peer, number, seated=False) for number, peer in enumerate(seats, 1)]
    assert roster(seats, *ends).seats == {*seats[2:]}
    assert roster(("a", "b"), word("a", 1, seated=False), word("c", 2, replaces="b")).seats == {"b"}
    assert roster(("a",), word("x", LEAP + 1)).known == {"a"}, "nor is a number taken that is too high"


def test_where_no_seat_is_here_those_decide_whom_the_owner_named() -> None:
    one = roster(("a", "b"), word("c", 1), admission("d"), work=("s",))
    assert deciding(one, "a", "c", "d", "s") == ["a"], "c does not yet"
    assert deciding(one, "c", "d", "s") == ["c"], "an invite is not the owner's word"
    assert deciding(one, "d", "s") == []
    assert one.seats == {"a", "b"} and one.known == {"a", "b", "c", "d"}


def test_where_the_only_seat_was_ended_those_decide_whom_the_owner_named() -> None:
    gone = word("a", 1, seated=False)
    assert deciding(roster(("a",), gone), "a", "c") == []
    assert deciding(roster(("a",), gone, word("c", 2)), "a", "c") == ["c"]
    assert deciding(roster(("a",), word("c", 2, replaces="a")), "a", "c") == ["c"]


def test_in_a_run_without_any_seat_those_decide_that_are_invited_or_named() -> None:
    assert deciding(roster((), admission("c")), "c", "s") == ["c"]
    assert deciding(roster((), admission("c"), word("d")), "c", "d", "s") == ["c", "d"]
    assert deciding(roster(()), "s") == []


def test_words_that_the_table_knows_change_nothing() -> None:
    solo = node()
    holds(solo, word("p1", 1, seated=False))
    solo.announce(child(solo.fragment.chain.header, "p2", term=3, papers=(word("p1", 2),)))
    assert voters(solo) == ["me", "p1", "p2"], "the owner has said something newer since"


# --- papers ----------------------------------------------------------------------------------------------

PAPERS = (
    word("x", 1),
    word("x", 2, seated=False),
    word("y", 3),
    word("y", 3, seated=False),
    word("z", 4, replaces="a"),
    admission("g"),
)


def test_papers_are_sets() -> None:
    """Also two words of one number, which the owner should never sign."""
    found = set()
    for papers in permutations(PAPERS):
        one = roster(("a", "b"), *papers)
        found.add((one.seats, one.known, one.to_carry(1, after(one, "g"), ())))
    assert len(found) == 1


def test_papers_are_news_once() -> None:
    held = Papers(RUN, (OWNER,), HashCrypto("").verify)
    assert held.take(PAPERS[:2]) and held.news is not None
    news = held.news
    assert not held.take(PAPERS[:2]) and not held.take([word("x", 1), word("x", 9, by="x")])
    assert held.news is news and list(held.words) == ["x"]


# --- what a version carries ------------------------------------------------------------------------------


def test_words_are_carried_by_number_and_then_who_was_merged_first_by_invite() -> None:
    papers = word("x", 5), admission("late"), word("y", 2), admission("early"), admission("never")
    one = roster(("a", "b"), *papers, work=("early", "late"))
    assert one.to_carry(3, after(one, "a"), ()) == (word("y", 2), word("x", 5), admission("early"))


def test_who_is_merged_in_that_version_first_is_seated_by_it() -> None:
    one = roster(("a", "b"), admission("g"))
    assert one.to_carry(1, after(one, "a"), ()) == ()
    assert one.to_carry(1, after(one, "a", "g"), ()) == (admission("g"),)


def test_what_a_version_may_not_carry_waits() -> None:
    ends = [word(peer, number, seated=False) for number, peer in enumerate(("a", "b"), 1)]
    one = roster(("a", "b", "c"), *ends, word("x", 3), word("far", LEAP + 4), work=("s",))
    assert one.to_carry(2, after(one), ()) == (ends[0], word("x", 3))
    assert one.seats == {"b", "c"} and "far" not in one.known


@pytest.mark.parametrize(("founders", "believed"), [(3, 3), (5, 1), (6, 0), (9, 0)])
def test_of_more_invited_ones_than_places_are_left_those_are_believed_who_worked_first(
    founders: int, believed: int
) -> None:
    """Nobody knows the order of the others."""
    seats, guests = tuple(f"f{n}" for n in range(founders)), ("g3", "g1", "g2")
    papers = [admission(guest, key=guest) for guest in ("g0", "g1", "g2", "g3")]
    one = roster(seats, *papers, work=guests)
    assert one.known == {*seats, *guests[:believed]}


def carries(solo: Solo, number: int) -> tuple[Paper, ...]:
    """Papers of the version that it makes next."""
    one_round(solo, "p1", "p2", number=number)
    assert solo.head.number == number
    return solo.fragment.chain.header.papers


def test_a_syncer_carries_papers_in_the_version_that_begins_its_term_and_in_no_other() -> None:
    solo = syncer(owner=OWNER, term_versions=2)
    first, second, third = word("s1", 1), word("s2", 2), word("p4", 3, seated=False)
    holds(solo, first)
    assert carries(solo, 1) == (first,) and solo.fragment.chain.marks.seats == {*SEATS, "s1"}
    holds(solo, second, third)
    assert carries(solo, 2) == () and "s2" not in solo.fragment.chain.marks.seats
    assert "s2" in solo.fragment.context.roster.known and "p4" not in solo.fragment.context.roster.seats
    solo.take_office()
    assert carries(solo, 3) == (second, third)
    assert solo.fragment.chain.marks.seats == {*SEATS, "s1", "s2"} - {"p4"}


def test_two_nodes_at_one_version_agree_on_its_seats_whatever_papers_they_hold() -> None:
    swarm = Swarm(config(term_versions=2, owner=OWNER, seats=("a", "b", "c")))
    for peer in ("a", "b", "c", "g", "x"):
        swarm.join(peer, genesis=peer == "a")
    swarm.run(5.0)
    papers = {"a": word("x", 1), "b": admission("g"), "c": word("c", 2, seated=False), "g": word("a", 3)}
    seen: dict[bytes, set[frozenset[str]]] = {}
    for round_ in range(8):
        for peer, paper in papers.items() if round_ >= 1 else ():
            swarm.post(peer, ev.Guided(papers=(paper,)))
        swarm.contribute()
        for _ in range(20):
            swarm.run(0.5)
            for member in swarm.members.values():
                chain = member.core.fragments[0].chain
                seen.setdefault(chain.head.digest, set()).add(chain.marks.seats)
    assert len(seen) >= 6 and all(len(seats) == 1 for seats in seen.values())
    assert len({each for seats in seen.values() for each in seats}) > 1, "the papers have changed them"


def test_a_key_that_signs_a_word_is_no_owner() -> None:
    """Of a paper's domains none is another's."""
    true = word("s1")
    forged = type(true)(RUN, "s1", 1, seated=True, signatures=((THE_OWNER, sign(OWNER, "grant", true)),))
    assert roster(("a",), forged).known == {"a"} and founding(("a",)).seats == {"a"}


def test_invites_that_have_ended_leave_their_places_to_others() -> None:
    """Else whoever came by a leaked invite, and worked first, would keep all later friends from a seat."""
    leaked = [admission(f"s{n}", "leaked", uses=20) for n in range(1, 7)]
    friend, ended = admission("friend"), word("leaked", 1, seated=False)
    worked = tuple(f"s{n}" for n in range(1, 7))
    before = roster(("a",), *leaked, friend, work=worked)
    assert "friend" not in before.known, "the first to work are as many as there are places"
    now = roster(("a",), *leaked, friend, ended, work=worked)
    assert now.known == {"a", "friend"}


def test_invites_alone_give_no_support_to_a_head() -> None:
    one = roster(("a",), *(admission(f"s{n}", uses=20) for n in range(1, 5)))
    assert one.known == {"a", "s1", "s2", "s3", "s4"} and one.given == {"a"}
    assert roster(("a",), word("s1")).given == {"a", "s1"}, "the owner's word does"


@pytest.mark.parametrize(
    ("founders", "papers", "waits"),
    [
        (("a",), (), True),
        (("a",), (admission("s"),), False),
        (tuple("abcdef"), (admission("s"),), True),
        (("a",), (word("s"),), False),
        (("a",), (word("s", seated=False),), False),
        (("a", "s"), (), False),
        ((), (admission("s"),), False),
    ],
)
def test_who_works_and_no_invite_seats_waits_for_a_word_unless_the_owner_has_spoken(
    founders: tuple[str, ...], papers: tuple[Paper, ...], waits: bool
) -> None:
    one = roster(founders, *papers, work=("s",))
    assert one.awaits_word("s") == waits
    assert not one.awaits_word("never"), "nothing of it was merged"


def test_whose_seat_has_ended_waits_for_no_word() -> None:
    chain = Chain((genesis(0),), (), 8, ("a", "s"))
    for number, papers in ((1, ()), (2, (word("s", seated=False),)), (3, ())):
        chain.extend(child(chain.header, learners=("a", "s"), term=number, papers=papers, seats=("a", "s")))
    elsewhere = Roster(Papers(RUN, (OWNER,), HashCrypto("").verify), chain)
    assert chain.marks.seats == {"a"} and elsewhere.attends("s") and not elsewhere.awaits_word("s")


def test_who_has_not_worked_lately_waits_for_nothing() -> None:
    one = roster(("a",), work=("s", *("b",) * LATELY_VERSIONS))
    assert one.awaits_word("s")
    assert not roster(("a",), work=("s", *("b",) * (LATELY_VERSIONS + 1))).awaits_word("s")
