"""Results and the tokenizer that belongs to them: beside the file, found again, or refused in a sentence."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.cli.main import run
from p2pdiloco.config.manifest import ExportSection
from p2pdiloco.daemon.payloads import Compute
from p2pdiloco.daemon.run_files.run import genesis_versions, save_run, sign_run
from p2pdiloco.daemon.run_files.saved_state import ResultPlan, ResultWriter, RunResult, load_result, result_of
from p2pdiloco.daemon.run_files.shared_files import keep_tokenizer
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import load_manifest
from p2pdiloco.tasks.tokens import tokenizer_digest


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A tokenizer of 301 tokens."""
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    Tokenizer(models.BPE(words | {"</s>": 300}, [])).save(str(tmp_path / "tokens.json"))
    return tmp_path / "tokens.json"


def node(folder: Path, name: str, tokens: Path) -> Path:
    """The data folder of a node that has ended, of a run with this tokenizer."""
    toml = folder / f"{name}.toml"
    new = ["run", "new", name, "--preset", "micro", "--tokenizer", str(tokens), "--out", str(toml)]
    assert run(new) == 0
    signed, vault = sign_run(toml, Identity.load_or_create(folder / f"{name}.key"))
    save_run(folder / name, signed, vault)
    keep_tokenizer(folder / name, signed.id, tokens.read_bytes())
    return folder / name


def result_without_tokenizer(folder: Path, name: str) -> Path:
    signed, vault = sign_run(folder / f"{name}.toml", Identity.generate())
    out = folder / "alone" / "theta.safetensors"
    out.parent.mkdir()
    result_of(signed, vault, list(genesis_versions(signed, vault))).save(out)
    return out


