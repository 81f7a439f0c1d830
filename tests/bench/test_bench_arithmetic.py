"""What the benchmarks of the data plane compute from what they measure, and that rules can be taken away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import bench_averaging
import bench_links
import bench_memory
import bench_merge
import bench_rivals
import bench_rules
import bench_wire
from bench_rules import CELLS, WITHOUT
from bench_wire import Count, Made
from mutation_kit import Patch
from p2pdiloco.core.context import Electorate
from p2pdiloco.demo.swarm import Line
from peers import rival_peer
from study import bench_nodes
from study.setting import Setting
from study.suites import every, of_optimizer, parallel


def line(kind: str, fragment: int, **fields: Any) -> Line:
    return Line(mono=fields.pop("mono", 0.0), kind=kind, about=fragment, **fields)


def test_tokens_of_all_lives_count_and_the_last_second_is_reckoned() -> None:
    tokens = bench_nodes.Tokens()
    tokens.heard("a", 5000, 1000.0, 10.0)
    tokens.heard("b", 3000, 500.0, 10.5)
    assert tokens.sum == 8000 and tokens.by_now(10.8) == pytest.approx(8000 + 800 + 150)
    tokens.heard("a", 4000)  # it was killed, and went on from what it had saved
    tokens.heard("a", 4500)
    assert tokens.sum == 8500
    assert tokens.by_now(99.0) == pytest.approx(8500 + 500), "b has been silent for too long"


def test_real_nodes_are_held_against_runs_that_the_learning_benchmark_has_made() -> None:
    command = ["--inner-rate", "6e-3", "--learners", "4", "--faults-per-hour", "0", "--step-s", "0.2"]
    rows = bench_nodes.rows_of(bench_nodes.options_of(command), seed=2)
    swarm = every(Setting(seed=2, inner_rate=6e-3), 24)
    assert rows["swarm in virtual time"].key == swarm.key
    assert rows["data parallel"].key == parallel(msgspec.structs.replace(swarm, inner_rate=1.2e-2)).key
    assert rows["real nodes"].kind == "nodes" and rows["real nodes"].step_s == 0.2
    command = ["--inner-rate", "6e-3", "--beta1", "0.8", "--tokens-per-step", "4096"]
    large = bench_nodes.rows_of(bench_nodes.options_of(command), seed=0)
    swarm = every(Setting(inner_rate=6e-3, beta1=0.8, tokens_per_step=4096), 24)
    assert large["swarm in virtual time"].key == swarm.key
    assert large["data parallel"].key == parallel(msgspec.structs.replace(swarm, inner_rate=1.2e-2)).key
    inner = large["real nodes"].manifest().inner
    assert (inner.tokens_per_step, inner.beta1) == (4096, 0.8)
    muon = bench_nodes.rows_of(bench_nodes.options_of([*command, "--optimizer", "muon"]), seed=0)
    assert muon["swarm in virtual time"].key == of_optimizer(swarm, "muon").key
    momenta = {name: row.manifest().inner.muon_momentum for name, row in muon.items()}
    assert momenta == {"data parallel": 0.9, "swarm in virtual time": 0.85, "real nodes": 0.85}
    slow = bench_nodes.rows_of(bench_nodes.options_of(["--speeds", "1", "1", "1", "0.2"]), seed=0)
    tokens = {name: row.manifest().inner.schedule_tokens for name, row in slow.items()}
    assert max(tokens.values()) < 1.001 * min(tokens.values()), "equal tokens, also if some are slow"
    dying = bench_nodes.rows_of(bench_nodes.options_of(["--faults-per-hour", "125"]), seed=0)
    assert dying["swarm in virtual time"].ends == "tokens", "as those of real nodes"
    assert dying["real nodes"].ends == Setting().ends, "theirs always do: it is no part of their name"


def test_sockets_are_frames_without_headers() -> None:
    before, after = Count(100, 1, 200, 2), Count(100 + 10 * 1514, 11, 200 + 5 * 66, 7)
    spent = after.since(before)
    assert spent.in_frames() == (15140, 330)
    assert spent.in_sockets() == (14480, 0), "bare acknowledgements carry nothing"


def test_wire_readings_of_a_swarm_whose_traffic_is_known_exactly() -> None:
    """Four nodes; a member sends and fetches 0.5 bytes a parameter, a syncer three times that. Offices
    are shared unevenly. Every reading must come out as it went in. Of payload a member sends 0.4 and passes
    another 0.2 on, a syncer gives 0.9."""
    numels, names = [1000, 3000], ["a", "b", "c", "d"]
    made = [Made(0, 5, "a", 4), Made(1, 5, "a", 4), Made(0, 6, "b", 4), Made(1, 6, "c", 4)]
    whole = sum(numels[v.fragment] for v in made)
    counts = {}
    for name in names:
        held = sum(numels[v.fragment] for v in made if v.syncer == name)
        each = round(0.5 * (whole - held) + 1.5 * held)
        counts[name] = (each, each)
    found = bench_wire.reading(counts, made, numels)
    assert found["transfer"] == pytest.approx(0.5)
    for kind in bench_wire.KINDS:
        assert found[kind] == pytest.approx(0.75)
    keys = ("pushed_bytes", "updates_given_bytes", "updates_passed_on_bytes")
    early, late = (
        {n: [line("progress", 0, **dict.fromkeys(keys, 7)), *lines] for n in names}
        for lines in (
            [],
            [
                line(
                    "progress",
                    0,
                    pushed_bytes=7 + round(0.1 * 3 * whole),
                    updates_given_bytes=7 + round(0.225 * whole),
                    updates_passed_on_bytes=7 + round(0.05 * 3 * whole),
                )
            ],
        )
    )
    sent = bench_wire.roles(bench_wire.given(early, late), made, numels, 4)
    assert sent == pytest.approx({"member": 0.6, "syncer": 0.9, "ratio": 1.5})


def test_a_missing_contributor_does_not_make_the_transfer_look_cheap() -> None:
    numels, counts = [1000], {name: (0, 0) for name in "abcd"}
    counts["a"], counts["b"] = (2500, 2500), (2500, 2500)  # five transfers of a byte per parameter
    found = bench_wire.reading(counts, [Made(0, 1, "a", 3)], numels)
    assert found["transfer"] == pytest.approx(1.0)


def test_versions_are_those_published_and_wait_for_every_node() -> None:
    diaries = {
        "a": [
            line("merge", 0, number=1, contributors=3, live=4),
            line("publish", 0, number=1, digest="x"),
            line("merge", 0, number=2),  # failed
            line("publish", 0, number=2),  # could not be saved
        ],
        "b": [line("apply", 0, number=1, digest="x")],
    }
    made = bench_wire.versions(diaries)
    assert made == {(0, 1): Made(0, 1, "a", 3)}
    assert bench_wire.everywhere(diaries, made)
    assert not bench_wire.everywhere(diaries | {"c": []}, made)


def test_shares_of_the_copy_bandwidth_count_what_each_part_touches() -> None:
    """A copy touches 8 bytes in 8 ns, so one byte is worth one: parts that take as long as their bytes are at
    100 %, and a whole of 2 (4 + 12) + 20 bytes in 104 ns is at half."""
    full = bench_merge.shares({"decode": [4.0], "add": [12.0], "outer step": [20.0]}, [8.0], 2)
    assert full == {"decode": [1.0], "add": [1.0], "outer step": [1.0], "accumulate + step": [1.0]}
    half = bench_merge.shares({"decode": [20.0], "add": [12.0], "outer step": [40.0]}, [8.0], 2)
    assert half["accumulate + step"] == [0.5] and half["decode"] == [0.2]


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (["done", "4", "1.5", "1.5", "9.0"], True),
        (["done", "3", "1.0", "1.0", "9.0"], False),  # a group without one of them
        (["done", "4", "0.0", "0.0", "9.0"], False),  # averaged nothing, and said nothing
        (["done", "4", "0.0", "1.5", "9.0"], False),
    ],
)
def test_an_averaging_that_did_not_average_does_not_count(said: list[str], right: bool) -> None:
    assert bench_averaging.averaged([["done", "4", "1.5", "1.5", "8.0"], said], 4) is right


async def test_the_memory_benchmark_merges_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_memory.pushes, "SHARE_BYTES", 0)  # put back afterwards
    found = await bench_memory.one(20_000, "int8", 3, bounded=True)
    assert found["payloads_mib"] > 3 * 20_000 / bench_memory.MIB


@pytest.mark.parametrize(("inner_steps", "fragments", "delay_steps"), [(11, 3, 6), (12, 4, 2), (8, 1, 0)])
def test_torchft_has_one_fragment_on_its_way_and_waits_for_each(
    inner_steps: int, fragments: int, delay_steps: int
) -> None:
    plan = rival_peer.schedule(inner_steps, fragments, delay_steps)
    assert set(plan) <= set(range(1, inner_steps + 1))
    done = [(step, *event) for step in sorted(plan) for event in plan[step]]
    assert [event[1:] for event in done] == [(w, f) for f in range(fragments) for w in ("send", "wait")]
    sent, waited = done[::2], done[1::2]
    assert [step for step, *_ in waited] == [inner_steps * (f + 1) // fragments for f in range(fragments)]
    delays = [b[0] - a[0] for a, b in zip(sent, waited, strict=True)]
    assert max(delays) == min(delay_steps, -(-inner_steps // fragments) - 1), "as long as it may be"


def test_who_stands_still_for_a_sync_has_made_fewer_steps() -> None:
    """Two intervals of 11 steps of 0.97 s; one node stood still for as long as it computed."""
    manifest = bench_links.scaled("e3m0")
    computed_s = 22 * bench_links.STEP_S
    quick = ["cycle", "22", str(100.0 + computed_s), "0.0", "6", "0"]
    slow = ["cycle", "22", str(100.0 + 2 * computed_s), str(computed_s), "5", "1"]
    last = [bench_rivals.Cycle.of(words) for words in (quick, slow)]
    found = bench_rivals.reading(last, 100.0, manifest, "torchft")
    assert found["utilisation"] == pytest.approx({"node-0": 1.0, "node-1": 0.5})
    assert found["merges"] == pytest.approx(5 / 12), "one that averaged nothing does not count"
    assert (found["intervals"], found["failed"]) == (2, 1)
    assert found["stood_s"] == pytest.approx(computed_s / 4)
    cells = {"50/20": {"torchft": found}, "slow": {"torchft": found}}
    assert bench_rivals.verdict("torchft", cells) == "torchft: reaches the goal in 0 of 1 cells"


# `bench_rules`: every rule is there to be taken away, and the same seed goes otherwise without it.


def test_a_seed_is_played_with_and_without_thin_uplinks_leaving_offices_to_others() -> None:
    found, fitness = {}, Electorate.fitness
    for name in ("as it is", "thin uplinks hold offices"):
        with Patch() as patch:
            WITHOUT[name](patch)
            found[name] = bench_rules.played(CELLS["slow first"], 100.0, 3)
    assert Electorate.fitness is fitness
    for figures in found.values():
        assert 0.0 < figures["merges"] <= 100.0 and 25.0 <= figures["participation"] <= 100.0
    assert found["as it is"] != found["thin uplinks hold offices"]


def test_every_rule_can_be_taken_away() -> None:
    for apply in WITHOUT.values():
        with Patch() as patch:
            apply(patch)
