"""A task that an installed package brings: the example of the documentation, found by its entry point."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.main import run as main
from p2pdiloco.config.manifest import (
    MAX_MANIFEST_BYTES,
    canonical_bytes,
    decode_signed,
    encode_signed,
    genesis_digest_of,
    manifest_from_canonical,
    sign_manifest,
    verify,
)
from p2pdiloco.config.presets import MICRO, expected_merges, harmful_settings
from p2pdiloco.daemon.run_files.run import genesis_versions, open_run, sign_run
from p2pdiloco.daemon.run_files.saved_state import result_of
from p2pdiloco.daemon.run_files.shared_files import initial_beside
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.learner.loop import evaluate, heldout_batch
from p2pdiloco.session import compare, new_run
from p2pdiloco.tasks.description import describe
from p2pdiloco.tasks.initial import named_parameters, tensor_specs
from p2pdiloco.tasks.registry import BUILT_IN, load_manifest, render_toml, task_of
from p2pdiloco.tasks.task import constants_of
from p2pdiloco.tensors.sizes import TensorSpec
from study.lockstep import Lockstep

torch.set_num_threads(1)
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "regression"
RUN = EXAMPLE / "run.toml"


def install(folder, value="p2pdiloco_regression:Regression", package="p2pdiloco_regression"):
    """What an installer leaves for the interpreter to find: metadata with the entry point."""
    metadata = folder / f"{package}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[p2pdiloco.tasks]\nregression = {value}\n")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_the_example_s_entry_point_is_the_one_that_is_tested():
    text = (EXAMPLE / "pyproject.toml").read_text()
    assert '"p2pdiloco.tasks"]\nregression = "p2pdiloco_regression:Regression"' in text


def test_a_swarm_learns_a_task_of_one_s_own(installed, tmp_path):
    manifest = load_manifest(RUN)
    assert manifest_from_canonical(canonical_bytes(manifest)) == manifest
    (tmp_path / "again.toml").write_text(render_toml(manifest))
    assert load_manifest(tmp_path / "again.toml") == manifest
    task = task_of(manifest)
    # By torch's meta device and the general version 0: the example says neither.
    assert task.specs() == (
        TensorSpec("0.weight", (32, 1)),
        TensorSpec("0.bias", (32,)),
        TensorSpec("2.weight", (1, 32)),
        TensorSpec("2.bias", (1,)),
    )
    start = task.initial_parameters()
    assert start["0.weight"].std().item() == pytest.approx(1.0, rel=0.3) and not start["0.bias"].any()
    swarm = Lockstep(manifest, learners=2, delay_steps=4)
    try:
        before = swarm.loss()
        [(_, after)] = swarm.run(160, 160)
        assert before > 0.2 > 0.05 > after
    finally:
        swarm.close()
    model = task.model()
    model.load_state_dict(start)
    found = evaluate(task, model, heldout_batch(task, task.load_data(None).heldout, 256))
    assert set(found.metrics) == {"mean_error"}
    assert (task.sample(model) or "").startswith("sin(1) is about")


def test_a_node_without_the_task_is_told_what_to_install_and_exits_with_2(capsys):
    assert cli_main.run(["run", "check", str(RUN)]) == 2
    error = capsys.readouterr().err
    assert error == (
        'error: the task "regression" is not installed on this machine\n'
        "hint: pip install p2pdiloco-regression, if you trust it: tasks are code\n"
    )


def test_a_newcomer_without_the_task_is_told_so_and_one_with_it_opens_the_run(
    installed, tmp_path, monkeypatch
):
    owner = Identity.load_or_create(tmp_path / "owner.key")
    run, _ = sign_run(RUN, owner)
    assert open_run(run.signed, owner, run.id)[0].layouts == run.layouts
    monkeypatch.undo()  # uninstalled
    with pytest.raises(UserError, match='the task "regression" is not installed'):
        open_run(run.signed, owner, run.id)


def test_a_model_that_a_peer_states_wrongly_is_refused(tmp_path):
    owner = Identity.load_or_create(tmp_path / "owner.key")
    wrong = type(MICRO)(**{f: getattr(MICRO, f) for f in MICRO.__struct_fields__} | {"model": {"layers": 2}})
    signed = sign_manifest(wrong, genesis_digest_of((bytes(32),)), owner, owner.peer_id)
    with pytest.raises(RemoteError, match="manifest-invalid"):
        open_run(signed, owner)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("p2pdiloco_nowhere:Task", "cannot be loaded: No module named"),
        ("p2pdiloco.errors:Nothing", "cannot be loaded"),
        ("p2pdiloco.errors:UserError", "is no subclass of"),
    ],
)
def test_a_broken_package_is_one_sentence(value, words, tmp_path, monkeypatch):
    install(tmp_path, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=words):
        load_manifest(RUN)


def test_two_packages_with_one_task_are_one_too_many(installed, tmp_path):
    install(tmp_path, "other:Regression", "other")
    with pytest.raises(UserError, match="2 installed packages bring a task"):
        load_manifest(RUN)


def test_built_in_tasks_cannot_be_replaced_by_a_package(installed, tmp_path, monkeypatch):
    install(tmp_path, "other:Task", "other")
    path = tmp_path / "other-0.1.dist-info" / "entry_points.txt"
    path.write_text("[p2pdiloco.tasks]\ncausal-lm = other:Task\n")
    assert type(task_of(MICRO)) is BUILT_IN["causal-lm"]


# Runs that programs train in loops of their own: their manifests, and whose model fits.


class Tied(torch.nn.Module):
    """Two names for one table, and a parameter without dimensions."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, width)
        self.head = torch.nn.Linear(width, 10, bias=False)
        self.head.weight = self.table.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.5))


