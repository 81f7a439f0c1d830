"""A round begins on sight of headers: what that gains, and what headers alone cannot do."""

from __future__ import annotations

from typing import Any

import pytest
from kit import Solo, child, config, contribution, found, reasons, sent
from scenes import syncer

from p2pdiloco.core import chain as scale
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.core.api.versions import PartialHeader, SignedPartial
from p2pdiloco.core.delegate import GroupInbox
from p2pdiloco.core.round import Job

LONG = {"inner_steps": 400, "delay_steps": 200}
"""A window of seconds."""


def header(solo: Solo, learner: str, transfer: int, **odd: Any) -> list[ef.Effect]:
    """It is read and accepted; the payload follows, or not."""
    return solo.feed(ev.Offered(transfer, learner, contribution(learner, solo.head, **odd)))


def here(solo: Solo, transfer: int) -> list[ef.Effect]:
    """Its payload is here."""
    return solo.feed(ev.PayloadReceived(transfer, 100 + transfer))


def cut(solo: Solo, transfer: int) -> list[ef.Effect]:
    """Its payload will not come."""
    return solo.feed(ev.PayloadBroken(transfer, Verdict.CUT))


def called(effects: list[ef.Effect]) -> list[str]:
    """To whom closing calls went."""
    return [send.peer for send in found(effects, ef.Send) if isinstance(send.message, msg.Closing)]


def test_others_are_called_while_the_first_payload_is_on_its_way() -> None:
    """On thin links the round would else take two transfers, one after the other."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), inner_steps=400, delay_steps=200)
    late = contribution("p1", solo.head, due=False)
    assert not sent(solo.feed(ev.Offered(1, "p1", late)), msg.Closing), "nothing to start with"
    effects = solo.feed(ev.Offered(2, "p2", contribution("p2", solo.head)))
    assert [send.peer for send in found(effects, ef.Send) if isinstance(send.message, msg.Closing)] == ["p3"]
    assert solo.fragment.words(solo.now).startswith("closing: 0 of 3")
    assert not found(solo.offer("p3", 3, due=False), ef.Merge)
    assert not found(solo.feed(ev.PayloadReceived(1, 101)), ef.Merge)
    assert len(found(solo.feed(ev.PayloadReceived(2, 102)), ef.Merge)[0].inputs) == 3


def test_a_round_outlives_the_payload_that_it_was_begun_for() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"))
    solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head)))
    solo.feed(ev.PayloadBroken(1, Verdict.CUT))
    assert solo.fragment.words(solo.now).startswith("closing: 0 of 2")
    solo.offer("p2", 2, due=False)
    merge = found(solo.wait(1.0), ef.Merge)[0]
    assert [part.contributor.learner for part in merge.inputs] == ["p2"]
    solo.merged(merge)
    # And where nothing comes at all, the next header begins another one.
    mark = solo.fragment.chain.marks.stamp("p1")
    first = contribution("p1", solo.head, stamp=Stamp(1, 1), after=mark)
    solo.feed(ev.Offered(3, "p1", first))
    solo.feed(ev.PayloadBroken(3, Verdict.CUT))
    solo.message("p2", msg.Pass("all", 0, 1, 2))
    assert not found(solo.wait(60.0), ef.Merge)
    assert solo.fragment.words(solo.now) == ""
    assert len(found(solo.offer("p1", 4, stamp=Stamp(1, 1), after=mark) + solo.wait(1.0), ef.Merge)) == 1


def test_the_quorum_is_what_is_in_when_the_round_closes() -> None:
    solo = syncer(quorum=3, peers=("p1", "p2", "p3", "p4"))
    for number, learner in enumerate(("p1", "p2", "p3"), 1):
        effects = header(solo, learner, number)
    assert called(effects) == ["p4"]
    here(solo, 1)
    cut(solo, 2)
    cut(solo, 3)
    assert not found(solo.wait(60.0), ef.Merge), "one of three is no quorum"
    assert solo.fragment.words(solo.now) == "waiting: 1 of 3 contributions"
    solo.offer("p2", 4)
    assert len(found(solo.offer("p4", 5) + solo.wait(1.0), ef.Merge)[0].inputs) == 3


def test_headers_without_payloads_begin_one_round_and_no_more() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), founders=("me", "f1", "f2"), **LONG)
    assert called(header(solo, "p1", 1)) == ["p2", "p3"]
    cut(solo, 1)
    solo.offer("p2", 2, due=False)
    (merge,) = found(solo.offer("p3", 3, due=False) + solo.wait(60.0), ef.Merge)
    solo.merged(merge)
    solo.wait(20.0)  # half an interval: rounds keep a distance
    for transfer in range(10, 15):
        assert not called(header(solo, "p1", transfer))
        assert not called(cut(solo, transfer))
    header(solo, "p1", 20)
    assert called(here(solo, 20)) == ["p2", "p3"], "whoever sends one that arrives is believed again"
    for number, learner in enumerate(("p2", "p3"), 21):
        mark = solo.fragment.chain.marks.stamp(learner)
        effects = solo.offer(learner, number, stamp=Stamp(1, 2), after=mark, due=False)
    solo.merged(found(effects, ef.Merge)[0])
    solo.wait(20.0)
    solo.take_office()  # p2 and p3 vote now
    mark = solo.fragment.chain.marks.stamp("p1")
    assert called(header(solo, "p1", 30, stamp=Stamp(1, 2), after=mark)) == ["p2", "p3"]


def test_a_header_that_is_too_late_for_a_version_begins_no_round_after_it() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2", "p3"), **LONG)
    header(solo, "p1", 1)
    header(solo, "p2", 2)
    here(solo, 2)
    solo.merged(found(solo.offer("p3", 3, due=False) + solo.wait(60.0), ef.Merge)[0])
    assert solo.head.number == 1
    mark = solo.fragment.chain.marks.stamp("p2")
    assert not called(solo.offer("p2", 4, stamp=Stamp(1, 2), after=mark)), "p1's is of the version before"


def test_the_one_whose_header_began_the_round_is_waited_for_also_when_it_is_not_heard() -> None:
    """Its upload may keep its own heartbeats back."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), **LONG)
    solo.wait(30.0, silent=("p1",))
    assert not solo.core.shared.view.alive("p1", solo.now)
    assert called(header(solo, "p1", 1)) == ["p2", "p3"]
    solo.offer("p2", 2, due=False)
    assert not found(solo.offer("p3", 3, due=False), ef.Merge)
    assert len(found(here(solo, 1), ef.Merge)[0].inputs) == 3


