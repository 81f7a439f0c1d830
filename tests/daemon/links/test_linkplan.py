"""`plan`: the arithmetic by hand, and advice that holds by the same arithmetic."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.presets import PRESETS
from p2pdiloco.daemon.budgets import LINK_OVERHEAD, LinkCapacity
from p2pdiloco.daemon.network.link import COMFORT, HEARTBEAT_BYTES, SPLITS, advise, demand
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments

SMALL = PRESETS["small"]
LAYOUTS = plan_fragments(task_of(SMALL).specs(), SMALL.sync.fragments)
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
