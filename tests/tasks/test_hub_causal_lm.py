"""The task hf-causal-lm: architectures of `transformers`, from configs only."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from one_rank import assert_same_gradients, one_rank
from safetensors.torch import save_file
from torch import nn

from p2pdiloco.cli.given_model import with_given_model
from p2pdiloco.cli.main import run
from p2pdiloco.config import presets
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import ADAMW_RATE, for_run
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files import run as initial
from p2pdiloco.daemon.run_files.footprint import footprint_of
from p2pdiloco.daemon.run_files.run import genesis_versions, open_run, save_run, sign_run
from p2pdiloco.daemon.run_files.saved_state import load_result, result_of
from p2pdiloco.daemon.run_files.shared_files import kept_initial, size_bounds
from p2pdiloco.errors import ConfigError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.loop import Training, evaluate, heldout_batch
from p2pdiloco.tasks.causal_lm import HubCausalLM, HubSection, built, existing
from p2pdiloco.tasks.description import (
    carried,
    describe,
    instance_of,
    load_constants,
    persistent_buffers,
    put_constants,
)
from p2pdiloco.tasks.hub_models import difference_from_ours, harmless, longest, without_dropout
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import constants_of

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
NEW = ["run", "new", "hub", "--preset", "micro", "--force", "--out"]
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 256}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SMALL |= {"vocab_size": 256}
QWEN = SMALL | {"model_type": "qwen2", "num_key_value_heads": 1, "max_position_embeddings": 64}
QWEN |= {"tie_word_embeddings": False}


def begun(toml: Path) -> tuple[Any, Any, Any]:
    """The run of a manifest, signed, its vault, and what it begins with."""
    signed, vault = sign_run(toml, Identity.generate())
    return signed, vault, result_of(signed, vault, list(genesis_versions(signed, vault)))


def new_run(config: Any, folder: Path, given: str = "--architecture", *more: str) -> int:
    """Write this config into a folder, and a manifest of it; the exit status."""
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return run([*NEW, str(folder / "run.toml"), given, str(folder), *more])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 35).view(1, -1), use_cache=False).logits
    return found


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def exported(checkpoint: Path, out: Path) -> Any:
    """What transformers makes of an export."""
    assert run(["export", "--checkpoint", str(checkpoint), "--out", str(out)]) == 0
    return loaded(out)


@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2-tied", "qwen2"])
def test_an_architecture_becomes_a_run_and_comes_back(config: dict[str, object], tmp_path: Path) -> None:
    """config.json -> run -> training -> export -> transformers -> run."""
    assert new_run(config | {"auto_map": {"AutoConfig": "evil.Evil"}}, tmp_path) == 0
    signed, _, theta = begun(tmp_path / "run.toml")
    manifest = signed.manifest
    assert manifest.run.task == "hf-causal-lm" and "evil" not in manifest.model["config"]  # type: ignore[operator]
    task = task_of(manifest)
    names = [spec.name for spec in task.specs()]
    assert ("lm_head.weight" in names) == (config is QWEN), "a tied head is its embedding, once"
    model = theta.model(torch.device("cpu"))
    data = task.load_data(None)
    held_out = heldout_batch(task, data.heldout, 1024)
    before = evaluate(task, model, held_out).loss
    assert before == pytest.approx(5.55, abs=0.4)
    training = Training(task, model, data.train, "peer")
    for _ in range(12):
        training.step()
    assert evaluate(task, model, held_out).loss < before - 0.05
    assert isinstance(task.written(model, "def ", 3, 0.0, 0), str)

    theta.save(tmp_path / "theta")
    theirs = exported(tmp_path / "theta", tmp_path / "out")
    ours = load_result(tmp_path / "theta").model(torch.device("cpu"))
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-5)

    theirs.save_pretrained(tmp_path / "saved")  # as anybody else would have it
    again = tmp_path / "again.toml"
    for source in ("theta", "out", "saved"):
        assert run([*NEW, str(again), "--from", str(tmp_path / source)]) == 0
        second, _, found = begun(again)
        assert all(torch.equal(found.parameters[n], value) for n, value in theta.parameters.items())
        task = task_of(second.manifest)
        Training(task, found.model(torch.device("cpu")), task.load_data(None).train, "peer").step()


def test_a_name_is_looked_up_on_the_hub_and_what_fails_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    asked: list[object] = []

    def download(*words: object, **keys: object) -> str:
        asked.append((words, keys))
        if len(asked) == 1:
            return str(tmp_path / "config.json")
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s [Retry 5/5].")
        raise ConnectionError("We could not connect\nto the hub.\nCheck your connection.")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    new = [*NEW, str(tmp_path / "run.toml")]
    assert run([*new, "--architecture", "owner/small@abc"]) == 0
    assert asked == [(("owner/small", "config.json"), {"revision": "abc"})]
    signed, _ = sign_run(tmp_path / "run.toml", Identity.generate())
    assert signed.manifest.run.initial_name == "new gpt2"
    assert "text is read as raw bytes" in capsys.readouterr().err
    # What is no name there is not asked for.
    for missing in (tmp_path / "missing", "missing.json", "a/b/c"):
        assert run([*new, "--architecture", str(missing)]) == 2
        said = capsys.readouterr().err
        assert f"there is no file or folder {missing}\n" in said and "asking" not in said
    assert run([*new, "--tokenizer", "missing/tokenizer.json"]) == 2
    assert "there is no tokenizer file missing/tokenizer.json" in capsys.readouterr().err
    assert run([*new, "--architecture", "gpt3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "asking the hub for config.json of gpt3",
        "error: config.json of gpt3 cannot be had from the hub: We could not connect",
        "hint: download it elsewhere and give its path",
    ]


def test_of_several_configs_in_a_folder_the_one_that_is_named_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "mine.json").write_text(json.dumps(GPT2))
    for name, kind in (("mine.json", "gpt2"), ("config.json", "qwen2"), ("", "qwen2")):
        manifest = with_given_model(None, str(tmp_path / name), for_run("micro", "hub"))[0]
        assert json.loads(str(manifest.model["config"]))["model_type"] == kind


def test_an_encoder_is_no_causal_model_unless_it_is_a_decoder_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert = SMALL | {"model_type": "bert", "max_position_embeddings": 64}
    decoder = bert | {"is_decoder": True}
    assert new_run(decoder, tmp_path) == 0
    specs = task_of(sign_run(tmp_path / "run.toml", Identity.generate())[0].manifest).specs()
    built(bert, specs).save_pretrained(tmp_path)
    for given in ("--architecture", "--from"):
        assert new_run(bert, tmp_path, given) == 2
        assert 'the model "bert" is not causal: what it says of a token depends' in capsys.readouterr().err
        assert new_run(decoder, tmp_path, given) == 0
    assert new_run(QWEN | {"num_key_value_heads": 3}, tmp_path) == 2
    assert 'the model "qwen2" takes no plain text: ' in capsys.readouterr().err


def test_what_cannot_be_built_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config, words in (
        ({"model_type": "no-such-model"}, "knows no such model_type\n"),
        ({"n_embd": 16}, "the config has no model_type"),
        ({"model_type": ["gpt2"]}, "the config has no model_type"),
        (GPT2 | {"n_embd": "x"}, "'n_embd' expected int, got str"),
        ({"model_type": "vit"}, 'causal model "vit": it has no such one\n'),
        ("[]", "is not JSON"),
    ):
        assert new_run(config, tmp_path) == 2
        assert words in capsys.readouterr().err
    assert new_run(GPT2, tmp_path, "--architecture", "--from", str(tmp_path)) == 2
    assert new_run(GPT2, tmp_path) == 0
    manifest = sign_run(tmp_path / "run.toml", Identity.generate())[0].manifest
    # Another release of the library that builds something else is noticed.
    wider = json.loads(str(manifest.model["config"])) | {"n_embd": 32}
    other = msgspec.structs.replace(manifest, model=manifest.model | {"config": json.dumps(wider)})
    with pytest.raises(UserError, match=r"builds other parameters than model\.parameters"):
        task_of(other).model()
    with pytest.raises(ConfigError, match="a JSON object with a model_type"):
        task_of(msgspec.structs.replace(manifest, model=manifest.model | {"config": "{}"}))


def manifest_with(config: dict[str, object], tmp_path: Path, tokens: int = 64) -> Manifest:
    base = for_run("micro", "hub")
    base = msgspec.structs.replace(base, inner=msgspec.structs.replace(base.inner, tokens_per_step=tokens))
    (tmp_path / "config.json").write_text(json.dumps(config))
    return with_given_model(None, str(tmp_path / "config.json"), base)[0]


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"attn_implementation": "kernels-community/x"}, 'not have the key "attn_implementation"'),
        ({"deep": [{"_experts_implementation": "x"}]}, 'not have the key "_experts_implementation"'),
        ({"x": {"kernel_config": {"RMSNorm": "a/b"}}}, 'not have the key "kernel_config"'),
        ({"use_kernels": True}, 'not have the key "use_kernels"'),
        ({"x": [{"use_kernels": True}]}, 'not have the key "use_kernels"'),
        ({"auto_map": {"AutoConfig": "a--b.C"}}, 'not have the key "auto_map"'),
        ({"quantization_config": {"quant_method": "x"}}, 'not have the key "quantization_config"'),
        ({"n_layer": 1_000_000}, '"n_layer" is more than the model has parameters'),
        ({"num_labels": 2_000_000_000}, '"num_labels" is more than the model can have of anything'),
        ({"num_blocks": 100_000_000}, '"num_blocks" is more than the model can have of anything'),
        ({"attention_types": [[["global"], 2_000_000_000]]}, '"attention_types" is more than'),
        ({"x": [{"num_things": [1, -100_000]}]}, '"num_things" is more than the model can have of anything'),
        ({"n_inner": 1 << 40}, '"n_inner" is beyond any model'),
        ({"n_positions": 32}, "context_tokens must be at most 32"),
        ({"vocab_size": 255}, "the tokenizer bytes needs a vocabulary of 256, the model's is 255"),
    ],
)
def test_a_stranger_s_config_that_is_more_than_an_architecture_is_refused(
    added: dict[str, object], words: str, tmp_path: Path
) -> None:
    manifest = manifest_with(GPT2, tmp_path)
    config = json.loads(str(manifest.model["config"]))
    model = manifest.model | {"config": json.dumps(config | added)}
    with pytest.raises(ConfigError, match=words):
        task_of(msgspec.structs.replace(manifest, model=model))


def test_nothing_in_a_config_reaches_a_loader_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the folder of a model says, too."""
    asked: list[str] = []
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda self, name, *_, **__: asked.append(name) or "eager",
    )
    theirs = {
        "attn_implementation": "kernels-community/x",
        "_attn_implementation": "kernels-community/y",
        "experts_implementation": "z",
        "quantization_config": {"quant_method": "fp8"},
        "use_kernels": True,
        "conv_kernel": 3,
        "use_mamba_kernels": False,
    }
    task = task_of(manifest_with(QWEN | theirs, tmp_path))
    model = built(QWEN | theirs, task.specs())
    model.save_pretrained(tmp_path)
    existing(tmp_path, QWEN | theirs, "a folder", {}, print)
    assert len(asked) > 3 and set(asked) <= {None, "eager"}
    kept = json.loads(task.section.config)
    assert {key: kept[key] for key in kept if "kernel" in key} == {
        "conv_kernel": 3,
        "use_mamba_kernels": False,
    }


