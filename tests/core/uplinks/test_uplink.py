"""Thin uplinks: members say how far theirs falls short, and leave the offices to those that carry them."""

from __future__ import annotations

import math

import pytest
from kit import STEP_S, Solo, child, config, contribution, found, reasons, sent, vote
from metered_way import MeteredWay

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.events import Effect, Merge
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.api.types import Head, Reach, Stamp
from p2pdiloco.core.base import WAITED_INTERVALS
from p2pdiloco.core.capacity import (
    LEAST_BYTES,
    LEAST_S,
    LEAST_SAMPLES,
    LONG_S,
    MARGIN,
    SAMPLES,
    OwnUplink,
    asked_bits_per_s,
)

PEERS = ("p1", "p2", "p3", "p4")
ASKED = asked_bits_per_s(config(), STEP_S)


def thin(solo: Solo, *peers: str, **words: bool) -> None:
    """These say that their uplinks are thin (or not: by name)."""
    for peer, is_thin in (dict.fromkeys(peers, True) | words).items():
        solo.says[peer] = {"thin": is_thin}
        solo.hear(peer)


def said(effects: list[Effect]) -> list[bool]:
    return [heartbeat.thin for heartbeat in sent(effects, msg.Progress)]


def measured(solo: Solo, bits_per_s: float) -> list[Effect]:
    return solo.feed(ev.UplinkMeasured(bits_per_s)) + solo.wait(0.55)


def test_what_is_said_of_an_uplink_changes_rarely() -> None:
    uplink = OwnUplink()
    assert not uplink.look(ASKED), "nothing is known"
    for share, until in ((100, False), (1.05 / MARGIN, False), (0.95 / MARGIN, True), (0.95 * MARGIN, True)):
        uplink.bits_per_s = ASKED * share
        uplink.look(ASKED)
        assert uplink.thin is until, "what was measured must lie far enough beyond"
    uplink.bits_per_s = math.inf
    assert uplink.look(ASKED) and not uplink.thin
    uplink.bits_per_s = ASKED / 100
    assert uplink.look(ASKED) and uplink.thin
    assert uplink.look(0.0) and not uplink.thin, "nobody knows what is asked"


def test_a_node_says_that_its_uplink_is_thin() -> None:
    solo = Solo(peers=PEERS)
    assert said(solo.greeting)[-1] is False
    effects = measured(solo, ASKED / 2)
    assert said(effects)[-1] is True
    assert reasons(effects, "uplink") == ["offices ask for more than it carries"]
    assert said(measured(solo, 2 * ASKED))[-1] is False


def test_the_rank_of_thin_uplinks_is_not_waited_for() -> None:
    solo = Solo(peers=PEERS)
    candidates = solo.fragment.office._candidates
    assert {candidates.our_rank(term, solo.now) for term in range(40)} == {0, 1, 2, 3, 4}
    thin(solo, "p1", "p2", "p3")
    assert {candidates.our_rank(term, solo.now) for term in range(40)} == {0, 1}
    assert not candidates.passed_over(solo.now)
    measured(solo, ASKED / 2)
    assert candidates.passed_over(solo.now), "p4 is there"
    thin(solo, "p4")
    assert not candidates.passed_over(solo.now), "no better than we"
    assert {candidates.our_rank(term, solo.now) for term in range(40)} == {0, 1, 2, 3, 4}
    solo.says["p4"] = {"reach": Reach.OUTBOUND}
    solo.hear("p4")
    assert not candidates.passed_over(solo.now), "a thin uplink is better than none that can be dialled"


def test_a_syncer_with_a_thin_uplink_gives_way_after_a_version() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1", term=1)
    office = solo.fragment.office
    thin(solo, "p1")
    solo.wait(20.0)
    assert not office.why_open(solo.now), "what is on its way to it is not to be sent again"
    version = child(solo.fragment.chain.header, "p1", ("p1",))
    refused = sent(solo.message("p2", msg.VoteRequest("all", 0, 2, solo.head, "why")), msg.VoteRefused)
    assert refused[0].reason is VoteRefusal.COUNTED_ON
    request = msg.VoteRequest("all", 0, 3, version.header.head(), "it gives way")
    assert sent(solo.message("p2", request), msg.VoteRefused)[0].reason is VoteRefusal.NOT_PROVEN
    solo.hear("p1", heads=(version.header.head(),))
    granted = solo.message("p2", request)
    assert sent(granted, msg.VoteGranted), "who has that version may be elected, also by those who do not"
    solo.message("p2", msg.Elected(certificate_of("p2", term=3, start=1)))
    assert office.syncer == "p2"


def certificate_of(syncer: str, term: int, start: int) -> msg.Certificate:
    votes = tuple(vote(voter, syncer, term, number=start) for voter in (*PEERS, "me"))
    return msg.Certificate("all", 0, term, syncer, votes)


