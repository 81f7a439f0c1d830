"""Who says that it learns and answers no call: three rounds wait for it, and nobody loses patience for it."""

from __future__ import annotations

from kit import Solo, config, found, sent
from scenes import syncer

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.base import ANSWER_SHARE
from p2pdiloco.core.round import IN_VAIN

PEERS = ("p1", "p2", "p3", "p4")


def test_who_has_worked_and_answers_no_call_is_waited_for_three_times() -> None:
    """Else one member makes every round as long as may be."""
    solo = syncer(quorum=1, founders=("me", "p1", "p2"), term_versions=30)
    called = []
    for number in range(1, 11):
        effects: list[ef.Effect] = []
        for place, learner in enumerate(("p2", "p1") if number == 6 else ("p1",)):
            mark = solo.fragment.chain.marks.stamp(learner)
            effects += solo.offer(learner, 2 * number + place, stamp=Stamp(1, number), after=mark)
        effects += solo.wait(30.0)
        called.append(bool(sent(effects, msg.Closing, to="p2")))
        solo.merged(found(effects, ef.Merge)[0])
    first, again = called[:5], called[6:]
    assert first == [True] * IN_VAIN + [False] * 2
    assert again == [True] * IN_VAIN + [False], "it came once again"


def test_a_learner_is_patient_for_as_long_as_a_round_may_be_open() -> None:
    """Else all lose patience with every syncer, one after the other, and no version is made any more."""
    solo = Solo(config(quorum=1), PEERS)
    step_s, steps = 1.0, solo.config.inner_steps
    solo.learn(step_s)
    for peer in PEERS:
        solo.says[peer] = {"step_time_s": step_s}
    solo.wait(1.0)
    solo.elect("p1")
    solo.feed(ev.OfferAnswered(found(solo.ready(), ef.Offer)[0], Verdict.IN_ROUND, None))
    patient_s = max(solo.config.timing.answer_floor_s, 4 * solo.config.delay_steps * step_s)
    open_s = min(solo.config.grace_cap_s, ANSWER_SHARE * steps * step_s)
    assert open_s > 1.0
    assert not sent(solo.wait(patient_s + open_s - 0.5), msg.VoteRequest)
    assert sent(solo.wait(10.0), msg.VoteRequest)
