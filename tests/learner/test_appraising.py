"""What contributions do to the loss, as a learner measures it."""

import functools
import math

import pytest
import torch
from learner_kit import LAYOUTS, TASK, alone, data

from p2pdiloco.core.audit_state import HARMS, HELPS, ratio_of
from p2pdiloco.learner.channel import Appraise, Appraised, DataShare, StopStepping
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tensors import vault
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import gather

INT8 = codec("int8")
STEPS = 24


def flat(parameters, fragment):
    """A fragment of them."""
    found = torch.empty(LAYOUTS[fragment].numel)
    gather(parameters, LAYOUTS[fragment], found)
    return found


@functools.cache
def displacement(fragment=1):
    """What an honest learner's steps from version 0 come to."""
    training, _ = alone(STEPS)
    start = flat(TASK.initial_parameters(), fragment)
    return start - flat(named_parameters(training.model), fragment)


def appraised(bench, path, theirs, ours=None, fragment=1):
    """What the learner says of these."""
    vault.begin_appraisal(path, flat(TASK.initial_parameters(), fragment))
    ours = displacement() if ours is None else ours
    vault.add_contributions(path, *(INT8.encode(way.clone()) for way in (theirs, ours)))
    bench.post(Appraise(fragment, "peer-b", path))
    bench.mailbox.boundary(bench.training.step())
    (found,) = [event for event in bench.events() if isinstance(event, Appraised)]
    assert found.path == path
    return found


def test_honest_work_helps_reversed_work_harms_and_noise_does_nothing(bench, tmp_path):
    ours, noise = displacement(), torch.randn(LAYOUTS[1].numel, generator=torch.Generator().manual_seed(3))
    before = bench.parameters()

    def ratio(theirs):
        found = appraised(bench, tmp_path / "given", theirs)
        assert len(found.theirs) == len(found.ours) == 2 and not found.same_data and found.took_s >= 0.0
        return ratio_of(found.theirs, found.ours)

    assert ratio(ours) == 1.0
    assert ratio(100 * ours) == pytest.approx(1.0, abs=0.05), "length wins nothing"
    assert ratio(-ours) == -1.0 < HARMS
    assert abs(ratio(noise * float(ours.norm() / noise.norm()))) < HELPS
    assert ratio(torch.zeros_like(ours)) == 0.0
    assert bench.training.inner_step == 5 and before.keys() == bench.parameters().keys()


def test_the_parameters_that_train_are_left_alone(bench, tmp_path):
    _, expected = alone(3)
    losses = []
    for _ in range(3):
        report = bench.training.step()
        losses.append(report.loss)
        path = tmp_path / "given"
        vault.begin_appraisal(path, torch.zeros(LAYOUTS[1].numel))
        vault.add_contributions(path, *(INT8.encode(displacement().clone()) for _ in range(2)))
        bench.post(Appraise(1, "peer-b", path))
        assert bench.mailbox.boundary(report)
    assert losses == expected


def test_the_share_of_a_reader_of_the_same_data_is_drawn_from(bench, tmp_path):
    stream, theirs = bench.training.stream, displacement()
    count = stream.shared.shards
    taken = bytes([170]) * ((count + 7) // 8)
    stream.share(DataShare(stream.data, 0, taken, ("peer-b", "peer-c")))
    assert appraised(bench, tmp_path / "given", theirs).same_data
    stream.share(DataShare(stream.data, 0, taken, ("peer-c",)))
    assert not appraised(bench, tmp_path / "given", theirs).same_data


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_file_that_is_not_whole_has_no_figures(bench, tmp_path, kept):
    path = tmp_path / "given"
    vault.begin_appraisal(path, torch.zeros(math.ceil(kept * LAYOUTS[1].numel)))
    if not kept:
        path.unlink()
    bench.post(Appraise(1, "peer-b", path))
    bench.mailbox.boundary(bench.training.step())
    (found,) = [event for event in bench.events() if isinstance(event, Appraised)]
    assert found == Appraised(path, took_s=found.took_s)


@pytest.mark.parametrize("heldout", [(), (torch.empty(0, 8), torch.empty(0, 8))])
def test_without_held_out_data_nothing_is_measured(bench, tmp_path, heldout):
    assert bench.mailbox.appraises
    bench.mailbox._heldout = heldout
    assert not bench.mailbox.appraises
    found = appraised(bench, tmp_path / "given", displacement())
    assert (found.theirs, found.ours) == ((), ())


def test_who_is_to_end_measures_nothing(bench, tmp_path):
    bench.post(StopStepping())
    bench.post(Appraise(1, "peer-b", tmp_path / "given"))
    bench.mailbox.obey()
    assert not [event for event in bench.events() if isinstance(event, Appraised)]


def test_the_start_is_found_from_the_version_and_its_update():
    start, delta = torch.randn(1000), torch.randn(1000)
    payload = codec("fp32").encode(delta.clone())
    found = vault.start_of_version(start - 0.7 * delta, payload, "fp32", 0.7)
    assert torch.allclose(found, start, atol=1e-5)
    assert len(data().heldout) > 0


def test_what_is_read_is_copied_nowhere(tmp_path, monkeypatch):
    """A copy is memory that nobody counts, and that the process keeps."""
    path, chosen, numel = tmp_path / "file", codec("int4"), 1_000
    values = torch.linspace(-1.0, 1.0, numel)
    vault.begin_appraisal(path, values)
    vault.add_contributions(path, chosen.encode(values), chosen.encode(-values))
    given = []
    decode = type(chosen).decode

    def spied(self, payload, out):
        given.append(payload.obj if isinstance(payload, memoryview) else None)
        decode(self, payload, out)

    monkeypatch.setattr(type(chosen), "decode", spied)
    found = vault.read_appraisal(path, "int4", numel)
    assert len(given) == 2 and given[0] is given[1] is not None
    assert torch.equal(found.theirs, -found.ours) and torch.equal(found.start, values)
