"""run.toml: what is written is read back, and every mistake is one sentence naming file and key."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.config import presets
from p2pdiloco.config.manifest import (
    COMMENTS,
    MAX_MANIFEST_BYTES,
    TABLES,
    AdmissionSection,
    CausalLMSection,
    Manifest,
    WeightSection,
    canonical_bytes,
    keys_of,
    manifest_from_canonical,
    tables_of,
    typed,
    vocabulary_for,
)
from p2pdiloco.errors import ConfigError, RemoteError
from p2pdiloco.tasks.registry import load_manifest, render_toml, task_class, task_of

TINY = presets.TINY


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_is_valid_and_survives_its_own_toml(preset: str, tmp_path: Path) -> None:
    manifest = presets.for_run(preset, "my-run.1", seed=7)
    path = tmp_path / "run.toml"
    path.write_text(render_toml(manifest))
    assert load_manifest(path) == manifest
    assert manifest_from_canonical(canonical_bytes(manifest)) == manifest


def test_every_key_of_the_schema_is_written_with_a_comment_and_no_comment_is_stale() -> None:
    assert list(COMMENTS) == list(keys_of(Manifest))
    assert list(TABLES) == list(tables_of(typed(CausalLMSection)))
    for preset in presets.PRESETS.values():
        section = task_class(preset.run.task).Section
        assert list(section.comments) == list(section.__struct_fields__)
        text = render_toml(preset)
        written = tomllib.loads(text)
        for key in keys_of(typed(section)).values():
            assert key.name in (written[key.section] if key.section else written)
        for above, line in itertools.pairwise(text.splitlines()):
            if " = " in line and not line.startswith("#"):
                assert above.startswith("# "), line


def test_presets_have_the_sizes_that_their_names_promise() -> None:
    sizes = {name: sum(s.numel for s in task_of(m).specs()) for name, m in presets.PRESETS.items()}
    assert 3.3e4 < sizes["micro"] < 3.6e4 and 8e5 < sizes["tiny"] < 8.5e5 and 10e6 < sizes["small"] < 11e6
    assert 123e6 < sizes["gpt2"] < 126e6 and 350e6 < sizes["350m"] < 365e6 and 1.29e9 < sizes["1.3b"] < 1.35e9


def test_vocabularies_of_new_models_are_whole_tiles_of_a_gpu() -> None:
    assert [vocabulary_for(n) for n in (1, 64, 65, 320, 50_257)] == [64, 64, 128, 320, 50_304]
    large = {name: presets.PRESETS[name].model["vocabulary"] for name in ("gpt2", "350m", "1.3b")}
    assert large == dict.fromkeys(large, 50_304)


@pytest.mark.parametrize(("members", "groups"), [(0, 1), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_run_of_more_members_than_a_group_starts_with_several(members: int, groups: int) -> None:
    group = msgspec.structs.replace(TINY.group, expected_members=members)
    assert group.groups_at_start == groups


REPLACED = [
    ("delay_steps = 8", "delay_steps = 30", "sync.delay_steps must be below sync.inner_steps (24), it is 30"),
    ("width = 128", "width = 130", "model.width must be a multiple of model.heads (4), it is 130"),
    (
        "tokens_per_step = 1024",
        "tokens_per_step = 1000",
        "inner.tokens_per_step must be a multiple of model.context_tokens (128), it is 1000",
    ),
    (
        "warmup_tokens = 212992",
        "warmup_tokens = 2150400",
        "inner.warmup_tokens must be below inner.schedule_tokens (2150400), it is 2150400",
    ),
    ("quorum = 1", "quorum = 17", "sync.quorum must be at most group.size (16), it is 17"),
    (
        "max_base_age_versions = 4",
        "max_base_age_versions = 17",
        "group.max_base_age_versions must be at most group.log_versions (16), it is 17",
    ),
    ("vocabulary = 256", "vocabulary = 255", "model.vocabulary must be at least 256 (raw bytes), it is 255"),
    ("layers = 4", "layers = 0", "model.layers must be an integer from 1 to 256, it is 0"),
    ("layers = 4", "layers = 4.5", "model.layers must be an integer from 1 to 256, it is 4.5"),
    ("layers = 4", "layers = true", "model.layers must be an integer from 1 to 256, it is true"),
    ("layers = 4", "", "model.layers is missing"),
    ("seed = 0", "seed = -1", "run.seed must be an integer >= 0, it is -1"),
    (
        "learning_rate = 0.7",
        "learning_rate = nan",
        "outer.learning_rate must be a number above 0 and at most 2, it is nan",
    ),
    (
        "clip_norm = 1.0",
        "clip_norm = inf",
        "inner.clip_norm must be a number above 0 and at most 1000000, it is inf",
    ),
    ("momentum = 0.8", "momentum = 1", "outer.momentum must be a number from 0 to below 1, it is 1"),
    (
        'contribution = "int8"',
        'contribution = "int3"',
        'codec.contribution must be one of "bf16", "e3m0", "fp32", "int4", "int8", "topk", it is "int3"',
    ),
    (
        'name = "tiny"',
        'name = "tiny\\n"',
        'run.name must be 1 to 63 of a-z 0-9 . _ - and begin with a letter or digit, it is "tiny\\n"',
    ),
    ("delay_steps = 8", "delay = 8", 'there is no key "sync.delay"'),
    ("[codec]", "[codecs]", 'there is no table "codecs"'),
    ("format = 4", "format = 3", "format must be 4, it is 3"),
    ("seed = 0", "seed = ", "line 12 is not valid TOML"),
    ("seed = 0", "seed = 0\nseed = 1", "line 13 is not valid TOML"),
]


@pytest.mark.parametrize(
    ("line", "instead", "sentence"), REPLACED, ids=[r[1][:30] or "missing" for r in REPLACED]
)
def test_mistakes_are_one_sentence(line: str, instead: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = render_toml(TINY)
    assert f"\n{line}\n" in text
    path.write_text(text.replace(f"\n{line}\n", f"\n{instead}\n", 1))
    with pytest.raises(ConfigError) as caught:
        load_manifest(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {sentence}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [("sync.delay_step = 4", "sync.delay_steps"), ("sync.seed = 4", "run.seed"), ("sync.zzzz = 4", None)],
)
def test_an_unknown_key_comes_with_the_closest_known_one(
    written: str, meant: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(written)
    with pytest.raises(ConfigError, match="there is no key") as caught:
        load_manifest(path)
    assert caught.value.hint == (f'did you mean "{meant}"?' if meant else "")


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = render_toml(presets.for_run("micro", "windows"))
    path.write_text(text)
    usual = load_manifest(path)
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_manifest(path) == usual


def test_unreadable_files(tmp_path: Path) -> None:
    for make, words in (
        (lambda p: None, "there is no such file"),
        (lambda p: p.mkdir(), "cannot be read: Is a directory"),
        (lambda p: p.write_bytes(b"a = '\xff'"), "is not UTF-8 text (byte 5)"),
        (lambda p: p.write_bytes(b"#" * 140_000), "is larger than 128 KiB"),
        (lambda p: p.write_bytes(b"sync = 1\n"), "sync must be a table, it is 1"),
    ):
        path = tmp_path / f"{words[:12]}.toml"
        make(path)
        with pytest.raises(ConfigError) as caught:
            load_manifest(path)
        assert str(caught.value).startswith(f"{path}: {words}")


def test_what_a_peer_sends_is_refused_with_a_reason() -> None:
    good = canonical_bytes(TINY)
    broken_rule = good.replace(b"\xabdelay_steps\x08", b"\xabdelay_steps\x63")
    longer_number = good.replace(b"\xabdelay_steps\x08", b"\xabdelay_steps\xcc\x08")
    assert broken_rule != good and longer_number != good
    for data, reason in (
        (good[:-1], "manifest-garbage"),
        (good + b"\xc0", "manifest-garbage"),
        (longer_number, "manifest-garbage"),
        (b"\x91" * 5000, "manifest-garbage"),
        (b"", "manifest-garbage"),
        (broken_rule, "manifest-invalid"),
        (b"\x00" * (MAX_MANIFEST_BYTES + 1), "manifest-oversized"),
    ):
        with pytest.raises(RemoteError) as caught:
            manifest_from_canonical(data)
        assert caught.value.reason == reason


def test_a_run_without_a_word_on_admission_is_what_it_was() -> None:
    """Its id is a digest of these bytes, and every node of it has them on its disk."""
    quiet = presets.for_run("micro", "x")
    assert b"admission" not in canonical_bytes(quiet)
    assert manifest_from_canonical(canonical_bytes(quiet)) == quiet
    closed = msgspec.structs.replace(quiet, admission=AdmissionSection(mode="invite"))
    assert manifest_from_canonical(canonical_bytes(closed)) == closed
    assert b"largest_share" not in canonical_bytes(closed)
    friends = msgspec.structs.replace(closed, weight=WeightSection(largest_share=1.0, most_units=16.0))
    assert manifest_from_canonical(canonical_bytes(friends)) == friends
    assert canonical_bytes(friends) != canonical_bytes(closed), "its id covers what a learner weighs"
    with pytest.raises(RemoteError):  # two encodings of one manifest would be two runs
        manifest_from_canonical(msgspec.msgpack.encode(quiet, order="deterministic"))
