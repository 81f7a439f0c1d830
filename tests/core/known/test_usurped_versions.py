"""Versions of members that nobody elected."""

from __future__ import annotations

import pytest
from kit import Solo, branch, certificate, child, config, found, saved
from known_flaws import given, known_flaw

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg

ALL = ("me", "p1", "p2", "p3")
CHAIN = branch(70, learners=ALL)
UNPROVEN = known_flaw(
    "a version carries no quorum certificate: a child of the head that a member signs in a higher term"
    " is taken"
)


@pytest.mark.parametrize(
    ("usurper", "admits"),
    [
        pytest.param("p2", False, id="a-voter", marks=UNPROVEN),
        pytest.param("p9", True, id="an-admitted-member-without-work", marks=UNPROVEN),
        pytest.param("p9", False, id="a-stranger-of-an-open-run"),
    ],
)
def test_no_version_is_taken_of_a_member_that_nobody_elected(usurper: str, admits: bool) -> None:
    """p1 holds term 1, and we have its certificate. The other signs the next version, in term 2."""
    settings = config(log_versions=20, term_versions=64, admits=admits)
    solo = Solo(settings, (*ALL[1:], "p9"), restored=saved(CHAIN))
    solo.wait(5.0)
    solo.message("p1", msg.Elected(certificate("p1", ALL[1:], term=1, start=70)))
    given(solo.core.confirmed and solo.fragment.office.syncer == "p1", "p1 is not in office")

    version = child(CHAIN[-1].header, usurper, (usurper,), term=2)
    effects = solo.announce(version)
    solo.says[usurper] = {"heads": (version.header.head(),)}
    for _ in range(20):
        for pull in found(effects, ef.FetchUpdate):
            solo.feed(ev.UpdateFetched(0, pull.peer, version, 900))
        effects = solo.wait(0.5)
        for job in found(effects, ef.ApplyUpdate):
            solo.feed(ev.UpdateApplied(0, job.number, job.ticket, version.header.state_digest))
    assert solo.head == CHAIN[-1].header.head()
