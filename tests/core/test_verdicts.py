"""Every word on an offer: how it comes about, and what a learner and a group do that hear it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kit import Solo, child, config, found, reasons
from refusal_rows import ELSEWHERE, GROUP, LEAF, PAYLOAD, Below, Effects, too_many, unsound, verdicts

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Suspicion, Then, Verdict

PEERS = ("p1", "p2", "p3", "p4")

# --- offers: how each verdict comes about ------------------------------------------------------------

BOTH = [(v, row) for table in (LEAF, GROUP) for v, rows in table.items() for row in rows]


@pytest.mark.parametrize(("verdict", "row"), BOTH, ids=lambda value: getattr(value, "name", ""))
def test_how_a_verdict_comes_about(verdict: Verdict, row: Callable[[], Effects]) -> None:
    effects = row()
    assert verdicts(effects) == [verdict]
    assert reasons(effects, "refusal") == [str(verdict)] * verdict.counted


@pytest.mark.parametrize("verdict", PAYLOAD)
def test_a_payload_that_is_not_as_promised(verdict: Verdict) -> None:
    assert reasons(unsound(verdict)(), "refusal") == [str(verdict)] * verdict.counted


def test_a_partial_of_more_contributions_than_a_header_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(too_many(monkeypatch.setattr)) == [Verdict.FULL]


def test_no_verdict_is_without_a_row() -> None:
    assert {*LEAF, *GROUP, *PAYLOAD, *ELSEWHERE} == set(Verdict)


# --- offers: what the sender does --------------------------------------------------------------------


@pytest.mark.parametrize("verdict", Verdict)
def test_what_a_learner_does_after_a_verdict(verdict: Verdict) -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.announce(child(solo.fragment.chain.header, "p1", ("p2",)))
    effects = solo.feed(ev.OfferAnswered(offer, verdict, solo.head))
    at_once = found(effects, ef.Offer)
    effects += solo.wait(1.0)
    again = found(effects, ef.Offer)
    assert not at_once, "never without a pause"
    refused = not verdict.taken
    assert reasons(effects, "contribution")[:refused] == [f"refused: {verdict}"] * refused
    match verdict.then:
        case Then.WAIT | Then.WAIT_LONGER:
            assert not again and not reasons(effects, "contribution")
        case Then.GIVE_UP:
            assert found(effects, ef.RetireSlot) and not again
            assert reasons(effects, "contribution")[-1] == f"given up: {verdict}"
        case _:
            bases = {other.signed.header.base_number for other in again}  # type: ignore[union-attr]
            assert bases == {1 if verdict.then is Then.RELABEL else 0}
            assert not reasons(effects, "suspicion"), "the first time"


@pytest.mark.parametrize("verdict", [v for v in Verdict if v.then in (Then.RETRY, Then.DOUBT)])
def test_what_a_learner_does_after_the_same_verdict_for_the_second_time(verdict: Verdict) -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    effects = solo.ready()
    for _ in range(2):
        effects = solo.feed(ev.OfferAnswered(found(effects, ef.Offer)[0], verdict, None)) + solo.wait(1.0)
    doubts = [str(Suspicion.NOT_IN_OFFICE)] * (verdict.then is Then.DOUBT)
    assert reasons(effects, "suspicion") == doubts


def test_who_is_held_over_is_more_patient() -> None:
    waited = {}
    for verdict in (Verdict.IN_ROUND, Verdict.HELD):
        solo = Solo(config(quorum=1), peers=PEERS)
        solo.learn()
        solo.elect("p1")
        solo.feed(ev.OfferAnswered(found(solo.ready(), ef.Offer)[0], verdict, None))
        since_s = solo.now
        while not reasons(solo.wait(0.5), "suspicion"):
            pass
        waited[verdict] = solo.now - since_s
    assert waited[Verdict.HELD] > waited[Verdict.IN_ROUND] + solo.config.timing.hold_floor_s - 0.6


@pytest.mark.parametrize("verdict", Verdict)
def test_what_a_group_does_after_a_verdict_on_its_partial(verdict: Verdict) -> None:
    below = Below()
    below.answer(verdict)
    again = below.again(0.5)
    if verdict.taken:
        assert not again
        return
    assert f"refused: {verdict}" in below.recorded("partial")
    assert again and again[0].attempt == below.offer.attempt, "whatever is wrong with it: it is all there is"
    assert not below.recorded("suspicion")
    below.answer(verdict, again[-1])
    below.again(0.5)
    assert below.recorded("suspicion") == [str(Suspicion.NOT_IN_OFFICE)] * (verdict.then is Then.DOUBT)
