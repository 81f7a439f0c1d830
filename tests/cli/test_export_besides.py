"""What an export says beside its weights: special tokens, chat template, when to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from daemon_kit import version_0
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from p2pdiloco.cli import given_files
from p2pdiloco.cli.given_files import with_side_files
from p2pdiloco.cli.main import run
from p2pdiloco.config.manifest import (
    MAX_EXPORT_TEXT,
    MAX_MANIFEST_BYTES,
    ExportSection,
    canonical_bytes,
    manifest_from_canonical,
)
from p2pdiloco.config.presets import MICRO
from p2pdiloco.daemon.run_files.saved_state import load_result
from p2pdiloco.errors import RemoteError
from p2pdiloco.tasks import text
from p2pdiloco.tasks.hub_export import hub_files
from p2pdiloco.tasks.registry import load_manifest
from p2pdiloco.tasks.tokens import tokenizer_digest

pytestmark = pytest.mark.long

transformers: Any = pytest.importorskip("transformers")
END, PAD, TURN = "<|endoftext|>", "<|pad|>", "<|turn|>"
TEMPLATE = "{% for m in messages %}{{m['role']}}\n{{m['content']}}<|turn|>{% endfor %}"


def theirs(folder: Path, architecture: str = "Llama") -> Path:
    """A small model that stops in the middle of what it would say, with all that belongs to it."""
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, PAD, TURN])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=TURN, pad_token=PAD, bos_token=END, padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=257,
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    said = model.generate(torch.tensor([[65, 66]]), max_new_tokens=8, eos_token_id=None, do_sample=False)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[258, int(said[0, -1])], pad_token_id=257, bos_token_id=256, repetition_penalty=1.0001
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def exported(toml: Path, out: Path) -> Path:
    """The export of the run's version 0."""
    checkpoint = out.with_suffix(".safetensors")
    version_0(toml).save(checkpoint)
    tokenizer = toml.with_suffix(".tokenizer.json")
    given = ["--tokenizer", str(tokenizer)] if tokenizer.exists() else []
    assert run(["export", "--checkpoint", str(checkpoint), *given, "--out", str(out)]) == 0
    return out


def new(tmp_path: Path, name: str, *arguments: str) -> Path:
    out = tmp_path / f"{name}.toml"
    assert run(["run", "new", name, "--preset", "micro", *arguments, "--out", str(out)]) == 0
    return out


def loaded(folder: Path) -> tuple[Any, Any]:
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_an_export_is_made_for_as_many_tokens_as_the_model_was(tmp_path: Path, architecture: str) -> None:
    source = theirs(tmp_path / "theirs", architecture)
    short = new(tmp_path, "short", "--from", str(source), "--context", "64")
    assert load_manifest(short).model["context_tokens"] == 64
    model, tokenizer = loaded(exported(short, tmp_path / "out"))
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 128


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_an_export_generates_stops_and_pads_as_the_model_did_that_it_began_with(
    tmp_path: Path, architecture: str
) -> None:
    source = theirs(tmp_path / "theirs", architecture)
    first = exported(new(tmp_path, "first", "--from", str(source)), tmp_path / "one")
    # An export is a model that exists, too: as a folder, and as its one file.
    again = exported(new(tmp_path, "again", "--from", str(first)), tmp_path / "two")
    file = new(tmp_path, "file", "--from", str(first / "model.safetensors"))
    told = load_manifest(tmp_path / "first.toml").export
    assert load_manifest(file).export == told
    # A checkpoint alone has its tokenizer elsewhere, and its words are of that one.
    alone = ["--from", str(tmp_path / "one.safetensors")]
    assert run(["run", "new", "alone", *alone, "--out", str(tmp_path / "alone.toml")]) == 2
    alone += ["--tokenizer", str(first / "tokenizer.json")]
    assert load_manifest(new(tmp_path, "alone", *alone)).export == told
    model, tokenizer = loaded(source)
    chat = [{"role": "user", "content": "hé"}]
    ids = torch.tensor([[65, 66]])
    said = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert len(said[0]) < 20, "it stops by itself"
    for folder in (first, again):
        other, words = loaded(folder)
        assert torch.equal(other.generate(ids, max_new_tokens=40, do_sample=False), said)
        assert other.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(other.config, name) == getattr(model.config, name)
        assert words.special_tokens_map == tokenizer.special_tokens_map
        batch = ["a", "bb<|turn|>"]
        assert words(batch, padding=True)["input_ids"] == tokenizer(batch, padding=True)["input_ids"]
        assert words.apply_chat_template(chat, tokenize=False) == (
            tokenizer.apply_chat_template(chat, tokenize=False)
        )