def test_time_to_quorum_begins_with_what_counts_for_it() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2", "p3"))
    header(solo, "p1", 1)
    cut(solo, 1)
    assert solo.fragment.words(solo.now) == ""
    solo.now += 100.0
    for peer in ("p1", "p2", "p3"):
        solo.hear(peer)
    solo.offer("p2", 2)
    solo.now += 0.06
    closing = [r for r in found(header(solo, "p3", 3), ef.Record) if r.kind == "closing"]
    assert reasons(closing, "closing") == ["quorum 2, 1 called"]
    assert dict(closing[0].fields)["grace_s"] > 0, "the slack is 2 x 0.1 s - 0.06 s"


def test_what_arrives_while_the_round_closes_is_in_it() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), **LONG)
    header(solo, "p1", 1)
    header(solo, "p2", 2)
    assert [a.verdict for a in found(here(solo, 2), ef.AnswerTransfer)] == [Verdict.IN_ROUND]
    assert [a.verdict for a in found(here(solo, 1), ef.AnswerTransfer)] == [Verdict.IN_ROUND]
    late = solo.merged(found(solo.offer("p3", 3, due=False), ef.Merge)[0])
    assert not sent(late, msg.Closing)


def test_a_round_that_began_with_what_is_due_is_due_although_that_did_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"), **LONG)
    jobs: list[Job] = []
    monkeypatch.setattr(solo.fragment.round._merger, "begin", lambda job, *_: jobs.append(job))
    header(solo, "p1", 1)
    cut(solo, 1)
    solo.offer("p2", 2, due=False)
    solo.message("p1", msg.Pass("all", 0, 1, 1))
    assert [(job.due, len(job.held)) for job in jobs] == [(True, 1)]


def test_a_header_from_before_a_version_that_is_not_ours_begins_nothing() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2", "p3"), **LONG)
    header(solo, "p1", 1)
    parts = (Contributor("p3", Stamp(1, 1), 40, 4),)
    chain, run = solo.fragment.chain, solo.core.shared.config
    usual = {"unit": scale.scale_after(chain, parts, run).unit, "limits": scale.limits_after(chain, run)}
    solo.announce(child(chain.header, "p3", ("p3",), term=2, **usual))
    assert solo.head.number == 1 and solo.fragment.office.holding
    assert not called(solo.offer("p2", 2)), "one is in for the new version"


def test_a_call_that_overtakes_the_version_with_our_last_work_is_answered_when_that_is_here() -> None:
    solo = Solo(config(), ("p1", "p2"))
    solo.learn()
    solo.elect("p1")
    (offer,) = found(solo.ready(ticket=1), ef.Offer)
    mine = offer.signed.header
    early = msg.Closing("all", 0, 1, 2, 5.0)
    assert not found(solo.message("p1", early), ef.RequestFragment), "for all we know it is answered already"
    merged = child(solo.fragment.chain.header, "p1", ("p2", "me"))
    assert mine.stamp in {part.stamp for part in merged.header.contributors if part.learner == "me"}
    assert found(solo.announce(merged), ef.RequestFragment) == [ef.RequestFragment(0)]
    assert not found(solo.announce(child(merged.header, "p1", ("p2",))), ef.RequestFragment), "once"


def test_groups_above_the_leaves_begin_with_payloads_only() -> None:
    solo = Solo(config(), ("p1", "p2"))
    inbox = GroupInbox(solo.fragment.context, solo.fragment.round._electorate)
    signed = contribution("p1", solo.head)
    done = signed.header
    header = PartialHeader(
        run=done.run,
        group="leaf",
        fragment=0,
        syncer="p1",
        number=solo.head.number,
        digest=solo.head.digest,
        parts=(signed.contributor(),),
        due=True,
        payload_digest=done.payload_digest,
        payload_bytes=100,
    )
    held = inbox.add(SignedPartial(header, b""), 1, in_time=True, now=solo.now)
    assert held.starts_round and not inbox.starting()
