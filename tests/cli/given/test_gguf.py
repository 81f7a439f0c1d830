"""`run new --from FILE.gguf`: dequantised with a sentence, or refused with one."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
from daemon_kit import version_0
from gguf_files import tiny, write_gguf

from p2pdiloco.cli.main import run
from p2pdiloco.tasks.registry import load_manifest


def new(source: Path, *arguments: str) -> int:
    out = str(source.parent / "run.toml")
    model = ["--from", str(source), *arguments]
    return run(["run", "new", "r", "--preset", "micro", *model, "--out", out, "--force"])


@pytest.mark.parametrize(
    ("family", "kind", "error", "words"),
    [
        ("llama", "F32", 1e-6, "are read as fp32: F32"),
        ("llama", "F16", 2e-3, "are read as fp32: F16, F32"),
        ("qwen2", "F32", 1e-6, "are read as fp32: F32"),
        ("llama", "Q8_0", 3e-2, "are dequantised: Q8_0 to fp32; what was lost in quantising stays lost"),
    ],
)
def test_a_file_is_the_model_that_it_was_made_of(
    family: str, kind: str, error: float, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(family)
    file = write_gguf(tmp_path / "tiny.gguf", model, kind)
    assert new(file) == 0
    said = capsys.readouterr().err
    assert f"the weights of {file} {words}" in said and "raw bytes" not in said
    manifest = load_manifest(tmp_path / "run.toml")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert manifest.run.initial_name == f"tiny.gguf sha256:{digest}"
    assert manifest.run.task == ("causal-lm" if family == "llama" else "hf-causal-lm")
    assert (manifest.data.begin_of_document, manifest.data.end_of_document) == ("<s>", "</s>")
    assert sorted(path.name for path in tmp_path.iterdir()) == (
        ["run.initial.safetensors", "run.recovery.key", "run.tokenizer.json", "run.toml", "tiny.gguf"]
    )
    theta = version_0(tmp_path / "run.toml")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours = theta.model(torch.device("cpu")).eval()(ids)[0]  # (logits first, of either task)
        theirs = model(ids).logits
    assert (ours - theirs).abs().max() <= error * theirs.abs().max()
    theta.save(tmp_path / "theta.safetensors")
    tokenizer = ["--tokenizer", str(tmp_path / "run.tokenizer.json")]
    export = ["export", "--checkpoint", str(tmp_path / "theta.safetensors"), *tokenizer]
    assert run([*export, "--out", str(tmp_path / "out")]) == 0
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    assert described["began_with"] == manifest.run.initial_name


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling."),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, "has rope_freqs.weight, which transformers does not"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "llama.expert_used_count = 2, which"),
        (
            {"llama.attention.scale": 0.5},
            "says llama.attention.scale = 0.5, which transformers does not read",
        ),
        ({"llama.rope.dimension_count": 4}, "mismatch"),
        (
            {"blk.0.attn_q.bias": np.ones(32, np.float32)},
            "has blk.0.attn_q.bias, which transformers does not",
        ),
        ({"split.count": 3}, "is one of 3 parts of a split GGUF file"),
        ({"tokenizer.ggml.pre": "some-new-way"}, 'cuts text as "some-new-way"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_another_model_is_refused(
    added: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny(), "F16", added)
    assert new(file) == 2
    said = capsys.readouterr().err
    assert f"error: {file} " in said or f"{file}, of the" in said, said
    assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def gguf_of(*entries: bytes, version: int = 3, tensors: int = 0, count: int | None = None) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, tensors, len(entries) if count is None else count)
    return head + b"".join(entries)


CLIP = entry(b"general.architecture", 8, struct.pack("<Q", 4) + b"clip")
DAMAGED = {
    "its end": (gguf_of(CLIP)[:30], "cannot be read as GGUF"),
    "a version": (gguf_of(version=1), "version 1 is none of (2, 3)"),
    "counts": (gguf_of(tensors=1 << 60), "are beyond any model"),
    "entries": (gguf_of(count=1 << 60), "are beyond any model"),
    "a text": (gguf_of(entry(b"x", 8, struct.pack("<Q", 1 << 60))), "it ends within a text of"),
    "an array": (gguf_of(entry(b"x", 9, struct.pack("<IQ", 0, 1 << 60))), "is beyond any vocabulary"),
    "texts": (gguf_of(entry(b"x", 9, struct.pack("<IQ", 8, 1 << 20))), "cannot be read as GGUF"),
    "a type": (gguf_of(entry(b"x", 13, b"\0" * 8)), "type 13 is none"),
    "dimensions": (
        gguf_of(CLIP, tensors=1) + struct.pack("<QI", 0, 1 << 30),
        "a tensor of 1073741824 dimensions is beyond any model",
    ),
    "the list": (gguf_of(CLIP, tensors=1) + struct.pack("<QI", 0, 2), "cannot be read as GGUF"),
    "another kind": (gguf_of(CLIP), 'of the architecture "clip"'),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = DAMAGED[case]
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    assert new(file) == 2
    said = capsys.readouterr().err
    assert words in said and str(file) in said and "Traceback" not in said
    assert ("it reads GGUF files of " in said and "llama" in said) == (case == "another kind")


def test_data_that_are_cut_off_and_a_folder_of_such_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny(), "F16", words=False)
    assert new(tmp_path) == 2
    assert f"give the file: {file}" in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:-4000])
    assert new(file) == 2
    assert f"transformers does not load {file}, of the" in capsys.readouterr().err
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert new(file) == 2
    assert "is a pointer of git-lfs" in capsys.readouterr().err
    file.write_bytes(b"GGU")
    assert new(file) == 2
    assert "is no GGUF file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