def test_a_run_of_its_own_ends_where_its_documents_do(tmp_path: Path) -> None:
    file = theirs(tmp_path / "theirs") / "tokenizer.json"
    toml = new(tmp_path, "own", "--tokenizer", str(file))
    assert load_manifest(toml).export == ExportSection()
    model, tokenizer = loaded(exported(toml, tmp_path / "out"))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == (END, PAD, None)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (256, 257)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (256, 257)
    # The model's own words are of its own tokenizer only.
    for other in (str(file), "bytes"):
        given = new(tmp_path, f"o{len(other)}", "--from", str(file.parent), "--tokenizer", other)
        assert load_manifest(given).export == ExportSection(context_tokens=128)
    model, tokenizer = loaded(exported(new(tmp_path, "bytes"), tmp_path / "bytes"))
    assert tokenizer.eos_token is None and model.generation_config.eos_token_id is None


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_an_export_has_the_type_of_the_model_that_it_began_with(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "EMBEDDED_MAX_BYTES", 1 << 20)  # of which `eval` reads all
    source = theirs(tmp_path / "theirs", architecture)
    model, _ = loaded(source)
    model.to(torch.bfloat16).save_pretrained(source)
    toml = new(tmp_path, "first", "--from", str(source))
    assert load_manifest(toml).export.dtype == "bf16"
    folder = exported(toml, tmp_path / "one")
    checkpoint = ["--checkpoint", str(tmp_path / "one.safetensors"), "--tokenizer"]
    checkpoint.append(str(toml.with_suffix(".tokenizer.json")))
    sizes = {}
    for dtype, given in (("bfloat16", "bf16"), ("float32", "fp32"), ("float16", "fp16")):
        out = tmp_path / given
        assert run(["export", *checkpoint, "--dtype", given, "--out", str(out)]) == 0
        found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        assert {str(value.dtype) for value in found.parameters()} == {f"torch.{dtype}"}
        for name, value in model.state_dict().items():  # (it has been bf16: nothing is lost)
            torch.testing.assert_close(found.state_dict()[name], value.to(found.dtype), rtol=0, atol=0)
        sizes[given] = (out / "model.safetensors").stat().st_size
    assert sizes["fp32"] > 1.6 * sizes["bf16"]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16", "without a word, too"
    # It is a result file like others.
    result = str(folder / "model.safetensors")
    assert run(["eval", "--checkpoint", result, "--tokens", "64", "--device", "cpu"]) == 0
    again = new(tmp_path, "again", "--from", str(folder))
    assert load_manifest(again).run.initial == load_manifest(toml).run.initial
    assert load_manifest(again).export == load_manifest(toml).export


def test_what_a_type_does_not_hold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = new(tmp_path, "r")
    result = version_0(toml)
    next(iter(result.parameters.values())).view(-1)[0] = 1e5
    result.save(tmp_path / "theta")
    given = ["--checkpoint", str(tmp_path / "theta"), "--out", str(tmp_path / "out"), "--force"]
    assert run(["export", *given, "--dtype", "bf16"]) == 0
    assert run(["export", *given, "--dtype", "fp16"]) == 2
    assert "has values beyond what fp16 holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "fp32"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"dtype": "torch.bfloat16", "torch_dtype": "float32"}, "bf16"),
        ({"text_config": {"torch_dtype": "bfloat16"}}, "bf16"),
        ({"dtype": "float8_e4m3fn"}, "fp32"),
        ({"dtype": 7, "text_config": 7}, "fp32"),
    ],
)
def test_the_type_is_stated_by_several_names(config: dict[str, object], dtype: str) -> None:
    assert given_files.dtype_in(config) == dtype


def test_a_stranger_s_words_name_no_files() -> None:
    told = ExportSection(tokenizer_config=json.dumps({"vocab_file": "/etc/passwd", "eos_token": END}))
    files = hub_files(msgspec.structs.replace(MICRO, export=told), {}, 64, None)
    about = json.loads(files["tokenizer_config.json"])
    assert about["eos_token"] == END and "vocab_file" not in about


