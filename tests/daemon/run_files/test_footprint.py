"""Footprint of a run: what a learner takes is counted, whatever it does beside training."""

from __future__ import annotations

import pytest

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon.run_files.footprint import footprint_of
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.sizes import training_bytes


@pytest.mark.parametrize("preset", ["micro", "tiny"])
def test_the_second_instance_in_which_a_learner_evaluates_is_counted(preset: str) -> None:
    manifest: Manifest = for_run(preset, "run")
    takes, model = footprint_of(manifest), task_of(manifest).model()
    second = sum(each.nbytes for each in model.parameters())
    training = training_bytes(takes.parameters, manifest.inner.optimizer)
    assert takes.learner_bytes == training + second
