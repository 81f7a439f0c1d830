"""Our own lateness is nobody's silence."""

from __future__ import annotations

import pytest
from kit import Solo, found, reasons, sent

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.members import LISTEN_S, Health

TIMING = Timing()


def test_a_lag_is_counted_once() -> None:
    health = Health()
    assert health.lag_s(100.0) == 0.0, "nothing was promised"
    health.promise(100.0)
    assert health.lag_s(100.4) == 0.0
    assert health.lag_s(102.0) == pytest.approx(2.0)
    health.promise(100.1)
    assert health.lag_s(102.0) == 0.0 and health.lag_s(102.3) == 0.0, "counted once"
    assert health.lag_s(103.0) == pytest.approx(1.0), "and again"
    assert health.listens_until_s == 103.0 + LISTEN_S


def stopped(seconds: float) -> tuple[Solo, list[ef.Effect]]:
    """A member that follows p1 stands still, and wakes."""
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    solo.wait(1.0)
    solo.core.next_deadline()
    solo.now += seconds
    return solo, solo.feed(ev.Tick())


@pytest.mark.parametrize("seconds", [2.0, 10.0, 60.0])
def test_who_stood_still_suspects_nobody_on_waking(seconds: float) -> None:
    solo, effects = stopped(seconds)
    assert reasons(effects, "health") and not reasons(effects, "silent")
    assert set(solo.core.shared.view.live(solo.now)) == {"p1", "p2"}
    effects = solo.wait(0.9, silent=("p1", "p2")) + solo.wait(30.0)
    assert not reasons(effects, "silent") and not sent(effects[:20], msg.VoteRequest)
    health = [r for r in found(stopped(seconds)[1], ef.Record) if r.kind == "health"]
    assert abs(dict(health[0].fields)["lag_s"] - seconds) < 0.6  # type: ignore[operator]


def test_calls_that_ran_out_meanwhile_make_nobody_unreachable() -> None:
    solo, _ = stopped(10.0)
    for _ in range(5):
        solo.feed(ev.SendFailed("p1"))
    assert solo.core.shared.view.alive("p1", solo.now)
    solo.wait(LISTEN_S + 0.1)
    for _ in range(TIMING.failures_to_suspect):
        solo.feed(ev.SendFailed("p1"))
    assert not solo.core.shared.view.alive("p1", solo.now)


def test_who_wakes_listens_before_it_stands() -> None:
    """Its term was over long ago: it finds the office open, others may have filled it meanwhile."""
    solo, _ = stopped(10.0)
    solo.message("p1", msg.Leaving(1))
    assert solo.fragment.own.idle is False
    begun_s = solo.now
    effects: list[ef.Effect] = []
    while not sent(effects, msg.VoteRequest) and solo.now < begun_s + 10.0:
        effects = solo.wait(0.05, silent=("p1",))
    assert LISTEN_S <= solo.now - begun_s < 5.0
