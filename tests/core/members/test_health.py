"""Design 5.6: patience with a peer follows its link, and our own lateness is nobody's silence."""

from __future__ import annotations

import msgspec
import pytest
from kit import Solo, found, reasons, sent
from kit import progress as heartbeat

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.members.health import LISTEN_S, Health
from p2pdiloco.core.members.suspicion import Gaps, suspect_after_s
from p2pdiloco.core.members.view import View

TIMING = Timing()


# --- suspicion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean_s", "deviation_s", "after_s"),
    [
        (0.5, 0.0, 3.0),  # an even link: the floor
        (0.5, 0.5, 3.0),  # mean + 4 deviations is still below it
        (0.8, 0.8, 4.0),
        (1.5, 1.25, 6.5),
        (3.0, 2.0, 8.0),  # the cap
    ],
)
def test_patience_follows_the_link(mean_s: float, deviation_s: float, after_s: float) -> None:
    assert suspect_after_s(mean_s, deviation_s, 3.0, 8.0) == pytest.approx(after_s)


def patience_s(gaps_s: list[float]) -> float:
    """After heartbeats with these gaps between them."""
    gaps, now = Gaps(TIMING.heartbeat_s), 100.0
    for gap_s in [0.0, *gaps_s]:
        now += gap_s
        gaps.heard(now, TIMING.suspect_cap_s)
    return gaps.after_s(TIMING.suspect_s, TIMING.suspect_cap_s)


def test_gaps() -> None:
    assert patience_s([0.5] * 40) == 3.0
    assert patience_s([0.5, 2.5] * 20) > 4.5, "bursts"
    assert 3.0 < patience_s([2.9] * 40) < 3.6, "slow but even"
    assert patience_s([0.5] * 20 + [60.0]) < 5.0, "one outage is no link"
    assert patience_s([0.5] * 20 + [60.0] + [0.5] * 20) == 3.0, "and soon forgotten"


def test_a_bursty_peer_is_suspected_later_than_an_even_one() -> None:
    solo = Solo()
    for burst in range(60):
        solo.now += 0.5
        solo.feed(ev.Tick())
        solo.hear("p1")
        if burst % 5 == 4:  # its heartbeats come five at a time
            for _ in range(5):
                solo.hear("p2")
    last_s = solo.now
    view = solo.core.shared.view
    assert not view.alive("p1", last_s + 3.1)
    assert view.alive("p2", last_s + 3.1)
    assert not view.alive("p2", last_s + TIMING.suspect_cap_s)


def test_the_time_between_two_lives_is_no_gap() -> None:
    view = View("me", TIMING)
    progress = heartbeat((Head(0, bytes(32), 0, 0),))
    for beat in range(20):
        view.heard("p1", progress, 100.0 + beat / 2)
    for beat in range(3):
        view.heard("p1", msgspec.structs.replace(progress, incarnation=2), 150.0 + beat / 2)
    assert view.alive("p1", 153.9) and not view.alive("p1", 154.1)


# --- our own health -------------------------------------------------------------------------------------


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
