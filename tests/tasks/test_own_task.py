"""A task that an installed package brings: the example of the documentation, found by its entry point."""

from pathlib import Path

import pytest
import torch

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.manifest import (
    canonical_bytes,
    genesis_digest_of,
    manifest_from_canonical,
    sign_manifest,
)
from p2pdiloco.config.presets import MICRO
from p2pdiloco.daemon.run_files.run import open_run, sign_run
from p2pdiloco.errors import RemoteError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.loop import evaluate, heldout_batch
from p2pdiloco.tasks.registry import BUILT_IN, load_manifest, render_toml, task_of
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
