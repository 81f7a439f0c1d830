"""Seats of a chain: how papers begin and end them, and which versions may carry papers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from kit import (
    OWNER,
    SEATS,
    Solo,
    admission,
    chain_to,
    child,
    config,
    genesis,
    reasons,
    said,
    saved,
    vote,
    word,
)
from msgspec.structs import replace

from p2pdiloco.core.api.papers import LEAP, MAX_PAPERS, RECOVERY_FROM, Paper, TwoVotes, Word
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.types import MAX_PEERS, Contributor, Seat, Stamp
from p2pdiloco.core.chain import (
    WATERMARK_VERSIONS,
    Chain,
    Marks,
    founding,
    version_fault,
)
from p2pdiloco.core.seating import ENDS_VERSIONS, LINK_PLACES, MAX_DEPUTIES, Seating, deputies

RECOVERY = "recovery"
FIVE = ("a", "b", "c", "d", "e")


def carried(marks: Marks, *versions: tuple[int, Sequence[Paper]]) -> Marks:
    """The table after versions of these numbers, which carry these papers and merge nothing."""
    for number, papers in versions:
        marks = marks.after(number, (), tuple(papers))
    return marks


def worked(marks: Marks, number: int, *learners: str) -> Marks:
    parts = tuple(Contributor(peer, Stamp(1, number), 40, 4) for peer in learners)
    return marks.after(number, parts)


def test_founding_seats_have_places_in_the_order_of_the_run_file() -> None:
    marks = Chain((genesis(0),), (), 8, ("b", "c", "a")).marks
    assert {peer: marks.seat(peer) for peer in marks.seats} == {"b": Seat(1), "c": Seat(2), "a": Seat(3)}
    assert [mark.learner for mark in marks.table] == ["a", "b", "c"] and marks.places == 3
    assert marks.seat("x") is None and founding(()).seats == frozenset()


def test_the_run_files_seats_are_those_of_version_0_alone() -> None:
    later = child(genesis(0).header)
    assert not Chain((later,), (), 8, FIVE).marks.seats, "a table that was saved says who has one"
    table = founding(("a",)).table
    assert Chain((genesis(0),), table, 8, FIVE).marks.seats == {"a"}


@pytest.mark.parametrize(
    ("versions", "peer", "seat"),
    [
        pytest.param([(1, [word("x")])], "x", Seat(6, 1, "", 1), id="a-word-seats"),
        pytest.param([(1, [word("a")])], "a", Seat(1, 0, "", 1), id="a-seat-keeps-its-place"),
        pytest.param(
            [(1, [word("x", 3)]), (2, [word("x", 3, seated=False)])],
            "x",
            Seat(6, 1, "", 3),
            id="an-equal-number-changes-nothing",
        ),
        pytest.param(
            [(1, [word("x", 3)]), (2, [word("x", 2, seated=False)])],
            "x",
            Seat(6, 1, "", 3),
            id="a-lower-number-changes-nothing",
        ),
        pytest.param([(1, [word("x", LEAP)])], "x", Seat(6, 1, "", LEAP), id="a-leap"),
        pytest.param([(1, [word("x", LEAP + 1)])], "x", None, id="too-wide-a-leap"),
        pytest.param(
            [(1, [word("y", 9)]), (2, [word("x", 9 + LEAP)])],
            "x",
            Seat(7, 2, "", 9 + LEAP),
            id="a-leap-from-the-highest-of-all",
        ),
        pytest.param(
            [(1, [word("y", 9)]), (2, [word("x", 10 + LEAP)])], "x", None, id="too-wide-a-leap-from-it"
        ),
        pytest.param(
            [(3, [word("a", 1, seated=False)])], "a", Seat(1, 0, "", 1, ended=3), id="a-word-ends-a-seat"
        ),
        pytest.param(
            [(3, [word("a", 1, seated=False)]), (4, [word("a", 2)])],
            "a",
            Seat(6, 0, "", 2, again=4),
            id="a-newer-word-begins-it-again-at-another-place",
        ),
        pytest.param(
            [(1, [word("x", 1)]), (2, [word("x", 3, seated=False)]), (3, [word("x", 2)])],
            "x",
            Seat(6, 1, "", 3, ended=2),
            id="an-older-word-does-not-begin-it-again",
        ),
        pytest.param(
            [(1, [word("x", 3, seated=False)]), (2, [word("x", 2)])],
            "x",
            Seat(0, word=3, ended=1),
            id="nor-one-that-never-was",
        ),
        pytest.param(
            [(2, [word("x", 1, replaces="a")])], "a", Seat(1, 0, "", 1, 2), id="another-ends-in-its-favour"
        ),
        pytest.param(
            [(2, [word("x", 1, replaces="a")])], "x", Seat(6, 2, "", 1), id="which-has-a-place-of-its-own"
        ),
        pytest.param(
            [(2, [word("x", 1, replaces="nobody")])], "x", Seat(6, 2, "", 1), id="in-favour-of-nobodys"
        ),
        pytest.param([(1, [admission("x")])], "x", Seat(6, 1, "link"), id="an-invite-seats"),
        pytest.param([(1, [admission("a")])], "a", Seat(1), id="an-invite-changes-no-seat"),
        pytest.param(
            [(1, [word("a", 1, seated=False)]), (2, [admission("a")])],
            "a",
            Seat(1, 0, "", 1, ended=1),
            id="an-invite-begins-no-ended-seat-again",
        ),
        pytest.param(
            [(1, [word("link", 1, seated=False)]), (2, [admission("x")])],
            "x",
            None,
            id="an-invite-whose-key-was-ended-seats-nobody",
        ),
        pytest.param(
            [(1, [admission("x")]), (2, [word("link", 1, seated=False)])],
            "x",
            Seat(6, 1, "link", 0, 2, 1),
            id="whom-it-seated-before-loses-its-seat",
        ),
        pytest.param(
            [(1, [admission("x")]), (2, [word("x", 1), word("link", 2, seated=False)])],
            "x",
            Seat(6, 1, "link", 1),
            id="but-for-those-that-the-owner-has-named",
        ),
        pytest.param(
            [(1, [admission("x")]), (2, [word("x", 4)])],
            "x",
            Seat(6, 1, "link", 4),
            id="the-owner-confirms-who-came-by-invite",
        ),
    ],
)
def test_what_papers_make_of_a_seat(
    versions: list[tuple[int, list[Paper]]], peer: str, seat: Seat | None
) -> None:
    """Of a run that begins with five."""
    assert carried(founding(FIVE), *versions).seat(peer) == seat


@pytest.mark.parametrize("uses", [1, 2, 3, 9])
def test_an_invite_seats_one_in_a_version_and_as_many_as_it_has_uses(uses: int) -> None:
    marks = founding(("a", "b"))
    guests = [admission(f"x{n}", uses=uses) for n in range(9)]
    seated = []
    for number in range(1, 10):
        before, marks = marks.seats, carried(marks, (number, guests))
        seated.append(len(marks.seats - before))
    places_left = LINK_PLACES - 2
    assert seated == [1] * min(uses, places_left) + [0] * (9 - min(uses, places_left))


def test_two_invites_seat_one_in_a_version() -> None:
    marks = carried(founding(("a",)), (1, [admission("x", key="k1"), admission("y", key="k2")]))
    assert marks.seats == {"a", "x"}
    assert carried(marks, (2, [admission("y", key="k2")])).seats == {"a", "x", "y"}


def test_invites_fill_the_first_six_places_that_there_ever_were() -> None:
    ended = carried(founding(FIVE), (1, [word("a", 1, seated=False)]))
    sixth = carried(ended, (2, [admission("x", uses=9)]))
    assert sixth.places == LINK_PLACES == 6 and len(sixth.seats) == 5
    assert carried(sixth, (3, [admission("y", uses=9)])).seats == sixth.seats, "the ended one counts"
    assert carried(sixth, (3, [word("y", 2)])).seat("y") == Seat(7, 3, "", 2), "the owner gives others"


def test_of_one_use_on_both_sides_of_a_split_the_side_that_is_left_keeps_its_guest() -> None:
    """The other one is a learner without a seat there, whose work counts, until the owner gives it one."""
    before = carried(founding(FIVE), (1, []))
    ours, theirs = ((2, [admission(peer, uses=1)]) for peer in "xy")
    assert "x" in carried(before, ours).seats and "y" in carried(before, theirs).seats
    healed = worked(carried(before, ours, (3, [admission("y", uses=1)])), 4, "x", "y")
    assert healed.seat("y") is None and "y" in healed and healed.seats == {*FIVE, "x"}
    assert "y" in carried(healed, (5, [word("y", 1)])).seats


@pytest.mark.parametrize(("seats", "most"), [(1, 1), (4, 1), (5, 1), (9, 1), (10, 2), (16, 3)])
def test_at_most_a_fifth_of_the_seats_end_in_64_versions(seats: int, most: int) -> None:
    """One at least."""
    founders = tuple(f"s{n:02}" for n in range(seats))
    ends = [word(peer, number, seated=False) for number, peer in enumerate(founders, 1)]
    marks = carried(founding(founders), (7, ends))
    assert founding(founders).seats - marks.seats == {*founders[:most]}
    left = ends[most:]
    assert carried(marks, (8, left), (6 + ENDS_VERSIONS, left)).seats == marks.seats
    later = carried(marks, (7 + ENDS_VERSIONS, left))
    assert len(marks.seats - later.seats) == min(len(left), max(1, len(marks.seats) // 5))


def test_an_end_in_favour_of_another_is_an_end_like_others() -> None:
    marks = carried(founding(FIVE), (1, [word("x", 1, replaces="a"), word("y", 2, replaces="b")]))
    assert marks.seats == {"x", "b", "c", "d", "e"} and marks.seat("y") is None


@pytest.mark.parametrize("seats", [5, 10, 12])
def test_seats_begin_while_no_more_may_end(seats: int) -> None:
    founders = tuple(f"s{n:02}" for n in range(seats))
    ends = [word(peer, number, seated=False) for number, peer in enumerate(founders, 1)]
    marks = carried(founding(founders), (1, ends))
    assert carried(marks, (2, [word("x", 99)])).seats == marks.seats | {"x"}


@pytest.mark.parametrize("number", [1, 63, 64, 65, 1000])
def test_words_count_in_every_version(number: int) -> None:
    marks = carried(founding(FIVE), (number, [word("x", 1), word("a", 2, seated=False)]))
    assert marks.seats == {"b", "c", "d", "e", "x"}


def test_papers_count_in_the_order_of_their_version() -> None:
    x, y = word("x", 1), word("y", 2)
    marks = carried(founding(FIVE), (1, [y, x]))
    assert (marks.seat("y"), marks.seat("x")) == (Seat(6, 1, "", 2), Seat(7, 1, "", 1))
    assert marks.digest != carried(founding(FIVE), (1, [x, y])).digest
    replaced = carried(founding(FIVE), (1, [x, word("y", 2, replaces="x")]))
    assert replaced.seats == {*FIVE, "y"}
    assert carried(founding(FIVE), (1, [word("y", 2, replaces="x"), x])).seats == {*FIVE, "x", "y"}


def test_what_a_paper_does_not_change_it_does_not_take() -> None:
    seats = Seating(founding(FIVE).table, 1)
    assert [seats.take(paper) for paper in (word("x", 2), word("x", 2), word("x", 1))] == [True, False, False]
    assert [seats.take(admission("y")), seats.take(admission("y"))] == [False, False], "x has the sixth place"


# --- deputies, leaves, lies, the recovery key ---------------------------------------------------------------


def lie(of: str) -> TwoVotes:
    return TwoVotes(vote(of, "b", 3), vote(of, "c", 3))


@pytest.mark.parametrize(
    ("versions", "peer", "seat"),
    [
        pytest.param([(1, [said("x", "a", "b", "c")])], "x", Seat(6, 1, turn=1), id="most-seats-give-one"),
        pytest.param([(1, [said("x", "a", "b")])], "x", None, id="fewer-do-not"),
        pytest.param([(1, [said("x", "a", "b", "x", "y", "z")])], "x", None, id="nor-with-those-without-one"),
        pytest.param(
            [(4, [said("a", "b", "c", "d", seated=False)])], "a", Seat(1, 0, "", 0, 4, 1), id="most-end-one"
        ),
        pytest.param(
            [(1, [word("a", 7)]), (4, [said("a", "b", "c", "d", seated=False)])],
            "a",
            Seat(1, 0, "", 7),
            id="not-by-what-they-said-before-the-owners-newest-word",
        ),
        pytest.param(
            [(4, [said("a", "b", "c", "d", seated=False)]), (5, [word("a", 1)])],
            "a",
            Seat(6, 0, "", 1, again=5),
            id="the-owner-says-otherwise",
        ),
        pytest.param(
            [(4, [said("a", "b", "c", "d", seated=False)]), (5, [said("a", "b", "c", "d")])],
            "a",
            Seat(1, 0, "", 0, 4, 1),
            id="not-twice-in-one-turn",
        ),
        pytest.param(
            [(4, [said("a", "b", "c", "d", seated=False)]), (5, [said("a", "b", "c", "e", turn=2)])],
            "a",
            Seat(6, 0, turn=2, again=5),
            id="of-the-seats-that-are-left-more-than-half",
        ),
        pytest.param(
            [(1, [said("x", "a", "b", "c", turn=LEAP + 1)])], "x", None, id="nor-with-too-high-a-number"
        ),
        pytest.param([(3, [said("a", "a", seated=False)])], "a", Seat(1, 0, "", 0, 3, 1), id="a-seat-leaves"),
        pytest.param(
            [(3, [said("a", "a", seated=False)]), (4, [said("a", "a", turn=2)])],
            "a",
            Seat(1, 0, "", 0, 3, 1),
            id="and-does-not-come-back-by-its-own-word",
        ),
        pytest.param([(3, [said("x", "x")])], "x", None, id="nobody-seats-itself"),
        pytest.param([(3, [lie("a")])], "a", Seat(1, 0, "", 0, 3, 1), id="a-lie-ends-a-seat"),
        pytest.param(
            [(3, [word("x", RECOVERY_FROM)]), (4, [word("x", 1, seated=False)])],
            "x",
            Seat(6, 3, "", RECOVERY_FROM),
            id="the-owners-key-says-nothing-after-the-recovery-key",
        ),
        pytest.param(
            [(3, [word("a", RECOVERY_FROM)]), (4, [word("x", 1)])],
            "x",
            None,
            id="nor-of-anybody-else",
        ),
        pytest.param([(3, [word("a", RECOVERY_FROM)]), (4, [admission("x")])], "x", None, id="nor-invites"),
        pytest.param(
            [(3, [word("a", RECOVERY_FROM)]), (4, [said("x", "a", "b", "c")])],
            "x",
            Seat(6, 4, turn=1),
            id="but-seats-do",
        ),
        pytest.param(
            [(3, [word("x", RECOVERY_FROM + LEAP + 1)])], "x", None, id="its-numbers-are-bounded-as-well"
        ),
    ],
)
def test_what_others_than_the_owners_key_make_of_a_seat(
    versions: list[tuple[int, list[Paper]]], peer: str, seat: Seat | None
) -> None:
    assert carried(founding(FIVE), *versions).seat(peer) == seat


def test_only_the_owners_words_count_in_the_limit_of_ends() -> None:
    """A liar that leaves, or is found out, keeps the owner from ending no other liar."""
    marks = carried(
        founding(FIVE), (1, [said("a", "a", seated=False), lie("b")]), (2, [word("c", 1, seated=False)])
    )
    assert marks.seats == {"d", "e"}


def test_the_end_of_a_link_ends_all_seats_that_it_gave_at_once() -> None:
    links = [(number, [admission(f"x{number}", uses=9)]) for number in range(1, 6)]
    marks = carried(founding(("a",)), *links)
    assert len(marks.seats) == 6
    named = [word("x1", 1), word("x2", 2), word("link", 3, seated=False)]
    assert carried(marks, (7, named)).seats == {"a", "x1", "x2"}


def test_a_link_that_is_closed_leaves_its_seats_and_gives_no_more() -> None:
    links = [(number, [admission(f"x{number}", uses=9)]) for number in range(1, 4)]
    marks = carried(founding(("a",)), *links, (7, [word("link", 1, seated=False, replaces="link")]))
    assert carried(marks, (8, [admission("x4", uses=9)])).seats == {"a", "x1", "x2", "x3"}


def test_seats_that_a_thief_began_raise_no_limit_and_end_at_once() -> None:
    seats = tuple(f"s{n}" for n in range(10))
    begun = [word(f"x{n}", n) for n in range(1, 41)]
    ends = [word(peer, 41 + n, seated=False) for n, peer in enumerate(seats)]
    marks = carried(founding(seats), (1, begun), (2, ends))
    assert len(marks.seats.intersection(seats)) == 8
    recovered = [word(f"x{n}", RECOVERY_FROM + n, seated=False) for n in range(1, 41)]
    assert len(carried(marks, (3, recovered)).seats) == 8


def test_a_seat_that_is_given_again_is_as_old_as_it_was() -> None:
    """Else a thief would make all of them young, one after the other, and end them."""
    seats = tuple(f"s{n}" for n in range(5))
    marks, number = founding(seats), count(1)
    for version in range(1, 40, 2):
        ends = [word(peer, next(number), seated=False) for peer in seats]
        again = [word(peer, next(number)) for peer in seats]
        marks = carried(marks, (version, ends), (version + 1, again))
        assert len(marks.seats) >= 4


def test_a_table_has_room_for_so_many_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its state would be too large to copy."""
    monkeypatch.setattr("p2pdiloco.core.seating.MAX_PEERS", 6)
    marks = carried(founding(FIVE), (1, [word("x", 1), word("y", 2), word("z", 3, seated=False)]))
    assert marks.seats == {*FIVE, "x"} and len(marks.table) == 6
    assert carried(marks, (2, [word("x", 4, seated=False)])).seats == {*FIVE}
    assert "y" in carried(marks, (2, [word("y", RECOVERY_FROM)])).seats, "the recovery key has more"