@pytest.mark.parametrize(
    ("check", "of_number", "of_true"),
    [
        (lambda value: harmless({"use_kernels": value}), {"use_kernels": 2}, {}),
        (lambda value: longest({"n_positions": value}), 2, 0),
        (lambda value: without_dropout("", {"dropout": value})["dropout"], 0.0, True),
        (
            lambda value: "counts" in difference_from_ours({"model_type": "llama", "hidden_size": value}),
            False,
            True,
        ),
        (lambda value: presets._embedding({"vocabulary": value, "width": 8}), (2, 8, 1), (0, 0, 0)),
        (lambda value: presets._embedding({"vocabulary": 8, "width": value}), (8, 2, 1), (8, 0, 1)),
        (lambda value: with_vocabulary(value).vocabulary, 2, 256),
    ],
)
def test_true_is_no_number_in_a_config(
    check: Callable[[object], object], of_number: object, of_true: object
) -> None:
    assert (check(2), check(True)) == (of_number, of_true)


def with_vocabulary(value: object) -> HubCausalLM:
    """A task whose config has this for a vocabulary, and whose embedding has 256 rows."""
    found = object.__new__(HubCausalLM)
    config = json.dumps({"vocab_size": value})
    found.section = HubSection(config=config, context_tokens=8, parameters=["e.weight 256x8 embedding"])
    return found


