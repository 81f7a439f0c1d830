"""Passes that torch's compiler really compiles, here for the CPU."""

from __future__ import annotations

import shutil

import msgspec
import numpy as np
import pytest
import torch
from learner_kit import alone, data

from p2pdiloco.config.presets import DIGITS, DIGITS_CNN, MICRO
from p2pdiloco.learner.inner_step import CACHE_VARIABLES, Form, PassOptions
from p2pdiloco.learner.loop import Training
from p2pdiloco.tasks.registry import task_of

MANIFEST = msgspec.structs.replace(MICRO, model=MICRO.model | {"layers": 1})
PASS_TOKENS = 192
"""Of a step of four samples: passes of three samples and of one."""


def go_elsewhere(training: Training) -> None:
    """Write other parameters in place, as a version does that is gone over to."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.copy_(parameter * 0.5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(300)
def test_compiled_passes_learn_the_same_over_an_odd_last_pass_and_a_version(tmp_path, monkeypatch):
    for variable in CACHE_VARIABLES:
        monkeypatch.setenv(variable, str(tmp_path))
    from torch._dynamo.utils import counters  # imports for seconds

    torch._dynamo.reset()
    counters.clear()
    plain, expected = alone(3, MANIFEST, micro_batch=PASS_TOKENS)
    task = task_of(MANIFEST)
    model = task.model()
    model.load_state_dict(task.initial_parameters())
    options = PassOptions(PASS_TOKENS, compile="always", precision="fp32")
    training = Training(task, model, data().train, "peer-a", options=options)
    found = [training.step().loss for _ in range(3)]
    for each, losses in ((plain, expected), (training, found)):
        go_elsewhere(each)
        losses += [each.step().loss for _ in range(2)]
    assert training._passes.made == 2
    assert counters["stats"]["unique_graphs"] == 1, "none of the odd passes, and none anew"
    assert training._passes._forms.form is Form.COMPILED and training.take_notes() == []
    assert found == pytest.approx(expected, rel=1e-4)
    assert training.tokens_total == plain.tokens_total == 5 * MICRO.inner.tokens_per_step


@pytest.mark.parametrize("manifest", [MICRO, DIGITS, DIGITS_CNN], ids=lambda manifest: manifest.run.name)
def test_built_in_models_are_one_graph_from_tokens_to_loss(manifest):
    if manifest is not MICRO:
        pytest.importorskip("sklearn")
    task = task_of(manifest)
    model = task.model()
    part = task.load_data(None).train.batch(np.arange(4))
    # In pieces it would be an error.
    compiled = torch.compile(lambda *part: task.loss(model, part), backend="eager", fullgraph=True)
    # Not the same bits: several threads may add up in another order.
    torch.testing.assert_close(compiled(*part), task.loss(model, part), rtol=1e-5, atol=0)
