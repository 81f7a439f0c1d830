"""Which contributions loss audits measure, how often, and what follows for their learner here."""

from __future__ import annotations

import random
from typing import Any

import pytest
from election_scenes import refusal, request
from kit import Solo, child, config, contribution, digest, found, reasons
from scenes import expels, syncer

from p2pdiloco.core import audit_state
from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import LossFinding, Verdict, VoteRefusal
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.core.api.versions import NONE_AT, Mean
from p2pdiloco.core.audit_state import FAILED_REST_S, LossAudits
from p2pdiloco.core.chain import Marks

Effects = list[ef.Effect]
PEERS = ("p1", "p2", "p3")
ALL = 0.5
"""Share with which every version is drawn."""


def node(share: float = ALL) -> Solo:
    solo = Solo(config(2, loss_audits=share, update_codec="bf16"), PEERS)
    solo.learn()
    return solo


def applied(solo: Solo, ours: bool = True, learners: tuple[str, ...] = ("p1",)) -> Effects:
    """A version becomes ours, in which these learners' contributions are, and one of ours."""
    number = solo.head.number + 1
    parts = [
        Contributor(peer, Stamp(1, number), 40, 4, payload_digest=digest(peer, number)) for peer in learners
    ]
    if ours:
        solo.ready(ticket=number)
        stamp = Stamp(solo.core.shared.incarnation, number)
        parts.append(Contributor(solo.me, stamp, 40, 4, payload_digest=digest("payload", solo.me, number)))
    made = child(
        solo.fragment.chain.header, "p1", tuple(part.learner for part in parts), contributors=tuple(parts)
    )
    return solo.announce(made, ticket=900 + number)


def answered(solo: Solo, audit: ef.LossAudit, ratio: float, **odd: Any) -> Effects:
    """Our learner measured this."""
    values = {"theirs": (ratio, ratio), "ours": (1.0, 1.0)} | odd
    return solo.feed(ev.LossAudited(audit.fragment, audit.version.header.digest(), **values))


def expelled(solo: Solo, ratio: float = -1.0, same_data: bool = True) -> Effects:
    """So many audits of p1 find this that it is expelled."""
    effects: Effects = []
    for _ in range(40):
        for audit in found(applied(solo), ef.LossAudit):
            effects += answered(solo, audit, ratio, same_data=same_data)
        if "p1" in solo.core.shared.loss_audits:
            break
    return effects


def test_without_a_share_nothing_is_measured() -> None:
    solo = node(0.0)
    assert not any(found(applied(solo), ef.LossAudit) for _ in range(5))


def test_a_contribution_is_measured_beside_ours_to_the_same_version() -> None:
    solo = node()
    (audit,) = found(applied(solo), ef.LossAudit)
    assert (audit.theirs.learner, audit.theirs.payload_digest) == ("p1", digest("p1", 1))
    assert (audit.ours.learner, audit.version.header.number) == (solo.me, 1)
    assert not found(applied(solo), ef.LossAudit), "one is under way"
    effects = answered(solo, audit, 0.5)
    assert reasons(effects, "audit") == ["a contribution to version 1 does 0.50 of what ours does"]
    assert found(applied(solo), ef.LossAudit)


@pytest.mark.parametrize("case", [{"ours": False}, {"learners": ()}])
def test_without_two_contributions_there_is_nothing_to_compare(case: dict[str, Any]) -> None:
    solo = node()
    assert not found(applied(solo, **case), ef.LossAudit)


def test_the_learner_rests_as_its_share_says() -> None:
    audits = LossAudits(0.25, random.Random(0))
    rest_s = 2.0 * 3
    audits.begin()
    audits.end("p1", (1.0,), (1.0,), False, 2.0, now=10.0)
    assert not any(audits.drawn(10.0 + rest_s - 0.1) for _ in range(50))
    drawn = [audits.drawn(10.0 + rest_s) for _ in range(2_000)]
    assert 0.4 < sum(drawn) / len(drawn) < 0.6, "half of the versions, which are two payloads each"