@pytest.mark.parametrize(
    "config",
    [GPT2, SMALL | {"model_type": "biogpt"}],
    ids=["gpt2", "biogpt"],
)
def test_there_is_no_dropout_also_where_a_config_does_not_name_it(
    config: dict[str, object], tmp_path: Path
) -> None:
    stated = {key: value for key, value in config.items() if key != "n_positions"}
    manifest = manifest_with(stated, tmp_path, tokens=2048)
    model = task_of(manifest).model().train()
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert manifest.model["context_tokens"] == 1024, "an architecture's own limit, where its config has none"
    ids = torch.arange(64)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_another_model_than_the_preset_s_gets_adamw_at_a_rate_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    for preset, rate in (("tiny", ADAMW_RATE), ("tiny-moe", ADAMW_RATE), ("small", 1e-3)):
        inner = with_given_model(None, str(tmp_path / "config.json"), for_run(preset, "hub"))[0].inner
        assert (inner.optimizer, inner.learning_rate) == ("adamw", rate)
    assert for_run("tiny", "own").inner.optimizer == "muon"


def test_figures_are_of_a_model_that_is_not_in_training(tmp_path: Path) -> None:
    task = task_of(manifest_with(GPT2, tmp_path))
    model = task.model().train()
    model.transformer.drop.p = 0.5
    model.transformer.h[0].eval()
    batch = (torch.arange(65)[None].repeat(4, 1),)
    assert evaluate(task, model, batch) == evaluate(task, model, batch)
    assert model.training and model.transformer.drop.training and not model.transformer.h[0].training