def test_the_oldest_64_seats_are_deputies() -> None:
    seats = tuple(f"s{n:03}" for n in range(MAX_DEPUTIES + 9))
    marks = founding(seats)
    assert deputies(marks.table) == {*seats[:MAX_DEPUTIES]}
    assert carried(marks, (1, [said("x", *seats[32:])])).seat("x") is None
    assert carried(marks, (1, [said("x", *seats[:33])])).seat("x") == Seat(MAX_DEPUTIES + 10, 1, turn=1)


# --- versions that carry papers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("papers", "term", "fault"),
    [
        pytest.param((), 1, None, id="none"),
        pytest.param((), 0, None, id="none-in-a-term-that-goes-on"),
        pytest.param((word("x"),), 1, None, id="a-word"),
        pytest.param((word("x"), word("y", 2), admission("z")), 1, "false-papers", id="no-place-is-left"),
        pytest.param((word("y"), word("p1", 2)), 1, None, id="several"),
        pytest.param((word("x"),), 0, "false-papers", id="a-term-that-goes-on"),
        pytest.param((word("x"), word("x")), 1, "false-papers", id="twice-the-same"),
        pytest.param((word("x", 1), word("x", 2), word("x", 1)), 1, "false-papers", id="an-older-one"),
        pytest.param((word("x", LEAP + 1),), 1, "false-papers", id="too-wide-a-leap"),
        pytest.param((admission("p1"),), 1, "false-papers", id="an-invite-of-who-has-a-seat"),
        pytest.param(
            (word("p1", 1, seated=False), word("p2", 2, seated=False)), 1, "false-papers", id="too-many-ends"
        ),
    ],
)
def test_which_papers_a_version_may_carry(papers: tuple[Paper, ...], term: int, fault: str | None) -> None:
    header = child(genesis(0).header, papers=papers, term=term).header
    found = version_fault(chain_to(genesis(0).header), header, config())
    assert (found and str(found)) == fault


