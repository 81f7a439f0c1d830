"""`run new --from`: what a model's files hold is used, refused, or named: unused, missing, in codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pdiloco.cli.main import run
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.hub_models import check_loaded
from p2pdiloco.tasks.registry import load_manifest

transformers: Any = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 64}
GATE, HEAD = "model.layers.0.mlp.gate_proj.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
KINDS = {"qwen2": "hf-causal-lm", "llama": "causal-lm"}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model that `transformers` reads, and one that is read here; both with a tied head."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def new(source: Path) -> int:
    out = str(source.parent / "run.toml")
    return run(["run", "new", "r", "--preset", "micro", "--from", str(source), "--out", out, "--force"])


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def codes(kind: torch.dtype) -> dict[str, torch.Tensor]:
    return {GATE: torch.ones(32, 16).to(kind)}


ONE = torch.ones(1)
TENSORS: tuple[tuple[dict[str, torch.Tensor], str], ...] = (
    (codes(torch.float8_e4m3fn), f"{GATE} is of type F8_E4M3, which holds codes"),
    (codes(torch.int8), f"{GATE} is of type I8, which holds codes"),
    (codes(torch.uint8), f"{GATE} is of type U8, which holds codes"),
    *(
        ({GATE.replace("weight", name): ONE}, f"quantised: {GATE.replace('weight', name)} belongs to weights")
        for name in ("weight_scale", "weight_scale_inv", "input_scale", "weight_zero_point", "SCB", "scales")
    ),
    *(
        ({name: ONE}, f"quantised: {name} belongs to weights in codes")
        for name in (f"{GATE}.absmax", "model.layers.0.self_attn.k_scale", f"{GATE}.quant_map")
    ),
    ({"model.layers.0.mlp.gate_proj.lora_A.weight": ONE}, "a part of an adapter, which the model would lose"),
    ({HEAD: torch.ones(256, 16)}, f"uses one matrix twice, but {HEAD} has values of its own"),
)


@pytest.mark.parametrize(("tensors", "words"), TENSORS, ids=lambda value: str(value)[:40])
def test_what_may_change_the_model_is_refused(
    folder: Path, tensors: dict[str, torch.Tensor], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_tensors(folder, tensors)
    assert new(folder) == 2
    said = capsys.readouterr().err
    assert words in said and "hint: " in said
    assert ("dequantize().save_pretrained" in said) == ("quantised" in said)
    assert not (folder.parent / "run.toml").exists()


@pytest.mark.parametrize(
    "stated",
    [
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"quantization_config": {"load_in_8bit": True}},
        {"compression_config": {"format": "int-quantized"}},
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
    ],
    ids=str,
)
def test_a_config_that_says_quantised_is_refused(
    folder: Path, stated: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | stated))
    assert new(folder) == 2
    said = capsys.readouterr().err
    assert f"{folder} is quantised (" in said and "dequantize().save_pretrained" in said


def test_what_changes_nothing_is_taken_and_what_is_left_out_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new(folder) == 0
    manifest = load_manifest(folder.parent / "run.toml")
    assert manifest.run.task == KINDS[json.loads((folder / "config.json").read_text())["model_type"]]
    ours = manifest.run.task == "causal-lm"
    # Copies of a tied matrix, and tables that the model makes by itself.
    head = load_file(folder / "model.safetensors")[EMBEDDING].clone()
    with_tensors(folder, {HEAD: head, "model.layers.0.self_attn.rotary_emb.inv_freq": ONE})
    capsys.readouterr()
    assert new(folder) == 0
    assert load_manifest(folder.parent / "run.toml").run.initial == manifest.run.initial
    assert "not used" not in capsys.readouterr().err
    # A part that the causal model has no use for.
    with_tensors(folder, {"mtp.0.weight": torch.ones(4), "visual.blocks.0.weight": torch.ones(4)})
    assert new(folder) == (2 if ours else 0)
    said = capsys.readouterr().err
    assert "mtp.0.weight" in said
    if not ours:
        assert f"not used by the causal model: 2 tensors of {folder}, the first mtp.0.weight" in said
        assert load_manifest(folder.parent / "run.toml").run.initial == manifest.run.initial
        # A part of a module that it does use.
        with_tensors(folder, {"model.layers.0.mlp.gate_proj.bias": torch.ones(32)})
        assert new(folder) == 2
        assert (
            "has model.layers.0.mlp.gate_proj.bias, which the model of its config" in capsys.readouterr().err
        )


def test_what_a_class_says_it_may_ignore_is_said_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.Qwen2ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.61.*"]
    )
    config = transformers.AutoConfig.for_model("qwen2", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    with_tensors(tmp_path / "theirs", {"model.layers.61.weight": ONE})
    assert new(tmp_path / "theirs") == 0
    assert "1 tensor of" in capsys.readouterr().err


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", POINTER, "model.safetensors is a pointer of git-lfs, and the file itself"),
        ("pytorch_model.bin", "x", "pytorch_model.bin is a pickle, which may execute code"),
        ("consolidated.00.pth", "x", "consolidated.00.pth is a pickle, which may execute code"),
        ("adapter_model.safetensors", "x", "is an adapter, not a model"),
        ("README.md", "x", "has no safetensors file"),
    ],
)
def test_files_that_are_no_weights_are_called_what_they_are(
    tmp_path: Path, name: str, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / name).write_text(content)
    (folder / ("adapter_config.json" if "adapter" in name else "config.json")).write_text("{}")
    for source in (folder, folder / name):
        if source == folder or not name.startswith(("adapter", "README")):
            assert new(source) == 2
            assert words in capsys.readouterr().err


def test_a_table_of_whole_numbers_that_the_model_has_is_no_code() -> None:
    """Files may call its module otherwise."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("expert_of", torch.zeros(2, dtype=torch.int64))
    report: dict[str, list[str]] = {"unexpected_keys": [], "missing_keys": [], "mismatched_keys": []}
    said: list[str] = []
    check_loaded(model, report, {"gate.expert_of": "I64", "weight": "F32"}, "it", said.append)
    assert not said
    with pytest.raises(UserError, match="it is quantised: weight is of type I64"):
        check_loaded(model, report, {"gate.expert_of": "I64", "weight": "I64"}, "it", said.append)
