"""Thin uplinks: members say how far theirs falls short, and leave the offices to those that carry them."""

from __future__ import annotations

import math
from collections import Counter

from kit import STEP_S, Solo, child, config, contribution, found, reasons, sent, vote

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.effects import Effect, Merge
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import Head, Stamp
from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.timing import ARRIVAL_INTERVALS
from p2pdiloco.core.uplinks.uplink import KEEP_S, MUCH, Strain, asked_bits_per_s, weights

PEERS = ("p1", "p2", "p3", "p4")
ASKED = asked_bits_per_s(config(), STEP_S)


def strained(solo: Solo, **strains: int) -> None:
    for peer, strain in strains.items():
        solo.says[peer] = {"strain": strain}
        solo.hear(peer)


def measured(solo: Solo, bits_per_s: float) -> list[Effect]:
    return solo.feed(ev.UplinkMeasured(bits_per_s)) + solo.wait(0.55)


def said(effects: list[Effect]) -> list[int]:
    return [heartbeat.strain for heartbeat in sent(effects, msg.Progress)]


def firsts(strains: dict[str, int]) -> Counter[str]:
    return Counter(ranking("run", "all", 0, term, weights(strains.items()))[0] for term in range(2000))


def test_equal_uplinks_rank_as_if_nothing_were_known() -> None:
    even = dict.fromkeys(PEERS, 1.0)
    for strain in (0, 1, 5, 24):
        odds = weights((peer, strain) for peer in PEERS)
        for term in range(100):
            assert ranking("run", "all", 3, term, odds) == ranking("run", "all", 3, term, even)


def test_half_an_uplink_has_a_quarter_of_the_terms() -> None:
    terms = firsts({"p1": 0, "p2": 1, "p3": 0, "p4": 2})
    assert 3 * terms["p2"] < terms["p1"] < 6 * terms["p2"]
    assert 3 * terms["p4"] < terms["p2"] < 6 * terms["p4"]


def test_what_is_said_of_an_uplink_changes_rarely() -> None:
    strain, now = Strain(), 1000.0
    assert not strain.look(ASKED, now), "nothing is known"
    for bits_per_s, until in ((ASKED * 100, 0), (ASKED / 1.3, 0), (ASKED / 3.9, 2), (ASKED / 1.5, 2)):
        strain.bits_per_s = bits_per_s
        now += KEEP_S
        strain.look(ASKED, now)
        assert strain.value == until, "half a class beyond the border"
    strain.bits_per_s = ASKED / 100
    now += KEEP_S
    assert strain.look(ASKED, now) and strain.value == 7
    strain.bits_per_s = math.inf
    assert not strain.look(ASKED, now + KEEP_S / 2), "it has just changed"
    assert strain.look(ASKED, now + KEEP_S) and strain.value == 0


def test_a_node_says_what_its_uplink_lacks() -> None:
    solo = Solo(peers=PEERS)
    assert said(solo.greeting)[-1] == 0
    effects = measured(solo, ASKED / 6)
    assert said(effects)[-1] == 3
    assert reasons(effects, "uplink") == ["offices ask for up to 8 times what it carries"]
    assert not reasons(measured(solo, ASKED), "uplink"), "for a while"
    assert said(solo.wait(KEEP_S + 2))[-1] == 0, "looked at again by itself"


def test_the_rank_of_far_thinner_uplinks_is_not_waited_for() -> None:
    solo = Solo(peers=PEERS)
    ranks = solo.fragment.office._ranks
    assert {ranks.ours(term, solo.now) for term in range(40)} == {0, 1, 2, 3, 4}
    strained(solo, p1=MUCH, p2=MUCH + 4, p3=MUCH)
    assert {ranks.ours(term, solo.now) for term in range(40)} == {0, 1}
    assert not ranks.passed_over(solo.now)
    measured(solo, ASKED / 2**MUCH / 1.9)
    assert ranks.passed_over(solo.now), "p4 is there"
    strained(solo, p4=1 + MUCH)
    assert not ranks.passed_over(solo.now), "no better than we"
    strained(solo, p4=MUCH - 1)
    solo.wait(KEEP_S)
    assert not ranks.passed_over(solo.now), "better, but not by far"