@pytest.mark.parametrize(
    ("theirs", "known", "written"),
    [
        ({"bos_token_id": 0, "pad_token_id": 1}, {}, {"bos_token_id": 0, "pad_token_id": 1}),
        ({"eos_token_id": 2, "pad_token_id": 1}, {"eos_token_id": 7, "pad_token_id": 9},
         {"eos_token_id": 7, "pad_token_id": 1}),
        ({"pad_token_id": None}, {"pad_token_id": 9, "bos_token_id": None}, {"pad_token_id": 9}),
    ],
)  # fmt: skip
def test_an_architecture_keeps_the_ids_that_it_needs(
    theirs: dict[str, Any], known: dict[str, Any], written: dict[str, Any]
) -> None:
    """Some count positions by the padding's, and configs of some take no id for none."""
    manifest = msgspec.structs.replace(MICRO, export=ExportSection(token_ids=json.dumps(known)))
    files = hub_files(manifest, theirs, 64, None)
    assert json.loads(files["config.json"]) == written | {"dtype": "float32"}


@pytest.mark.parametrize("stated", [{}, {"pad_token_id": 1}])
def test_what_counts_positions_by_its_padding_comes_back(tmp_path: Path, stated: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = {"model_type": "roberta", "is_decoder": True, "vocab_size": 320} | sizes | stated
    config |= {"max_position_embeddings": 80}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    tokenizer = theirs(tmp_path / "theirs") / "tokenizer.json"  # with a padding token of its own
    for name in (str(tokenizer), "bytes"):
        toml = new(tmp_path, f"r{len(name)}", "--architecture", str(file), "--tokenizer", name)
        out = exported(toml, tmp_path / f"o{len(name)}")
        model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        ours = load_result(out / "model.safetensors").model(torch.device("cpu")).eval()
        ids = torch.tensor([[65, 257, 1, 66]])
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, ours(ids).logits, rtol=1e-5, atol=1e-6)


def test_a_list_of_words_and_none_but_the_end_s_padding() -> None:
    tokenizer = json.dumps({"model": {"vocab": [["a", 0.0], ["</s>", -1.0]]}, "added_tokens": []}).encode()
    data = msgspec.structs.replace(
        MICRO.data, tokenizer="own", tokenizer_digest=tokenizer_digest(tokenizer), end_of_document="</s>"
    )
    files = hub_files(msgspec.structs.replace(MICRO, data=data), {}, 64, tokenizer)
    assert json.loads(files["generation_config.json"]) == (
        {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    )
    assert json.loads(files["tokenizer_config.json"])["pad_token"] == "</s>"


def test_what_is_damaged_too_large_or_a_class_of_its_own_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    (tmp_path / "config.json").write_text("{")
    own = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": "x.Theirs"}, "eos_token": END}
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y" * MAX_EXPORT_TEXT}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | {"chat_template": named}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": PAD}))
    found = with_side_files(MICRO, tmp_path)
    assert json.loads(found.export.tokenizer_config) == {"eos_token": END, "pad_token": PAD}
    assert len(found.export.chat_template) == MAX_EXPORT_TEXT
    said = capsys.readouterr().err
    assert "config.json is no JSON object, and left out" in said and "generation_config.json is no" in said
    named[1]["template"] += "y"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | {"chat_template": named}))
    found = with_side_files(MICRO, tmp_path)
    assert not found.export.chat_template and found.export.tokenizer_config
    assert "the chat template in" in capsys.readouterr().err
    # All of it has to travel with the manifest.
    room = MAX_MANIFEST_BYTES - len(canonical_bytes(MICRO))
    monkeypatch.setattr(given_files, "MAX_EXPORT_TEXT", room)
    (tmp_path / "chat_template.jinja").write_text("z" * room)
    assert len(canonical_bytes(with_side_files(MICRO, tmp_path))) < MAX_MANIFEST_BYTES


def test_a_stranger_s_export_section_is_bounded_and_json() -> None:
    quiet = canonical_bytes(MICRO)
    for export, reason in (
        (ExportSection(generation_config="[]"), "manifest-invalid"),
        (ExportSection(token_ids="{" * 5000), "manifest-invalid"),
        (ExportSection(chat_template="x" * (MAX_EXPORT_TEXT + 1)), "manifest-garbage"),
    ):
        with pytest.raises(RemoteError) as caught:
            manifest_from_canonical(canonical_bytes(msgspec.structs.replace(MICRO, export=export)))
        assert caught.value.reason == reason
    for section in (ExportSection(chat_template="x"), ExportSection(dtype="bf16")):
        told = msgspec.structs.replace(MICRO, export=section)
        assert manifest_from_canonical(canonical_bytes(told)) == told
        # (runs from before there was a type keep their ids)
        assert (b"dtype" in canonical_bytes(told)) == (section.dtype == "bf16")
    assert b"export" not in quiet and manifest_from_canonical(quiet) == MICRO
