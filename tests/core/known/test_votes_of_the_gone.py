"""Votes of members that are gone, where members come and go."""

from __future__ import annotations

import hashlib
import random

import pytest
from kit import TABLES, Solo, branch, config, digest, saved, sent, sign, signed_part
from known_flaws import given, known_flaw
from msgspec.structs import replace

from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.types import Contributor, Stamp, Watermark, table_digest
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain import marks_of

FOUNDING = 64
BY_AGE = known_flaw(
    "new votes are given by the age of the first merged work to anybody in the table, also to those that left"
)


def voters_here(members: int, stay_versions: float, versions: int) -> list[int]:
    """Number of members here that vote, at each version after the founding ones.

    For each member that leaves one comes.
    """
    rng = random.Random(1)
    marks = marks_of(())
    stays: dict[str, float] = {}
    sequences: dict[str, int] = {}
    voting: list[int] = []
    for number in range(1, versions + 1):
        stays = {peer: left for peer, left in stays.items() if left > 0}
        while len(stays) < members:
            peer = f"m{len(sequences):05d}"
            stays[peer], sequences[peer] = rng.expovariate(1 / stay_versions), 0
        parts = []
        for peer in sorted(stays):
            stays[peer] -= 1
            if rng.random() < 0.9:  # some are late for a round
                before = Stamp(1, sequences[peer]) if sequences[peer] else Stamp(0, 0)
                sequences[peer] += 1
                payload = hashlib.sha256(f"{peer}/{sequences[peer]}".encode()).digest()
                parts.append(Contributor(peer, Stamp(1, sequences[peer]), 40, 4, before, payload))
        marks = marks.after(number, tuple(parts))
        if number > FOUNDING:
            voting.append(sum(peer in marks.voters for peer in stays))
    return voting


@pytest.mark.parametrize(
    ("members", "stay_versions"),
    [
        pytest.param(20, 50, marks=BY_AGE),
        pytest.param(20, 100, marks=BY_AGE),
        pytest.param(6, 100, marks=BY_AGE),
        (20, 200),
        (6, 400),
    ],
)
def test_of_members_that_come_and_go_some_vote_at_every_version(members: int, stay_versions: float) -> None:
    assert min(voters_here(members, stay_versions, 1000)) >= 1


OTHERS = ("me", "p2", "p3", "p4", "p5", "p6")


def chain_of(voters: tuple[str, ...]) -> list[SignedVersion]:
    """Version 200, by which these vote; the others have worked for 20 versions."""
    marks = [Watermark(p, Stamp(1, 9), 200, 1, 100, 20, 300, b"", 100) for p in voters]
    marks += [Watermark(p, Stamp(1, 9), 200, 180, 9, 0, 300, b"", 9) for p in OTHERS if p not in voters]
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
    """Of the voters v1 is here, and does nothing. Our number of vote requests in 15 minutes."""
    solo = Solo(config(log_versions=20), ("v1", *OTHERS[1:]), restored=saved(chain_of(voters)))
    solo.learn()
    solo.wait(5.0)
    deciding = solo.fragment.office._electorate.voters(solo.now)
    given(set(deciding) == {"v1", "me"} & set(voters), f"others decide: {deciding}")
    return solo, len(sent(solo.wait(900.0), msg.VoteRequest))


@known_flaw("the only voter here decides alone: where it does nothing, nobody else stands for election")
def test_the_only_voter_here_does_nothing_and_another_member_stands() -> None:
    _, requests = idle_hour(("v1", "v2", "v3"))
    assert requests


@known_flaw("one of two voters here that gives no ballot keeps the other from a majority for ever")
def test_one_of_two_voters_here_gives_no_ballot_and_the_other_is_elected_at_last() -> None:
    solo, requests = idle_hour(("v1", "v2", "me"))
    given(requests, "we do not even stand")
    assert solo.fragment.office.holding
