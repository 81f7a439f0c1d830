"""Return to an open run in which nobody is left that our chain knows: a month of sleep."""

from __future__ import annotations

from kit import Solo, branch, config, saved
from known_flaws import given, known_flaw
from known_kit import States, forged, meet

OLD = ("me", "q1", *(f"o{index}" for index in range(1, 19)))
CHAIN = branch(70, learners=OLD)
NEW = tuple(f"s{index}" for index in range(1, 7))
FAR = forged("s1", number=4000, tokens=10**7, voters=NEW)
"""The head of those who are in the run now. It is true, and our chain knows nobody in it."""


def returns(peers: tuple[str, ...]) -> Solo:
    """We start with the old chain, and meet these."""
    solo = Solo(config(log_versions=20, quorum=1), (), restored=saved(CHAIN))
    solo.says |= {peer: {"heads": (FAR.header.head(),)} for peer in NEW}
    old = {"heads": (CHAIN[-1].header.head(),), "confirmed": False, "saved": True, "learning": True}
    solo.says["q1"] = old
    meet(solo, peers)
    solo.learn()
    given(not solo.core.confirmed, "it is confirmed at once")
    return solo


def test_one_that_returns_copies_the_runs_state() -> None:
    assert States(returns(NEW), FAR, copy_s=60.0).given_for(900.0)


@known_flaw("strangers are believed for ten minutes only: a copy that takes longer is thrown away")
def test_one_that_returns_copies_a_state_that_takes_a_quarter_of_an_hour() -> None:
    assert States(returns(NEW), FAR, copy_s=900.0).given_for(1600.0)


@known_flaw("two that return know each other, so they believe no stranger, and go on as a second run")
def test_two_that_return_copy_the_runs_state() -> None:
    assert States(returns((*NEW, "q1")), FAR, copy_s=60.0).given_for(900.0)
