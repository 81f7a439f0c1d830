"""export, generate, eval and checkpoint: from a node's folder and from checkpoint files."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import json
import logging
import os
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from daemon_kit import version_0
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.result_file import load_tensors, save_tensors
from p2pdiloco.cli import live_result
from p2pdiloco.cli.main import run
from p2pdiloco.config.manifest import ExportSection, Manifest
from p2pdiloco.config.presets import DIGITS, MICRO
from p2pdiloco.daemon.display import logs
from p2pdiloco.daemon.display.logs import JsonFormatter
from p2pdiloco.daemon.payloads import Compute
from p2pdiloco.daemon.run_files.known_runs import WaysIn, change_ways
from p2pdiloco.daemon.run_files.run import genesis_versions, save_run, sign_run
from p2pdiloco.daemon.run_files.saved_state import ResultPlan, ResultWriter, RunResult, load_result
from p2pdiloco.daemon.run_files.shared_files import keep_tokenizer
from p2pdiloco.errors import ConfigError, StorageError, json_line
from p2pdiloco.identity import Identity
from p2pdiloco.learner.channel import Failed, Save, StateSaved, Stop, decode_command, decode_event, frame
from p2pdiloco.tasks.registry import load_manifest, render_toml
from p2pdiloco.tasks.tokens import tokenizer_digest

torch.set_num_threads(1)
DENSE = msgspec.structs.replace(
    MICRO, model=MICRO.model | {"heads": 4, "key_value_heads": 2, "tied_head": False, "norm_epsilon": 1e-5}
)
ADDRESS, OTHER = (
    f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity.from_seed(bytes([i]) * 32).peer_id}" for i in range(2)
)
MOE = msgspec.structs.replace(MICRO, model=MICRO.model | {"experts": 3})


def saved(folder: Path, manifest: Manifest) -> Path:
    """A checkpoint of that run's version 0."""
    (folder / "run.toml").write_text(render_toml(manifest))
    version_0(folder / "run.toml").save(folder / "theta.safetensors")
    return folder / "theta.safetensors"


