"""run.toml: what is written is read back, and every mistake is one sentence naming file and key."""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import identity
from p2pdiloco.config import manifest, presets
from p2pdiloco.config.manifest import (
    COMMENTS,
    MAX_MANIFEST_BYTES,
    TABLES,
    AdmissionSection,
    CausalLMSection,
    Manifest,
    SignedManifest,
    WeightSection,
    canonical_bytes,
    keys_of,
    manifest_from_canonical,
    tables_of,
    typed,
    vocabulary_for,
)
from p2pdiloco.config.presets import PRESETS, for_bytes, unreached_rows, warnings_about
from p2pdiloco.errors import ConfigError, RemoteError, StorageError
from p2pdiloco.identity import Identity
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
        "group.max_base_age_versions (17) and group.term_versions (8) must be at most "
        "group.log_versions (16)",
    ),
    (
        "term_versions = 8",
        "term_versions = 17",
        "group.max_base_age_versions (4) and group.term_versions (17) must be at most "
        "group.log_versions (16)",
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


# The signed manifest: any changed field, byte or owner is refused, and is another run.

GENESIS = hashlib.sha256(b"version 0").digest()


class Key:
    """A stand-in for Ed25519 with the same contract: only who knows the name's secret can sign."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha256(b"secret of " + self.peer.encode() + message).digest()


def verify_signature(peer: str, message: bytes, signature: bytes) -> bool:
    return Key(peer).sign(message) == signature


def signed() -> SignedManifest:
    return manifest.sign_manifest(presets.TINY, GENESIS, Key("alice"), "alice")


def test_a_signed_manifest_survives_the_wire_and_names_one_run() -> None:
    again = manifest.decode_signed(manifest.encode_signed(signed()))
    assert again == signed()
    assert manifest.verify(again, verify_signature) == presets.TINY
    assert manifest.run_id(again) == manifest.run_id(signed())
    assert len(manifest.run_id(again)) == 64


CHANGES = {
    "another owner": {"owner": "mallory"},
    "another version 0": {"genesis_digest": bytes(32)},
    "another manifest": {"manifest": manifest.canonical_bytes(presets.SMALL)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_covered_field_changes_run_and_breaks_signature(change: str) -> None:
    forged = msgspec.structs.replace(signed(), **CHANGES[change])
    assert manifest.run_id(forged) != manifest.run_id(signed())
    with pytest.raises(RemoteError) as caught:
        manifest.verify(forged, verify_signature)
    assert caught.value.reason == "manifest-signature"


def test_a_wrong_key_cannot_sign_in_the_owners_name() -> None:
    forged = manifest.sign_manifest(presets.TINY, GENESIS, Key("mallory"), "alice")
    with pytest.raises(RemoteError, match="manifest-signature"):
        manifest.verify(forged, verify_signature)


def test_the_signature_is_not_the_run_id_preimage() -> None:
    # Domain separation: what is signed cannot be replayed as anything else that this key signs.
    messages: list[bytes] = []

    class Spy(Key):
        def sign(self, message: bytes) -> bytes:
            messages.append(message)
            return super().sign(message)

    manifest.sign_manifest(presets.TINY, GENESIS, Spy("alice"), "alice")
    assert messages[0].startswith(b"p2pdiloco/1/manifest\0")
    assert hashlib.sha256(messages[0]).hexdigest() != manifest.run_id(signed())


def test_a_signed_but_invalid_manifest_is_still_refused() -> None:
    unsigned = msgspec.structs.replace(signed(), manifest=b"\x80", signature=b"")
    forged = msgspec.structs.replace(
        unsigned, signature=Key("alice").sign(manifest._covered("manifest", unsigned))
    )
    with pytest.raises(RemoteError) as caught:
        manifest.verify(forged, verify_signature)
    assert caught.value.reason == "manifest-garbage"


@given(st.data())
def test_any_flipped_byte_or_truncation_is_refused(data: st.DataObject) -> None:
    wire = bytearray(manifest.encode_signed(signed()))
    at = data.draw(st.integers(0, len(wire) - 1))
    if data.draw(st.booleans()):
        wire[at] ^= data.draw(st.integers(1, 255))
    else:
        del wire[at:]
    with pytest.raises(RemoteError):
        manifest.verify(manifest.decode_signed(bytes(wire)), verify_signature)


def test_oversized_and_nested_garbage() -> None:
    owner = signed().owner.encode()
    for wire, reason in (
        (bytes(manifest.MAX_SIGNED_BYTES + 1), "manifest-oversized"),
        (b"\x91" * 5000, "manifest-garbage"),
        (manifest.encode_signed(signed()).replace(owner, b"\xe1" + owner[1:]), "manifest-garbage"),
        (b"", "manifest-garbage"),
    ):
        with pytest.raises(RemoteError) as caught:
            manifest.decode_signed(wire)
        assert caught.value.reason == reason


def test_saved_and_loaded_and_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "manifest.signed"
    manifest.save_signed(path, signed())
    manifest.save_signed(path, signed())
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.signed"]
    assert manifest.load_signed(path, verify_signature) == (signed(), presets.TINY)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="is damaged"):
        manifest.load_signed(path, verify_signature)
    with pytest.raises(StorageError, match="cannot be read"):
        manifest.load_signed(tmp_path / "none", verify_signature)
    with pytest.raises(StorageError, match="cannot be written"):
        manifest.save_signed(tmp_path / "no-folder" / "manifest.signed", signed())


def test_genesis_digest_depends_on_order() -> None:
    a, b = bytes(32), b"\x01" * 32
    assert manifest.genesis_digest_of((a, b)) != manifest.genesis_digest_of((b, a))


def test_with_real_keys() -> None:
    owner, other = Identity.generate(), Identity.generate()
    good = manifest.sign_manifest(presets.TINY, GENESIS, owner, owner.peer_id)
    assert manifest.verify(good, identity.verify) == presets.TINY
    with pytest.raises(RemoteError, match="manifest-signature"):
        manifest.verify(msgspec.structs.replace(good, owner=other.peer_id), identity.verify)


# Rows of a model that no token reaches are said, with what they cost.

GPT2 = PRESETS["gpt2"]


def with_model(manifest: Manifest, **keys: object) -> Manifest:
    return msgspec.structs.replace(manifest, model=manifest.model | keys)  # type: ignore[operator]


def test_a_vocabulary_beyond_raw_bytes_is_said_wherever_doubts_are() -> None:
    said = [doubt for doubt in warnings_about(GPT2, 124_000_000) if "never reached" in doubt]
    assert len(said) == 1
    assert "50304 token ids, and bytes has 256: 38.4 M parameters, 31% of the model" in said[0]
    assert "a vocabulary of 256 is enough" in said[0]
    untied = with_model(GPT2, tied_head=False)
    assert "76.9 M parameters, are never reached" in unreached_rows(untied)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_as_they_are_written_have_none(name: str) -> None:
    assert unreached_rows(for_bytes(PRESETS[name])) == ""


def test_of_another_tokenizer_its_ids_count_rounded_up() -> None:
    data = msgspec.structs.replace(GPT2.data, tokenizer="mine.json")
    mine = msgspec.structs.replace(GPT2, data=data)
    assert unreached_rows(mine) == "", "its file is not at hand"
    assert unreached_rows(mine, 50_257) == ""
    assert "mine.json has 301: 38.4 M parameters" in unreached_rows(mine, 301)
    assert "a vocabulary of 320 is enough" in unreached_rows(mine, 301)


def test_an_architecture_of_transformers_is_looked_at_by_its_config() -> None:
    config = {"vocab_size": 1256, "hidden_size": 100, "tie_word_embeddings": False}
    hub = msgspec.structs.replace(GPT2, model={"config": json.dumps(config)})
    assert "1256 token ids, and bytes has 256: 0.2 M parameters" in unreached_rows(hub)
    for text in ("[]", "{", json.dumps({"vocab_size": "many"}), "[" * 100_000):
        assert unreached_rows(msgspec.structs.replace(GPT2, model={"config": text})) == ""


# Seats of version 0.

SEATED = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(2)]
WRONG_SEATS = (
    ([SEATED[0][:-1]], "a peer id"),
    (["12D3KooW" + "0" * 44], "a peer id"),
    ([SEATED[0], SEATED[0]], "must not name a peer twice"),
    (["12D3KooW" + "1" * 44] * 1025, "an array, each item a peer id"),
)


def test_seats_are_in_the_id_of_a_run_only_where_there_are_any() -> None:
    plain = PRESETS["micro"]
    seated = presets.with_seats(plain, SEATED)
    assert b"seats" not in canonical_bytes(plain) and b"seats" in canonical_bytes(seated)
    assert manifest_from_canonical(canonical_bytes(seated)) == seated
    assert presets.begun_by(plain, SEATED[1]).admission.seats == (SEATED[1],)
    assert presets.begun_by(seated, SEATED[1]) == seated


@pytest.mark.parametrize(("seats", "words"), WRONG_SEATS)
def test_seats_are_peers_and_each_is_named_once(seats: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = render_toml(PRESETS["micro"])
    assert text.count("\nseats = []\n") == 1
    path.write_text(text.replace("\nseats = []\n", f"\nseats = {json.dumps(seats)}\n"))
    with pytest.raises(ConfigError, match=words):
        load_manifest(path)
