"""Swarms in virtual time, and what they are compared with."""

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2pdiloco.config.presets import ADAMW_RATE, ALONE, SPARSE
from p2pdiloco.tasks.registry import check_manifest
from study.play import play
from study.setting import Outcome, Setting
from study.suites import (
    MUON_MOMENTUM,
    PARALLEL_MUON_MOMENTUM,
    SUITES,
    every,
    settings_of,
    usual_rate,
)
from study.virtual import Circumstances, Fault, Virtual

replace = msgspec.structs.replace
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "study" / "bench_learning.py"


@pytest.fixture(autouse=True)
def one_thread():
    """What is this small is slower on several, much slower where others work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = Setting(model="pico", steps=16, inner_steps=4, learners=2, warmup=5, momentum_warmup=2)


def test_without_delay_compression_and_fragments_a_swarm_is_synchronous_diloco():
    plain = msgspec.structs.replace(SMALL, fragments=1, codec="fp32", merge="mean", delay=0.0)
    swarm = play(plain, 512)
    oracle = play(msgspec.structs.replace(plain, kind="oracle"), 512)
    assert [loss for _, loss in swarm.curve] == pytest.approx([loss for _, loss in oracle.curve], abs=1e-6)
    assert (swarm.merges, swarm.contributors) == (4, 2)
    assert len({loss for _, loss in swarm.curve}) == 4  # one after each outer step


@pytest.mark.parametrize("kind", ["swarm", "oracle", "parallel"])
def test_in_bf16_only_passes_are_less_precise(kind, monkeypatch):
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda it, dynamic: (compiled.append(it), it)[1])
    exact = play(msgspec.structs.replace(SMALL, kind=kind), 512)
    assert not compiled
    rough = play(msgspec.structs.replace(SMALL, kind=kind, precision="bf16"), 512)
    assert len(compiled) == (1 if kind == "parallel" else SMALL.learners)
    assert rough.loss != exact.loss == pytest.approx(rough.loss, abs=0.01)


def test_the_grace_window_takes_in_a_slow_learner_and_faults_cost_only_what_was_not_sent():
    learners, period = 3, 8
    setting = msgspec.structs.replace(SMALL, learners=learners, inner_steps=period, delay=0.5)
    manifest, speeds = setting.manifest(), (1.0, 1.0, 0.25)
    found = {}
    for grace, faults in ((0.75, ()), (0.0, ()), (0.75, (Fault(20.0, 0, 10.0),))):
        swarm = Virtual(
            manifest, learners, Circumstances(delay=0.5, grace=grace, speeds=speeds, faults=faults)
        )
        try:
            swarm.play(6 * period, 6 * period)
            found[grace, len(faults)] = swarm
        finally:
            swarm.close()
    patient, hasty, hit = found.values()
    assert patient.contributions / patient.merges > 2.5 > 2 > hasty.contributions / hasty.merges
    # Half an interval and one under way are not merged at the end, at most two intervals of each learner.
    tokens = manifest.inner.tokens_per_step
    unmerged = patient.tokens - max(patient.merged_tokens)
    assert 0 < unmerged < 2 * period * 2.25 * tokens
    # Ten units without one learner, and what it had not sent; nobody else lost anything.
    assert 10 * tokens <= patient.tokens - hit.tokens <= 12 * tokens
    assert patient.tokens - hit.tokens <= max(patient.merged_tokens) - max(hit.merged_tokens) < 22 * tokens


def test_with_deaths_a_run_lasts_until_as_many_tokens_are_trained_if_it_shall():
    hit = replace(SMALL, faults_per_hour=3600.0, step_s=0.25, away_s=1.0)
    short, whole, calm = play(hit, 512), play(replace(hit, ends="tokens"), 512), play(SMALL, 512)
    step_tokens = hit.manifest().inner.tokens_per_step
    assert short.tokens <= calm.tokens - 4 * step_tokens
    assert calm.tokens <= whole.tokens < calm.tokens + hit.learners * step_tokens
    assert short.curve[-1][0] == SMALL.steps < whole.curve[-1][0]


def script() -> Any:
    """scripts/bench/study/bench_learning.py."""
    spec = importlib.util.spec_from_file_location("bench_learning", SCRIPT)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    return bench


def test_the_benchmark_runs_and_goes_on_where_it_was(tmp_path, capsys):
    bench = script()
    command = ["alone", "--quick", "--seeds", "0", "--out", str(tmp_path / "results.jsonl")]
    assert bench.main(command) == 0
    first = capsys.readouterr()
    assert first.err.count("CPU-s") == 3
    assert "| one learner | " in first.out
    assert bench.main([*command, "--jobs", "2"]) == 0
    assert capsys.readouterr() == (first.out, "")


def outcome(setting: Setting, loss: float) -> Outcome:
    """Of a run that nobody made."""
    return Outcome(setting=setting, loss=loss, curve=[(1, 2 * loss), (2, loss)])


def test_a_row_is_held_against_the_best_data_parallel_process_and_the_best_oracle_of_its_period():
    bench, base = script(), Setting(model="nano", inner_rate=1.0)
    made = {}
    for seed, loss in ((0, 2.0), (1, 3.0)):
        for case in SUITES["parity"](replace(base, seed=seed)):
            rate, kind = case.setting.inner_rate, case.setting.kind
            scale = {"parallel": 1.0, "oracle": 1.1, "swarm": 1.21}[kind] * (1.0 if rate == 1.0 else 1.5)
            made[case.setting.key] = outcome(case.setting, loss * scale)
    text = bench.table("parity", base, [0, 1], made, curve=True)
    rows = {
        cells[1]: cells[2:-1]
        for cells in ([c.strip() for c in line.split("|")] for line in text.split("\n")[1:])
    }
    assert rows["swarm, H = 100, 1"] == [
        "3.0250",
        "+21.00 % (+21.00 to +21.00)",
        "+10.00 % (+10.00 to +10.00)",
        "",
        "",
        "6.050, 3.025",
    ]
    assert rows["data parallel, 2"][1].startswith("+50.00 %")
    assert rows["data parallel, 1"][2] == "", "H means nothing to it"


def test_a_row_is_held_against_data_parallel_with_the_same_memory():
    bench = script()
    base = bench.base_of(bench.options_of(["betas", "--beta1", "0.8", "--model", "nano"]))
    assert base.beta1 == 0.8
    losses = {"parallel": {0.9: 4.0, 0.8: 2.0}, "swarm": {0.9: 5.0, 0.8: 3.0, 0.7: 2.5}}
    cases = [case.setting for case in SUITES["betas"](base)]
    made = {s.key: outcome(s, losses[s.kind][s.beta1]) for s in cases if s.beta1 in losses[s.kind]}
    text = bench.table("betas", base, [0], made)
    assert "| swarm, beta1 0.9 | 5.0000 | +25.00 % (one seed) |" in text
    assert "| swarm, beta1 0.8 | 3.0000 | +50.00 % (one seed) |" in text
    assert "| swarm, beta1 0.7 | 2.5000 |  |" in text, "data parallel with that was not run"


def test_every_suite_is_made_of_manifests_that_nodes_would_accept():
    base = Setting(model="nano")
    settings = settings_of(list(SUITES), base, [0, 1])
    assert len({setting.key for setting in settings}) == len(settings) > 2 * 60
    for setting in settings:
        check_manifest(setting.manifest(), setting.key)


@pytest.mark.parametrize("steps", [700, 2800])
@pytest.mark.parametrize("model", ["nano", "tiny-moe"])
def test_no_two_rows_of_a_suite_are_the_same_run(steps, model):
    base = every(Setting(model=model, steps=steps), 24)
    for name, suite in SUITES.items():
        cases = suite(base)
        keys, names = {case.setting.key for case in cases}, {case.name for case in cases}
        assert len(keys) == len(names) == len(cases), name


def test_one_learner_has_the_outer_step_of_one_learner():
    base = every(Setting(model="nano", steps=2800), 24)
    steps = {case.name: (case.setting.outer_rate, case.setting.momentum) for case in SUITES["alone"](base)}
    assert steps["one learner"] == (ALONE.learning_rate, ALONE.momentum)
    assert steps["one learner, H = 100"] == (SPARSE.learning_rate, SPARSE.momentum)


def test_all_that_is_compared_has_the_same_batch():
    base = Setting(model="nano", tokens_per_step=256)
    assert {s.manifest().inner.tokens_per_step for s in settings_of(list(SUITES), base, [0])} == {256}


def test_data_parallel_and_oracle_have_the_inner_optimizer_of_the_swarm():
    base = Setting(model="pico", steps=48, inner_steps=4, learners=2, beta1=0.8, optimizer="muon")
    for case in SUITES["parity"](base):
        inner = case.setting.manifest().inner
        assert (inner.beta1, inner.optimizer) == (0.8, "muon"), case.name
    assert Setting(beta1=0.9, muon_momentum=0.95).key == Setting().key == "{}", (
        "runs of before are found again"
    )


def test_a_rate_that_nobody_chose_is_adamws_also_where_the_preset_has_muon():
    for model in ("nano", "tiny-moe"):
        assert Setting(model=model).manifest().inner.learning_rate == ADAMW_RATE
    assert usual_rate("mini", "muon") == 2 * usual_rate("mini", "adamw") > 0 == usual_rate("pico", "muon")


def test_muon_is_held_against_muon_each_with_its_own_momentum():
    bench, base = script(), Setting(model="nano", inner_rate=1.0)
    made = {}
    for case in SUITES["optimizers"](base):
        inner = case.setting.manifest().inner
        scale = {"parallel": 1.0, "oracle": 1.1, "swarm": 1.2}[case.setting.kind]
        made[case.setting.key] = outcome(case.setting, scale * (2.0 if inner.optimizer == "muon" else 3.0))
        if inner.optimizer == "muon":
            least = PARALLEL_MUON_MOMENTUM if case.setting.kind == "parallel" else MUON_MOMENTUM
            assert inner.muon_momentum == least or "momentum" in case.name
    text = bench.table("optimizers", base, [0], made)
    for optimizer, loss in (("adamw", 3.6), ("muon", 2.4)):
        assert f"| {optimizer}: swarm, H = 24, 1 | {loss:.4f} | +20.00 % (one seed)" in text
    assert "| muon: swarm, momentum 0.95 | 2.4000 | +20.00 % (one seed)" in text


def test_a_share_in_merges_holds_a_fast_learner_back_and_no_equal_ones():
    ends = {}
    for speeds in ((1.0, 1.0, 1.0), (1.0, 0.25, 0.25)):
        setting = replace(SMALL, learners=3, inner_steps=8, steps=32, speeds=speeds)
        for share in (1.0, 1 / 3):
            ends[speeds, share] = play(replace(setting, largest_share=share), 512).loss
    equal, uneven = (abs(ends[s, 1.0] - ends[s, 1 / 3]) for s in ((1.0, 1.0, 1.0), (1.0, 0.25, 0.25)))
    assert equal == 0.0 < uneven