def test_a_checkpoint_s_tokenizer_lies_beside_it_and_is_taken_from_there(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(tokens.read_bytes() + b"\n")
    results = tmp_path / "results"
    results.mkdir()
    (results / "tokenizer.json").write_text("a user's own")
    for name, file in (("one", tokens), ("two", other)):
        out = results / f"{name}.safetensors"
        arguments = ["checkpoint", "--data-dir", str(node(tmp_path, name, file)), "--out", str(out)]
        assert run(arguments) == 0
        beside = results / f"tokenizer-{tokenizer_digest(file.read_bytes())[:12]}.json"
        assert f"the run's tokenizer is in {beside}: keep it beside {name}.safetensors" in (
            capsys.readouterr().err
        )
        assert beside.read_bytes() == file.read_bytes()
        assert run(arguments) == 0, "once more: it is there"
        assert "the run's tokenizer is in" not in capsys.readouterr().err
    assert (results / "tokenizer.json").read_text() == "a user's own"
    for name, file in (("one", tokens), ("two", other)):
        result = results / f"{name}.safetensors"
        assert load_result(result).tokenizer == file.read_bytes()
        assert run(["export", "--checkpoint", str(result), "--out", str(tmp_path / f"{name}-hub")]) == 0
        assert (tmp_path / f"{name}-hub" / "tokenizer.json").read_bytes() == file.read_bytes()
        assert len(list((tmp_path / f"{name}-hub").glob("tokenizer-*.json"))) == 0
        again = tmp_path / f"{name}-again.toml"
        assert run(["run", "new", "again", "--from", str(result), "--out", str(again)]) == 0
        assert load_manifest(again).data == load_manifest(tmp_path / f"{name}.toml").data
    # What has the name and is not it is left alone.
    beside.write_text("somebody's")
    assert run(arguments) == 2
    assert f"{beside} is not the tokenizer that its name says" in capsys.readouterr().err
    assert beside.read_text() == "somebody's"


def test_who_has_not_the_run_s_tokenizer_is_told_where_it_is(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node(tmp_path, "one", tokens)
    result = result_without_tokenizer(tmp_path, "one")
    (result.parent / "tokenizer.json").write_bytes(tokens.read_bytes() + b"\n")
    out = ["--out", str(tmp_path / "hub")]
    source = ["--checkpoint", str(result)]
    for command in (["export", *out], ["generate", "--device", "cpu"], ["eval", "--device", "cpu"]):
        assert run([*command, *source]) == 2
        said = capsys.readouterr().err
        assert 'the tokenizer "tokens.json" of this run is not here\n' in said
        assert "hint: give its file with --tokenizer: it lies beside run.toml" in said and "--join" in said
    wrong = ["--tokenizer", str(result.parent / "tokenizer.json")]
    copied = ["checkpoint", "--out", str(tmp_path / "copy.safetensors"), *source]
    for command in (["export", *out], copied):
        assert run([*command, *source[: 2 * (command[0] == "export")], *wrong]) == 2
        assert "this is not the tokenizer of the run: its SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "hub").exists() and not (tmp_path / "copy.safetensors").exists()
    assert run(copied) == 0
    assert "the tokenizer tokens.json of the run is not here, and was not saved" in capsys.readouterr().err
    assert run(["export", *out, *source, "--tokenizer", str(tokens)]) == 0
    assert (tmp_path / "hub" / "tokenizer.json").read_bytes() == tokens.read_bytes()


def test_a_run_of_bytes_takes_no_tokenizer(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "new", "b", "--preset", "micro", "--out", str(tmp_path / "b.toml")]) == 0
    result = result_without_tokenizer(tmp_path, "b")
    given = ["--checkpoint", str(result), "--tokenizer", str(tokens)]
    assert run(["export", *given, "--out", str(tmp_path / "hub")]) == 2
    assert "the run reads text as raw bytes: it has no tokenizer file" in capsys.readouterr().err


def test_words_of_the_given_model_stay_with_its_run_s_checkpoint(tmp_path: Path, tokens: Path) -> None:
    """A checkpoint lies in no model's folder: what the manifest says is all that there is."""
    folder = node(tmp_path, "one", tokens)
    toml = tmp_path / "one.toml"
    toml.write_text(toml.read_text().replace('chat_template = ""', 'chat_template = "{{x}}"'))
    signed, vault = sign_run(toml, Identity.generate())
    (tmp_path / "results").mkdir()
    parameters = result_of(signed, vault, list(genesis_versions(signed, vault))).parameters
    labels = load_labels(folder, tmp_path)
    RunResult(signed.signed, signed.manifest, labels, parameters, tokens.read_bytes()).save(
        tmp_path / "results" / "theta.safetensors"
    )
    again = tmp_path / "again.toml"
    source = str(tmp_path / "results" / "theta.safetensors")
    assert run(["run", "new", "again", "--from", source, "--out", str(again)]) == 0
    assert load_manifest(again).export == ExportSection(chat_template="{{x}}")


def load_labels(folder: Path, tmp_path: Path) -> tuple:
    out = tmp_path / "first.safetensors"
    assert run(["checkpoint", "--data-dir", str(folder), "--out", str(out)]) == 0
    return load_result(out).labels


def test_a_node_writes_the_tokenizer_beside_its_results(tmp_path: Path, tokens: Path) -> None:
    node(tmp_path, "one", tokens)
    signed, vault = sign_run(tmp_path / "one.toml", Identity.generate())
    compute = Compute(vault, None)
    compute.copy_out = lambda layout, parameters: genesis_versions(signed, vault)[layout.index]  # type: ignore[method-assign]
    folder, said = tmp_path / "results", []
    plan = ResultPlan(folder, 0.0, 1, 3)
    with concurrent.futures.ThreadPoolExecutor(1) as io:
        writer = ResultWriter(signed, compute, io, plan, tokens, lambda *words: said.append(words))
        folder.mkdir()
        folder.chmod(0o750)
        asyncio.run(writer.save())
        (beside,) = folder.glob("tokenizer-*.json")
        assert beside.stat().st_mode & 0o777 == 0o640, "for whom the folder is for"
        beside.write_text("somebody's")
        asyncio.run(writer.save())
    compute.close()
    (result,) = folder.glob("*.safetensors")
    assert [saved for _, saved in said] == [True, False] and "is not the tokenizer" in said[1][0]
    assert load_result(result).tokenizer is None
