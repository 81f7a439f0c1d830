"""Which versions show that their syncer holds the office, to a member of four that has p1 in office."""

from __future__ import annotations

import pytest
from kit import Solo, branch, certificate, child, config, saved

from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.types import Certificate
from p2pdiloco.core.chain import MOST_TERMS
from p2pdiloco.core.voting import office_fault

SEATS = ("me", "p1", "p2", "p3")
CHAIN = branch(70, learners=SEATS, seats=SEATS)
HEAD = CHAIN[-1].header.head()
NEXT = HEAD.term + 1
FOREIGN = bytes(range(32))


def member(in_office: str = "p1") -> Solo:
    solo = Solo(config(log_versions=20, term_versions=16), SEATS[1:], restored=saved(CHAIN))
    solo.wait(5.0)
    if in_office:
        solo.message(in_office, msg.Elected(elected(in_office, SEATS[1:])))
        assert solo.fragment.office.syncer == in_office
    return solo


def elected(
    syncer: str, voters: tuple[str, ...], term: int = NEXT, base: int = 70, digest: bytes = b""
) -> Certificate:
    return certificate(syncer, voters, term, base, base=digest or CHAIN[base].header.digest())


def taken(solo: Solo, syncer: str, term: int, proof: Certificate | None, giver: str = "p3") -> bool:
    version = child(CHAIN[-1].header, syncer, (syncer,), term, elected=proof)
    return office_fault(solo.fragment.context, version.header, giver, solo.now) is None


@pytest.mark.parametrize(
    ("proof", "right"),
    [
        pytest.param(elected("p2", SEATS, NEXT + 1), True, id="most-of-the-table-whoever-is-counted-on"),
        pytest.param(elected("p2", ("p2", "p3"), NEXT + 1), False, id="half-while-another-is-counted-on"),
        pytest.param(None, False, id="none"),
        pytest.param(elected("p3", SEATS, NEXT + 1), False, id="another-seat's"),
        pytest.param(elected("p2", SEATS, NEXT + 1, digest=FOREIGN), False, id="votes-for-another-branch"),
        pytest.param(elected("p2", SEATS, NEXT + 1, base=69), True, id="votes-before-another's-version"),
        pytest.param(elected("p2", SEATS, NEXT + 1, base=54), False, id="votes-a-term-ago"),
        pytest.param(elected("p2", SEATS, NEXT + 1, base=40, digest=FOREIGN), False, id="older-than-the-log"),
        pytest.param(elected("p2", ("p2", "p2", "p2"), NEXT + 1), False, id="one-vote-three-times"),
        pytest.param(elected("p2", ("p2", "s1", "s2", "s3"), NEXT + 1), False, id="votes-of-seatless-ones"),
    ],
)
def test_what_a_certificate_must_show(proof: Certificate | None, right: bool) -> None:
    assert taken(member(), "p2", NEXT + 1, proof) is right


def test_its_votes_are_for_one_head_and_its_syncers_own_is_among_them() -> None:
    good, odd = elected("p2", SEATS[1:], NEXT + 1), elected("p2", ("me",), NEXT + 1, base=69)
    for votes in ((*odd.votes, *good.votes), tuple(vote for vote in good.votes if vote.body.voter != "p2")):
        assert not taken(member(), "p2", NEXT + 1, type(good)(good.group, 0, good.term, "p2", votes))


@pytest.mark.parametrize("term", [5, HEAD.term])
def test_an_old_certificate_is_one_of_its_own_term_only(term: int) -> None:
    assert not taken(member(), "p2", term, elected("p2", SEATS, term, base=60))


def test_a_weak_certificate_is_taken_of_half_of_those_here_where_nobody_is_counted_on() -> None:
    solo = member(in_office="")
    assert taken(solo, "p2", NEXT, elected("p2", ("p2", "p3")))
    assert not taken(solo, "p2", NEXT, elected("p2", ("p2",)))
    solo.wait(Timing().resume_alone_s + 1.0)
    assert taken(solo, "p2", NEXT, elected("p2", ("p2",))), "nothing came, and nobody was in office"


def test_a_holder_that_is_counted_on_is_followed_however_long_its_version_takes() -> None:
    solo = member()
    solo.fragment.context.moved_s -= 2 * Timing().resume_alone_s
    assert not taken(solo, "p2", NEXT + 1, elected("p2", ("p2",), NEXT + 1))
    assert taken(solo, "p1", NEXT, elected("p1", ("p1",)))


@pytest.mark.parametrize("syncer", ["p1", "p2"])
def test_what_a_holder_gives_of_the_branch_from_which_it_was_elected_is_followed(syncer: str) -> None:
    """Of four that were split two had made versions alone: three elected one, and did not follow it."""
    solo, alone = member(), elected(syncer, (syncer,), NEXT + 1)
    assert not taken(solo, syncer, NEXT + 1, alone, giver="p1")
    base = child(CHAIN[-1].header, syncer, (syncer,), NEXT + 1).header.digest()
    solo.message("p1", msg.Elected(elected("p1", SEATS[1:], NEXT + 5, base=HEAD.number + 1, digest=base)))
    assert taken(solo, syncer, NEXT + 1, alone, giver="p1")
    other, early = "p2" if syncer == "p1" else "p1", elected("p1", ("p1",), NEXT + 2)
    assert not taken(solo, other, NEXT + 2, early, giver="p1"), "it was elected to go on from another"
    assert not taken(solo, syncer, NEXT + 1, alone, giver="p3")
    late = elected(syncer, (syncer,), NEXT + 6)
    assert not taken(solo, syncer, NEXT + 6, late, giver="p1"), "else it would go on for ever by its own vote"


def test_a_term_is_gone_on_with_for_so_many_versions_and_no_longer() -> None:
    solo = member()
    last = CHAIN[-1].header
    assert taken(solo, last.syncer, last.term, None)
    made = sum(version.header.term == last.term for version in CHAIN)
    short = Solo(config(log_versions=20, term_versions=made), SEATS[1:], restored=saved(CHAIN))
    assert not taken(short, last.syncer, last.term, None)


def test_a_certificate_that_a_later_holder_is_not_known_to_follow_comes_too_late() -> None:
    solo = member()
    solo.message("p1", msg.Elected(elected("p1", SEATS[1:], NEXT + 5)))
    hoarded = elected("p2", SEATS, NEXT + 1)
    assert not taken(solo, "p2", NEXT + 1, hoarded)
    version = child(CHAIN[-1].header, "p2", ("p2",), NEXT + 1, elected=hoarded)
    solo.hear("p1", heads=(version.header.head(),))
    assert taken(solo, "p2", NEXT + 1, hoarded), "it goes on from that one"


@pytest.mark.parametrize(("voters", "right"), [(SEATS, True), (("p2", "p3"), False)])
def test_no_number_of_terms_is_too_many_for_most_seats(voters: tuple[str, ...], right: bool) -> None:
    """One seat can have all vote in ever later terms: no version would be possible any more."""
    solo = member(in_office="")
    late = HEAD.term + MOST_TERMS + 1
    assert taken(solo, "p2", late, elected("p2", voters, late)) is right