def test_a_compiled_model_s_run_is_that_of_the_module_inside(tmp_path: Path) -> None:
    model, sync = Tied(), {"inner_steps": 16, "fragments": 2}
    compiled = torch.compile(model, backend="eager")
    path = new_run(compiled, tmp_path / "compiled.toml", "own", tokens_per_step=64, **sync)
    plain = new_run(model, tmp_path / "plain.toml", "own", tokens_per_step=64, **sync)
    assert path.read_text() == plain.read_text()
    assert initial_beside(path).read_bytes() == initial_beside(plain).read_bytes()


def test_a_run_begins_at_the_program_s_parameters(tmp_path: Path) -> None:
    model = Tied()
    path = new_run(model, tmp_path / "run.toml", "own", tokens_per_step=64, inner_steps=16, fragments=2)
    run, vault = sign_run(path, Identity.generate())
    task = task_of(run.manifest)
    assert task.specs() == tensor_specs(model) and run.manifest.sync.inner_steps == 16
    assert run.manifest.inner.optimizer == "adamw", "the program's own, so no preset's is stated"
    assert [(s.name, s.shape, s.embedding) for s in task.specs()] == [
        ("scale", (), False),
        ("table.weight", (10, 4), True),
    ]
    found = torch.cat([vault.theta(layout.index) for layout in run.layouts]).sort().values
    own = torch.cat([p.detach().flatten() for p in model.parameters()]).sort().values
    assert torch.equal(found, own)
    for needs_the_program in (task.model, lambda: task.load_data(None)):
        with pytest.raises(UserError, match="trained by programs with a loop of their own"):
            needs_the_program()
    compare(tensor_specs(model), task.specs())
    with pytest.raises(UserError, match=r"table.weight has shape \(10, 4\) there, \(10, 5\) here"):
        compare(tensor_specs(Tied(5)), task.specs())
    given = {file: file.read_bytes() for file in (path, initial_beside(path))}
    with pytest.raises(UserError, match=r"run\.toml exists already"):
        new_run(Tied(5), path, "own", tokens_per_step=64, inner_steps=16, fragments=2)
    assert given == {file: file.read_bytes() for file in given}
    blocked = tmp_path / "blocked.toml"
    initial_beside(blocked).mkdir()
    with pytest.raises(StorageError):
        new_run(model, blocked, "own", tokens_per_step=64, inner_steps=16, fragments=2)
    assert not blocked.exists()


