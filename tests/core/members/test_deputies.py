"""Words of seats on seats, as nodes hear them, pass them on, and say them for their person."""

from __future__ import annotations

import pytest
from core_swarm import Swarm
from kit import OWNER, SEATS, Solo, child, config, reasons, said, sent, vote, word
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.papers import MAX_PAPERS, RECOVERY_FROM, TwoVotes, Word
from p2pdiloco.core.api.reasons import MessageFault
from p2pdiloco.core.seating import TURNS

END = said("p4", "p1", seated=False)
PEERS = ("p1", "p2", "p3", "p4")


def node() -> Solo:
    """A member of a run of five seats."""
    solo = Solo(config(owner=OWNER), PEERS)
    solo.announce(child(solo.fragment.chain.header, term=1))
    return solo


def tells(solo: Solo, word: Word, by: str = "p1") -> list[str]:
    """Whom a node tells of a word that it hears."""
    effects = solo.message(by, msg.Said(word))
    return sorted(effect.peer for effect in effects if isinstance(effect, ev.Send) and _is(effect, word))


def _is(effect: ev.Send, word: Word) -> bool:
    return isinstance(effect.message, msg.Said) and effect.message.word == word


def test_a_seats_word_is_passed_on_once() -> None:
    solo = node()
    assert tells(solo, END) == ["p2", "p3", "p4"]
    assert tells(solo, END) == tells(solo, END, by="p2") == []
    assert solo.core.shared.papers.said == {("p1", "p4"): END}


def test_more_than_half_of_the_seats_end_one_where_they_are_heard() -> None:
    solo = node()
    for author in ("p1", "p2"):
        tells(solo, said("p4", author, seated=False))
    assert "p4" in solo.fragment.context.roster.seats
    tells(solo, said("p4", "p3", seated=False))
    assert "p4" not in solo.fragment.context.roster.seats
    assert "p4" in solo.fragment.chain.marks.seats, "until a version carries it"


@pytest.mark.parametrize(
    ("heard", "fault"),
    [
        pytest.param(replace(END, peer="p3"), [MessageFault.FALSE_STATEMENT], id="not-signed"),
        pytest.param(said("p4", "s1", seated=False), [], id="of-no-seat"),
        pytest.param(said("p4", "p1", "p2", seated=False), [], id="of-two-at-once"),
        pytest.param(said("p4", "p1", seated=False, turn=0), [], id="as-the-owner"),
        pytest.param(word("p4", 1, seated=False), [], id="the-owners"),
        pytest.param(said("s1", "s1"), [], id="for-itself"),
    ],
)
def test_what_is_no_word_of_a_seat_is_not_held(heard: Word, fault: list[MessageFault]) -> None:
    solo = node()
    assert reasons(solo.message("p1", msg.Said(heard)), "refusal") == [*map(str, fault)]
    assert not solo.core.shared.papers.said and not solo.core.shared.papers.words


def test_a_seat_has_room_for_so_many_words() -> None:
    solo = node()
    for number in range(MAX_PAPERS + 9):
        tells(solo, said(f"x{number}", "p1"))
    tells(solo, said("x0", "p2"))
    held = solo.core.shared.papers.said
    assert sum(author == "p1" for author, _ in held) == MAX_PAPERS and ("p2", "x0") in held


def test_a_word_that_can_change_nothing_any_more_is_forgotten() -> None:
    solo = node()
    tells(solo, END)
    marked = solo.core.shared.told_mark
    ends = said("p4", "p1", "p2", "p3", seated=False)
    solo.announce(child(solo.fragment.chain.header, term=2, papers=(ends,)))
    solo.wait(1.0)
    assert not solo.core.shared.papers.said and solo.core.shared.told_mark == 0 != marked


def test_who_knows_other_words_is_told_ours() -> None:
    solo = node()
    tells(solo, END)
    effects = [effect for _ in range(12) for effect in solo.wait(1.0)]
    assert {effect.peer for effect in effects if isinstance(effect, ev.Send) and _is(effect, END)} >= {"p2"}


def test_the_recovery_key_speaks_before_the_words_of_a_thief() -> None:
    solo = Solo(config(owner=OWNER, recovery="recovery"), PEERS)
    thiefs = tuple(word(f"x{number}", number) for number in range(1, 99))
    solo.feed(ev.Guided(papers=(*thiefs, word("p4", RECOVERY_FROM, seated=False, by="recovery"))))
    roster, marks = solo.fragment.context.roster, solo.fragment.chain.marks
    assert [paper.peer for paper in roster.to_carry(1, marks, ()) if isinstance(paper, Word)] == ["p4"]
    assert roster.known == {*SEATS} - {"p4"}