@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2-tied", "qwen2"])
def test_gradients_are_the_same_where_processes_share_it_out(
    config: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(manifest_with(config, tmp_path))
    batch = (torch.randint(0, 256, (2, 65)),)
    with one_rank(tmp_path, monkeypatch):
        assert_same_gradients(task, task.model(), batch, blocks=1)


# Constants of a model (persistent buffers): from a folder into version 0, every instance, and the export.

EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1}
GLM = SMALL | EXPERTS | {"model_type": "glm4_moe", "num_hidden_layers": 2, "num_key_value_heads": 2}
GLM |= {"head_dim": 8, "max_position_embeddings": 64}
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


def test_they_are_in_version_0_in_every_instance_and_in_the_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(loaded(folder))
    toml, data_dir = tmp_path / "run.toml", tmp_path / "node"
    assert run([*NEW, str(toml), "--tokenizer", "bytes", "--from", str(folder)]) == 0
    signed, vault, theta = begun(toml)
    listed = constants_of(signed.manifest.model)
    assert [constant.name for constant in listed] == [BIAS] and footprint_of(signed.manifest).download_bytes
    save_run(data_dir, signed, vault)
    # The learner's instances, from the file that the daemon keeps.
    kept = kept_initial(data_dir, signed.id)
    least, most = size_bounds(signed.manifest)
    assert least < kept.stat().st_size <= most
    model = instance_of(task_of(signed.manifest), load_constants(kept, listed))
    theta.save(tmp_path / "theta")
    own = load_result(tmp_path / "theta").parameters
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
    assert torch.equal(logits(exported(tmp_path / "theta", tmp_path / "out")), expected)
    second = with_given_model(tmp_path / "out", "", for_run("micro", "again"))[0]
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
