"""Which contributions loss audits measure, how often, and what follows for their learner here."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from election_scenes import refusal, request
from kit import Solo, child, config, contribution, digest, found, reasons
from scenes import expels, syncer

from p2pdiloco.core import audit_state
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import LossFinding, Verdict, VoteRefusal
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.core.api.versions import Mean
from p2pdiloco.core.audit_state import FAILED_REST_S, Accounts, LossAudits, ratio_of
from p2pdiloco.core.chain import Marks
from p2pdiloco.core.distrust import OF_OFFICE, Distrust
from p2pdiloco.util import MOST_NOTED

Effects = list[ev.Effect]
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


def answered(solo: Solo, audit: ev.LossAudit, ratio: float, **odd: Any) -> Effects:
    """Our learner measured this."""
    values = {"theirs": (ratio, ratio), "ours": (1.0, 1.0)} | odd
    return solo.answer(audit, ev.LossAudited(**values))


def expelled(solo: Solo, ratio: float = -1.0, same_data: bool = True) -> Effects:
    """So many audits of p1 find this that it is expelled."""
    effects: Effects = []
    for _ in range(40):
        for audit in found(applied(solo), ev.LossAudit):
            effects += answered(solo, audit, ratio, same_data=same_data)
        if solo.core.shared.loss_audits.finding("p1"):
            break
    return effects


def test_without_a_share_nothing_is_measured() -> None:
    solo = node(0.0)
    assert not any(found(applied(solo), ev.LossAudit) for _ in range(5))


def test_a_contribution_is_measured_beside_ours_to_the_same_version() -> None:
    solo = node()
    (audit,) = found(applied(solo), ev.LossAudit)
    assert (audit.theirs.learner, audit.theirs.payload_digest) == ("p1", digest("p1", 1))
    assert (audit.ours.learner, audit.version.header.number) == (solo.me, 1)
    assert not found(applied(solo), ev.LossAudit), "one is under way"
    effects = answered(solo, audit, 0.5)
    assert reasons(effects, "audit") == ["a contribution to version 1 does 0.50 of what ours does"]
    assert found(applied(solo), ev.LossAudit)


@pytest.mark.parametrize("case", [{"ours": False}, {"learners": ()}])
def test_without_two_contributions_there_is_nothing_to_compare(case: dict[str, Any]) -> None:
    solo = node()
    assert not found(applied(solo, **case), ev.LossAudit)


def test_the_learner_rests_as_its_share_says() -> None:
    audits = LossAudits(0.25, random.Random(0), Distrust())
    rest_s = 2.0 * 3
    audits.begin()
    audits.end("p1", (1.0,), (1.0,), False, 2.0, now=10.0)
    assert not any(audits.drawn(10.0 + rest_s - 0.1) for _ in range(50))
    drawn = [audits.drawn(10.0 + rest_s) for _ in range(2_000)]
    assert 0.4 < sum(drawn) / len(drawn) < 0.6, "half of the versions, which are two payloads each"


def test_after_audits_that_come_to_nothing_it_rests_ever_longer() -> None:
    audits = LossAudits(ALL, random.Random(0), Distrust())
    for count in range(20):
        audits.begin()
        audits.end("p1", (), (), False, 0.0, now=0.0)
        rest_s = FAILED_REST_S * min(2**count, 16)
        assert not audits.drawn(rest_s - 0.1) and audits.drawn(rest_s)
    audits.end("p1", (1.0,), (1.0,), False, 0.0, now=0.0)
    audits.end("p1", (), (), False, 0.0, now=0.0)
    assert audits.drawn(FAILED_REST_S)


def test_whoever_looks_bad_is_measured_the_more_often_the_worse_it_looks() -> None:
    audits = LossAudits(ALL, random.Random(0), Distrust())
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
    assert found(applied(solo, learners=("p1", "p2")), ev.LossAudit)[0].theirs.learner == "p2"
    assert "p1" not in solo.core.shared.expected_learners(solo.now), "no round waits for it"
    assert refusal(request(solo, "p1", term=2)) is VoteRefusal.DISTRUSTED


@pytest.mark.parametrize("agreement", [0, 1])
def test_harm_to_ours_counts_only_against_who_agrees_with_nobody(
    agreement: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest work on data of one's own may harm ours, but goes where others go, too."""
    monkeypatch.setattr(Marks, "mean", lambda _marks, _learner: Mean(agreement, 9))
    effects = expelled(node(), same_data=False)
    assert reasons(effects, "expelled") == [str(LossFinding.HARM)] * (agreement <= 0)


def test_a_syncer_takes_nothing_of_it() -> None:
    solo = expels(syncer(loss_audits=ALL), "p1")
    effects = solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head)))
    assert [answer.verdict for answer in found(effects, ev.AnswerTransfer)] == [Verdict.EXPELLED]
    assert found(solo.feed(ev.Offered(2, "p2", contribution("p2", solo.head))), ev.AcceptTransfer)