def test_words_of_seats_are_carried_before_those_of_a_thief() -> None:
    solo = node()
    solo.feed(ev.Guided(papers=tuple(word(f"x{number}", number) for number in range(1, 99))))
    for author in ("p1", "p2", "p3"):
        tells(solo, said("p4", author, seated=False))
    carried = solo.fragment.context.roster.to_carry(2, solo.fragment.chain.marks, ())
    assert isinstance(carried[0], Word) and carried[0].peer == "p4"


def test_a_person_says_what_other_persons_said() -> None:
    """So more than half need no number from each other."""
    solo = node()
    for author in ("p1", "p2"):
        tells(solo, said("p4", author, seated=False, turn=3))
    effects = solo.feed(ev.SayWord("p4", seated=False))
    told = sent(effects, msg.Said)[0].word
    assert told == said("p4", "me", seated=False, turn=3)
    assert "p4" not in solo.fragment.context.roster.seats
    assert not sent(solo.feed(ev.SayWord("p3", seated=True)), msg.Said), "it has a seat"


@pytest.mark.parametrize(
    "liars",
    [
        said("p4", "p4", number=1 << 53, seated=False),
        said("p4", "p4", seated=False, turn=1 << 61),
        said("p4", "p4", seated=False, turn=TURNS),
        said("p4", "p3", seated=False, replaces="zz", turn=TURNS),
    ],
)
def test_a_liars_word_keeps_no_others_from_counting(liars: Word) -> None:
    solo = node()
    tells(solo, said("p4", "p1", seated=False))
    tells(solo, liars, by="p4")
    tells(solo, said("p4", "p2", seated=False))
    solo.feed(ev.SayWord("p4", seated=False))
    assert "p4" not in solo.fragment.context.roster.seats


@pytest.mark.parametrize("order", ["abac", "aabbc", "aaaabc", "abcabc"])
def test_who_says_it_twice_splits_no_majority(order: str) -> None:
    seats = ("a", "b", "c", "d", "e")
    swarm = Swarm(config(owner=OWNER, seats=seats))
    for peer in seats:
        swarm.join(peer, genesis=peer == "a")
    swarm.run(5.0)
    for peer in order:
        swarm.post(peer, ev.SayWord("e", seated=False))
        swarm.run(1.0)
    rosters = [member.core.fragments[0].context.roster.seats for member in swarm.members.values()]
    assert not any("e" in roster for roster in rosters)


def test_a_liar_is_passed_on_a_few_times_only() -> None:
    solo = node()
    heard = [tells(solo, said("p4", "p1", seated=False, turn=turn)) for turn in range(1, 20)]
    assert [bool(told) for told in heard] == [True] * TURNS + [False] * (19 - TURNS)
    again = replace(said("p4", "p1", seated=False, turn=TURNS), signatures=(("p1", b"\xff" * 16),))
    assert not solo.message("p1", msg.Said(again)), "nor is another signature of one word"


def test_who_leaves_is_let_go_whoever_says_so_too() -> None:
    solo = node()
    for author in ("p4", "p3"):
        tells(solo, said("p4", author, seated=False))
    assert "p4" not in solo.fragment.context.roster.seats


def test_most_seats_give_one_and_a_seat_gives_its_own_up_in_a_swarm() -> None:
    seats = ("a", "b", "c")
    swarm = Swarm(config(term_versions=2, owner=OWNER, seats=seats))
    for peer in (*seats, "x"):
        swarm.join(peer, genesis=peer == "a")
    swarm.run(5.0)
    for peer in ("a", "b"):
        swarm.post(peer, ev.SayWord("x", seated=True))
    swarm.post("c", ev.SayWord("c", seated=False))
    swarm.post("x", ev.SayWord("a", seated=False))
    for _ in range(6):
        swarm.contribute()
        swarm.run(10.0)
    cores = [member.core for member in swarm.members.values()]
    assert {core.fragments[0].chain.marks.seats for core in cores} == {frozenset({"a", "b", "x"})}
    assert not any(core.shared.papers.said for core in cores)


def test_a_version_with_a_proof_tells_of_the_lie() -> None:
    solo = node()
    lie = TwoVotes(vote("p4", "p1", 70), vote("p4", "p2", 70))
    effects = solo.announce(child(solo.fragment.chain.header, term=2, papers=(lie,)))
    assert solo.core.shared.excluded.peers == ("p4",) and sent(effects, msg.Proven)
    assert solo.fragment.chain.marks.seats == {*SEATS} - {"p4"}