def test_a_run_starts_from_what_another_one_came_to(tmp_path: Path) -> None:
    model = Tied()
    path = new_run(model, tmp_path / "run.toml", "own", tokens_per_step=64, inner_steps=16, fragments=2)
    run, vault = sign_run(path, Identity.generate())
    result_of(run, vault, list(genesis_versions(run, vault))).save(tmp_path / "theta")
    again = tmp_path / "again.toml"
    assert main(["run", "new", "next", "--from", str(tmp_path / "theta"), "--out", str(again)]) == 0
    second, vault_2 = sign_run(again, Identity.generate())
    assert second.manifest.run.task == "own-loop"
    found = result_of(second, vault_2, list(genesis_versions(second, vault_2))).parameters
    assert all(torch.equal(found[name], value) for name, value in named_parameters(model).items())


@pytest.mark.parametrize("tokens", [64, 65_536])
def test_the_schedule_is_as_long_as_the_program_s_steps_are(tmp_path: Path, tokens: int) -> None:
    run = sign_run(new_run(Tied(), tmp_path / "run.toml", "own", tokens, fragments=2), Identity.generate())[0]
    assert harmful_settings(run.manifest) == [] and expected_merges(run.manifest) == 416
    (doubt,) = run.doubts()
    assert "10000 inner steps (2800), task own-loop (causal-lm, image" in doubt and "parameters" not in doubt
    path = new_run(Tied(), tmp_path / "short.toml", "own", tokens, schedule_steps=480, fragments=2)
    run = sign_run(path, Identity.generate())[0]
    assert "the schedule is about 20 outer steps" in "".join(harmful_settings(run.manifest))
    assert expected_merges(run.manifest) == 20
    assert run.manifest.outer.momentum_warmup_merges == 13


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("Own 2", {}, r"run\.name must be"),
        ("own", {"tokens_per_step": 0}, r"inner\.tokens_per_step must be"),
        ("own", {"tokens_per_step": object()}, r"inner\.tokens_per_step must be"),
        ("own", {"fragments": 0}, r"sync\.fragments must be"),
        ("own", {"schedule_steps": -3}, r"inner\.(warmup|schedule)_tokens must be"),
        ("own", {"schedule_steps": 0}, "schedule_tokens"),
        ("own", {"inner_steps": 2, "fragments": 2}, r"sync\.delay_steps must be below"),
        ("own", {"steps": 16}, "no such key"),
    ],
)
def test_nothing_is_written_that_would_be_refused(
    name: str, keys: dict[str, int], words: str, tmp_path: Path
) -> None:
    not_finite = Tied()
    not_finite.scale.data.fill_(math.nan)
    for model, given, wrong, kind in (
        (Tied(), keys, words, UserError if "steps" in keys else ConfigError),
        (torch.nn.ReLU(), {}, "the model has no parameters", UserError),
        (not_finite, {}, "the parameter scale has values that are not finite", UserError),
    ):
        with pytest.raises(kind, match=wrong):
            new_run(model, tmp_path / "run.toml", name, **{"tokens_per_step": 64} | given)
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_signed_unless_it_was_changed_to_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    new_run(Tied(), path, "own", tokens_per_step=np.int64(64), inner_steps=np.int32(16))
    sign_run(path, Identity.generate())
    path.write_text(path.read_text().replace("10x4 embedding", "10y4"))
    with pytest.raises(ConfigError, match="which is not a name and a shape"):
        sign_run(path, Identity.generate())