def test_of_whom_the_data_are_known_nothing_is_too_little() -> None:
    solo = node()
    for _ in range(100):
        for audit in found(applied(solo), ev.LossAudit):
            effects = answered(solo, audit, 0.0, same_data=True)
        if solo.core.shared.loss_audits.finding("p1"):
            break
    assert reasons(effects, "expelled") == [str(LossFinding.NOTHING)]


def test_honest_work_is_never_refused() -> None:
    solo = node()
    for count in range(100):
        for audit in found(applied(solo), ev.LossAudit):
            answered(solo, audit, (0.9, 0.1, -0.3)[count % 3], same_data=True)
    assert not solo.core.shared.distrust.has("p1", solo.now, *OF_OFFICE)


# What loss audits show of a learner, and how rarely they are wrong.


def shown(ratios: list[float], same_data: bool = False, odd: bool = True) -> tuple[LossFinding | None, int]:
    """What is shown by these, and after how many."""
    book = Accounts()
    for count, ratio in enumerate(ratios, 1):
        if (found := book.add("p1", ratio, same_data, odd)) is not None:
            return found, count
    return None, len(ratios)


def test_reversed_work_is_shown_to_do_harm_within_thirty_audits() -> None:
    found, count = shown([-0.95] * 100)
    assert found is LossFinding.HARM and count <= 28


def test_reversed_work_is_seen_through_noise() -> None:
    rng = random.Random(1)
    for _ in range(200):
        found, count = shown([max(-1.0, min(1.0, rng.gauss(-0.7, 0.6))) for _ in range(200)])
        assert found is LossFinding.HARM and count <= 150


def test_who_turns_is_shown_as_soon_as_who_always_did_harm() -> None:
    found, count = shown([1.0] * 500 + [-0.95] * 100)
    assert found is LossFinding.HARM and count <= 528


def test_harm_shows_nothing_of_a_learner_with_data_of_its_own_that_agrees_with_others() -> None:
    assert shown([-0.45] * 5_000, odd=False) == (None, 5_000)


def test_noise_does_nothing_for_data_that_it_says_to_read() -> None:
    found, count = shown([0.0] * 200, same_data=True)
    assert found is LossFinding.NOTHING and count <= 80
    assert shown([0.0] * 5_000) == (None, 5_000), "whose data nobody knows may do nothing for ours"


def test_thirty_audits_of_odd_honest_work_are_wrong_in_none_of_ten_thousand_learners() -> None:
    """On the mean it does a little harm to us, as much as is allowed, and one measurement says nothing."""
    rng = random.Random(2)
    choice = rng.random
    for _ in range(10_000):
        money = audit_state.START
        for _ in range(30):
            # -1 or 1, with a mean of `HARMS`.
            money = audit_state.bet(
                money, 1.0 if choice() < (1 + audit_state.HARMS) / 2 else -1.0, audit_state.HARMS
            )
            assert audit_state.stakes(money) < audit_state.ENOUGH


@pytest.mark.parametrize("least", [audit_state.HARMS, audit_state.HELPS])
def test_a_bet_wins_nothing_on_the_mean_if_the_mean_is_the_least(least: float) -> None:
    chance = (1 + least) / 2
    won, lost = (
        audit_state.bet(audit_state.START, -1.0, least),
        audit_state.bet(audit_state.START, 1.0, least),
    )
    for low, high in zip(won, lost, strict=True):
        assert math.isclose((1 - chance) * low + chance * high, 1.0) and high >= 0.0


@pytest.mark.parametrize(
    ("theirs", "ours", "ratio"),
    [
        ((0.02, 0.04), (0.03, 0.03), 1.0),
        ((-0.01, -0.02), (0.02, 0.04), -0.5),
        ((9.0, 9.0), (0.1, 0.1), 1.0),
        ((0.0,), (0.1,), 0.0),
        ((0.1, 0.1), (0.2, -0.1), None),
        ((0.1, 0.1), (0.0, 0.1), None),
        ((), (), None),
        ((0.1,), (0.1, 0.1), None),
        ((math.nan, 0.1), (0.1, 0.1), None),
        ((0.1, 0.1), (math.inf, 0.1), None),
    ],
)
def test_a_contribution_is_measured_by_ours(
    theirs: tuple[float, ...], ours: tuple[float, ...], ratio: float | None
) -> None:
    assert ratio_of(theirs, ours) == ratio


def test_the_accounts_is_bounded() -> None:
    book = Accounts()
    for index in range(MOST_NOTED + 10):
        book.add(f"p{index}", -1.0, True)
    assert book.audits("p0") == 0 and book.audits(f"p{MOST_NOTED}") == 1
    assert book.doubt("p0") == 1.0 < book.doubt(f"p{MOST_NOTED}")
