"""What the outer step follows from, and what a manifest is warned about."""

import msgspec
import pytest

from p2pdiloco.config.outer import LENGTHS, doubts, expected_merges, for_length, with_outer
from p2pdiloco.config.presets import PRESETS, for_run, with_schedule
from p2pdiloco.tasks.manifests import check_manifest

replace = msgspec.structs.replace


def changed(table, **keys):
    tiny = PRESETS["tiny"]
    return replace(tiny, **{table: replace(getattr(tiny, table), **keys)})


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("members", [0, 3, 40])
def test_presets_of_every_length_raise_no_doubts(name, members):
    preset = for_run(name, "run")
    assert doubts(preset) == []
    of_some = replace(preset, group=replace(preset.group, expected_members=members))
    for length, expected in LENGTHS.items():
        made = with_outer(for_length(of_some, length))
        check_manifest(made, length)
        assert doubts(made) == []
        assert expected_merges(made) == expected.steps // made.sync.inner_steps


def test_the_warm_up_of_momentum_is_two_thirds_of_a_short_run():
    warmups = [
        with_schedule(PRESETS["tiny"], steps, 3).outer.momentum_warmup_merges for steps in (240, 720, 9600)
    ]
    assert warmups == [7, 20, 20]
    # It is all of the outer step that a length changes.
    told = with_schedule(changed("outer", learning_rate=0.4, momentum=0.6), 720, 3).outer
    assert told == replace(PRESETS["tiny"].outer, learning_rate=0.4, momentum=0.6, momentum_warmup_merges=20)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (changed("outer", momentum_warmup_merges=0), "overshoots in a run of about 21 outer steps"),
        (changed("outer", momentum_warmup_merges=20), "warms up over 20 merges"),
        (changed("outer", learning_rate=1.5), "outer.learning_rate 1.5 is outside"),
        (changed("outer", momentum=0.95), "more than was tried"),
        (changed("sync", inner_steps=200), "sync.inner_steps 200 is more than was tried"),
        (changed("sync", inner_steps=100), "about 5 outer steps of each fragment long"),
        (changed("sync", delay_steps=20), "sync.delay_steps 20 is more than half"),
        (changed("codec", update="topk"), "the codec topk costs in loss was not measured"),
    ],
)
def test_what_was_not_shown_to_work_is_said(manifest, words):
    assert any(words in sentence for sentence in doubts(manifest))


@pytest.mark.parametrize(("steps", "warmup"), [(240, 24), (700, 70), (2800, 140), (100_000, 1000)])
def test_the_inner_rate_warms_up_over_a_tenth_of_a_short_run(steps, warmup):
    inner = with_schedule(PRESETS["tiny"], steps, 3).inner
    step_tokens = 3 * inner.tokens_per_step
    assert (inner.warmup_tokens, inner.schedule_tokens) == (warmup * step_tokens, steps * step_tokens)