@pytest.mark.parametrize(
    "papers",
    [
        pytest.param((word("x", by="p1"),), id="a-word-of-another"),
        pytest.param((replace(word("x"), peer="y"),), id="a-word-on-another"),
        pytest.param((replace(word("x"), run="other"),), id="of-another-run"),
        pytest.param((admission("x", by="p1"),), id="an-invite-of-another"),
        pytest.param((admission("x", signer="x"),), id="an-admission-that-the-key-did-not-sign"),
        pytest.param((replace(admission("x"), peer="y"),), id="an-admission-of-another"),
        pytest.param((word("x"), word("y", 2, by="p1")), id="one-of-two"),
        pytest.param((replace(said("x", *SEATS), peer="y"),), id="a-word-of-seats-on-another"),
        pytest.param((said("x", *SEATS, SEATS[0]),), id="a-word-of-one-author-twice"),
        pytest.param((replace(word("x"), number=RECOVERY_FROM),), id="a-number-of-the-recovery-key"),
        pytest.param((word("x", RECOVERY_FROM),), id="the-owner-by-a-number-of-the-recovery-key"),
        pytest.param((replace(said("x", *SEATS), turn=0),), id="seats-as-the-owner"),
        pytest.param((TwoVotes(vote("p1", "p2", 3), vote("p1", "p2", 3)),), id="no-lie"),
    ],
)
def test_papers_that_neither_the_owner_nor_an_invite_signed_are_refused(papers: tuple[Paper, ...]) -> None:
    solo = Solo(config(owner=OWNER))
    effects = solo.announce(child(genesis(0).header, papers=papers))
    assert reasons(effects, "refusal") == [str(VersionFault.FALSE_PAPERS)] and solo.head.number == 0