def test_after_audits_that_come_to_nothing_it_rests_ever_longer() -> None:
    audits = LossAudits(ALL, random.Random(0))
    for count in range(20):
        audits.begin()
        audits.end("p1", (), (), False, 0.0, now=0.0)
        rest_s = FAILED_REST_S * 2 ** min(count, audit_state.MAX_FAILED - 1)
        assert not audits.drawn(rest_s - 0.1) and audits.drawn(rest_s)
    audits.end("p1", (1.0,), (1.0,), False, 0.0, now=0.0)
    audits.end("p1", (), (), False, 0.0, now=0.0)
    assert audits.drawn(FAILED_REST_S)


def test_whoever_looks_bad_is_measured_the_more_often_the_worse_it_looks() -> None:
    audits = LossAudits(ALL, random.Random(0))
    learners = [f"p{index}" for index in range(20)]
    shares = []
    for _ in range(3):
        chosen = [audits.choose(learners) for _ in range(1_000)]
        assert len(set(chosen)) == 20
        shares.append(chosen.count("p7") / 1_000)
        for _ in range(2):
            audits.end("p7", (-1.0,), (1.0,), False, 0.0, now=0.0, odd=True)
    assert shares[0] < 0.1 < 0.4 < shares[1] < 0.7 < 0.75 < shares[2] < 0.95
    assert audits.choose([]) is None


def test_whose_work_does_harm_is_refused_and_gets_no_vote() -> None:
    solo = node()
    effects = expelled(solo)
    assert reasons(effects, "expelled") == [str(LossFinding.NOTHING)]
    assert found(applied(solo, learners=("p1", "p2")), ef.LossAudit)[0].theirs.learner == "p2"
    assert "p1" not in solo.core.shared.expected_learners(solo.now), "no round waits for it"
    assert refusal(request(solo, "p1", term=2)) is VoteRefusal.EXPELLED


@pytest.mark.parametrize("agreement", [NONE_AT, NONE_AT + 1])
def test_harm_to_ours_counts_only_against_who_agrees_with_nobody(
    agreement: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest work on data of one's own may harm ours, but goes where others go, too."""
    monkeypatch.setattr(Marks, "mean", lambda _marks, _learner: Mean(agreement, 9))
    effects = expelled(node(), same_data=False)
    assert reasons(effects, "expelled") == [str(LossFinding.HARM)] * (agreement <= NONE_AT)


def test_a_syncer_takes_nothing_of_it() -> None:
    solo = expels(syncer(loss_audits=ALL), "p1")
    effects = solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head)))
    assert [answer.verdict for answer in found(effects, ef.AnswerTransfer)] == [Verdict.EXPELLED]
    assert found(solo.feed(ev.Offered(2, "p2", contribution("p2", solo.head))), ef.AcceptTransfer)


def test_of_whom_the_data_are_known_nothing_is_too_little() -> None:
    solo = node()
    for _ in range(100):
        for audit in found(applied(solo), ef.LossAudit):
            effects = answered(solo, audit, 0.0, same_data=True)
        if "p1" in solo.core.shared.loss_audits:
            break
    assert reasons(effects, "expelled") == [str(LossFinding.NOTHING)]


def test_honest_work_is_never_refused() -> None:
    solo = node()
    for count in range(100):
        for audit in found(applied(solo), ef.LossAudit):
            answered(solo, audit, (0.9, 0.1, -0.3)[count % 3], same_data=True)
    assert not solo.core.shared.loss_audits.expels


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    solo = node()
    (audit,) = found(applied(solo), ef.LossAudit)
    assert not solo.feed(ev.LossAudited(0, bytes(32), (-1.0,), (1.0,)))
    answered(solo, audit, 1.0)
    assert not answered(solo, audit, -1.0)
    assert solo.core.shared.loss_audits.audits("p1") == 1
