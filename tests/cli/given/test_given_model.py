"""`run new --from FOLDER`: which of the folder's files are read, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from daemon_kit import version_0
from known_flaws import known_flaw
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.adapters.result_file import load_tensors, save_tensors
from p2pdiloco.cli.main import run
from p2pdiloco.config.presets import MICRO
from p2pdiloco.tasks.causal_lm import CausalLM
from p2pdiloco.tasks.hub_models import llama_config
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import load_manifest, task_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's Llama, in one file, with a tokenizer of 301 tokens."""
    task = task_of(msgspec.structs.replace(MICRO, model=MICRO.model | {"vocabulary": 320}))
    assert isinstance(task, CausalLM)
    out = tmp_path / "llama"
    out.mkdir()
    parameters = {name: value.numpy() for name, value in named_parameters(task.model()).items()}
    save_tensors(out / "model.safetensors", parameters, {})
    (out / "config.json").write_text(json.dumps(llama_config(task.section)))
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(words | {"</s>": 300}, []))
    backend.save(str(out / "tokenizer.json"))
    return out


def new(source: Path, *arguments: str) -> int:
    out = str((source if source.is_dir() else source.parent).parent / "run.toml")
    model = ["--from", str(source)]
    return run(["run", "new", "r", "--preset", "micro", *model, "--out", out, "--force", *arguments])


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "TOKENIZER.MODEL", "vocab.json", "spiece.model", "tekken.json", "vocab.txt"]
)
def test_a_model_whose_tokenizer_is_of_another_kind_is_refused(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").rename(folder.parent / "kept.json")
    (folder / name).write_bytes(b"\n\xff")
    (folder / "tokenizer_config.json").write_text("{}")
    for arguments in ((), ("--tokenizer", str(folder)), ("--tokenizer", str(folder / name))):
        if arguments == ("--tokenizer", str(folder / name)) and name.endswith(".json"):
            continue  # a person may call a file as he likes: its content says what it is
        assert new(folder, *arguments) == 2
        said = capsys.readouterr().err
        assert f"{folder} has its tokenizer in {name}, but only tokenizer.json is read" in said
        assert f"T.from_pretrained('{folder}').save_pretrained('{folder}')" in said
    assert new(folder / "model.safetensors") == 2
    assert "has its tokenizer in" in capsys.readouterr().err
    # What a person asks for is done.
    assert new(folder, "--tokenizer", str(folder.parent / "kept.json")) == 0
    assert load_manifest(folder.parent / "run.toml").data.end_of_document == "</s>"
    assert new(folder, "--tokenizer", "bytes") == 0
    data = load_manifest(folder.parent / "run.toml").data
    assert (data.tokenizer, data.tokenizer_digest, data.end_of_document) == ("bytes", "", "")


def test_a_file_of_somebodys_folder_brings_its_tokenizer_and_none_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new(folder / "model.safetensors") == 0
    assert load_manifest(folder.parent / "run.toml").data.tokenizer == "tokenizer.json"
    (folder / "tokenizer.json").unlink()
    capsys.readouterr()
    assert new(folder) == 0
    assert f"{folder.name} has no tokenizer: text is read as raw bytes" in capsys.readouterr().err
    assert load_manifest(folder.parent / "run.toml").data.tokenizer == "bytes"
    assert run(["run", "new", "r", "--tokenizer", "bytes", "--out", str(folder / "run.toml")]) == 0


def test_what_lies_beside_a_checkpoint_is_not_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml, folder = tmp_path / "first.toml", tmp_path / "folder"
    folder.mkdir()
    assert run(["run", "new", "first", "--preset", "micro", "--out", str(toml)]) == 0
    version_0(toml).save(folder / "theta.safetensors")
    (folder / "vocab.txt").touch()
    capsys.readouterr()
    assert new(folder / "theta.safetensors") == 0
    assert load_manifest(tmp_path / "run.toml").data.tokenizer == "bytes"
    assert "tokenizer" not in capsys.readouterr().err


def test_the_hint_converts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the tokenizer is of GPT-2's two files."""
    transformers = pytest.importorskip("transformers")
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(words | {"<|endoftext|>": 256}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert new(folder) == 2
    code = capsys.readouterr().err.split("as T; ")[1].split('"')[0]
    exec(code, {"T": transformers.AutoTokenizer})
    assert new(folder) == 0
    assert load_manifest(folder.parent / "run.toml").data.end_of_document == "<|endoftext|>"


def parts(folder: Path, index: bool = True) -> dict[str, str]:
    """Cut the folder's model in two files; returns the index's map."""
    arrays, _ = load_tensors(folder / "model.safetensors")
    names = sorted(arrays)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    listed = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_tensors(folder / file, {name: arrays[name] for name in half}, {})
        listed |= dict.fromkeys(half, file)
    if index:
        write_index(folder, listed)
        (folder / "model.safetensors").unlink()
    return listed


def write_index(folder: Path, listed: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def initial_of(folder: Path) -> str:
    return load_manifest(folder.parent / "run.toml").run.initial


@pytest.fixture(params=["causal-lm", "hf-causal-lm"])
def any_folder(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A model that is read here, and one that `transformers` reads (biases, of a shape that fits)."""
    if request.param == "hf-causal-lm":
        pytest.importorskip("transformers")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
        arrays, _ = load_tensors(folder / "model.safetensors")
        width = config["hidden_size"]
        for name in [name for name in arrays if "self_attn" in name]:
            arrays[name.replace("weight", "bias")] = np.ones(width, np.float32)
        save_tensors(folder / "model.safetensors", arrays, {"format": "pt"})
    assert new(folder) == 0
    assert load_manifest(folder.parent / "run.toml").run.task == request.param
    return folder


def test_what_the_index_does_not_list_is_named_and_not_read(
    any_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = initial_of(any_folder)
    whole, _ = load_tensors(any_folder / "model.safetensors")
    stale = {name: array + 1 for name, array in whole.items()}
    # One file of the usual name: older parts beside it, without an index, are not read.
    save_tensors(any_folder / "model-00001-of-00009.safetensors", stale, {"format": "pt"})
    capsys.readouterr()
    assert new(any_folder) == 0 and initial_of(any_folder) == expected
    said = capsys.readouterr().err
    assert "model-00001-of-00009.safetensors, since there is model.safetensors" in said
    # An index: nor is a file of the usual name.
    parts(any_folder)
    for name in ("model.safetensors", "a.safetensors"):
        save_tensors(any_folder / name, stale, {"format": "pt"})
    capsys.readouterr()
    assert new(any_folder) == 0 and initial_of(any_folder) == expected
    said = capsys.readouterr().err
    assert "not read: " in said and "a.safetensors and 2 more, since model.safetensors.index.json" in said


def test_parts_without_an_index_are_read_whole_or_not_at_all(
    any_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = initial_of(any_folder)
    parts(any_folder, index=False)
    (any_folder / "model.safetensors").rename(any_folder / "spare")
    assert new(any_folder) == 0 and initial_of(any_folder) == expected
    (any_folder / "model-00001-of-00002.safetensors").rename(any_folder / "first")
    capsys.readouterr()
    assert new(any_folder) == 2
    assert f"{any_folder} has no model-00001-of-00002.safetensors" in capsys.readouterr().err
    (any_folder / "first").rename(any_folder / "model-00001-of-00002.safetensors")
    (any_folder / "spare").rename(any_folder / "x.safetensors")
    assert new(any_folder) == 2
    assert ", and so has model-0000" in capsys.readouterr().err


def test_what_the_index_lists_and_is_not_there_is_named(
    any_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = parts(any_folder)
    name, file = sorted(listed.items())[0]
    others = {key: value for key, value in listed.items() if key != name}
    other = next(value for value in listed.values() if value != file)
    capsys.readouterr()
    for wrong, sentence in (
        (
            listed | {name: "model-00003-of-00003.safetensors"},
            "lists model-00003-of-00003.safetensors, which",
        ),
        (listed | {name: other}, f"{file} has {name}, which by model.safetensors.index.json is in {other}"),
        (others, f"{file} has {name}, which by model.safetensors.index.json is listed nowhere"),
        (listed | {"more": file}, f"{file} lacks more, which model.safetensors.index.json lists there"),
        (
            listed | {name: "../model.safetensors"},
            "lists ../model.safetensors, which is no file of its folder",
        ),
        (listed | {name: "pytorch_model.bin"}, "lists pytorch_model.bin, which is no file"),
        ({}, "lists nothing"),
        (7, "is no index of safetensors files"),
    ):
        write_index(any_folder, wrong)
        assert new(any_folder) == 2
        assert sentence in capsys.readouterr().err
    write_index(any_folder, listed)
    (any_folder / file).write_bytes(b"cut")
    assert new(any_folder) == 2
    assert f"{file} cannot be read as safetensors" in capsys.readouterr().err
    (any_folder / file).unlink()
    assert new(any_folder) == 2
    assert f"lists {file}, which is not there" in capsys.readouterr().err


def test_a_file_that_is_named_is_read_alone(any_folder: Path) -> None:
    expected = initial_of(any_folder)
    (any_folder / "model.safetensors").rename(any_folder / "mine.safetensors")
    (any_folder / "model.safetensors").write_bytes(b"something else")
    assert new(any_folder / "mine.safetensors") == 0 and initial_of(any_folder) == expected


def test_a_check_says_which_ids_the_tokenizer_does_not_have(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "run.toml"
    tokenizer = ["--tokenizer", str(folder / "tokenizer.json")]
    assert run(["run", "new", "r", "--preset", "micro", *tokenizer, "--out", str(out)]) == 0
    out.write_text(out.read_text().replace("\nvocabulary = 320\n", "\nvocabulary = 1000\n"))
    assert run(["run", "check", str(out)]) == 0
    said = capsys.readouterr().err
    assert "1000 token ids, and tokenizer.json has 301: " in said and "% of the model, are never" in said


# Files with a byte order mark, and names of another program's wrapping.


@pytest.fixture
def with_more(folder: Path) -> Path:
    """The folder, with an index and words on generation."""
    arrays, _ = load_tensors(folder / "model.safetensors")
    write_index(folder, dict.fromkeys(arrays, "model.safetensors"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 300}))
    return folder


def test_a_folder_without_marks_is_taken(with_more: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new(with_more) == 0
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
)
@known_flaw("a byte order mark, as editors of Windows write it, is called malformed JSON or no JSON object")
def test_a_file_with_a_byte_order_mark_is_read(
    name: str, with_more: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (with_more / name).write_bytes(b"\xef\xbb\xbf" + (with_more / name).read_bytes())
    assert new(with_more) == 0
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
@known_flaw("of names with a prefix only the missing one is said, and not what is there instead")
def test_names_with_the_prefix_of_a_wrapper_are_called_so(
    prefix: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays, _ = load_tensors(folder / "model.safetensors")
    wrapped = {prefix + name: each for name, each in arrays.items()}
    save_tensors(folder / "model.safetensors", wrapped, {})
    write_index(folder, dict.fromkeys(wrapped, "model.safetensors"))
    status = new(folder)
    assert status == 0 or prefix in capsys.readouterr().err