@pytest.mark.parametrize(
    "papers",
    [
        (word("x"),),
        (admission("x"),),
        (word("p1", 1, seated=False),),
        (said("x", *SEATS[:3]),),
        (said("p1", "p1", seated=False),),
        (word("x", RECOVERY_FROM, by=RECOVERY),),
    ],
)
def test_papers_that_are_signed_are_taken_in_a_run_that_has_that_owner(papers: tuple[Paper, ...]) -> None:
    version = child(genesis(0).header, papers=papers)
    solo = Solo(config(owner=OWNER, recovery=RECOVERY))
    solo.announce(version)
    assert solo.head == version.header.head() and solo.fragment.chain.marks.seats != {*SEATS}
    for owner in ("", "somebody") if not (isinstance(papers[0], Word) and papers[0].turn) else ():
        other = Solo(config(owner=owner))
        assert reasons(other.announce(version), "refusal") == [str(VersionFault.FALSE_PAPERS)]


def test_a_table_that_does_not_follow_from_the_papers_is_refused() -> None:
    plain = child(genesis(0).header).header.table
    solo = Solo(config(owner=OWNER))
    effects = solo.announce(child(genesis(0).header, papers=(word("x"),), table=plain))
    assert reasons(effects, "refusal") == [str(VersionFault.FALSE_TABLE)]


