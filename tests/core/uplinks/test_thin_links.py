"""Payloads that take longer than a grace window: a syncer does not merge alone, and learners are patient."""

from __future__ import annotations

from kit import Solo, announce, branch, child, config, contribution, found, reasons

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import Head

LEARNERS = ("p1", "p2", "p3", "p4")


def waiting() -> Solo:
    """We are the syncer; of four learners one is in, one never answers, two payloads are on their way, and
    the grace window has just ended."""
    solo = Solo(config(quorum=1, grace_cap_s=0.1), LEARNERS)
    solo.take_office()
    for transfer, learner in ((8, "p2"), (9, "p3")):
        solo.feed(ev.Offered(transfer, learner, contribution(learner, solo.head)))
    solo.offer("p1", 1)
    effects = solo.wait(0.2)
    assert reasons(effects, "closing")[-1:] == ["1 in, waits for 2 on their way"], effects
    assert solo.fragment.words(solo.now) == "closing: 1 of 4 learners, others are on their way"
    return solo


def merged(effects: list[ef.Effect]) -> list[list[str]]:
    return [[part.contributor.learner for part in merge.inputs] for merge in found(effects, ef.Merge)]


def test_a_round_waits_for_payloads_on_their_way_until_a_majority_is_in() -> None:
    solo = waiting()
    assert not merged(solo.wait(2.0)), "long after the window"
    assert not merged(solo.feed(ev.PayloadReceived(8, 108))), "two of four are no majority"
    assert merged(solo.feed(ev.PayloadReceived(9, 109))) == [["p1", "p2", "p3"]], "p4 sent nothing"


def test_nobody_is_waited_for_whose_stream_was_cut() -> None:
    solo = waiting()
    solo.feed(ev.PayloadBroken(8, Verdict.CUT))
    assert not merged(solo.wait(1.0))
    solo.feed(ev.PayloadBroken(9, Verdict.CUT))
    assert merged(solo.wait(0.6)) == [["p1"]], "the next heartbeat's look"


def test_a_round_waits_no_longer_than_those_that_are_in() -> None:
    # p1's payload came at once: it is patient for five seconds, and a version takes some time too.
    assert merged(waiting().wait(4.5)) == [["p1"]]


def test_a_majority_waits_for_nobody() -> None:
    solo = Solo(config(quorum=1, grace_cap_s=0.1), ("p1", "p2", "p3"))
    solo.take_office()
    solo.feed(ev.Offered(9, "p3", contribution("p3", solo.head)))
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert merged(solo.wait(0.2)) == [["p1", "p2"]]


def test_who_needed_long_to_send_is_as_patient_with_the_others() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.wait(20.0)
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    assert not reasons(solo.wait(75.0), "suspicion"), "four times the 20 s"
    assert reasons(solo.wait(15.0), "suspicion")


def test_a_syncer_is_not_slow_while_its_versions_are_on_their_way() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    version = child(solo.fragment.chain.header, "p1", ("p1",))
    assert found(solo.message("p1", announce(version)), ef.FetchUpdate)
    assert not reasons(solo.wait(60.0), "suspicion"), "the update's way is slow, not the syncer"
    solo.feed(ev.FetchFailed(0, 1, "p1", FetchFailure.NOT_READY))
    assert reasons(solo.wait(10.0), "suspicion"), "it has no such version"


def denied(solo: Solo, head: Head) -> list[str]:
    """Why we suspect the syncer p1, which turns our contribution away for 5 s, and whose head this is."""
    offers, seen = found(solo.ready(), ef.Offer), []
    for _ in range(10):
        for offer in offers:
            seen += solo.feed(ev.OfferAnswered(offer, Verdict.NOT_SYNCER, head))
        effects = solo.wait(0.5)
        offers, seen = found(effects, ef.Offer), seen + effects
    return reasons(seen, "suspicion")


def test_a_syncer_whose_term_is_over_is_not_suspected_while_its_last_version_is_on_its_way_to_us() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    last = branch(solo.config.term_versions)[-1].header.head()
    assert not denied(solo, last)
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    assert denied(solo, solo.head), "in the middle of its term it gave up"
