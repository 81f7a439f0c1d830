"""Constants of a model (persistent buffers): from a folder into version 0, every instance, and the export."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from p2pdiloco.cli.given_model import with_given_model
from p2pdiloco.cli.main import run
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files import run as initial
from p2pdiloco.daemon.run_files.footprint import footprint_of
from p2pdiloco.daemon.run_files.run import genesis_versions, open_run, save_run, sign_run
from p2pdiloco.daemon.run_files.saved_state import load_result, result_of
from p2pdiloco.daemon.run_files.shared_files import kept_initial, size_bounds
from p2pdiloco.errors import ConfigError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.description import (
    carried,
    describe,
    instance_of,
    load_constants,
    persistent_buffers,
    put_constants,
)
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import constants_of

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
GLM = SIZES | {
    "model_type": "glm4_moe",
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts whose buffers have values of their own."""
    kept = tmp_path_factory.mktemp("glm")
    torch.manual_seed(1)
    config: Any = transformers.AutoConfig.for_model(**GLM)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for buffer in persistent_buffers(model).values():
        buffer.uniform_(-1, 1)
    model.save_pretrained(kept)
    return kept


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 35).view(1, -1), use_cache=False).logits
    return found


def test_they_are_in_version_0_in_every_instance_and_in_the_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    toml, data_dir = tmp_path / "run.toml", tmp_path / "node"
    new = ["run", "new", "glm", "--preset", "micro", "--tokenizer", "bytes", "--from", str(folder)]
    assert run([*new, "--out", str(toml)]) == 0
    signed, vault = sign_run(toml, Identity.generate())
    listed = constants_of(signed.manifest.model)
    assert [constant.name for constant in listed] == [BIAS] and footprint_of(signed.manifest).download_bytes
    save_run(data_dir, signed, vault)
    # The learner's instances, from the file that the daemon keeps.
    kept = kept_initial(data_dir, signed.id)
    least, most = size_bounds(signed.manifest)
    assert least < kept.stat().st_size <= most
    model = instance_of(task_of(signed.manifest), load_constants(kept, listed))
    result_of(signed, vault, list(genesis_versions(signed, vault))).save(tmp_path / "theta")
    own = {name: value for name, value in load_result(tmp_path / "theta").parameters.items()}
    for name, parameter in model.named_parameters():
        parameter.data.copy_(own[name])
    assert torch.equal(logits(model), expected)
    # A newcomer's, from a peer; a visitor's, who needs no version 0.
    given = initial.given_on_disk(data_dir, signed.id, signed.manifest)
    opened, _ = open_run(signed.signed, Identity.generate(), signed.id, given)
    assert torch.equal(opened.constants[BIAS], signed.constants[BIAS])
    content = kept.read_bytes()
    giver = Giver(content[8 + int.from_bytes(content[:8], "little") :])
    asking = initial.given_constants(giver, signed.id, signed.manifest, ["peer"])  # type: ignore[arg-type]
    alone = asyncio.run(asking)
    assert torch.equal(alone[BIAS], signed.constants[BIAS]) and giver.given_bytes == 16
    # The export.
    out = tmp_path / "out"
    assert run(["export", "--checkpoint", str(tmp_path / "theta"), "--out", str(out)]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(again), expected)
    second = with_given_model(out, "", for_run("micro", "again"))[0]
    assert second.model["constants_sum"] == signed.manifest.model["constants_sum"]


class Giver:
    """A transport to a peer that gives what it is asked for."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.given_bytes = 0

    async def pull_into(self, peer: str, request: bytes, sink: Any, pause_s: float) -> bytes:
        asked = wire.decode(request, wire.PullInitial)
        rest = self._content[asked.offset :]
        sink.begin(wire.encode(wire.InitialHeader(asked.offset)), len(rest))
        sink.write(0, memoryview(rest))
        self.given_bytes += len(rest)
        return b""


def test_a_file_with_other_constants_is_refused(folder: Path, tmp_path: Path) -> None:
    manifest = with_given_model(folder, "", for_run("micro", "glm"))[0]
    listed = constants_of(manifest.model)
    other = tmp_path / "other.safetensors"
    from safetensors.torch import save_file

    for tensors in ({}, {BIAS: torch.zeros(5)}, {BIAS: torch.zeros(4, dtype=torch.int64)}):
        save_file(tensors, other)
        with pytest.raises(StorageError):
            load_constants(other, listed)
    with pytest.raises(StorageError, match="cannot be read"):
        load_constants(tmp_path / "missing", listed)


@pytest.mark.parametrize(
    ("constants", "words"),
    [
        (["bias"], "not a name, a shape and a type"),
        (["bias 4 float16"], "not a name, a shape and a type"),
        (["bias 4 float32", "bias 5 float32"], "a name twice"),
        (["model.norm.weight 4 float32"], "that of a parameter"),
        (["bias 999999999x999999999 float64"], "more bytes than the parameters"),
        (["bias 0x999999999x999999999x999999999 float32"], "more bytes than the parameters"),
        (["__metadata__ 4 float32"], "the name __metadata__"),
    ],
)
def test_a_manifest_says_nothing_absurd_of_them(folder: Path, constants: list[str], words: str) -> None:
    manifest = with_given_model(folder, "", for_run("micro", "glm"))[0]
    with pytest.raises(ConfigError, match=words):
        task_of(msgspec.structs.replace(manifest, model=manifest.model | {"constants": constants}))


class Odd(nn.Module):
    """A module with all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, track_running_stats=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("same", self.scale)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)


def test_buffers_are_told_apart() -> None:
    model = Odd()
    statistics = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    spectral = [f"spectral.parametrizations.weight.0.{name}" for name in ("_u", "_v")]
    parts = describe(model)
    assert list(parts.statistics) == statistics + spectral
    assert [spec.name for spec in parts.averageable] == statistics[:2]
    before = {name: value.clone() for name, value in persistent_buffers(model).items()}
    model.train().spectral(model.norm(torch.randn(8, 4)))
    changed = [n for n, value in persistent_buffers(model).items() if not torch.equal(value, before[n])]
    assert set(changed) == set(statistics + spectral)
    constants = carried(parts.constants)
    assert {name: value.dtype for name, value in constants.items()} == {
        "scale": torch.float32,
        "steps": torch.int64,
        "mask": torch.bool,
    }
    other = Odd()
    put_constants(other, constants | {"scale": torch.full((2,), 0.5)})
    assert other.scale.tolist() == [0.5, 0.5] and other.scale.dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"the buffer wave has shape \(2,\) there, none here"):
        put_constants(other, constants | {"wave": torch.ones(2)})
    model.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UserError, match="wave of the model is of type complex64"):
        carried(describe(model).constants)
