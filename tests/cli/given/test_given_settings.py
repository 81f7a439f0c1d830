"""`run new --from`: settings for a model that exists, and the flags that change them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from daemon_kit import version_0

from p2pdiloco.adapters.result_file import save_tensors
from p2pdiloco.cli.main import run
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import AVERAGE, GENTLE, MICRO, TINY, USUAL, OuterRule, expected_merges, rule_of
from p2pdiloco.tasks.causal_lm import CausalLM
from p2pdiloco.tasks.hub_models import llama_config
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import load_manifest, task_of

OWN = 4096
LINES = ("context: ", "rate: ", "length: ", "outer step: ", "change it: ")
ROW = json.dumps({"text": "of all that is here, one line; " * 8}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama of somebody, made for 4096 tokens of bytes; with text, lines and images' place beside."""
    task = task_of(MICRO)
    assert isinstance(task, CausalLM)
    out = tmp_path / "llama"
    out.mkdir()
    parameters = {name: value.numpy() for name, value in named_parameters(task.model()).items()}
    save_tensors(out / "model.safetensors", parameters, {})
    (out / "config.json").write_text(
        json.dumps(llama_config(task.section) | {"max_position_embeddings": OWN})
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(f"{n} {n}".join(('{"text": "', ROW[10:])) for n in range(400))
    )
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.jsonl").write_text(ROW)
    (tmp_path / "both" / "b.parquet").touch()
    return out


def new(folder: Path, *arguments: str) -> int:
    out = ["--out", str(folder.parent / "run.toml"), "--force"]
    return run(["run", "new", "r", *(word.replace("HERE", str(folder.parent)) for word in arguments), *out])


def made(folder: Path, *arguments: str) -> Manifest:
    assert new(folder, *arguments) == 0
    return load_manifest(folder.parent / "run.toml")


@pytest.mark.parametrize(
    ("flags", "context", "rate", "decay", "steps", "merges", "rule"),
    [
        ("", 2048, 3e-4, 0.0, 700, 30, USUAL),
        ("--finetune", 2048, 3e-4, 0.0, 700, 30, USUAL),
        ("--continue", 2048, 6e-4, 0.1, 10_000, 200, USUAL),
        ("--length day", 2048, 3e-4, 0.0, 10_000, 200, USUAL),
        ("--context 4096", 4096, 3e-4, 0.0, 700, 30, USUAL),
        ("--context 64 --tokens 1000000", 64, 3e-4, 0.0, 244, 30, GENTLE),
        ("--tokens 170000 --context 100", 100, 3e-4, 0.0, 42, 10, GENTLE),
        ("--tokens 100000 --context 128", 128, 3e-4, 0.0, 24, 6, AVERAGE),
        ("--learning-rate 0.0005", 2048, 5e-4, 0.0, 700, 30, USUAL),
        ("--expected-members 1 --tokens 200000 --context 128", 128, 3e-4, 0.0, 195, 32, GENTLE),
    ],
)
def test_settings_follow_from_the_model_and_the_length(
    folder: Path,
    flags: str,
    context: int,
    rate: float,
    decay: float,
    steps: int,
    merges: int,
    rule: OuterRule,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_of = made(folder, "--from", "HERE/llama", *flags.split())
    inner = run_of.inner
    assert run_of.model["context_tokens"] == context
    assert (inner.optimizer, inner.learning_rate, inner.weight_decay) == ("adamw", rate, decay)
    assert inner.tokens_per_step % context == 0
    members = run_of.group.expected_members or 4
    assert inner.schedule_tokens // (members * inner.tokens_per_step) == steps
    assert expected_merges(run_of) == merges and rule_of(run_of.outer) == rule
    assert 2 * run_of.sync.delay_steps <= run_of.sync.inner_steps
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(LINES)]
    assert [line.partition(" ")[0] for line in said] == [line.partition(" ")[0] for line in LINES]
    assert str(context) in said[0] and f"{rate:g} to " in said[1] and f"{steps} steps of" in said[2]
    assert f"rate {run_of.outer.learning_rate:g}, momentum {run_of.outer.momentum:g}" in said[3]


def test_epochs_count_the_tokens_of_data_that_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--from", "HERE/llama", "--context", "64", "--data", "HERE/rows.jsonl"]
    once = made(folder, *short, "--epochs", "1")
    assert (once.data.source, once.data.dataset) == ("jsonl", "")
    size = sum(len(json.loads(line)["text"]) + 1 for line in (folder.parent / "rows.jsonl").open())
    assert 0.85 * size < once.inner.schedule_tokens < 0.98 * size  # without what is held out
    thrice = made(folder, *short, "--epochs", "3")
    assert thrice.inner.schedule_tokens == 3 * once.inner.schedule_tokens
    assert "rows.jsonl 3 times" in capsys.readouterr().err
    assert made(folder, *short) == made(folder, *short, "--epochs", "2")
    assert made(folder, *short, "--continue").inner.schedule_tokens == once.inner.schedule_tokens
    plain = made(folder, "--preset", "micro", "--data", "HERE/rows.jsonl", "--epochs", "2")
    assert plain.inner.schedule_tokens == 2 * once.inner.schedule_tokens
    assert plain.sync == MICRO.sync and plain.inner.learning_rate == MICRO.inner.learning_rate