def test_a_manifest_that_is_written_can_be_signed(tmp_path: Path) -> None:
    """Its bound is one of bytes: it is said before anything is written."""

    def model(count: int, prefix: str) -> torch.nn.Module:
        scalars = {f"{prefix}{index:04}": torch.nn.Parameter(torch.zeros(())) for index in range(count)}
        return torch.nn.ParameterDict(scalars)

    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"the manifest has \d+ bytes, at most 65536 travel"):
        new_run(model(1300, "p" * 60), path, "own", tokens_per_step=64, fragments=2)
    assert not list(tmp_path.iterdir())
    # Nearly as large as is allowed, with a file that is larger.
    new_run(model(3200, "p" * 12), path, "own", tokens_per_step=64, fragments=2)
    run, _ = sign_run(path, Identity.generate())
    assert path.stat().st_size > MAX_MANIFEST_BYTES
    sent = encode_signed(run.signed)
    assert len(sent) > 0.9 * MAX_MANIFEST_BYTES
    assert verify(decode_signed(sent), verify_signature) == run.manifest


def adapted() -> torch.nn.Sequential:
    """Model of which two of six parameters are trained, as of one with adapters; it has buffers, too."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    model[:2].requires_grad_(False)
    return model


def test_what_is_frozen_stays_each_program_s_own_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted()
    path = new_run(model, tmp_path / "run.toml", "own", tokens_per_step=64, inner_steps=16, fragments=1)
    said = capsys.readouterr().err
    assert said.startswith(
        "p2pdiloco: the run has 2 tensors (34 elements) of the model; 4 frozen parameters "
    )
    assert "(176 elements)" in said and said.count("\n") == 1
    specs = task_of(sign_run(path, Identity.generate())[0].manifest).specs()
    assert [spec.name for spec in specs] == ["2.weight", "2.bias"]
    names = {spec.name for spec in specs}
    frozen, buffers = describe(model).left_out(names)
    assert frozen.startswith(
        "4 frozen parameters (176 elements) are not in the run: they stay each program's"
    )
    assert buffers.endswith("own: 1.running_mean and 2 more; evaluate measures with yours")

    compare(describe(model).of_run(names), specs)
    model[2].bias.requires_grad_(False)
    compare(describe(model).of_run(names), specs)  # what the run has may be frozen here
    model[0].weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"0\.weight has shape none there, \(16, 8\) here"):
        compare(describe(model).of_run(names), specs)

    everything = {"frozen": True, "inner_steps": 16, "fragments": 1}
    whole = new_run(adapted(), tmp_path / "whole.toml", "own", tokens_per_step=64, **everything)
    assert len(task_of(sign_run(whole, Identity.generate())[0].manifest).specs()) == 6
    assert "frozen" not in capsys.readouterr().err
    assert describe(torch.nn.Linear(2, 2)).left_out({"weight", "bias"}) == []
    with pytest.raises(UserError, match="no parameters that are trained"):
        new_run(model.requires_grad_(False), tmp_path / "none.toml", "own", tokens_per_step=64)


class Normed(torch.nn.Module):
    """Model with running statistics, a constant, and a table that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        self.register_buffer("codebook", torch.zeros(3))


def test_a_run_says_of_every_buffer_what_becomes_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"tokens_per_step": 64, "inner_steps": 16, "fragments": 1}
    path = new_run(
        Normed(), tmp_path / "run.toml", "own", average_statistics=True, own_buffers=["codebook"], **keys
    )
    assert "own: norm.num_batches_tracked and 1 more" in capsys.readouterr().err
    run, vault = sign_run(path, Identity.generate())
    specs = task_of(run.manifest).specs()
    assert [(spec.name, spec.embedding) for spec in specs] == [
        ("norm.weight", False),
        ("norm.bias", False),
        ("norm.running_mean", True),
        ("norm.running_var", True),
    ]
    assert [constant.name for constant in constants_of(run.manifest.model)] == ["scale"]
    assert run.constants["scale"].tolist() == [1.0, 2.0]
    found = result_of(run, vault, list(genesis_versions(run, vault)))
    assert found.parameters["norm.running_var"].tolist() == [1.0] * 4
    with pytest.raises(UserError, match="the model has no buffer code"):
        new_run(Normed(), tmp_path / "wrong.toml", "own", own_buffers=["code"], **keys)
    assert not (tmp_path / "wrong.toml").exists()