def test_we_lay_an_office_down_for_a_better_uplink_once_a_version_is_made() -> None:
    solo = Solo(config(quorum=1), PEERS)
    solo.take_office()
    measured(solo, ASKED / 2)
    solo.wait(10.0)
    assert solo.fragment.office.holding, "nothing was made yet"
    merge = found(solo.offer("p1", 1) + solo.wait(20.0), Merge)[0]
    laid_down = reasons(solo.merged(merge) + solo.wait(1.0), "office")
    assert laid_down == ["laid down: this node has a thin uplink, and others have none"]


def thin_syncer() -> tuple[Solo, Head]:
    """It has made version 1, which nobody else holds: and the version before it. All have thin uplinks."""
    solo = Solo(config(quorum=1), PEERS)
    thin(solo, *PEERS)
    solo.take_office()
    before = solo.head
    solo.merged(found(solo.offer("p1", 1) + solo.wait(20.0), Merge)[0])
    measured(solo, ASKED / 2)
    for peer in PEERS:
        solo.hear(peer, heads=(before,))
    return solo, before


def test_a_syncer_does_not_outrun_the_others_by_merging_alone() -> None:
    solo = Solo(config(quorum=1), PEERS)
    solo.take_office()
    before = solo.heads()
    solo.merged(found(solo.offer("p1", 1) + solo.wait(20.0), Merge)[0])
    calls, chain = solo.fragment.round._calls, solo.fragment.chain
    assert chain.head.number == 1 and not calls.outruns(chain, (), solo.now), "nobody said what it has"
    for peer in PEERS:
        solo.hear(peer, heads=before)
    calls.called((), 2, solo.now)
    assert calls.outruns(chain, (), solo.now), "nobody has version 1"
    bound_s = WAITED_INTERVALS * config().inner_steps * STEP_S
    assert not calls.outruns(chain, (), solo.now + bound_s), "it waits no longer, whatever is in"
    solo.hear("p2", heads=solo.heads())
    assert not calls.outruns(chain, (), solo.now)


def test_nor_with_one_of_them_that_is_behind_too() -> None:
    solo, old = thin_syncer()
    more = contribution("p1", old, stamp=Stamp(1, 2), after=Stamp(1, 1))
    solo.feed(ev.Offered(2, "p1", more))
    solo.feed(ev.PayloadReceived(2, 102))
    calls, chain, ready = solo.fragment.round._calls, solo.fragment.chain, solo.fragment.round.inbox.ready()
    assert [held.child for held in ready] == ["p1"]
    assert calls.outruns(chain, ready, solo.now), "its work is measured against version 0"
    solo.hear("p2", heads=solo.heads())
    assert not calls.outruns(chain, ready, solo.now)


def test_who_contributes_upon_the_last_version_has_it_whatever_its_heartbeat_said() -> None:
    solo, _ = thin_syncer()
    solo.offer("p1", 2, stamp=Stamp(1, 2), after=Stamp(1, 1))
    calls, chain, ready = solo.fragment.round._calls, solo.fragment.chain, solo.fragment.round.inbox.ready()
    assert [held.based_on for held in ready] == [1]
    assert not calls.outruns(chain, ready, solo.now)


def asks(solo: Solo, candidate: str, term: int) -> list[str]:
    """Our answer to a candidate whose chain is as long as ours: why we refuse; empty: it has our vote."""
    request = msg.VoteRequest("all", 0, term, solo.head, "why")
    refused = sent(solo.message(candidate, request), msg.VoteRefused)
    return [str(answer.reason) for answer in refused]


def test_who_gives_way_does_so_to_one_of_the_better_ones_until_it_has_laid_the_office_down() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1", term=1)
    solo.announce(child(solo.fragment.chain.header, "p1", ("p1",)))
    thin(solo, "p1", "p2", p3=False, p4=False)
    solo.says["p4"]["stands"] = False
    solo.says["p1"]["offices"] = (("all", 0, 1),)
    solo.hear("p1")
    solo.hear("p4")
    assert asks(solo, "p2", 2) == ["the syncer in office is alive"], "no better than the holder"
    assert asks(solo, "p4", 3) == ["the syncer in office is alive"], "it is leaving"
    solo.says["p3"]["stands"] = False
    solo.hear("p3")
    assert asks(solo, "p3", 4) == ["the syncer in office is alive"], (
        "nobody is left to whom it would give way"
    )
    solo.says["p3"]["stands"] = True
    solo.hear("p3")
    assert not asks(solo, "p3", 5)
    solo.hear("p1", offices=())
    assert not asks(solo, "p2", 6), "it has laid it down: whoever comes first"


