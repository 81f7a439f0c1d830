"""Configs with numbers that JSON has not, from `run new` to an export that `transformers` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from daemon_kit import version_0

from p2pdiloco.cli.main import run
from p2pdiloco.errors import ConfigError
from p2pdiloco.tasks.registry import load_manifest, task_of

transformers: Any = pytest.importorskip("transformers")
MAMBA = {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16}
MAMBA |= {"state_size": 8, "n_groups": 1, "vocab_size": 256, "pad_token_id": 0, "chunk_size": 8}
HYBRID = {"model_type": "falcon_h1", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
HYBRID |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "mamba_d_ssm": 32}
HYBRID |= {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRID |= {"max_position_embeddings": 64}
TAGGED = {"__float__": "Infinity"}


@pytest.mark.parametrize("spelling", [TAGGED, float("inf")], ids=["tagged", "bare"])
@pytest.mark.parametrize("config", [MAMBA, HYBRID], ids=["mamba2", "falcon_h1"])
def test_infinity_comes_through_to_an_export(
    config: dict[str, Any], spelling: object, tmp_path: Path
) -> None:
    limit = [0.0, float("inf")] if config is MAMBA else None
    stated = config | {"time_step_limit": [0.0, spelling], "mamba_limit": spelling}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config | ({"time_step_limit": limit} if limit else {}))
    ).eval()
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(stated))
    toml, file = tmp_path / "run.toml", tmp_path / "theta.safetensors"
    new = ["run", "new", "r", "--preset", "micro", "--from", str(tmp_path / "theirs"), "--out", str(toml)]
    assert run(new) == 0
    kept = msgspec.json.decode(str(load_manifest(toml).model["config"]))
    assert kept["time_step_limit"] == [0.0, TAGGED] and kept["mamba_limit"] == TAGGED
    version_0(toml).save(file)
    assert run(["export", "--checkpoint", str(file), "--out", str(tmp_path / "out")]) == 0
    msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert again.config.mamba_limit == float("inf")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert run([*new, "--force", "--from", str(tmp_path / "out")]) == 0, "an export is a model that exists"


@pytest.mark.parametrize("wrong", ["NaN", '{"__float__": "NaN"}', '{"__float__": [1]}', '{"__float__": 1}'])
def test_what_is_no_number_at_all_is_refused(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    text = json.dumps(MAMBA | {"time_step_limit": "LIMIT"})
    file.write_text(text.replace('"LIMIT"', f"[0.0, {wrong}]"))
    new = ["run", "new", "r", "--preset", "micro", "--out", str(tmp_path / "run.toml"), "--architecture"]
    assert run([*new, str(file)]) == 2
    assert "is not a number that a model can have" in capsys.readouterr().err
    # Nor in a stranger's manifest.
    file.write_text(text.replace('"LIMIT"', "[0.0, Infinity]"))
    assert run([*new, str(file)]) == 0
    manifest = load_manifest(tmp_path / "run.toml")
    for spelling in (wrong, "Infinity"):
        config = str(manifest.model["config"]).replace(json.dumps(TAGGED), spelling)
        with pytest.raises(ConfigError, match=r'model\.config(: "__float__"| must be a JSON object)'):
            task_of(msgspec.structs.replace(manifest, model=manifest.model | {"config": config}))
