"""What the outer step follows from, and what a manifest is warned about."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.adapters.hivemind_binding import MAX_SUBKEYS
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.config.presets import (
    ADAPTER,
    ALONE,
    AVERAGE,
    CONTINUE,
    EQUALS,
    FEW_STEPS,
    FINETUNE,
    GENTLE,
    KINDS,
    LENGTHS,
    MOST_MEMBERS,
    PRESETS,
    ROWS,
    SPARSE,
    USUAL,
    OuterRule,
    expected_merges,
    for_given,
    for_length,
    for_run,
    harmful_settings,
    likely_slips,
    row_for,
    rule_of,
    too_large,
    warnings_about,
    with_outer,
    with_schedule,
    with_tokens,
)
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.registry import check_manifest

replace = msgspec.structs.replace


def changed(table, **keys):
    tiny = PRESETS["tiny"]
    return replace(tiny, **{table: replace(getattr(tiny, table), **keys)})


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("members", [0, 3, 40])
def test_presets_of_every_length_are_not_known_to_hurt_but_for_being_short(name, members):
    preset = for_run(name, "run")
    assert all(sentence.startswith("the schedule is about") for sentence in harmful_settings(preset))
    of_some = replace(preset, group=replace(preset.group, expected_members=members))
    for length, expected in LENGTHS.items():
        made = with_outer(for_length(of_some, length))
        check_manifest(made, length)
        if expected.steps // made.sync.inner_steps > 29:
            assert harmful_settings(made) == []
        assert expected_merges(made) == expected.steps // made.sync.inner_steps
        assert made.inner.beta1 == (preset.inner.beta1 if length == "demo" else 0.9)
        shorter = length != "demo" and preset.inner.optimizer == "muon"
        assert made.inner.learning_rate == preset.inner.learning_rate * (0.5 if shorter else 1)


def test_the_warm_up_of_momentum_is_two_thirds_of_a_short_run():
    warmups = [
        with_schedule(PRESETS["tiny"], steps, 3).outer.momentum_warmup_merges for steps in (240, 720, 9600)
    ]
    assert warmups == [7, 20, 20]


def test_runs_with_a_large_h_have_a_larger_outer_step_unless_somebody_chose_it():
    far_apart = changed("sync", inner_steps=100, delay_steps=4)
    for steps, learners in ((700, 3), (FEW_STEPS + 1, 3), (700, 1), (FEW_STEPS + 1, 1)):
        assert rule_of(with_schedule(far_apart, steps, learners).outer) == SPARSE
    assert rule_of(with_schedule(PRESETS["tiny"], 2800, 3).outer) == USUAL
    for other in (USUAL, ALONE):
        outer = replace(far_apart.outer, **other._asdict())
        again = with_outer(replace(with_schedule(far_apart, 720, 3), outer=outer), 3)
        assert rule_of(again.outer) == SPARSE
    told = with_schedule(changed("outer", learning_rate=0.4, momentum=0.6), 720, 3).outer
    assert told == replace(PRESETS["tiny"].outer, learning_rate=0.4, momentum=0.6, momentum_warmup_merges=20)
    for chosen in (USUAL._replace(learning_rate=0.5), USUAL._replace(merge="mean"), EQUALS):
        made = with_schedule(changed("outer", **chosen._asdict()), 2800, 3).outer
        assert rule_of(made) == chosen


def test_a_long_run_of_one_learner_has_a_step_of_its_own():
    assert rule_of(with_schedule(PRESETS["tiny"], 2800, 1).outer) == ALONE
    assert rule_of(with_schedule(PRESETS["tiny"], 2800, 2).outer) == USUAL
    assert rule_of(with_schedule(PRESETS["tiny"], 700, 1).outer) == USUAL


def test_a_manifest_that_says_nothing_of_the_outer_step_has_the_usual_one():
    assert rule_of(OuterSection()) == USUAL


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (changed("outer", momentum_warmup_merges=0), "overshoots in a run of about 21 outer steps"),
        (
            changed("outer", **ALONE._asdict()),
            "is the choice for learners of such a number (4), inner steps (about 525) and H (24)",
        ),
        (changed("outer", momentum_warmup_merges=20), "warms up over 20 merges"),
        (changed("inner", warmup_tokens=30_000), "warms up over 7 steps: with delays so short"),
        (changed("sync", inner_steps=100), "about 5 outer steps of each fragment long: with 29 a swarm"),
        (changed("sync", delay_steps=20), "sync.delay_steps 20 is more than half"),
        (
            changed("outer", learning_rate=1.6),
            "yet (docs/results.md): outer.learning_rate 1.6 (0.35 to 1.5)",
        ),
        (changed("outer", momentum=0.95), "yet (docs/results.md): outer.momentum 0.95 (0.9)"),
        (changed("sync", inner_steps=101), "yet (docs/results.md): sync.inner_steps 101 (100)"),
        (changed("sync", quorum=3), "yet (docs/results.md): sync.quorum 3 (1)"),
        (
            changed("codec", update="topk"),
            "yet (docs/results.md): codec topk (fp32, bf16, int8, e3m0)",
        ),
        (
            replace(PRESETS["tiny-moe"], model=PRESETS["tiny-moe"].model | {"experts": 8}),
            "yet (docs/results.md): 8 experts (4)",
        ),
        (
            replace(PRESETS["digits"], inner=replace(PRESETS["digits"].inner, optimizer="muon")),
            "yet (docs/results.md): Muon with task image-classification (causal-lm)",
        ),
        (
            changed("run", task="own-loop"),
            "yet (docs/results.md): task own-loop (causal-lm, image-classification)",
        ),
    ],
)
def test_what_hurt_and_what_was_not_shown_to_work_is_said(manifest, words):
    assert sum(words in sentence for sentence in warnings_about(manifest)) == 1


def test_all_that_is_beyond_what_was_shown_is_one_sentence():
    with_muon = with_schedule(PRESETS["tiny"], 2800, 4)
    assert warnings_about(with_muon, 3_229_952) == []
    shown = replace(with_muon, inner=replace(with_muon.inner, optimizer="adamw"))
    assert warnings_about(shown, 3_229_952) == []
    assert warnings_about(shown, 124_000_000) == [
        "not compared with data parallel yet (docs/results.md): 124 M parameters (3.23 M)"
    ]
    many = for_length(replace(shown, group=replace(shown.group, expected_members=64)), "day")
    many = replace(
        with_outer(many),
        sync=replace(many.sync, keep_in_flight=0.3),
        codec=replace(many.codec, contribution="int4"),
    )
    assert warnings_about(many) == [
        "not compared with data parallel yet (docs/results.md): 64 members (8 at most), 10000 inner "
        "steps (2800), codec int4 (fp32, bf16, int8, e3m0), "
        "sync.keep_in_flight 0.3 (0, 1)"
    ]


def test_what_made_short_runs_level_is_told_of_such_runs_only():
    def sentence_of(manifest):
        (sentence,) = [one for one in harmful_settings(manifest) if "the schedule is about" in one]
        return sentence

    def said(manifest):
        words = "within 1 % in two small models with inner.tokens_per_step 8192 and inner.beta1 0.8"
        return words in sentence_of(manifest)

    with_muon = with_schedule(PRESETS["tiny"], 700, 4)
    demo = replace(with_muon, inner=replace(with_muon.inner, optimizer="adamw"))
    assert expected_merges(demo) == 29 and said(demo)
    assert not said(with_schedule(demo, 600, 4)), "nobody tried it with 25 merges"
    assert not said(with_muon) and "level with data parallel with AdamW" in sentence_of(with_muon)
    assert not said(replace(demo, run=PRESETS["digits"].run))
    images = sentence_of(replace(with_muon, run=PRESETS["digits"].run))
    assert "AdamW" not in images, "nobody tried Muon with images"


def test_language_models_train_with_muon_but_the_smallest():
    muon = {name: its.inner.learning_rate for name, its in PRESETS.items() if its.inner.optimizer == "muon"}
    large = {"gpt2": 6e-4, "350m": 3e-4, "1.3b": 2e-4}
    assert muon == {"tiny": 6e-3, "tiny-moe": 6e-3, "small": 3e-3} | large
    assert PRESETS["tiny"].inner.muon_momentum == 0.85
    text = (Path(__file__).parents[2] / "docs/topics/tasks.md").read_text()
    sentence = text.partition("**Rates with Muon.**")[2].partition("measured")[0]
    rates = re.findall(r"((?:`\S+`(?: and )?)+) (\de-\d)", sentence)
    told = {name: float(rate) for names, rate in rates for name in re.findall(r"`(\S+)`", names)}
    assert told == muon


@pytest.mark.parametrize(("steps", "warmup"), [(240, 24), (700, 70), (2800, 140), (100_000, 1000)])
def test_the_inner_rate_warms_up_over_a_tenth_of_a_short_run(steps, warmup):
    inner = with_schedule(PRESETS["tiny"], steps, 3).inner
    step_tokens = 3 * inner.tokens_per_step
    assert (inner.warmup_tokens, inner.schedule_tokens) == (warmup * step_tokens, steps * step_tokens)


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("inner", {"fresh_warmup_steps": 10**9}, "none would reach its learning rate"),
        ("inner", {"clip_norm": 1e-300}, "inner.clip_norm 1e-300 leaves next to nothing"),
        ("inner", {"learning_rate": 1.0}, "inner.learning_rate 1 is far above"),
        ("inner", {"weight_decay": 1.0}, "inner.weight_decay 1 pulls parameters to zero"),
        (
            "inner",
            {"tokens_per_step": 1 << 53, "schedule_tokens": 1 << 53},
            "is more than a learner computes",
        ),
        (
            "group",
            {"expected_members": 1025},
            "group.expected_members 1025: a run lists at most 1024 members",
        ),
    ],
)
def test_slips_of_the_pen_are_said(section, changes, words):
    assert sum(words in sentence for sentence in warnings_about(changed(section, **changes))) == 1


def test_what_presets_have_is_no_slip():
    assert [likely_slips(preset) for preset in PRESETS.values()] == [[]] * len(PRESETS)
    assert likely_slips(changed("group", expected_members=1024)) == []
    assert MOST_MEMBERS == MAX_SUBKEYS


# Rates and outer steps for models that exist.


def test_larger_models_have_lower_rates_and_every_row_its_sources() -> None:
    for smaller, larger in pairwise(ROWS):
        assert smaller.most_numel < larger.most_numel
        assert all(smaller.rate(kind) >= larger.rate(kind) for kind in KINDS)
    for row in ROWS:
        assert row.sources and row.finetune < row.continued < row.adapter
    assert ROWS[-1].most_numel == float("inf")


@pytest.mark.parametrize(
    ("numel", "kind", "rate"),
    [
        (35_000, FINETUNE, 3e-4),
        (124_000_000, FINETUNE, 1e-4),
        (124_000_000, CONTINUE, 2e-4),
        (1_100_000_000, FINETUNE, 3e-5),
        (8_000_000_000, FINETUNE, 1e-5),
        (8_000_000_000, CONTINUE, 1e-4),
        (8_000_000_000, ADAPTER, 2e-4),
        (70_000_000_000, FINETUNE, 2e-6),
    ],
)
def test_a_rate_far_above_the_table_is_warned_of(numel: int, kind: str, rate: float) -> None:
    assert row_for(numel).rate(kind) == rate
    assert too_large(3 * rate, numel, kind) == ""
    assert f"({rate:g}): it may lose what it has learned" in too_large(3.1 * rate, numel, kind)


@pytest.mark.parametrize(
    ("steps", "inner_steps", "rule", "warmup"),
    [
        (36, 4, AVERAGE, 0),  # 9 merges
        (40, 4, GENTLE, 0),
        (240, 8, GENTLE, 0),  # 30 merges, but few steps
        (725, 25, GENTLE, 0),  # 29 merges
        (690, 23, GENTLE, 0),
        (720, 24, USUAL, 20),
        (10_000, 50, USUAL, 20),
    ],
)
def test_the_outer_step_of_a_model_that_exists_is_gentle_where_the_run_is_short(
    steps: int, inner_steps: int, rule: OuterRule, warmup: int
) -> None:
    tiny = PRESETS["tiny"]
    short = replace(tiny, sync=replace(tiny.sync, inner_steps=inner_steps, delay_steps=1))
    made = for_given(with_tokens(short, steps * 4 * tiny.inner.tokens_per_step))
    assert rule_of(made.outer) == rule and made.outer.momentum_warmup_merges == warmup
    assert with_outer(made) == made
    assert all(sentence.startswith("the schedule is about") for sentence in harmful_settings(made))
    # A run that begins with nothing has what it had.
    assert rule_of(with_outer(with_tokens(short, steps * 4 * tiny.inner.tokens_per_step)).outer) == USUAL


def test_a_length_in_tokens_has_its_warm_up_and_is_at_least_one_step() -> None:
    tiny = PRESETS["tiny"]
    inner = with_tokens(tiny, 4_096_001).inner
    assert (inner.schedule_tokens, inner.warmup_tokens) == (4_096_001, 70 * 4096)
    assert with_tokens(tiny, 4096).inner.warmup_tokens == 0
    with pytest.raises(UserError, match="4095 tokens are less than one inner step of each learner"):
        with_tokens(tiny, 4095)
