"""`run new` and `run check` say with what documents begin; a run that has begun otherwise goes on so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon_kit import version_0
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from p2pdiloco.cli.main import run
from p2pdiloco.tasks.registry import load_manifest

transformers: Any = pytest.importorskip("transformers")
BEGIN, END = "<s>", "</s>"
SAID = f"documents begin with {BEGIN}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's Llama, whose tokenizer begins a text with a token."""
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([BEGIN, END])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))]
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=64)
    )
    model.save_pretrained(tmp_path / "theirs")
    backend.save(str(tmp_path / "theirs" / "tokenizer.json"))
    return tmp_path / "theirs"


def new(out: Path, *arguments: str) -> str:
    """Write a run.toml; returns what its documents begin with."""
    arguments = ("--preset", "micro", *arguments)
    assert run(["run", "new", out.stem, *arguments, "--out", str(out), "--force"]) == 0
    return load_manifest(out).data.begin_of_document


def exported(toml: Path, out: Path) -> Path:
    checkpoint = out.with_suffix(".safetensors")
    version_0(toml).save(checkpoint)
    tokenizer = ["--tokenizer", str(toml.with_suffix(".tokenizer.json"))]
    assert run(["export", "--checkpoint", str(checkpoint), *tokenizer, "--out", str(out)]) == 0
    return out


def test_it_is_taken_from_a_models_folder_and_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml, file = tmp_path / "r.toml", str(folder / "tokenizer.json")
    assert new(toml, "--from", str(folder)) == BEGIN
    assert f"{SAID}, as the tokenizer begins a text" in capsys.readouterr().err
    assert run(["run", "check", str(toml)]) == 0
    assert SAID in capsys.readouterr().out
    # So does a new model, with which its export's tokenizer begins a text; of bytes there is none.
    assert new(tmp_path / "own.toml", "--tokenizer", file) == BEGIN
    assert new(tmp_path / "bytes.toml", "--from", str(folder), "--tokenizer", "bytes") == ""
    for name in ("own", "r"):
        out = exported(tmp_path / f"{name}.toml", tmp_path / name)
        words = transformers.AutoTokenizer.from_pretrained(out)
        assert words.convert_ids_to_tokens(words("a")["input_ids"]) == [BEGIN, "a"]
        # An export and a checkpoint say what their run did.
        assert new(tmp_path / "again.toml", "--from", str(out)) == BEGIN
        assert new(tmp_path / "again.toml", "--from", str(out), "--data", "jsonl") == BEGIN
    text = (tmp_path / "r.toml").read_text()
    (tmp_path / "without.toml").write_text(
        text.replace(f'begin_of_document = "{BEGIN}"', 'begin_of_document = ""')
    )
    for kind in ("tokenizer.json", "initial.safetensors"):
        (tmp_path / f"r.{kind}").rename(tmp_path / f"without.{kind}")
    capsys.readouterr()
    out = exported(tmp_path / "without.toml", tmp_path / "without")
    assert new(tmp_path / "again.toml", "--from", str(out)) == ""
    assert SAID not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("about", "begin", "said"),
    [({"add_bos_token": False, "bos_token": BEGIN}, "", ""), ({"bos_token": BEGIN}, BEGIN, SAID)],
)
def test_the_folders_words_go_before_its_file(
    folder: Path, about: dict[str, object], begin: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    assert new(folder.parent / "r.toml", "--from", str(folder)) == begin
    printed = capsys.readouterr().err
    assert said in printed and (said or SAID not in printed)


def test_what_begins_with_several_does_without(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END} {BEGIN} $A", special_tokens=[(BEGIN, 256), (END, 257)]
    )
    backend.save(str(file))
    assert new(folder.parent / "r.toml", "--from", str(folder)) == ""
    assert f"begins a text with {END} {BEGIN}: documents do without" in capsys.readouterr().err