def test_a_restart_finds_the_seats_that_papers_made() -> None:
    chain = [genesis(0), child(genesis(0).header, papers=(word("x"), word("p1", 2, seated=False)))]
    solo = Solo(config(owner=OWNER), restored=saved(chain))
    assert solo.fragment.chain.marks.seats == {"me", "p2", "p3", "p4", "x"}


def test_a_version_has_room_for_a_few_dozen_papers() -> None:
    papers = tuple(word(f"x{number}", number) for number in range(1, MAX_PAPERS + 1))
    header = child(genesis(0).header, papers=papers).header
    assert version_fault(chain_to(genesis(0).header), header, config()) is None
    assert len(carried(founding(SEATS), (1, papers)).seats) == len(SEATS) + MAX_PAPERS


# --- seats of those who never work -----------------------------------------------------------------------


def test_who_never_works_keeps_its_seat_and_counts_as_no_learner() -> None:
    marks = carried(founding(("a", "b")), (1, [word("x")]))
    assert marks.lately == 0
    marks = worked(worked(marks, 2, "a", "s"), 3, "a")
    for number in range(4, 40):
        marks = worked(marks, number, "a")
    assert marks.seats == {"a", "b", "x"} and marks.lately == 1
    assert "a" in marks and "b" not in marks and "x" not in marks
    assert (marks.weighs("b"), marks.first("b"), marks.number("b")) == (None, None, 0)
    assert marks.weighs("a") == 1.0, "nor is it a usual one"
    assert marks.seated_since(3) == {"a"}, "nor does it make groups"


def test_seats_are_kept_when_those_without_one_are_forgotten() -> None:
    marks = worked(founding(("a", "b")), 1, "a", "s")
    marks = worked(marks, 2 + WATERMARK_VERSIONS, "t")
    assert [mark.learner for mark in marks.table] == ["a", "b", "t"] and marks.seats == {"a", "b"}
    assert carried(marks, (3 + WATERMARK_VERSIONS, [word("a", 1, seated=False)])).seat("a") is not None


def test_no_crowd_pushes_out_a_seat() -> None:
    crowd = [f"s{number:05}" for number in range(MAX_PEERS + 9)]
    marks = worked(worked(founding(("a", "b")), 1, "a"), 2, *crowd)
    assert marks.seats == {"a", "b"} and len(marks.table) == 2 + MAX_PEERS


def test_work_and_papers_of_one_version_count_together() -> None:
    parts = (Contributor("x", Stamp(1, 1), 40, 4),)
    marks = founding(("a",)).after(5, parts, (admission("x"),))
    assert marks.seat("x") == Seat(2, 5, "link") and marks.first("x") == 5 and "x" in marks