@pytest.mark.parametrize("manifest", [DENSE, MOE], ids=["dense", "experts"])
def test_transformers_loads_what_is_exported(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal logits, and a tokenizer whose ids are the bytes."""
    transformers = pytest.importorskip("transformers")
    source, out = saved(tmp_path, manifest), tmp_path / "hub"
    assert run(["export", "--checkpoint", str(source), "--out", str(out)]) == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_result(source).model(torch.device("cpu")).eval()
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids)[0], rtol=1e-4, atol=1e-5)
    text = "héllo  wörld\n\tx"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    found = tokenizer(text)["input_ids"]
    assert found == list(text.encode()) and tokenizer.decode(found) == text
    # Once more into the same folder: not by accident.
    assert run(["export", "--checkpoint", str(source), "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_model_is_asked_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ["--checkpoint", str(saved(tmp_path, MICRO))]
    assert run(["generate", *source, "--prompt", "def ", "--tokens", "5", "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    assert run(["generate", *source, "--prompt", "def ", "--tokens", "5", "--device", "cpu"]) == 0
    assert first.startswith("def ") and first == capsys.readouterr().out
    with mock.patch.object(logs, "SAY_AFTER_S", 0.0):
        assert run(["eval", *source, "--tokens", "1024", "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    assert "measuring on held-out samples: 100%" in said.err
    found = json.loads(said.out)
    assert found["loss"] == pytest.approx(5.5, abs=0.3) and found["tokens"] == 1024
    assert found["versions"] == [0] * 4 and found["run"] == "micro"
    assert run(["eval", *source, "--tokens", "10", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "less than a sample cannot be measured: it has 64 tokens\n" in said.err
    assert said.out.endswith(" over 64 tokens\n")


def test_a_prompt_that_is_no_text_and_a_temperature_that_is_no_number_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = ["generate", "--checkpoint", str(saved(tmp_path, MICRO)), "--tokens", "1", "--device", "cpu"]
    for errors in ("strict", "surrogateescape"):  # as the locale has it
        for content, status in ((b"d\xc3\xa9f\n", 0), (b"ab\xff", 2)):
            given = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors)
            monkeypatch.setattr("sys.stdin", given)
            assert run([*generate, "--prompt", "-"]) == status
            said = capsys.readouterr()
            assert said.out.startswith("déf\n") if not status else "prompt is not UTF-8 text" in said.err
    monkeypatch.setattr("sys.stdin", None)  # closed, as by a shell's <&-
    assert run([*generate, "--prompt", "-"]) == 2
    assert "there is no input to read the prompt from" in capsys.readouterr().err
    assert run([*generate, "--prompt", os.fsdecode(b"ab\xff")]) == 2
    assert "the prompt is not UTF-8 text" in capsys.readouterr().err
    assert run([*generate, "--temperature", "nan"]) == 2
    assert "nan is not a number in the range 0<=x<=100" in capsys.readouterr().err


def test_an_image_model_is_exported_by_name_and_writes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--checkpoint", str(saved(tmp_path, DIGITS))]
    out = tmp_path / "hub"
    assert run(["export", *source, "--out", str(out)]) == 0
    described = json.loads((out / "run.json").read_text())
    assert described["task"] == "image-classification" and described["model"]["classes"] == 10
    assert not (out / "config.json").exists()
    assert run(["eval", "--checkpoint", str(out / "model.safetensors"), "--json", "--device", "cpu"]) == 0
    assert "accuracy" in json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert run(["eval", *source, "--tokens", "9", "--device", "cpu"]) == 0
    assert " over 9 images, accuracy " in capsys.readouterr().out
    assert run(["generate", *source]) == 2
    assert "the task image-classification writes no text" in capsys.readouterr().err


def test_what_cannot_be_read_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, MICRO)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    (tmp_path / "flipped").write_bytes(content)
    (tmp_path / "cut").write_bytes(content[:-100])
    node = tmp_path / "node"
    node.mkdir()
    with DataDir(node):
        cases = {
            ("--checkpoint", str(tmp_path / "flipped")): "the checksum does not match",
            ("--checkpoint", str(tmp_path / "cut")): "cannot be read as safetensors",
            ("--checkpoint", str(tmp_path / "none")): "cannot be read: No such file",
            ("--data-dir", str(node)): "in use by another running node",
            ("--data-dir", str(tmp_path / "none")): "does not exist",
            ("--checkpoint", str(path), "--run", "other"): "not of other",
            ("--checkpoint", str(path), "--data-dir", str(node)): "2 sources of the parameters",
            (): "no sources of the parameters",
        }
        for source, words in cases.items():
            assert run(["eval", *source]) == 2
            said = capsys.readouterr().err
            assert words in said and "Traceback" not in said, said
        # It runs, and can be dialled: it is asked, and so is whoever else is named.
        change_ways(node, WaysIn.reached_at, [ADDRESS])
        asked: list[object] = []

        def result_of_run(*way: object) -> RunResult:
            asked.append(way)
            return load_result(path)

        monkeypatch.setattr(live_result, "result_of_run", result_of_run)
        for source in ((), ("--join", OTHER)):
            assert run(["checkpoint", *source, "--data-dir", str(node), "--out", str(tmp_path / "new")]) == 0
        assert asked == [((way,), "", 600.0, node) for way in (ADDRESS, OTHER)]
        capsys.readouterr()
    assert run(["eval", "--data-dir", str(node)]) == 2
    said = capsys.readouterr().err
    assert f"{node} has no run\n" in said and "hint: give the --data-dir of a node" in said
    signed, vault = sign_run(tmp_path / "run.toml", Identity.load_or_create(tmp_path / "owner.key"))
    save_run(node, signed, vault)
    assert run(["eval", "--data-dir", str(node), "--run", "other"]) == 2
    said = capsys.readouterr().err
    assert f'{node} has no run "other"\n' in said and f"hint: it has micro ({signed.id[:12]})\n" in said


def test_a_checkpoint_must_fit_its_manifest(tmp_path: Path) -> None:
    theta = load_result(saved(tmp_path, MICRO))
    name = next(iter(theta.parameters))
    wrong = msgspec.structs.replace(theta, parameters=theta.parameters | {name: torch.zeros(3)})
    wrong.save(tmp_path / "wrong")
    with pytest.raises(StorageError, match="other parameters than its manifest"):
        load_result(tmp_path / "wrong")


def test_the_folder_of_a_node_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was joined and of which nothing was saved is at version 0."""
    path = saved(tmp_path, MICRO)
    signed, vault = sign_run(tmp_path / "run.toml", Identity.load_or_create(tmp_path / "owner.key"))
    save_run(tmp_path / "node", signed, vault)
    out = tmp_path / "again.safetensors"
    assert run(["checkpoint", "--data-dir", str(tmp_path / "node"), "--out", str(out)]) == 0
    assert (
        "version 0: this run has not trained them yet; a bootstrap keeps no others" in capsys.readouterr().err
    )
    again, first = load_result(out), load_result(path)
    assert all(torch.equal(again.parameters[name], value) for name, value in first.parameters.items())


# --- a run that starts from a model ------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [DENSE, MOE], ids=["dense", "experts"])
def test_an_exported_model_is_version_0_of_a_new_run(manifest: Manifest, tmp_path: Path) -> None:
    """From our own export, and from the same folder as anybody else would have saved it."""
    source, out = saved(tmp_path, manifest), tmp_path / "hub"
    assert run(["export", "--checkpoint", str(source), "--out", str(out)]) == 0
    expected = load_result(source)
    numpy = {name: value.numpy() for name, value in expected.parameters.items()}
    for label in ("ours", "theirs"):
        if label == "theirs":
            save_tensors(out / "model.safetensors", numpy, {})
            # Buffers of older exports are of whatever type.
            integers = {"x.attn.masked_bias": np.zeros(3, np.int64)}
            safetensors.numpy.save_file(integers, out / "early.safetensors")
        else:  # the label is of a file that is not the first
            save_tensors(out / "early.safetensors", {"rotary.inv_freq": np.ones(3, np.float32)}, {})
        toml = tmp_path / f"{label}.toml"
        assert run(["run", "new", "tuned", "--preset", "micro", "--from", str(out), "--out", str(toml)]) == 0
        theta = version_0(toml)
        assert theta.manifest.run.initial_name == "hub" and theta.manifest.run.name == "tuned"
        assert theta.parameters.keys() == expected.parameters.keys()
        assert all(torch.equal(theta.parameters[n], value) for n, value in expected.parameters.items())
        if label == "ours":
            assert theta.manifest.model == manifest.model


def test_a_model_that_cannot_be_started_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = saved(tmp_path, DENSE), tmp_path / "hub"
    assert run(["export", "--checkpoint", str(source), "--out", str(out)]) == 0
    new = ["run", "new", "tuned", "--preset", "micro", "--out", str(tmp_path / "tuned.toml"), "--force"]
    assert run([*new, "--from", str(out)]) == 0
    # A folder with more than one checkpoint does not say which.
    (out / "newer.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    assert run([*new, "--from", str(out)]) == 2
    assert "has several checkpoints" in capsys.readouterr().err
    (out / "newer.safetensors").unlink()
    # Version 0 is in the file beside run.toml, and it has to be that one.
    initial = tmp_path / "tuned.initial.safetensors"
    arrays, _ = load_tensors(initial)
    save_tensors(initial, {name: array * 2 for name, array in arrays.items()}, {})
    with pytest.raises(ConfigError, match=r"other parameters than run\.initial names"):
        sign_run(tmp_path / "tuned.toml", Identity.generate())
    initial.unlink()
    with pytest.raises(ConfigError, match=r"there is no tuned\.initial\.safetensors beside it"):
        sign_run(tmp_path / "tuned.toml", Identity.generate())
    capsys.readouterr()
    assert run(["run", "check", str(tmp_path / "tuned.toml")]) == 2
    assert "there is no tuned.initial.safetensors beside it" in capsys.readouterr().err
    name = "model.norm.weight"
    cases = [
        (arrays | {name: arrays[name][:3]}, {}, f"the parameter {name} has shape (3,), not (32,)"),
        (arrays | {name: arrays[name] * float("inf")}, {}, "not finite"),
        (arrays, {"attention_bias": True}, "has no usable parameter model.layers."),
        (arrays, {"rope_parameters": {"rope_type": "llama3"}}, "transformers cannot build"),
        (arrays, {"hidden_size": "x"}, "'hidden_size'"),
        (arrays, {"vocab_size": "x"}, "config.json of the model"),
    ]
    config = json.loads((out / "config.json").read_text())
    capsys.readouterr()
    for tensors, keys, words in cases:
        save_tensors(out / "model.safetensors", tensors, {})
        (out / "config.json").write_text(json.dumps(config | keys))
        assert run([*new, "--from", str(out)]) == 2
        assert words in capsys.readouterr().err


# Results and the tokenizer that belongs to them: beside the file, found again, or refused in a sentence.


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
    out = folder / "alone" / "theta.safetensors"
    out.parent.mkdir()
    version_0(folder / f"{name}.toml").save(out)
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
    node(tmp_path, "one", tokens)
    toml, source = tmp_path / "one.toml", tmp_path / "results" / "theta.safetensors"
    toml.write_text(toml.read_text().replace('chat_template = ""', 'chat_template = "{{x}}"'))
    source.parent.mkdir()
    msgspec.structs.replace(version_0(toml), tokenizer=tokens.read_bytes()).save(source)
    again = tmp_path / "again.toml"
    assert run(["run", "new", "again", "--from", str(source), "--out", str(again)]) == 0
    assert load_manifest(again).export == ExportSection(chat_template="{{x}}")


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


# Names of people, files and folders whose bytes are not UTF-8: they work, or are one sentence.

NAME = os.fsdecode(b"Zo\xeb")


@pytest.mark.parametrize(
    "arguments",
    [
        ("node", "--name", NAME),
        ("node", "--join", f"/dns4/{NAME}/tcp/1"),
        ("node", "--run", NAME, "--listen", NAME),
        ("bootstrap", "--announce", f"/dns4/{NAME}/tcp/1"),
        ("invite", "--name", NAME, "run"),
        ("run", "amend", "--message", NAME, "run"),
        ("ban", NAME, "peer"),
    ],
)
def test_what_others_are_told_is_text_of_a_flag_and_of_the_environment(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    flag = next((word for word in arguments if word.startswith("--")), "RUN")
    assert f"'{flag}'" in said and "must be UTF-8 text" in said
    assert len(said.splitlines()) == 2
    monkeypatch.setenv("P2PDILOCO_NAME", NAME)
    assert run(["node"]) == 2
    assert "must be UTF-8 text" in capsys.readouterr().err


def test_a_model_is_started_from_and_written_in_such_folders(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    first, second = folder / "run.toml", tmp_path / "second.toml"
    assert run(["run", "new", "first", "--preset", "micro", "--out", str(first)]) == 0
    # Whoever reads the output gets a path that there is.
    assert capfdbinary.readouterr().out.strip() == os.fsencode(first)
    assert run(["run", "check", str(first)]) == 0

    version_0(first).save(folder / "theta.safetensors")
    out = str(tmp_path / f"x{NAME}")
    assert run(["export", "--checkpoint", str(folder / "theta.safetensors"), "--out", out]) == 0
    given = ["--from", out, "--out", str(second)]
    assert run(["run", "new", "second", "--preset", "micro", *given]) == 0
    assert load_manifest(second).run.initial_name == "xZo·"


def test_the_learner_hears_of_every_path_and_says_what_is_wrong_with_it() -> None:
    path = Path("/data") / NAME
    for command in (Save(path), Stop(path)):
        assert decode_command(frame(command)[4:]) == command
    assert decode_event(frame(StateSaved(path, False, f"no {path}"))[4:]) == (
        StateSaved(path, False, "no /data/Zo\\udceb")
    )
    assert decode_event(frame(Failed(f"{path} is no text", "x"))[4:]) == Failed(
        "/data/Zo\\udceb is no text", "x"
    )


def test_lines_for_machines_show_such_a_name() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "cannot read %s", (NAME,), None)
    record.fields = {"path": NAME, NAME: [NAME]}
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "cannot read Zo\\udceb"
    assert entry["fields"] == {"path": "Zo\\udceb", "Zo\\udceb": ["Zo\\udceb"]}
    told = {"a": "Zo\\udceb", "b": 1.5, "c": None}
    assert json.loads(json_line(told | {"a": Path(NAME)})) == told
