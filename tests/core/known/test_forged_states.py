"""Forged states of a few liars, while most of the voters are not here: a night, a short cut, a power cut.

Ten vote, by a chain of 70 versions. A member should copy a state only if more than half of those who vote by
its own chain have it, here or not. It counts those that are here.
"""

from __future__ import annotations

import pytest
from kit import Solo, branch, config, saved
from known_flaws import given, known_flaw
from known_kit import States, forged, meet

from p2pdiloco.core.api.versions import SignedVersion

ALL = ("me", *(f"p{index}" for index in range(1, 10)))
CHAIN = branch(70, learners=ALL)
FIVE = ("me", "p1", "p2", "p3", "p9")
SHORT = branch(70, learners=FIVE)
FORGED = forged("p9")
THAT_ARE_HERE = known_flaw(
    "support for a state is counted among the voters that are here, not among those who vote by the chain"
)
AT_RETURN = known_flaw(
    "a returning member believes those few that say they are confirmed, whatever most voters that return have"
)


def stands(solo: Solo, peers: tuple[str, ...], version: SignedVersion) -> None:
    """These say from now on that they hold this version."""
    for peer in peers:
        solo.says[peer] = {"heads": (version.header.head(),)}


def awake(here: tuple[str, ...], chain: list[SignedVersion], me: str = "me") -> Solo:
    """We are confirmed, with these around us."""
    solo = Solo(config(log_versions=20), here, restored=saved(chain), me=me)
    solo.wait(5.0)
    given(solo.core.confirmed and solo.head == chain[-1].header.head(), "it is not confirmed")
    given(
        len(solo.fragment.chain.marks.voters) == len(ALL if chain is CHAIN else FIVE), "not all of them vote"
    )
    return solo


@pytest.mark.parametrize(
    ("here", "liars"),
    [
        pytest.param(("p9",), ("p9",), id="one-of-ten-alone-with-us", marks=THAT_ARE_HERE),
        pytest.param(("p1", "p2", "p8", "p9"), ("p8", "p9"), id="two-of-five-here", marks=THAT_ARE_HERE),
        pytest.param(("p1", "p2", "p3", "p8", "p9"), ("p8", "p9"), id="two-of-six-here"),
    ],
)
def test_no_state_of_a_fifth_of_the_voters_is_copied(here: tuple[str, ...], liars: tuple[str, ...]) -> None:
    version = forged("p9", voters=liars)
    solo = awake(here, CHAIN)
    stands(solo, liars, version)
    assert not States(solo, version).given_for(60.0)


@THAT_ARE_HERE
def test_one_liar_of_five_and_one_member_that_copied_its_state_convince_no_third() -> None:
    """The other had been alone with the liar. p1 never was."""
    solo = awake(("p2", "p3", "me", "p9"), SHORT, me="p1")
    stands(solo, ("me", "p9"), FORGED)
    assert not States(solo, FORGED).given_for(60.0)


@pytest.mark.parametrize(
    "confirmed", [pytest.param(("me", "p9"), id="a-night"), pytest.param(("p9",), id="a-power-cut-of-all")]
)
@AT_RETURN
def test_most_voters_that_return_with_the_true_chain_are_believed_before_a_liar(
    confirmed: tuple[str, ...],
) -> None:
    """All others come back with us. After the night one honest member has copied the liar's state already."""
    solo = Solo(config(log_versions=20), (), restored=saved(CHAIN), me="p1")
    stands(solo, confirmed, FORGED)
    others = tuple(peer for peer in ALL if peer != "p1")
    for peer in others:
        if peer not in confirmed:
            true = (CHAIN[-1].header.head(),)
            solo.says[peer] = {"heads": true, "confirmed": False, "saved": True, "learning": False}
    meet(solo, others)
    given(not solo.core.confirmed, "it is confirmed before it has heard anybody")
    assert not States(solo, FORGED).given_for(60.0)
