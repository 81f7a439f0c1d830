"""The task hf-causal-lm: architectures of `transformers`, from configs only."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from p2pdiloco.cli.main import run
from p2pdiloco.daemon.runs import genesis_versions, sign_run
from p2pdiloco.daemon.theta import load_theta, theta_of
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.evaluate import evaluate, heldout_batch
from p2pdiloco.learner.loop import Training
from p2pdiloco.tasks.registry import task_of

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 256}
QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2-tied", "qwen2"])
def test_an_architecture_becomes_a_run_and_comes_back(config: dict[str, object], tmp_path: Path) -> None:
    """config.json -> run -> training -> export -> transformers -> run."""
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.Evil"}}))
    toml = tmp_path / "run.toml"
    new = ["run", "new", "hub", "--preset", "micro"]
    assert run([*new, "--architecture", str(tmp_path / "config.json"), "--out", str(toml)]) == 0
    signed, vault = sign_run(toml, Identity.generate())
    manifest = signed.manifest
    assert manifest.run.task == "hf-causal-lm" and "evil" not in manifest.model["config"]  # type: ignore[operator]
    task = task_of(manifest)
    names = [spec.name for spec in task.specs()]
    assert ("lm_head.weight" in names) == (config is QWEN), "a tied head is its embedding, once"
    theta = theta_of(signed, vault, list(genesis_versions(signed, vault)))
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
    out = tmp_path / "out"
    assert run(["export", "--checkpoint", str(tmp_path / "theta"), "--out", str(out)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ours = load_theta(tmp_path / "theta").model(torch.device("cpu")).eval()
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-5)

    theirs.save_pretrained(tmp_path / "saved")  # as anybody else would have it
    again = tmp_path / "again.toml"
    assert run([*new, "--from", str(tmp_path / "saved"), "--out", str(again)]) == 0
    second, vault_2 = sign_run(again, Identity.generate())
    found = theta_of(second, vault_2, list(genesis_versions(second, vault_2)))
    assert all(torch.equal(found.parameters[n], value) for n, value in theta.parameters.items())


def test_what_cannot_be_built_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    new = ["run", "new", "hub", "--preset", "micro", "--out", str(tmp_path / "run.toml"), "--force"]
    cases = {
        json.dumps({"model_type": "no-such-model"}): 'cannot build a causal model "no-such-model"',
        json.dumps({"model_type": "vit"}): 'cannot build a causal model "vit"',
        "[]": "is not JSON",
    }
    for text, words in cases.items():
        file.write_text(text)
        assert run([*new, "--architecture", str(file)]) == 2
        assert words in capsys.readouterr().err
    file.write_text(json.dumps(GPT2))
    assert run([*new, "--architecture", str(file), "--from", str(tmp_path)]) == 2
    assert run([*new, "--architecture", str(tmp_path)]) == 0
    manifest = sign_run(tmp_path / "run.toml", Identity.generate())[0].manifest
    # Another release of the library that builds something else is noticed.
    wider = json.loads(str(manifest.model["config"])) | {"n_embd": 32}
    other = msgspec.structs.replace(manifest, model=manifest.model | {"config": json.dumps(wider)})
    with pytest.raises(UserError, match=r"builds other parameters than model\.parameters"):
        task_of(other).model()
    with pytest.raises(ConfigError, match="a JSON object with a model_type"):
        task_of(msgspec.structs.replace(manifest, model=manifest.model | {"config": "{}"}))
