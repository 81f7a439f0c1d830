"""A link that cannot keep up is noticed, said once, and lets the node contribute to fewer versions."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import msgspec
import pytest
from daemon_kit import Neighbourhood, until
from hypothesis import given, settings
from hypothesis import strategies as st
from metered_way import MeteredWay

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.presets import PRESETS
from p2pdiloco.core.capacity import LEAST_BYTES, LEAST_S, LEAST_SAMPLES, Meter
from p2pdiloco.daemon.budgets import LINK_OVERHEAD, LinkCapacity
from p2pdiloco.daemon.network.link import (
    COMFORT,
    FALL,
    HEARTBEAT_BYTES,
    MAX_AGE_S,
    MAX_EVERY,
    RISE,
    SPLITS,
    LinkMeters,
    LinkWatch,
    advise,
    control_doubts,
    demand,
    demand_of,
    load_uplink,
    save_uplink,
)
from p2pdiloco.learner import channel as ch
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments

SMALL = PRESETS["small"]
LAYOUTS = plan_fragments(task_of(SMALL).specs(), SMALL.sync.fragments)
MEMBERS = 4


Way = partial(MeteredWay, LINK_OVERHEAD)


def watch(
    up: MeteredWay,
    limit: float = math.inf,
    quorum: int = 1,
    down: float = math.inf,
    meter: Meter | None = None,
) -> LinkWatch:
    manifest = msgspec.structs.replace(SMALL, sync=msgspec.structs.replace(SMALL.sync, quorum=quorum))
    meters = object.__new__(LinkMeters)  # the clocks of both ways are the test's
    meters.limits, meters.uplink, meters.downlink = LinkCapacity(limit, down), up.uplink, meter or Way().meter
    return LinkWatch(manifest, LAYOUTS, meters)


def rate_for(every: int, step_s: float = 1.0) -> float:
    """An upload that suffices for one contribution in `every` versions and no more."""
    for rate in range(100_000, 100_000_000, 20_000):
        found = demand_of(SMALL, LAYOUTS, LinkCapacity(rate, math.inf, 0.0), MEMBERS, step_s)
        if found.every <= every:
            return float(rate)
    raise AssertionError


def test_how_often_follows_from_the_arithmetic() -> None:
    every = [
        demand_of(SMALL, LAYOUTS, LinkCapacity(rate, math.inf, 0.0), MEMBERS, 1.0).every
        for rate in (1e9, rate_for(1), rate_for(1) * 0.9, rate_for(3), 1e3)
    ]
    assert every[:2] == [1, 1] and every[2] > 1 and every[3:] == [3, MAX_EVERY]


def test_it_is_said_once_and_taken_back_when_the_link_is_better() -> None:
    up = Way()
    link = watch(up, limit=rate_for(3))
    assert not link.judge(MEMBERS, 0.0)  # no inner step yet: nothing is known
    said = [link.judge(MEMBERS, 1.0) for _ in range(RISE + 5)]
    assert said == [False] * (RISE - 1) + [True] + [False] * 5
    assert link.every == 3
    assert "cannot keep up" in link.words and "one in 3 versions" in link.words and "inf" not in link.words
    assert len(link.words) <= 240
    said = [link.judge(MEMBERS, 10.0) for _ in range(FALL + 5)]  # longer inner steps ask for less
    assert said.count(True) == 1 and said[FALL - 1]
    assert (link.every, link.words) == (1, "")


def test_one_bad_moment_is_no_alarm() -> None:
    link = watch(Way(), limit=rate_for(3))
    for _ in range(20):
        assert not link.judge(MEMBERS, 1.0) and not link.judge(MEMBERS, 1.0) and not link.judge(MEMBERS, 10.0)
    assert link.every == 1


def test_what_transfers_achieve_counts_where_nothing_is_set() -> None:
    up = Way()
    link = watch(up)
    assert not any(link.judge(MEMBERS, 1.0) for _ in range(10))
    for _ in range(LEAST_SAMPLES):
        assert not any(link.judge(MEMBERS, 1.0) for _ in range(10))
        up.move(LEAST_BYTES, 8 * LINK_OVERHEAD * LEAST_BYTES / rate_for(2))
    assert [link.judge(MEMBERS, 1.0) for _ in range(RISE)][-1] and link.every == 2


def test_nobody_is_left_without_a_quorum() -> None:
    link = watch(Way(), limit=rate_for(3), quorum=MEMBERS)
    assert [link.judge(MEMBERS, 1.0) for _ in range(RISE)][-1]
    assert link.every == 1 and "come late" in link.words


def test_the_uplink_is_known_from_what_was_given_or_in_an_earlier_life_where_nothing_was_contributed() -> (
    None
):
    up = Way(remembered=1e5)
    assert watch(up).uplink_bits_per_s == 1e5 and watch(up, limit=1e4).uplink_bits_per_s == 1e4
    up.move(2 * LEAST_BYTES, LEAST_S, up.uplink.given)
    given = 16 * LINK_OVERHEAD * LEAST_BYTES / LEAST_S
    assert watch(up).uplink_bits_per_s == given, "few long transfers say something already"
    up.move(LEAST_BYTES, LEAST_S)
    assert watch(up).uplink_bits_per_s == given, "that one was held up elsewhere"
    assert watch(up).meters.link.upload_bits_per_s == math.inf, "no contribution is left out for it"


def test_what_an_uplink_carried_is_believed_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1.7e9
    monkeypatch.setattr("time.time", lambda: now)
    save_uplink(tmp_path, math.inf)
    assert load_uplink(tmp_path) == math.inf and not list(tmp_path.iterdir())
    save_uplink(tmp_path, 3e6)
    now += MAX_AGE_S
    assert load_uplink(tmp_path) == 3e6
    now += 1.0
    assert load_uplink(tmp_path) == math.inf
    now -= MAX_AGE_S + 2.0
    assert load_uplink(tmp_path) == math.inf, "the clock was set back"
    for rubbish in (b"", b"3e6", b'{"bits_per_s": -1.0, "at_s": 1.7e9}', b"[" * 9999):
        (tmp_path / "uplink.json").write_bytes(rubbish)
        assert load_uplink(tmp_path) == math.inf


async def test_a_member_remembers_its_uplink_over_a_restart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_uplink(tmp_path / "a", 3e6)
    async with Neighbourhood(tmp_path, seats=("a",)) as town:
        member = await town.member("a", genesis=True)
        assert member.core.shared.uplink.bits_per_s == 3e6
        uplink = member.meters.uplink
        for _ in range(LEAST_SAMPLES):
            with uplink.given.moving():
                uplink.given._from_bytes -= LEAST_BYTES
        member.link_teller.judge()
        assert member.core.shared.uplink.bits_per_s == uplink.measured_bits_per_s > 3e6
        await town.lives[member].save()
        assert load_uplink(member.settings.data_dir) == uplink.measured_bits_per_s


def asked_down(share: str) -> float:
    """A download that carries exactly that."""
    return float(getattr(demand_of(SMALL, LAYOUTS, LinkCapacity(1e6, 1e6, 0.0), MEMBERS, 1.0), share) * 1e6)


def test_a_thin_downlink_is_said_and_contributing_less_would_not_help() -> None:
    for rate, effect in (
        (
            asked_down("fetch_share") * 0.9,
            "it may fall behind for good; contributions to old versions are refused",
        ),
        (asked_down("download_share") * 0.9, "versions come late, and others' too where this node is syncer"),
    ):
        link = watch(Way(), limit=100e6, down=rate)
        said = [link.judge(MEMBERS, 1.0) for _ in range(RISE + 5)]
        assert said == [False] * (RISE - 1) + [True] + [False] * 5
        assert link.every == 1 and effect in link.words and "bit/s down) cannot keep up" in link.words
        assert len(link.words) <= 240
        assert [link.judge(MEMBERS, 10.0) for _ in range(FALL)][-1] and link.words == ""
    wide = watch(Way(), limit=100e6, down=asked_down("download_share"))
    assert not any(wide.judge(MEMBERS, 1.0) for _ in range(10)) and not wide.words


def test_a_downlink_that_transfers_show_to_be_thin_counts_too() -> None:
    down = Way()
    link = watch(Way(), meter=down.meter)
    for _ in range(LEAST_SAMPLES):
        assert not any(link.judge(MEMBERS, 1.0) for _ in range(10))
        down.move(LEAST_BYTES, 16 * LINK_OVERHEAD * LEAST_BYTES / asked_down("fetch_share"))
    assert not any(link.judge(MEMBERS, 1.0, catching_up=True) for _ in range(10)), "states come slowly"
    assert [link.judge(MEMBERS, 1.0) for _ in range(RISE)][-1] and "fall behind" in link.words
    permitted = watch(Way(), down=asked_down("fetch_share") / 2)
    assert [permitted.judge(MEMBERS, 1.0, catching_up=True) for _ in range(RISE)][-1]


def test_who_permits_little_download_holds_fewer_offices() -> None:
    link = watch(Way(), limit=30e6, down=1e6)
    # One contribution and two copies of an update go out, three contributions and an update come in.
    assert link.office_bits_per_s(4) == pytest.approx(1e6 * 3 / 4)
    assert link.office_bits_per_s(100) == pytest.approx(1e6 * 3 / 16), "of its group"
    down = Way()
    for _ in range(LEAST_SAMPLES):
        down.move(LEAST_BYTES, 100.0)
    assert watch(Way(), limit=30e6, meter=down.meter).office_bits_per_s(4) == 30e6


def test_while_nothing_went_out_an_uplink_is_taken_for_no_better_than_what_came_in() -> None:
    up, down = Way(), Way()
    link = watch(up, meter=down.meter)
    assert link.office_bits_per_s(4) == math.inf
    down.move(2 * LEAST_BYTES, LEAST_S)
    came_in = 16 * LINK_OVERHEAD * LEAST_BYTES / LEAST_S
    assert link.office_bits_per_s(4) == came_in
    up.move(4 * LEAST_BYTES, LEAST_S, up.uplink.given)
    assert link.office_bits_per_s(4) == 2 * came_in, "whoever sent may have been slow"


def test_thin_both_ways() -> None:
    link = watch(Way(), limit=rate_for(3), down=asked_down("fetch_share") / 2)
    assert [link.judge(MEMBERS, 1.0) for _ in range(RISE)][-1]
    assert link.every == 3 and "fall behind" in link.words and "one in 3 versions" in link.words
    assert len(link.words) <= 240


def test_limits_that_control_messages_use_up() -> None:
    # 15 others, two heartbeats of 700 bytes a second each: 168 kbit/s.
    assert control_doubts(SMALL, LinkCapacity(170e3, math.inf)) == []
    (words,) = control_doubts(SMALL, LinkCapacity(170e3, 100e3))
    assert words == (
        "--max-download: 100 kbit/s carry the control messages of 9 members, and in this run a node may have "
        "to do with 16 (168 kbit/s): then no update comes in"
    )
    group = msgspec.structs.replace(SMALL.group, expected_members=1000)
    large = msgspec.structs.replace(SMALL, group=group)
    assert len(control_doubts(large, LinkCapacity(1e6, 1e6))) == 2 and not control_doubts(
        large, LinkCapacity(3e6, 3e6)
    )


async def test_a_member_says_it_everywhere_and_tells_its_learner_and_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Neighbourhood(tmp_path, seats=("a",)) as town:
        member = await town.member("a", genesis=True, max_upload="3Mbit", max_download="100kbit")
        assert "--max-download: 100 kbit/s carry the control messages of 9 members" in caplog.text
        link, meters = member.link_watch, member.meters
        assert (meters.link.upload_bits_per_s, meters.link.download_bits_per_s) == (3e6, 100e3)
        said = member.core.shared.uplink
        assert said.bits_per_s == pytest.approx(100e3 * 3), (
            "alone a syncer has only its own update to take in"
        )
        meters.limits = LinkCapacity(3.0, math.inf)
        member.link_teller.judge()
        assert said.bits_per_s == 3.0, "what is known of the uplink decides who holds offices"
        meters.limits = LinkCapacity(3e6, math.inf)
        judge = link.judge
        link.judge = lambda members, step_s, **_: members == 1 and step_s == 0.01  # type: ignore
        link.every, link.words = 3, "the link cannot keep up"
        member.link_teller.judge()
        link.judge = judge  # type: ignore[method-assign]
        assert ch.TakePart(3) in member.learner.commands
        assert member.report.status(0.0).link == "the link cannot keep up"
        (record,) = await until(lambda: member.records("link"), "the record is written")
        assert record["every"] == 3 and record["upload_bits_per_s"] == 3_000_000
        member.learner.commands = []
        member.learner.die()
        await until(lambda: ch.TakePart(3) in member.learner.commands, "the next learner is told")


# `plan`: the arithmetic by hand, and advice that holds by the same arithmetic.

NUMEL, LARGEST = sum(f.numel for f in LAYOUTS), max(f.numel for f in LAYOUTS)


def with_sync(**values: object):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(SMALL, sync=msgspec.structs.replace(SMALL.sync, **values))


def test_traffic_of_four_members_is_what_the_protocol_sends() -> None:
    found = demand(SMALL, LinkCapacity(8e6, 8e6, 0.0), members=4, step_s=1.0)
    # A contribution and an update of every fragment, and three quarters of a syncer's share of both.
    assert found.upload_bytes_per_cycle == pytest.approx(1.75 * NUMEL * LINK_OVERHEAD, rel=0.02)
    assert found.download_bytes_per_cycle == pytest.approx(1.75 * NUMEL * LINK_OVERHEAD, rel=0.02)
    assert found.upload_bits_per_s == pytest.approx(8 * found.upload_bytes_per_cycle / 48)
    assert found.upload_share == pytest.approx(found.upload_bits_per_s / 8e6)
    fragment_s = NUMEL / 12 * LINK_OVERHEAD / 1e6
    assert found.member_round_s == pytest.approx(2 * fragment_s, rel=0.12)
    # Three contributions come in; the update goes to two, who pass it on.
    assert found.syncer_round_s == pytest.approx(2.5 * found.member_round_s, rel=1e-3)
    assert found.delay_steps == -(-found.syncer_round_s // 1.0)


def test_of_sixty_four_members_groups_send_each_other_sums_in_full_precision() -> None:
    topk = msgspec.structs.replace(SMALL.codec, contribution="topk", update="topk")
    found, sparse = (
        demand(manifest, LinkCapacity(8e6, 8e6, 0.0), members=64, step_s=1.0)
        for manifest in (SMALL, msgspec.structs.replace(SMALL, codec=topk))
    )
    # Four groups of 16: three of their four syncers send 4 bytes a parameter to the fourth.
    for each in (found, sparse):
        assert each.partial_bytes_per_cycle == pytest.approx(3 / 64 * 4 * NUMEL * LINK_OVERHEAD, rel=0.01)
    # In twelve fragments' groups a member meets nearly all others: two heartbeats a second to each.
    control = 63 * (1 - 0.75**12) * 2 * HEARTBEAT_BYTES * 48
    # A contribution, an update passed on by all but one. 60 contributions come in, to four syncers.
    up, down = 1 + 63 / 64 + 12 / 64, 1 + 60 / 64 + 12 / 64
    assert found.upload_bytes_per_cycle == pytest.approx(up * NUMEL * LINK_OVERHEAD + control, rel=0.02)
    assert found.download_bytes_per_cycle == pytest.approx(down * NUMEL * LINK_OVERHEAD + control, rel=0.02)
    fragment_s = LARGEST * LINK_OVERHEAD / 1e6
    # Fifteen contributions and three sums come in, the update goes to two.
    assert found.syncer_round_s == pytest.approx((15 + 3 * 4 + 2) * fragment_s, rel=0.02)
    assert sparse.syncer_round_s > 3 * 4 * fragment_s, "whatever the codec"
    assert sparse.delay_steps >= sparse.syncer_round_s


def test_sums_of_three_levels() -> None:
    found = demand(SMALL, LinkCapacity(8e6, 8e6, 0.0), members=1000, step_s=1.0)
    # 63 groups, then 4, then the root: all but one of 63 sums cross a wire, wherever they end.
    assert found.partial_bytes_per_cycle == pytest.approx(62 / 1000 * 4 * NUMEL * LINK_OVERHEAD, rel=0.02)
    fragment_s = LARGEST * LINK_OVERHEAD / 1e6
    # 15 contributions; then 15 sums, then 3; and the update, with 1000 names, to two.
    update_s = 2 * 70_400 * LINK_OVERHEAD / 1e6
    assert found.syncer_round_s == pytest.approx((15 + 18 * 4 + 2) * fragment_s + update_s, rel=0.02)


def test_nobody_to_talk_to_costs_nothing() -> None:
    found = demand(SMALL, LinkCapacity(1e6, 1e6), members=1, step_s=1.0)
    assert found.upload_bytes_per_cycle == found.download_bytes_per_cycle == 0
    assert found.carried


def test_a_link_that_is_too_thin_costs_merges_in_proportion() -> None:
    thin, wide = (demand(SMALL, LinkCapacity(bits, bits), 4, 1.0) for bits in (1e6, 100e6))
    assert wide.carried and not thin.carried
    assert thin.participation == pytest.approx(1 / thin.upload_share, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["micro", "tiny", "small"]),
    st.floats(2e5, 1e9),
    st.floats(2e5, 1e9),
    st.integers(2, 40),
    st.floats(0.01, 30.0),
)
def test_advice_holds_by_the_same_arithmetic(
    preset: str, up: float, down: float, members: int, step: float
) -> None:
    manifest, link = PRESETS[preset], LinkCapacity(up, down, 0.03)
    advice = advise(manifest, link, members, step)
    if advice is None:
        return
    sync = msgspec.structs.replace(
        manifest.sync,
        inner_steps=advice.inner_steps,
        fragments=advice.fragments,
        delay_steps=advice.delay_steps,
    )
    codec = msgspec.structs.replace(manifest.codec, contribution=advice.codec, update=advice.codec)
    taken = msgspec.structs.replace(manifest, sync=sync, codec=codec)
    found = demand(taken, link, members, step)
    assert found == advice.demand
    assert max(found.upload_share, found.download_share) <= COMFORT and found.carried
    assert found.delay_steps <= advice.delay_steps < advice.inner_steps >= advice.fragments
    assert advice.fragments in [times * manifest.sync.fragments for times in SPLITS]
    assert any("codec topk" in doubt for doubt in advice.doubts) == (advice.codec == "topk")


def test_a_wide_link_keeps_what_the_run_has_or_less_and_a_dead_one_is_told() -> None:
    wide = advise(with_sync(inner_steps=24, fragments=12), LinkCapacity(1e9, 1e9, 0.001), 4, 1.0)
    assert wide is not None and (wide.inner_steps, wide.codec, wide.fragments) == (24, "int8", 12)
    assert advise(SMALL, LinkCapacity(1e5, 1e5, 5.0), 16, 0.001) is None


def test_a_thin_link_gets_smaller_fragments_and_four_bits_before_topk() -> None:
    gpt2 = PRESETS["gpt2"]
    slow, slower = (
        advise(gpt2, LinkCapacity(20e6, 20e6), members=64, step_s=step_s) for step_s in (3.0, 0.3)
    )
    assert slow is not None and slower is not None
    assert (slow.inner_steps, slow.fragments, slow.codec) == (50, 48, "e3m0"), "24 have rounds of 16 steps"
    assert slower.codec == "e3m0" and slower.fragments == 48
    assert any("sync.inner_steps 500" in d and "124 M parameters" in d for d in slower.doubts)
    few = msgspec.structs.replace(SMALL, model={**SMALL.model, "layers": 1, "width": 8, "heads": 1})
    few = msgspec.structs.replace(
        few, sync=msgspec.structs.replace(few.sync, inner_steps=1000, fragments=300)
    )
    found = advise(few, LinkCapacity(1e6, 1e6, 9.0), members=4, step_s=0.1)
    assert found is None or found.fragments <= 1024, "no more than a manifest may have"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--preset", "small", "--upload", "1Mbit", "--step-s", "30", "--step-s", "0.001"]
    assert cli_main.run(line) == 0
    text = capsys.readouterr().out
    assert "small: H 48, P 12" in text and "too little for any setting" in text
    assert "int8: " in text and "% of the link, stale 0." in text and "Learners never wait" in text
    assert cli_main.run(["plan", "--preset", "small", "--upload", "1Mbit", "--step-s", "0.1"]) == 0
    said = capsys.readouterr()
    assert "topk: " in said.out
    assert "warning: advice for 0.1 s: not compared with data parallel" in said.err
    assert "codec topk" in said.err
    assert cli_main.run([*line, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["demand"]["step_s"] for row in rows] == [30.0, 0.001] and rows[1]["advice"] is None
    assert rows[0]["link"]["upload_bits_per_s"] == rows[0]["link"]["download_bits_per_s"] == 1e6
    assert rows[0]["measured"] is None
    assert cli_main.run(["plan", "--upload", "20Mbit"]) == 2
    assert "plan needs a run.toml" in capsys.readouterr().err
    assert cli_main.run(["plan", "--preset", "small"]) == 2
    assert "plan needs a link: --upload RATE or --join ADDRESS" in capsys.readouterr().err
    assert cli_main.run(["plan", "--join", "/ip4/127.0.0.1/tcp/1"]) == 2
    assert "/p2p/ID" in capsys.readouterr().err
    assert cli_main.run(["plan", "--preset", "small", "--upload", "20MB"]) == 2
    assert "bits per second" in capsys.readouterr().err


def test_a_preset_is_planned_as_it_is_written_for_raw_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["plan", "--preset", "gpt2", "--upload", "1Gbit", "--step-s", "1"]) == 0
    assert ", 85.2 M parameters (" in capsys.readouterr().err