def test_a_preset_that_is_named_is_the_rest_and_its_rate_is_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = made(folder, "--from", "HERE/llama", "--preset", "tiny")
    said = capsys.readouterr().err
    assert "warning: a learning rate of 0.002 is 6.7 times what is usual to fine-tune" in said
    assert "context: " not in said
    assert tiny.inner.learning_rate == 2e-3 and tiny.sync == TINY.sync and tiny.outer == TINY.outer
    assert tiny.model["context_tokens"] == 1024
    changes = ["--learning-rate", "0.0001", "--context", "2048"]
    lower = made(folder, "--from", "HERE/llama", "--preset", "tiny", *changes)
    assert "warning" not in capsys.readouterr().err
    assert (lower.inner.learning_rate, lower.inner.tokens_per_step) == (1e-4, 2048)
    monkeypatch.setenv("P2PDILOCO_PRESET", "micro")
    assert made(folder, "--from", "HERE/llama").sync == MICRO.sync


def test_a_plain_preset_takes_what_fits_it(folder: Path) -> None:
    changes = ["--learning-rate", "0.001", "--tokens", "5000000", "--context", "100"]
    changed = made(folder, "--preset", "tiny", *changes)
    assert (changed.inner.learning_rate, changed.inner.schedule_tokens) == (1e-3, 5_000_000)
    assert (changed.model["context_tokens"], changed.inner.tokens_per_step) == (100, 1000)
    assert changed.inner.optimizer == "muon" and changed.sync == TINY.sync


def test_data_that_are_named_are_a_checkpoints_too(folder: Path) -> None:
    toml = folder.parent / "first.toml"
    assert run(["run", "new", "first", "--preset", "micro", "--out", str(toml)]) == 0
    version_0(toml).save(folder.parent / "theta.safetensors")
    given = ["--from", "HERE/theta.safetensors"]
    assert made(folder, *given).data.source == "embedded"
    own = made(folder, *given, "--data", "HERE/rows.jsonl", "--epochs", "1")
    assert own.data.source == "jsonl" and own.model["context_tokens"] == 64
    assert own.inner.schedule_tokens < 200_000
    assert msgspec.structs.replace(own.data, source="embedded") == MICRO.data


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--from HERE/llama --finetune --continue", "--finetune and --continue are both given"),
        ("--finetune", "--finetune is for a model that exists"),
        ("--continue --architecture HERE/llama", "--continue is for a model that exists"),
        ("--from HERE/llama --finetune --preset tiny", "--finetune and --preset are both given"),
        ("--from HERE/llama --epochs 2 --tokens 9", "--tokens and --epochs all say how long"),
        ("--from HERE/llama --length day --tokens 9", "--length and --tokens all say how long"),
        ("--from HERE/llama --epochs 2 --data jsonl", "which --data jsonl does not name"),
        ("--epochs 2 --data hub:a/b", "which --data hub:a/b does not name"),
        ("--from HERE/llama --data HERE/nowhere", "or a path that exists, not"),
        ("--from HERE/llama --data HERE/both", "both jsonl and parquet files"),
        ("--from HERE/llama --data HERE/llama/config.json --epochs 2", "the context needs 2049"),
        ("--from HERE/llama --context 4097", "--context 4097 is more than the model is made for, 4096"),
        ("--from HERE/llama --preset tiny --context 4097", "more than the model is made for, 4096"),
        ("--preset digits --context 64", "--context is for models of text"),
        ("--from HERE/llama --context 7", "7 is not in the range"),
        ("--from HERE/llama --learning-rate 0", "0.0 is not in the range"),
        ("--from HERE/llama --learning-rate -1e-4", "-0.0001 is not in the range"),
        ("--from HERE/llama --learning-rate nan", "nan is not a number in the range"),
        ("--from HERE/llama --learning-rate inf", "inf is not in the range"),
        ("--from HERE/llama --epochs 0", "0 is not in the range"),
        ("--from HERE/llama --tokens 0", "0 is not in the range"),
        ("--from HERE/llama --tokens 32767", "32767 tokens are too few for one merge, which takes 32768"),
        ("--preset tiny --tokens 4095", "4095 tokens are less than one inner step"),
    ],
)
def test_what_contradicts_itself_is_one_sentence_and_nothing_is_written(
    folder: Path, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.parent.iterdir())
    assert new(folder, *flags.split()) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and words in said[0]
    assert sorted(folder.parent.iterdir()) == before


def test_a_context_of_any_architecture_is_at_most_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256}
    (folder.parent / "gpt2.json").write_text(json.dumps(gpt2 | {"n_positions": 64}))
    given = ["--architecture", "HERE/gpt2.json", "--context"]
    assert new(folder, *given, "65") == 2
    assert "--context 65 is more than the model is made for, 64 tokens" in capsys.readouterr().err
    small = made(folder, *given, "48", "--tokens", "600000", "--learning-rate", "0.001")
    assert (small.model["context_tokens"], small.inner.tokens_per_step) == (48, 1008)
    assert (small.inner.learning_rate, small.inner.schedule_tokens) == (1e-3, 600_000)
