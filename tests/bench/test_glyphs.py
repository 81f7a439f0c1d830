"""Images that the study draws itself, through the task image-classification."""

import numpy as np

from p2pdiloco.tasks.registry import task_of
from study import glyphs
from study.data import data_of
from study.play import play
from study.setting import Setting


def test_images_are_drawn_once_from_a_seed_and_a_swarm_trains_on_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(glyphs, "IMAGES", 360)
    setting = Setting(model="glyphs", learners=2, steps=4, inner_steps=2, momentum_warmup=1)
    task = task_of(setting.manifest())
    data = data_of(task)
    assert len(data.train) + len(data.heldout) == 360 and 15 < len(data.heldout) < 70
    _, labels = data.train.batch(np.arange(len(data.train)))
    assert set(labels.tolist()) == set(range(len(glyphs.CLASSES)))
    with monkeypatch.context() as patched:
        patched.setattr(glyphs, "draw", None)  # what is there is not drawn again
        folder = glyphs.glyphs()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    first, again = sorted(folder.rglob("*.png")), tmp_path / "again"
    glyphs.draw(again, 72)
    drawn = {path.relative_to(again): path.read_bytes() for path in again.rglob("*.png")}
    assert len(first) == 360 and len(set(drawn.values())) == len(drawn) == 72
    assert all((folder / name).read_bytes() == content for name, content in drawn.items())
    outcome = play(setting, 100)
    assert outcome.merges > 1 and 3 < outcome.loss < 5
