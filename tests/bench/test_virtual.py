"""Swarms in virtual time, and what they are compared with; outer steps, lockstep, and images of the study."""

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from p2pdiloco.config.presets import ADAMW_RATE, ALONE, MICRO, SPARSE
from p2pdiloco.tasks.registry import check_manifest, task_of
from study import glyphs
from study.data import data_of
from study.lockstep import Absence, Lockstep, Restart, mean_loss
from study.outer.variants import TopTwoBits, Variant, VariantSwarm
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
    plain = replace(SMALL, fragments=1, codec="fp32", merge="mean", delay=0.0)
    swarm = play(plain, 512)
    oracle = play(replace(plain, kind="oracle"), 512)
    assert [loss for _, loss in swarm.curve] == pytest.approx([loss for _, loss in oracle.curve], abs=1e-6)
    assert (swarm.merges, swarm.contributors) == (4, 2)
    assert len({loss for _, loss in swarm.curve}) == 4  # one after each outer step


@pytest.mark.parametrize("kind", ["swarm", "oracle", "parallel"])
def test_in_bf16_only_passes_are_less_precise(kind, monkeypatch):
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda it, dynamic: (compiled.append(it), it)[1])
    exact = play(replace(SMALL, kind=kind), 512)
    assert not compiled
    rough = play(replace(SMALL, kind=kind, precision="bf16"), 512)
    assert len(compiled) == (1 if kind == "parallel" else SMALL.learners)
    assert rough.loss != exact.loss == pytest.approx(rough.loss, abs=0.01)


def test_the_grace_window_takes_in_a_slow_learner_and_faults_cost_only_what_was_not_sent():
    learners, period = 3, 8
    setting = replace(SMALL, learners=learners, inner_steps=period, delay=0.5)
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


# Outer steps of studies (`study.outer.variants`).


LONGER = replace(SMALL, steps=32, momentum_warmup=4)


def played(setting, variant):
    swarm = VariantSwarm(setting, variant, 512)
    try:
        return swarm.play(setting.steps, 8), swarm.seen
    finally:
        swarm.close()


def test_the_variant_that_changes_nothing_is_production():
    usual = play(LONGER, 512)
    curve, seen = played(LONGER, Variant())
    assert [loss for _, loss in curve] == pytest.approx([loss for _, loss in usual.curve], abs=2e-4)
    assert {one.factor for one in seen} == {1.0}
    first = [one for one in seen if one.number == 1]
    assert [one.gain for one in first] == pytest.approx([1.0] * len(first)), "momentum is not there yet"


def test_a_step_is_never_longer_along_the_update_than_the_usual_one_without_a_past():
    mu = LONGER.momentum
    _, seen = played(LONGER, Variant(gain=True, corrected=True))
    assert any(one.factor < 1 for one in seen)
    assert all(one.gain * one.factor <= 1 + mu + 1e-6 for one in seen)
    first = next(one for one in seen if one.number == 1)
    assert first.gain == pytest.approx(1 + mu / (1 - mu), rel=0.05)


def test_top_of_two_bits_keeps_the_largest_with_their_signs_and_two_magnitudes():
    source = torch.randn(4096 + 100, generator=torch.Generator().manual_seed(3))
    chosen, out = TopTwoBits(0.0625), torch.empty(4096 + 100)
    chosen.decode(chosen.encode(source), out)
    kept = out[:4096] != 0
    assert int(kept.sum()) == 256 and len(out[:4096].abs().unique()) == 3
    assert source[:4096][kept].abs().min() >= source[:4096][~kept].abs().max()
    assert torch.equal(out[kept.nonzero()].sign(), source[kept.nonzero()].sign())


def test_top_of_two_bits_sends_what_it_left_out_later():
    setting = replace(LONGER, momentum=0.0, outer_rate=1.0, merge="mean")
    ends = {share: played(setting, Variant(top=share))[0][-1][1] for share in (0.0, 0.0625)}
    assert ends[0.0] != ends[0.0625] == pytest.approx(ends[0.0], rel=0.1)


# A few learners in lockstep: they learn, and a long absence is merged in shares.


@pytest.fixture
def swarm():
    made = Lockstep(MICRO, learners=2)
    yield made
    made.close()


def test_learners_in_lockstep_learn_and_hold_the_same_versions(swarm):
    start = swarm.loss()
    losses = swarm.run(48, evaluate_every=16)
    assert [step for step, _ in losses] == [16, 32, 48]
    assert mean_loss(losses, 0.3) == losses[-1][1] < start - 0.5
    assert {swarm.global_state.version(fragment) for fragment in range(4)} == {6}


def test_who_was_away_brings_its_work_in_shares(swarm, monkeypatch):
    period, seen = MICRO.sync.inner_steps, []
    merge = swarm.global_state.merge

    def watch(fragment, number, inputs):
        if fragment == 0:
            seen.append([steps for _, _, steps, *_ in inputs])
        return merge(fragment, number, inputs)

    monkeypatch.setattr(swarm.global_state, "merge", watch)
    swarm.run(13 * period, 1000, [Absence(learner=1, from_step=1, steps=6 * period)])
    first = 2  # the step at which fragment 0 is due for the first time
    assert seen[:6] == [[first], *[[period]] * 5]
    # Seven rounds' worth waits and one more comes with each round: five double ones work it off.
    assert [steps[1] for steps in seen[6:]] == [*[2 * period] * 5, period + first, period]
    assert {steps[0] for steps in seen[6:]} == {period}


def test_who_died_goes_on_from_the_global_parameters_with_the_moments_that_it_is_given(swarm):
    first, second = swarm._learners
    restarts = [Restart(0, 6, "disk", saved_steps=2), Restart(1, 8, "peer"), Restart(0, 12, "none")]
    swarm.run(6, 100, restarts=restarts)
    state = next(iter(first.training.optimizer.state.values()))
    assert state["step"] == 4, "as they were two steps ago"
    assert all(counters.unmerged_steps == 0 for counters in first.fragments.counters)
    swarm.run(12, 100, restarts=restarts[1:])
    assert first.training.optimizer_steps == 0 and not first.training.optimizer.state
    assert next(iter(second.training.optimizer.state.values()))["step"] == 4 + 8 + 4, (
        "the other's, then its own"
    )


# Images that the study draws itself, through the task image-classification.


def test_images_are_drawn_once_from_a_seed_and_a_swarm_trains_on_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(glyphs, "IMAGES", 360)
    setting = Setting(model="glyphs", learners=2, steps=4, inner_steps=2, momentum_warmup=1)
    task = task_of(setting.manifest())
    data = data_of(task)
    assert len(data.train) + len(data.heldout) == 360 and 15 < len(data.heldout) < 70
    _, labels = data.train.batch(np.arange(len(data.train)))
    assert set(labels.tolist()) == set(range(len(glyphs.CLASSES)))
    with monkeypatch.context() as patched:
        patched.setattr(glyphs, "draw", None)  # what is there is not drawn again
        folder = glyphs.glyphs()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    first, again = sorted(folder.rglob("*.png")), tmp_path / "again"
    glyphs.draw(again, 72)
    drawn = {path.relative_to(again): path.read_bytes() for path in again.rglob("*.png")}
    assert len(first) == 360 and len(set(drawn.values())) == len(drawn) == 72
    assert all((folder / name).read_bytes() == content for name, content in drawn.items())
    outcome = play(setting, 100)
    assert outcome.merges > 1 and 3 < outcome.loss < 5