def test_a_syncer_waits_for_nobody_who_is_leaving_nor_when_it_leaves_itself() -> None:
    solo, old = thin_syncer()
    before = (old,)
    calls, chain = solo.fragment.round._calls, solo.fragment.chain
    calls.called((), 2, solo.now)
    assert calls.outruns(chain, (), solo.now)
    solo.core.shared.leaving = True
    assert not calls.outruns(chain, (), solo.now)
    solo.core.shared.leaving = False
    for peer in PEERS:
        solo.hear(peer, heads=before, stands=False)
    assert not calls.outruns(chain, (), solo.now)


def test_a_thin_syncer_goes_on_until_one_of_the_better_ones_has_what_it_made() -> None:
    solo = Solo(config(quorum=1), PEERS)
    solo.take_office()
    before = solo.heads()
    for peer in PEERS[1:]:
        thin(solo, peer)
    measured(solo, ASKED / 2)
    solo.says["p1"] = {"heads": before}
    solo.merged(found(solo.offer("p2", 1) + solo.wait(20.0), Merge)[0])
    solo.wait(3.0)
    assert solo.head.number == 1 and solo.fragment.office.holding, "p1 could not be elected yet"
    del solo.says["p1"]
    assert reasons(solo.wait(1.0), "office") == [
        "laid down: this node has a thin uplink, and others have none"
    ]


# A link's rate is known from transfers that are long enough, and from an earlier life.

OVERHEAD = 1.0625


def test_the_meter_wants_long_transfers_and_takes_the_best_of_the_latest() -> None:
    up = MeteredWay(OVERHEAD)
    assert up.meter.bits_per_s == math.inf
    up.move(LEAST_BYTES - 1, 100.0)
    assert up.meter.bits_per_s == math.inf
    for took_s in (4.0, 1.0, 2.0) * (LEAST_SAMPLES // 3):
        up.now_s += 50.0  # idle time is not the link's
        up.move(LEAST_BYTES, took_s)
    assert up.meter.bits_per_s == 8 * OVERHEAD * LEAST_BYTES
    for _ in range(SAMPLES):
        up.move(LEAST_BYTES, 2.0)
    assert up.meter.bits_per_s == 4 * OVERHEAD * LEAST_BYTES


def test_transfers_that_overlap_count_together_and_a_link_that_is_never_idle_too() -> None:
    up = MeteredWay(OVERHEAD)
    for _ in range(LEAST_SAMPLES):
        assert up.meter.bits_per_s == math.inf
        with up.meter.moving():
            up.move(LEAST_BYTES, 1.0)
            assert up.meter.bits_per_s == math.inf  # what is under way has its share of that second
            up.bytes += LEAST_BYTES
    assert up.meter.bits_per_s == 16 * OVERHEAD * LEAST_BYTES
    with up.meter.moving():
        for _ in range(SAMPLES):
            up.move(LEAST_BYTES, LONG_S)
        assert up.meter.bits_per_s == pytest.approx(8 * OVERHEAD * LEAST_BYTES / LONG_S)


def test_an_uplink_is_what_the_better_of_its_meters_has_measured_and_else_what_is_remembered() -> None:
    up = MeteredWay(OVERHEAD, remembered=1e5)
    assert up.uplink.measured_bits_per_s == math.inf and up.uplink.bits_per_s == 1e5
    up.move(2 * LEAST_BYTES, LEAST_S, up.uplink.given)
    given = 16 * OVERHEAD * LEAST_BYTES / LEAST_S
    up.move(LEAST_BYTES, LEAST_S)  # held up elsewhere
    assert up.uplink.bits_per_s == up.uplink.measured_bits_per_s == given
    assert up.uplink.sure_bits_per_s == math.inf
    for _ in range(LEAST_SAMPLES):
        up.move(LEAST_BYTES, LEAST_S)
    assert up.uplink.sure_bits_per_s == given


# Payloads that take longer than a grace window: a syncer does not merge alone, and learners are patient.

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


def merged(effects: list[ev.Effect]) -> list[list[str]]:
    return [[part.contributor.learner for part in merge.inputs] for merge in found(effects, ev.Merge)]


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
    offer = found(solo.ready(), ev.Offer)[0]
    solo.wait(20.0)
    solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
    assert not reasons(solo.wait(75.0), "suspicion"), "four times the 20 s"
    assert reasons(solo.wait(15.0), "suspicion")


def denied(solo: Solo, head: Head) -> list[str]:
    """Why we suspect the syncer p1, which turns our contribution away for 5 s, and whose head this is."""
    offers, seen = found(solo.ready(), ev.Offer), []
    for _ in range(10):
        for offer in offers:
            seen += solo.answer(offer, ev.OfferAnswered(Verdict.NOT_SYNCER, head))
        effects = solo.wait(0.5)
        offers, seen = found(effects, ev.Offer), seen + effects
    return reasons(seen, "suspicion")
