"""Heads that nobody should take, and one that returning members should.

Versions of members that nobody elected; states that a few liars forge while most seats are away; the state
of a run in which a member that returns knows nobody any more. A member copies a state that no more
than half of all seats have, whether they are here or not, only if it is no worse on its own data.
"""

from __future__ import annotations

import pytest
from kit import (
    OWNER,
    TABLES,
    Solo,
    admission,
    branch,
    certificate,
    child,
    config,
    digest,
    found,
    saved,
    sign,
    signed_part,
    table,
    word,
)
from known_flaws import given
from msgspec.structs import replace

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.papers import Paper
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.types import Contributor, Seat, Stamp, Watermark, table_digest
from p2pdiloco.core.api.versions import MemberList, SignedVersion
from p2pdiloco.core.chain import marks_of


def forged(
    liar: str, number: int = 5000, tokens: int = 10**9, voters: tuple[str, ...] | None = None
) -> SignedVersion:
    """A version that never was: the liar signs it, and its table names those who decide from then on."""
    stamp = Stamp(1, 1)
    seated = enumerate(sorted(voters or (liar,)), 1)
    marks = tuple(Watermark(p, stamp, number, 1, 100, Seat(place), 300, b"") for place, p in seated)
    header = replace(
        branch(0)[0].header,
        number=number,
        parent=digest("nobody", number),
        term=4000,
        syncer=liar,
        tokens=tokens,
        state_digest=digest("a state of the liar's choosing"),
        contributors=(signed_part(Contributor(liar, Stamp(1, 2), 40, 4, stamp)),),
        unit=40,
        table=table_digest(marks),
    )
    TABLES[header.digest()] = marks_of(marks)
    return SignedVersion(header, sign(liar, "version", header))


def meet(solo: Solo, peers: tuple[str, ...]) -> list[ev.Effect]:
    """These peers are seen all at once; what they say is heard from then on."""
    solo.peers = peers
    return solo.feed(ev.PresenceSeen(MemberList(tuple((peer, 1) for peer in (*peers, solo.me)))))


class States:
    """Peers that have whole states of one version, and updates of none. A copy takes `copy_s`. `worse`: on
    our data it is worse than what we have."""

    def __init__(self, solo: Solo, version: SignedVersion, copy_s: float = 0.0, worse: bool = False) -> None:
        self._solo, self._version, self._copy_s, self._worse = solo, version, copy_s, worse
        self._due: list[tuple[float, ev.FetchState]] = []

    def given_for(self, seconds: float) -> bool:
        """Let time pass. Whether the version was taken; time ends with that."""
        solo, end_s = self._solo, self._solo.now + seconds
        while solo.now < end_s:
            if self._serve(solo.wait(0.5)):
                return True
        return False

    def _serve(self, effects: list[ev.Effect]) -> bool:
        taken = self._version.header.digest()
        while effects:
            if any(c.version.header.digest() == taken for c in found(effects, ev.CommitVersion)):
                return True
            self._due += [(self._solo.now + self._copy_s, copy) for copy in found(effects, ev.FetchState)]
            gone, trials = found(effects, ev.FetchUpdate), found(effects, ev.TryStates)
            here = self._arrived()
            effects = []
            for trial in trials:
                effects += self._solo.answer(trial, ev.Tried(not self._worse, "tried"))
            for pull in gone:
                effects += self._solo.answer(pull, ev.FetchFailed(FetchFailure.GONE))
            for copy in here:
                effects += self._solo.answer(copy, ev.StateFetched(self._version, table(self._version)))
        return False

    def _arrived(self) -> list[ev.FetchState]:
        here = [copy for at_s, copy in self._due if at_s <= self._solo.now]
        self._due = [(at_s, copy) for at_s, copy in self._due if at_s > self._solo.now]
        return here


FOUR = ("me", "p1", "p2", "p3")
OF_FOUR = branch(70, learners=FOUR, seats=FOUR)


@pytest.mark.parametrize(
    ("usurper", "papers"),
    [
        pytest.param("p2", (), id="a-seat"),
        pytest.param("p9", (admission("p9"),), id="an-invited-member-without-a-seat"),
        pytest.param("p9", (), id="a-stranger"),
    ],
)
def test_no_version_is_taken_of_a_member_that_nobody_elected(usurper: str, papers: tuple[Paper, ...]) -> None:
    """p1 holds the office, and we have its certificate. The other votes for itself, and signs the next
    version."""
    settings = config(log_versions=20, term_versions=64, owner=OWNER)
    solo = Solo(settings, (*FOUR[1:], "p9"), restored=saved(OF_FOUR))
    solo.feed(ev.Guided(papers=papers))
    solo.wait(5.0)
    head = OF_FOUR[-1].header.head()
    solo.message("p1", msg.Elected(certificate("p1", FOUR[1:], head.term + 1, head.number, base=head.digest)))
    given(solo.core.confirmed and solo.fragment.office.syncer == "p1", "p1 is not in office")

    term = head.term + 2
    alone = certificate(usurper, (usurper,), term, head.number, base=head.digest)
    version = child(OF_FOUR[-1].header, usurper, (usurper,), term, elected=alone)
    solo.announce(version)
    solo.says[usurper] = {"heads": (version.header.head(),)}
    for _ in range(20):
        effects = solo.wait(0.5)
        for pull in found(effects, ev.FetchUpdate):
            effects += solo.answer(pull, ev.UpdateFetched(version, 900))
        for job in found(effects, ev.ApplyUpdate):
            solo.answer(job, ev.UpdateApplied(version.header.state_digest))
    assert solo.head == head


