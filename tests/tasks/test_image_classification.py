"""The task image-classification: two models, and images from folders and from scikit-learn."""

import importlib.util
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from p2pdiloco.cli import main as cli_main
from p2pdiloco.config.manifest import DataSection, ImageSection
from p2pdiloco.config.presets import DIGITS, DIGITS_CNN
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.learner.loop import Training, evaluate, heldout_batch
from p2pdiloco.tasks import images
from p2pdiloco.tasks.images import load_images
from p2pdiloco.tasks.initial import tensor_specs
from p2pdiloco.tasks.registry import task_of

torch.set_num_threads(1)
SMALL = ImageSection(classes=2, image_pixels=8, channels=3, layers=1, width=16)
HALF = DataSection(source="files", heldout_percent=50)


def changed(preset, **keys):
    return msgspec.structs.replace(preset, model=preset.model | keys)


COLOUR = changed(DIGITS_CNN, channels=3, layers=2, width=12)


@pytest.mark.parametrize("manifest", [DIGITS, DIGITS_CNN, COLOUR], ids=["vit", "cnn", "cnn-colour"])
def test_specs_by_arithmetic_are_the_model_s_own_and_nothing_else_is_state(manifest):
    task = task_of(manifest)
    model = task.model()
    assert task.specs() == tensor_specs(model)
    assert set(model.state_dict()) == {spec.name for spec in task.specs()}


@pytest.mark.parametrize("manifest", [DIGITS, DIGITS_CNN], ids=["vit", "cnn"])
def test_digits_are_learned_from_version_0(manifest):
    task = task_of(manifest)
    data = task.load_data(None)
    assert 250 < len(data.heldout) < 450 and len(data.train) + len(data.heldout) == 1797
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    held = heldout_batch(task, data.heldout, 10_000)
    before = evaluate(task, model, held)
    assert before.loss < 3.5 and before.metrics["accuracy"] < 0.35
    assert before.tokens == len(data.heldout)
    training = Training(task, model, data.train, "peer-a")
    for _ in range(120):
        assert training.step().tokens == 64
    after = evaluate(task, model, held)
    assert after.metrics["accuracy"] > 0.65
    assert after.loss < before.loss - 0.8


def test_a_node_without_scikit_learn_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="not installed") as caught:
        task_of(DIGITS).load_data(None)
    assert ".[vision]" in caught.value.hint


def folders(root, **counts):
    """Folders of plain images: those of the n-th class have n of red, and all have another green."""
    for number, (name, count) in enumerate(sorted(counts.items())):
        (root / name).mkdir()
        for index in range(count):
            image = Image.new("RGB", (10, 6), (40 * number, 10 * index, 255))
            image.save(root / name / f"{index}.png")
    return str(root)


def colours(samples):
    return {tuple(image[:, 0, 0].tolist()) for image in samples.pixels}


def test_folders_are_classes_and_their_images_are_scaled_and_split_by_content(tmp_path):
    path = folders(tmp_path, cats=20, dogs=20)
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    data = load_images(HALF, SMALL, path)
    again = load_images(HALF, SMALL, path)
    assert len(data.train) + len(data.heldout) == 40 and 8 < len(data.heldout) < 32
    assert np.array_equal(data.heldout.labels, again.heldout.labels)
    # Who has fewer of them, under other names, holds none out that others train on, nor the reverse.
    for file in sorted(Path(path).rglob("1*.png")):
        other = tmp_path / ".other" / file.parent.name / "sub" / f"n{file.name}"
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(file.read_bytes())
    fewer = load_images(HALF, SMALL, str(tmp_path / ".other"))
    assert len(fewer.train) + len(fewer.heldout) == 22
    assert colours(fewer.heldout) < colours(data.heldout) and colours(fewer.train) < colours(data.train)
    pixels, labels = data.train.batch(np.arange(len(data.train)))
    assert pixels.shape == (len(data.train), 3, 8, 8)
    red = {0: -1.0, 1: 40 / 127.5 - 1}
    for image, label in zip(pixels, labels.tolist(), strict=True):
        assert torch.allclose(image[0], torch.tensor(red[label]), atol=1e-6)
        assert torch.equal(image[2], torch.ones(8, 8))


def test_named_classes_keep_their_numbers_where_a_folder_is_missing(tmp_path):
    model = msgspec.structs.replace(SMALL, classes=3, class_folders=["ants", "cats", "dogs"])
    data = load_images(HALF, model, folders(tmp_path, cats=9, dogs=9))
    assert set(data.train.labels) | set(data.heldout.labels) == {1, 2}


def test_bad_images_are_one_sentence(tmp_path, monkeypatch):
    path = folders(tmp_path, cats=9, dogs=9)
    (tmp_path / ".one" / "cats").mkdir(parents=True)
    three = msgspec.structs.replace(SMALL, classes=3)
    named = msgspec.structs.replace(SMALL, class_folders=["cats", "birds"])
    for model, where, words in (
        (SMALL, None, "none are given"),
        (SMALL, str(tmp_path / "nowhere"), "the data path .*nowhere does not exist$"),
        (SMALL, str(tmp_path / "cats" / "0.png"), "cannot read the data path"),
        (SMALL, str(tmp_path / "cats"), "has 0 folders, but the run has 2 classes"),
        (three, path, "has 2 folders, but the run has 3 classes"),
        (SMALL, str(tmp_path / ".one"), "has 1 folder, but the run has 2 classes"),
        (named, path, 'the folder "dogs" of .* is no class of this run'),
    ):
        with pytest.raises(UserError, match=words):
            load_images(HALF, model, where)
    with pytest.raises(UserError, match="10 classes"):
        load_images(DataSection(), SMALL, None)
    monkeypatch.setattr(images, "FILES_MAX_BYTES", 100)
    with pytest.raises(UserError, match="more than 0 GiB"):
        load_images(HALF, SMALL, path)
    monkeypatch.undo()
    (tmp_path / "cats" / "torn.png").write_bytes((tmp_path / "cats" / "0.png").read_bytes()[:50])
    with pytest.raises(UserError, match=r"torn.png cannot be read"):
        load_images(HALF, SMALL, path)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"heads": 5}, "model.width must be a multiple of model.heads (5)"),
        ({"patch_pixels": 3}, "model.image_pixels must be a multiple of model.patch_pixels (3)"),
        ({"class_folders": ["a", "b"]}, "model.class_folders must name 10 different folders"),
        ({"class_folders": ["../x", *"abcdefghi"]}, "model.class_folders must be names of folders"),
        ({"channels": 2}, "[model] of run"),
    ],
)
def test_a_model_that_makes_no_sense_is_one_sentence(keys, sentence):
    with pytest.raises(ConfigError) as caught:
        task_of(changed(DIGITS, **keys))
    assert str(caught.value).startswith(sentence)


def test_whoever_writes_a_run_of_digits_is_told_which_package_is_missing(tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    new = ["run", "new", "d", "--preset", "digits", "--force", "--out", str(tmp_path / "run.toml")]
    assert cli_main.run(new) == 0 and "need scikit-learn" not in capsys.readouterr().err
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else real(name, *a)
    )
    assert cli_main.run(new) == 0
    said = capsys.readouterr().err
    assert "need scikit-learn on every node, and it is not installed here" in said and "'.[vision]'" in said
