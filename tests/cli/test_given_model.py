"""`run new --from FOLDER`: which of the folder's files are read, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.adapters.disk.result_file import save_tensors
from p2pdiloco.cli.main import run
from p2pdiloco.cli.name_tokenizer import OTHER_KINDS
from p2pdiloco.config.presets import MICRO
from p2pdiloco.tasks.causal_lm import CausalLM
from p2pdiloco.tasks.manifests import load_manifest
from p2pdiloco.tasks.models.hub_form import llama_config
from p2pdiloco.tasks.models.parameters import named_parameters
from p2pdiloco.tasks.registry import task_of


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
    "name", ["tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "vocab.txt"]
)
def test_a_model_whose_tokenizer_is_of_another_kind_is_refused(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(Path(name).match(pattern) for pattern in OTHER_KINDS)
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
    assert f"{folder} has no tokenizer: text is read as raw bytes" in capsys.readouterr().err
    assert load_manifest(folder.parent / "run.toml").data.tokenizer == "bytes"
    assert run(["run", "new", "r", "--tokenizer", "bytes", "--out", str(folder / "run.toml")]) == 0


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