TEN = ("me", *(f"p{index}" for index in range(1, 10)))
OF_TEN = branch(70, learners=TEN, seats=TEN)
FIVE = ("me", "p1", "p2", "p3", "p9")
OF_FIVE = branch(70, learners=FIVE, seats=FIVE)
FORGED = forged("p9")


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
        solo.fragment.chain.marks.seats == set(TEN if chain is OF_TEN else FIVE),
        "not all of them have a seat",
    )
    return solo


@pytest.mark.parametrize(
    ("here", "liars"),
    [
        pytest.param(("p9",), ("p9",), id="one-of-ten-alone-with-us"),
        pytest.param(("p1", "p2", "p8", "p9"), ("p8", "p9"), id="two-of-five-here"),
        pytest.param(("p1", "p2", "p3", "p8", "p9"), ("p8", "p9"), id="two-of-six-here"),
    ],
)
def test_no_state_of_a_fifth_of_the_seats_is_copied(here: tuple[str, ...], liars: tuple[str, ...]) -> None:
    version = forged("p9", voters=liars)
    solo = awake(here, OF_TEN)
    stands(solo, liars, version)
    assert not States(solo, version, worse=True).given_for(60.0)


def test_one_liar_of_five_and_one_member_that_copied_its_state_convince_no_third() -> None:
    """The other had been alone with the liar. p1 never was."""
    solo = awake(("p2", "p3", "me", "p9"), OF_FIVE, me="p1")
    stands(solo, ("me", "p9"), FORGED)
    assert not States(solo, FORGED, worse=True).given_for(60.0)


@pytest.mark.parametrize(
    "confirmed", [pytest.param(("me", "p9"), id="a-night"), pytest.param(("p9",), id="a-power-cut-of-all")]
)
def test_most_seats_that_return_with_the_true_chain_are_believed_before_a_liar(
    confirmed: tuple[str, ...],
) -> None:
    """All others come back with us. After the night one honest member has copied the liar's state already."""
    solo = Solo(config(log_versions=20), (), restored=saved(OF_TEN), me="p1")
    stands(solo, confirmed, FORGED)
    others = tuple(peer for peer in TEN if peer != "p1")
    for peer in others:
        if peer not in confirmed:
            true = (OF_TEN[-1].header.head(),)
            solo.says[peer] = {"heads": true, "confirmed": False, "saved": True, "learning": False}
    meet(solo, others)
    given(not solo.core.confirmed, "it is confirmed before it has heard anybody")
    assert not States(solo, FORGED, worse=True).given_for(60.0)


OLD = ("me", "q1", *(f"o{index}" for index in range(1, 19)))
OF_TWENTY = branch(70, learners=OLD, seats=OLD)
NEW = tuple(f"s{index}" for index in range(1, 7))
FAR = forged("s1", number=4000, tokens=10**7, voters=NEW)
"""The head of those who are in the run now. It is true, and none of them has a seat by our chain."""


def returns(peers: tuple[str, ...]) -> Solo:
    """We start with the old chain, hear the owner's words that seat the new ones, and meet these."""
    run = config(log_versions=20, quorum=1, owner=OWNER)
    solo = Solo(run, (), restored=saved(OF_TWENTY))
    solo.feed(ev.Guided(papers=tuple(word(peer, number) for number, peer in enumerate(NEW, 1))))
    solo.says |= {peer: {"heads": (FAR.header.head(),)} for peer in NEW}
    old = {"heads": (OF_TWENTY[-1].header.head(),), "confirmed": False, "saved": True, "learning": True}
    solo.says["q1"] = old
    meet(solo, peers)
    solo.learn()
    given(not solo.core.confirmed, "it is confirmed at once")
    return solo


@pytest.mark.parametrize("copy_s", [60.0, 900.0])
@pytest.mark.parametrize("peers", [NEW, (*NEW, "q1")], ids=["one", "two"])
def test_those_that_return_copy_the_runs_state(peers: tuple[str, ...], copy_s: float) -> None:
    """However long the copy takes, and whoever returns beside them."""
    assert States(returns(peers), FAR, copy_s=copy_s).given_for(1600.0)
