"""What a syncer takes in, and what it refuses on sight."""

from __future__ import annotations

from typing import Any

import pytest
from kit import Solo, child, contribution, found, reasons
from scenes import one_round, syncer

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NEVER, Stamp
from p2pdiloco.core.syncer import MAX_NOTED, ROOM


def test_an_old_base_starts_no_round_but_is_merged() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    old = solo.head
    one_round(solo, "p1")
    signed = contribution("p2", old)
    solo.feed(ev.Offered(9, "p2", signed))
    assert not reasons(solo.feed(ev.PayloadReceived(9, 109)), "closing")
    effects = solo.offer("p3", 10) + solo.wait(0.5)
    assert [p.contributor.learner for p in found(effects, ef.Merge)[0].inputs] == ["p2", "p3"]


@pytest.mark.parametrize(
    ("reason", "odd"),
    [
        ("bad-signature", {"tokens": 30}),
        ("wrong-codec", {"codec": "fp8"}),
        ("wrong-size", {"payload_bytes": 1001}),
        ("wrong-size", {"payload_bytes": 0}),
        ("implausible-tokens", {"tokens": 41}),
        ("implausible-tokens", {"tokens": 0}),
        ("implausible-tokens", {"tokens": 1 << 60, "inner_steps": 1 << 58}),
        ("implausible-tokens", {"inner_steps": 1 << 40}),
        ("implausible-tokens", {"inner_steps": 1, "tokens": 1 << 32, "tokens_per_step": 1 << 32}),
        ("implausible-tokens", {"inner_steps": 1 << 32, "tokens": 1 << 48, "tokens_per_step": 1 << 16}),
        ("other-run", {"run": "other"}),
        ("unknown-fragment", {"fragment": 7}),
        ("unknown-fragment", {"group": "half"}),
        ("behind", {"base_number": 1}),
        ("unknown-base", {"base_digest": bytes(32)}),
        ("behind", {"after": Stamp(1, 1), "stamp": Stamp(1, 2)}),
        ("already-merged", {"stamp": NEVER}),
    ],
)
def test_what_is_refused_on_sight_of_the_header(reason: str, odd: dict[str, Any]) -> None:
    odd = dict(odd)
    run = {"tokens_per_step": odd.pop("tokens_per_step")} if "tokens_per_step" in odd else {}
    solo = syncer(**run)
    signed = contribution("p1", solo.head, **odd)
    if reason == "bad-signature":
        signed = type(signed)(signed.header, contribution("p1", solo.head).signature)
    effects = solo.feed(ev.Offered(1, "p1", signed))
    refusal = found(effects, ef.AnswerTransfer)[0]
    assert refusal.verdict.value == reason and not found(effects, ef.AcceptTransfer)
    fault = reason not in ("behind", "unknown-base", "already-merged")
    assert refusal.verdict.counted == fault and (reasons(effects, "refusal") == [reason]) == fault


def test_nobody_contributes_in_anothers_name() -> None:
    solo = syncer()
    effects = solo.feed(ev.Offered(1, "p1", contribution("p2", solo.head)))
    assert [r.verdict for r in found(effects, ef.AnswerTransfer)] == [Verdict.FALSE_LEARNER]


def test_a_contribution_is_admitted_once() -> None:
    solo = syncer()
    first = contribution("p1", solo.head)
    assert found(solo.feed(ev.Offered(1, "p1", first)), ef.AcceptTransfer)
    again = found(solo.feed(ev.Offered(2, "p1", first)), ef.AnswerTransfer)[0]
    assert again.verdict is Verdict.IN_TRANSFER
    solo.feed(ev.PayloadReceived(1, 101))
    again = found(solo.feed(ev.Offered(3, "p1", first)), ef.AnswerTransfer)[0]
    assert again.verdict is Verdict.ALREADY_HELD
    solo.merged(found(solo.offer("p2", 4), ef.Merge)[0])
    again = found(solo.feed(ev.Offered(5, "p1", first)), ef.AnswerTransfer)[0]
    assert again.verdict is Verdict.ALREADY_MERGED


def test_a_base_too_old_is_refused_and_the_learner_labels_it_anew() -> None:
    solo = syncer(quorum=1, max_base_age_versions=0)
    old = solo.head
    one_round(solo, "p1", "p2", number=1)
    assert solo.head.number == 1
    stamp, after = Stamp(1, 2), solo.fragment.chain.marks.stamp("p1")
    signed = contribution("p1", old, stamp, after=after)
    refusal = found(solo.feed(ev.Offered(90, "p1", signed)), ef.AnswerTransfer)[0]
    assert refusal.verdict is Verdict.STALE_BASE


def test_the_learners_side_of_a_refused_base() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    signed = offer.signed
    solo.announce(child(solo.fragment.chain.header))
    assert solo.head.number == 1 and signed.header.base_number == 0
    solo.feed(ev.OfferAnswered(offer, Verdict.STALE_BASE, solo.head))
    again = found(solo.wait(1.0), ef.Offer)[0].signed
    assert (again.header.base_number, again.header.base_digest) == (1, solo.head.digest)
    assert (again.header.stamp, again.header.payload_digest) == (
        signed.header.stamp,
        signed.header.payload_digest,
    )


def test_strangers_headers_leave_half_of_the_room_to_those_who_have_worked() -> None:
    solo = syncer(founders=("me", "p1", "p2"))
    room = ROOM * solo.config.group_size
    taken = [
        bool(found(solo.feed(ev.Offered(n, f"s{n}", contribution(f"s{n}", solo.head))), ef.AcceptTransfer))
        for n in range(1, room + 1)
    ]
    assert taken == [True] * (room // 2) + [False] * (room // 2)
    assert found(solo.feed(ev.Offered(99, "p1", contribution("p1", solo.head))), ef.AcceptTransfer)


def test_what_is_remembered_of_cut_streams_is_bounded() -> None:
    solo = syncer(founders=("me", "p1", "p2"))
    for number in range(MAX_NOTED + 9):
        learner = f"s{number}"
        solo.feed(ev.Offered(number, learner, contribution(learner, solo.head)))
        solo.feed(ev.PayloadBroken(number, Verdict.CUT))
    assert len(solo.fragment.round.inbox._cut) == MAX_NOTED


@pytest.mark.parametrize("order", [("p1", "p2", "p3"), ("p3", "p2", "p1"), ("p2", "p3", "p1")])
def test_contributions_are_merged_in_the_order_of_the_header(order: tuple[str, ...]) -> None:
    """Sums depend on it, and whoever audits the version knows no other order."""
    solo = syncer(peers=("p1", "p2", "p3"))
    effects = [effect for n, peer in enumerate(order, 1) for effect in solo.offer(peer, n)]
    merge = found([*effects, *solo.ready(ticket=7)], ef.Merge)[0]
    version = found(solo.merged(merge), ef.Persist)[0].record
    assert isinstance(version, ef.UpdateRecord)
    named = [part.learner for part in version.version.header.contributors]
    assert [given.contributor.learner for given in merge.inputs] == named == sorted(named)
