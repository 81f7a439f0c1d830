"""Votes of members that are gone, or do nothing."""

from __future__ import annotations

from kit import OWNER, TABLES, Solo, branch, config, digest, saved, sent, sign, signed_part, word
from known_flaws import given
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.types import Contributor, Seat, Stamp, Watermark, table_digest
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import marks_of

OTHERS = ("me", "p2", "p3", "p4", "p5", "p6")


def chain_of(voters: tuple[str, ...]) -> list[SignedVersion]:
    """Version 200, by which these have seats; the others have worked, too."""
    marks = [
        Watermark(p, Stamp(1, 9), 200, 1, 100, Seat(place), 300, b"") for place, p in enumerate(voters, 1)
    ]
    marks += [Watermark(p, Stamp(1, 9), 200, 180, 9, None, 300, b"") for p in OTHERS if p not in voters]
    table = tuple(sorted(marks, key=lambda mark: mark.learner))
    header = replace(
        branch(0)[0].header,
        number=200,
        parent=digest("x"),
        term=50,
        syncer="p1",
        tokens=8000,
        contributors=(signed_part(Contributor("me", Stamp(1, 9), 40, 4, Stamp(1, 8))),),
        unit=40,
        table=table_digest(table),
    )
    TABLES[header.digest()] = marks_of(table)
    return [SignedVersion(header, sign("p1", "version", header))]


def idle_hour(voters: tuple[str, ...]) -> tuple[Solo, int]:
    """Of those with a seat v1 is here, and does nothing. Our number of vote requests in 15 minutes."""
    run = config(log_versions=20, owner=OWNER)
    solo = Solo(run, ("v1", *OTHERS[1:]), restored=saved(chain_of(voters)))
    solo.learn()
    solo.wait(5.0)
    deciding = solo.fragment.office._electorate.voters(solo.now)
    given(set(deciding) == {"v1", "me"} & set(voters), f"others decide: {deciding}")
    return solo, len(sent(solo.wait(900.0), msg.VoteRequest))


def test_where_the_only_seat_does_nothing_the_owner_gives_it_to_another() -> None:
    """Its work gives nobody the right to stand, however much there is of it."""
    solo, requests = idle_hour(("v1",))
    assert not requests
    solo.feed(ev.Guided(papers=(word("me", replaces="v1"),)))
    solo.wait(60.0)
    assert solo.fragment.office.holding


def test_one_of_two_seats_here_gives_no_ballot_and_the_other_is_elected_at_last() -> None:
    solo, requests = idle_hour(("v1", "v2", "me"))
    given(requests, "we do not even stand")
    assert solo.fragment.office.holding


def test_the_owners_word_ends_a_seat_that_gives_no_ballot() -> None:
    solo, _ = idle_hour(("v1", "v2", "me"))
    solo.feed(ev.Guided(papers=(word("v1", seated=False),)))
    solo.wait(60.0)
    assert solo.fragment.office.holding
