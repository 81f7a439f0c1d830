"""Given models of six kinds between real nodes: bootstrap, two nodes, an export that transformers loads.

Each begins with random weights and random buffers. What comes out has been trained, has the buffers that went
in, and says of text what the run's own instance says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from system_kit import Swarm

from p2pdiloco.cli.main import run
from p2pdiloco.daemon.run_files.saved_state import load_result
from p2pdiloco.tasks.description import describe, persistent_buffers

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
BODY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": BODY | {"model_type": "olmo2"},
    "experts with buffers": BODY
    | {
        "model_type": "glm4_moe",
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "mamba": {
        "model_type": "mamba",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "vocab_size": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "hybrid": BODY
    | {
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "tied": BODY | {"model_type": "qwen3", "tie_word_embeddings": True},
    "vision": {
        "model_type": "gemma3",
        "text_config": BODY | {"model_type": "gemma3_text", "sliding_window": 32},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
}


def written(config: dict[str, Any], folder: Path) -> Any:
    """A model of this architecture with random buffers, saved as transformers saves it."""
    torch.manual_seed(3)
    made: Any = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made).float().eval()
    for buffer in describe(model).constants.values():
        buffer.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 35).view(1, -1), use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_model_is_trained_and_comes_back(kind: str, tmp_path: Path) -> None:
    folder, out, checkpoint = tmp_path / "model", tmp_path / "out", tmp_path / "theta.safetensors"
    model = written(KINDS[kind], folder)
    given = describe(model).constants
    assert bool(given) == (kind == "experts with buffers")
    with Swarm(tmp_path) as swarm:
        toml = swarm.manifest("given", "--from", str(folder), "--tokenizer", "bytes")
        bootstrap = swarm.bootstrap("--run", str(toml))
        one = swarm.node("one", bootstrap, "--genesis")
        two = swarm.node("two", bootstrap)
        swarm.training(one, two)
        swarm.until(lambda: one.full_merges(2) + two.full_merges(2) > 3, "both to take part", 120.0)
        asked = ("--join", bootstrap.address() or "")
        for command, target in (("export", out), ("checkpoint", checkpoint)):
            done = swarm.command(command, *asked, "--out", str(target))
            assert done.returncode == 0, done.stderr
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, value in given.items():
        assert torch.equal(persistent_buffers(again)[name], value), name
    assert not torch.equal(logits(again), logits(model)), "nothing was learned"
    assert load_result(checkpoint).merges
    theirs = tmp_path / "theirs"
    assert run(["export", "--checkpoint", str(checkpoint), "--out", str(theirs)]) == 0
    own = load_result(checkpoint).model(torch.device("cpu"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    assert torch.equal(logits(own), logits(loaded))
