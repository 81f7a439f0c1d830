"""Views made of reports: who is behind and why, the pulse, the forecast, strangers' clocks and numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon.budgets import LinkCapacity
from p2pdiloco.daemon.display.snapshot import (
    CourseRow,
    ExcludedRow,
    FragmentRow,
    NewestRow,
    NodeSnapshot,
    PeerRow,
    StatusReport,
    decode_status,
    encode_status,
    status_of,
)
from p2pdiloco.daemon.display.timeline import LossPoint, PastEvent, Timeline
from p2pdiloco.errors import RemoteError
from p2pdiloco.web.sources import LinkRates, WatchedRun, middle_report, own_view
from p2pdiloco.web.view import (
    BehindReason,
    MarkKind,
    MemberCondition,
    Pulse,
    condition_of,
    fit_power_law,
    forecast,
    join_view,
    public_view,
)

NOW_S = 1_800_000_000.0


def row(**fields: Any) -> PeerRow:
    kept: dict[str, Any] = {"peer": "ben", "last_seen_s": 1.0, "confirmed": True}
    return PeerRow(**(kept | fields))


def report(**fields: Any) -> StatusReport:
    snapshot = NodeSnapshot(
        name="ann",
        peer="ann",
        run_name="test",
        run_id="ab" * 32,
        state="training",
        fragments=tuple(FragmentRow(index=index, number=3) for index in range(4)),
        run_versions=12,
        clock_s=NOW_S,
    )
    made: dict[str, Any] = {
        name: getattr(snapshot, name) for name in NodeSnapshot.__struct_fields__ if name != "peers"
    }
    return status_of(NodeSnapshot(**(made | fields)))


@pytest.mark.parametrize(
    ("fields", "state", "why"),
    [
        ({}, MemberCondition.HERE, BehindReason.NONE),
        ({"last_seen_s": None}, MemberCondition.SILENT, BehindReason.SILENT),
        ({"last_seen_s": 16.0, "confirmed": False}, MemberCondition.SILENT, BehindReason.SILENT),
        ({"confirmed": False, "behind_versions": 9}, MemberCondition.BEHIND, BehindReason.CATCHING_UP),
        ({"votes": False}, MemberCondition.BEHIND, BehindReason.NO_DISK),
        ({"learning": False}, MemberCondition.RESTING, BehindReason.NOT_TRAINING),
        ({"behind_versions": 1}, MemberCondition.HERE, BehindReason.NONE),
        ({"behind_versions": 2}, MemberCondition.BEHIND, BehindReason.OLD_VERSIONS),
        ({"behind_versions": 2, "thin": True}, MemberCondition.BEHIND, BehindReason.THIN_UPLINK),
        ({"merged_age_s": 61.0}, MemberCondition.BEHIND, BehindReason.NOT_MERGED),
        ({"expelled": LossFinding.HARM, "merged_age_s": 61.0}, MemberCondition.BEHIND, BehindReason.EXPELLED),
        ({"thin": True}, MemberCondition.HERE, BehindReason.THIN_UPLINK),
        ({"weighs": 0.5}, MemberCondition.HERE, BehindReason.NONE),
        ({"weighs": 0.2, "thin": True}, MemberCondition.HERE, BehindReason.DISAGREES),
    ],
)
def test_who_is_behind_and_why(fields: dict[str, Any], state: MemberCondition, why: BehindReason) -> None:
    assert condition_of(row(**fields), patience_s=60.0) == (state, why)


@pytest.mark.parametrize(
    ("fields", "pulse"),
    [
        ({"run_versions": 0}, Pulse.NEW),
        ({}, Pulse.ALIVE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=59.0)}, Pulse.ALIVE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=61.0)}, Pulse.LATE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=61.0, usual_s=30.0)}, Pulse.ALIVE),
        ({"newest": NewestRow(fragment=0, number=3, age_s=601.0)}, Pulse.STILL),
        ({"newest": NewestRow(fragment=0, number=3, age_s=601.0), "state": "idle"}, Pulse.LATE),
        ({"course": CourseRow(rests="paused")}, Pulse.PAUSED),
        ({"course": CourseRow(rests="ended")}, Pulse.ENDED),
    ],
)
def test_the_pulse_of_a_run(fields: dict[str, Any], pulse: Pulse) -> None:
    assert public_view(report(**fields), NOW_S).pulse is pulse


def test_who_is_excluded_is_told_once_and_not_as_silent_too() -> None:
    liar = ExcludedRow(peer="dan", name="Dan", reason="it voted twice")
    marks = (PastEvent(NOW_S - 90, "silent", "died", "dan", None, 1, "Dan"),)
    view = public_view(report(marks=marks, excluded=(liar,)), NOW_S)
    assert view.excluded == (liar,) and [member.peer for member in view.members] == ["ann"]


def test_whom_loss_audits_of_this_node_expelled_is_counted_by_what_they_have_shown() -> None:
    rows = (row(expelled=LossFinding.HARM), row(expelled=LossFinding.HARM), row())
    snapshot = NodeSnapshot(name="", peer="ann", run_name="", run_id="", state="training", peers=rows)
    view = own_view(snapshot, Timeline(), LinkCapacity(math.inf, math.inf), LinkRates(lambda: 0.0), None)
    assert view.expelled == {LossFinding.HARM: 2}


def test_a_member_that_died_is_shown_for_a_while_and_one_that_left_is_not() -> None:
    marks = (
        PastEvent(NOW_S - 90, "silent", "died", "dan", None, 1, "Dan"),
        PastEvent(NOW_S - 80, "silent", "died", "eve"),
        PastEvent(NOW_S - 70, "join", "heard of", "eve"),
        PastEvent(NOW_S - 2000, "silent", "died", "old"),
        PastEvent(NOW_S - 60, "leave", "good-bye", "fay"),
    )
    view = public_view(report(marks=marks), NOW_S)
    assert [(m.peer, m.name, m.state) for m in view.members] == [
        ("ann", "ann", MemberCondition.HERE),
        ("dan", "Dan", MemberCondition.SILENT),
    ]
    assert view.members[0].is_me and view.members_total == 2


def test_times_of_another_clock_are_ours_and_what_cannot_be_is_left_out() -> None:
    theirs_s = NOW_S - 86_400.0
    curve = (
        LossPoint(theirs_s - 50, 1000, 3.0),
        LossPoint(theirs_s + 9e6, 2000, 2.9),
        LossPoint(theirs_s - 10, 3000, float("nan")),
    )
    marks = (PastEvent(theirs_s - 5, "silent", "", "dan"), PastEvent(theirs_s, "nonsense", ""))
    view = public_view(report(clock_s=theirs_s, curve=curve, marks=marks), NOW_S)
    assert view.curve.at_s == (NOW_S - 50,) and view.curve.tokens == (1000,)
    assert [(mark.kind, mark.at_s) for mark in view.marks] == [(MarkKind.SILENT, NOW_S - 5)]


def test_a_forecast_goes_through_the_newest_point_to_the_end_of_the_schedule() -> None:
    points = tuple(LossPoint(float(n), 1000 * n, 2.0 + 30.0 * (1000 * n) ** -0.5) for n in range(1, 60))
    found = fit_power_law(points)
    assert found is not None and abs(found.exponent - 0.5) < 0.01 and abs(found.floor - 2.0) < 0.01
    ahead = forecast(points, 60_000, 200_000, NOW_S, NOW_S + 1400.0)
    assert ahead is not None and ahead.tokens[0] == 59_000 and ahead.tokens[-1] == 200_000
    assert (
        abs(ahead.loss[0] - points[-1].loss) < 1e-4 and abs(ahead.loss[-1] - (2 + 30 * 200_000**-0.5)) < 0.01
    )
    assert ahead.at_s[-1] == NOW_S + 1400.0
    assert all(low <= loss <= high for low, loss, high in zip(ahead.low, ahead.loss, ahead.high, strict=True))


@pytest.mark.parametrize("left_s", [None, 0.0, -1.0, math.nan, math.inf, 1e300])
def test_an_end_that_cannot_be_is_not_known(left_s: float | None) -> None:
    """The script of a page with an infinite time would draw no curve: JSON has none."""
    assert public_view(report(course=CourseRow(left_s=left_s)), NOW_S).progress.ends_at_s is None
    ends = public_view(report(course=CourseRow(left_s=1000.0)), NOW_S).progress
    assert ends.ends_at_s == NOW_S + 1000


def test_there_is_no_forecast_of_what_is_over_too_short_or_rises() -> None:
    points = tuple(LossPoint(float(n), 1000 * n, 2.0 + 30.0 * (1000 * n) ** -0.5) for n in range(1, 60))
    assert forecast(points, 60_000, 50_000, NOW_S, None) is None
    assert forecast(points[:5], 6_000, 50_000, NOW_S, None) is None
    assert forecast((), 6_000, 50_000, NOW_S, None) is None
    assert fit_power_law(tuple(LossPoint(float(n), 1000 * n, 2.0 + n) for n in range(1, 60))) is None
    assert fit_power_law(tuple(LossPoint(0.0, 1000, 2.0) for _ in range(60))) is None


def test_rates_are_between_two_looks_that_are_not_too_close() -> None:
    now = [0.0]
    rates = LinkRates(lambda: now[0])
    told = []
    for now[0], sent, received in ((0.0, 0, 0), (1.0, 10**9, 0), (4.0, 4000, 400), (5.0, 10**9, 10**9)):
        told.append(rates.of(sent, received))
    assert told == [(None, None), (None, None), (8000, 800), (8000, 800)]


def test_addresses_that_no_link_can_hold_are_a_line_all_the_same() -> None:
    owner = "12D3KooWEcnp3mdr86DAFqXiDnMPUVLnrnkV1iEjgs7iy1sqASGB"
    run: Any = SimpleNamespace(id="ab" * 32, name="test", signed=SimpleNamespace(owner=owner))
    told = f"/ip4/192.0.2.1/tcp/1/p2p/{owner}"
    assert join_view(run, [told]).line.startswith("p2pdiloco node p2pdiloco:")
    assert join_view(run, ["/dnsaddr/a b"]).line == f"p2pdiloco node --join /dnsaddr/a b --run {run.id}"


def test_one_liar_among_three_is_not_believed() -> None:
    honest = [report(course=CourseRow(tokens=tokens)) for tokens in (1000, 1010)]
    for lie in (0, 1 << 60):
        assert middle_report([*honest, report(course=CourseRow(tokens=lie))]).course.tokens in (1000, 1010)
    newcomer = report(course=CourseRow(tokens=5), state="joining")
    assert middle_report([newcomer, honest[0]]) is honest[0] and middle_report([newcomer]) is newcomer


@pytest.mark.parametrize("age", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize(
    "fields",
    [
        lambda age: {"peers": (row(last_seen_s=age),)},
        lambda age: {"peers": (row(merged_age_s=age),)},
        lambda age: {"heldout_age_s": age},
        lambda age: {"newest": NewestRow(fragment=0, number=3, age_s=age)},
        lambda age: {"clock_s": age},
        lambda age: {"curve": (LossPoint(age, 5, 3.0),)},
        lambda age: {"marks": (PastEvent(age, "silent", "", "ben"),)},
    ],
)
def test_a_time_that_is_none_comes_with_no_report(fields: Any, age: float) -> None:
    with pytest.raises(RemoteError):
        decode_status(encode_status(report(**fields(age))))


def test_a_lie_about_what_is_to_come_keeps_nothing_out() -> None:
    run = WatchedRun(Timeline(now_s=lambda: NOW_S))
    course = CourseRow(tokens=1000)
    run.take(report(course=course, curve=(LossPoint(NOW_S, 1, 9.0), LossPoint(NOW_S, 1 << 61, 0.1))), NOW_S)
    run.take(report(course=course, curve=(LossPoint(NOW_S, 1, 4.0), LossPoint(NOW_S, 900, 3.0))), NOW_S)
    assert [point.tokens for point in run.timeline.curve.points] == [1, 900]