def test_a_syncer_with_a_far_thinner_uplink_gives_way_after_a_version() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1", term=1)
    office = solo.fragment.office
    strained(solo, p1=MUCH)
    solo.wait(20.0)
    assert not office.why_open(solo.now), "what is on its way to it is not to be sent again"
    version = child(solo.fragment.chain.header, "p1", ("p1",))
    refused = sent(solo.message("p2", msg.VoteRequest("all", 0, 2, solo.head, "why")), msg.VoteRefused)
    assert refused[0].reason is VoteRefusal.COUNTED_ON
    granted = solo.message("p2", msg.VoteRequest("all", 0, 3, version.header.head(), "it gives way"))
    assert sent(granted, msg.VoteGranted), "who has that version may be elected, also by those who do not"
    solo.message("p2", msg.Elected(certificate_of("p2", term=3, start=1)))
    assert office.syncer == "p2"


def certificate_of(syncer: str, term: int, start: int) -> msg.Certificate:
    votes = tuple(vote(voter, syncer, term) for voter in (*PEERS, "me"))
    return msg.Certificate("all", 0, term, syncer, start, votes)


def test_we_lay_an_office_down_for_a_far_better_uplink_once_a_version_is_made() -> None:
    solo = Solo(config(quorum=1), PEERS)
    solo.take_office()
    measured(solo, ASKED / 2**MUCH / 1.9)
    solo.wait(10.0)
    assert solo.fragment.office.holding, "nothing was made yet"
    merge = found(solo.offer("p1", 1) + solo.wait(20.0), Merge)[0]
    laid_down = reasons(solo.merged(merge) + solo.wait(1.0), "office")
    assert laid_down == ["laid down: this node has a far thinner uplink than others"]


def strained_syncer() -> tuple[Solo, Head]:
    """It has made version 1, which nobody else holds: and the version before it."""
    solo = Solo(config(quorum=1), PEERS)
    solo.take_office()
    before = solo.head
    solo.merged(found(solo.offer("p1", 1) + solo.wait(20.0), Merge)[0])
    measured(solo, ASKED / 3)
    for peer in PEERS:
        solo.hear(peer, heads=(before,))
    return solo, before


def test_a_strained_syncer_does_not_outrun_the_others_by_merging_alone() -> None:
    solo = Solo(config(quorum=1), PEERS)
    solo.take_office()
    before = solo.heads()
    solo.merged(found(solo.offer("p1", 1) + solo.wait(20.0), Merge)[0])
    calls, chain = solo.fragment.round._calls, solo.fragment.chain
    assert chain.head.number == 1 and not calls.outruns(chain, (), solo.now), "its uplink suffices"
    measured(solo, ASKED / 3)
    for peer in PEERS:
        solo.hear(peer, heads=before)
    calls.called((), 2, solo.now)
    assert calls.outruns(chain, (), solo.now), "nobody has version 1"
    bound_s = ARRIVAL_INTERVALS * config().inner_steps * STEP_S
    assert not calls.outruns(chain, (), solo.now + bound_s), "it waits no longer, whatever is in"
    solo.hear("p2", heads=solo.heads())
    assert not calls.outruns(chain, (), solo.now)


def test_nor_with_one_of_them_that_is_behind_too() -> None:
    solo, old = strained_syncer()
    more = contribution("p1", old, stamp=Stamp(1, 2), after=Stamp(1, 1))
    solo.feed(ev.Offered(2, "p1", more))
    solo.feed(ev.PayloadReceived(2, 102))
    calls, chain, ready = solo.fragment.round._calls, solo.fragment.chain, solo.fragment.round.inbox.ready()
    assert [held.child for held in ready] == ["p1"]
    assert calls.outruns(chain, ready, solo.now), "its work is measured against version 0"
    solo.hear("p2", heads=solo.heads())
    assert not calls.outruns(chain, ready, solo.now)


def test_who_contributes_upon_the_last_version_has_it_whatever_its_heartbeat_said() -> None:
    solo, _ = strained_syncer()
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
    strained(solo, p1=MUCH, p2=MUCH, p3=0, p4=0)
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


def test_a_strained_syncer_waits_for_nobody_who_is_leaving_nor_when_it_leaves_itself() -> None:
    solo, old = strained_syncer()
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
        strained(solo, **{peer: MUCH})
    measured(solo, ASKED / 2**MUCH / 1.9)
    solo.says["p1"] = {"heads": before}
    solo.merged(found(solo.offer("p2", 1) + solo.wait(20.0), Merge)[0])
    solo.wait(3.0)
    assert solo.head.number == 1 and solo.fragment.office.holding, "p1 could not be elected yet"
    del solo.says["p1"]
    assert reasons(solo.wait(1.0), "office") == ["laid down: this node has a far thinner uplink than others"]
