"""Given models whose files have a byte order mark, or names of another program's wrapping."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from known_flaws import known_flaw
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.adapters.result_file import save_tensors
from p2pdiloco.cli.main import run
from p2pdiloco.config.presets import MICRO
from p2pdiloco.tasks.causal_lm import CausalLM
from p2pdiloco.tasks.hub_models import llama_config
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of

MARK = b"\xef\xbb\xbf"


def llama(out: Path, prefix: str = "") -> Path:
    """Somebody's Llama, with an index and a tokenizer."""
    task = task_of(msgspec.structs.replace(MICRO, model=MICRO.model | {"vocabulary": 320}))
    assert isinstance(task, CausalLM)
    out.mkdir()
    tensors = {prefix + name: value.numpy() for name, value in named_parameters(task.model()).items()}
    save_tensors(out / "model.safetensors", tensors, {})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(llama_config(task.section)))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 300}))
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    Tokenizer(models.BPE(words | {"</s>": 300}, [])).save(str(out / "tokenizer.json"))
    return out


def new(folder: Path) -> int:
    """Exit status of `run new --from`."""
    out = str(folder.parent / "run.toml")
    return run(["run", "new", "r", "--preset", "micro", "--from", str(folder), "--out", out, "--force"])


def test_a_folder_without_marks_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new(llama(tmp_path / "llama")) == 0
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
)
@known_flaw("a byte order mark, as editors of Windows write it, is called malformed JSON or no JSON object")
def test_a_file_with_a_byte_order_mark_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = llama(tmp_path / "llama")
    (folder / name).write_bytes(MARK + (folder / name).read_bytes())
    assert new(folder) == 0
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
@known_flaw("of names with a prefix only the missing one is said, and not what is there instead")
def test_names_with_the_prefix_of_a_wrapper_are_called_so(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = new(llama(tmp_path / "llama", prefix))
    assert status == 0 or prefix in capsys.readouterr().err
