"""Which devices compute in bf16, and who is told."""

from __future__ import annotations

import pytest
import torch

from p2pdiloco.config.manifest import run_id, sign_manifest
from p2pdiloco.config.presets import MICRO
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.member import learner_options
from p2pdiloco.daemon.run_files.run import Run
from p2pdiloco.errors import InvariantViolation
from p2pdiloco.identity import Identity
from p2pdiloco.learner import optimizer, ranks, training_process
from p2pdiloco.learner.channel import BaseRef, Start
from p2pdiloco.learner.ranks import computes_in_bf16, multiplies_bf16, passes_in_bf16


@pytest.mark.parametrize(("major", "hip", "bf16"), [(7, None, False), (8, None, True), (7, "6.2", True)])
def test_gpus_that_only_emulate_bf16_compute_in_fp32(monkeypatch, major, hip, bf16) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 5))
    monkeypatch.setattr(torch.version, "hip", hip)
    computes_in_bf16.cache_clear()
    try:
        assert computes_in_bf16("cuda") is multiplies_bf16("cuda") is bf16
        assert not multiplies_bf16("mps"), "nobody has looked"
    finally:
        computes_in_bf16.cache_clear()


@pytest.mark.parametrize(
    ("capability", "found", "bf16"),
    [
        ("AVX512", {"avx512_bf16": True, "amx_bf16": False}, True),
        ("AVX512", {"amx_bf16": True}, True),
        ("AVX512", {"avx512_bf16": False}, False),
        ("AVX512", None, False),  # an older torch
        ("AVX2", {"avx512_bf16": True}, False),  # torch was told to leave AVX-512 alone
        ("DEFAULT", {"bf16": True}, False),  # ARM's
    ],
)
def test_cpus_compute_in_bf16_where_they_have_instructions_for_it(
    monkeypatch, capability, found, bf16
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if found is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    computes_in_bf16.cache_clear()
    try:
        assert computes_in_bf16("cpu") is multiplies_bf16("cpu") is bf16
    finally:
        computes_in_bf16.cache_clear()


@pytest.mark.parametrize(("precision", "bf16"), [("auto", True), ("fp32", False)])
def test_a_nodes_precision_is_its_learners(monkeypatch, tmp_path, precision, bf16) -> None:
    monkeypatch.setattr(ranks, "computes_in_bf16", lambda kind: kind == "cpu")
    settings = NodeSettings(data_dir=tmp_path, device="cpu", threads=1, precision=precision)
    owner = Identity.generate()
    signed = sign_manifest(MICRO, bytes(32), owner, owner.peer_id)
    run = Run(id=run_id(signed), signed=signed, manifest=MICRO, layouts=())
    options = learner_options(settings, run, "peer-a", tmp_path / "place")
    bases = (BaseRef(0, 0),) * MICRO.sync.fragments
    training = training_process._build(Start(MICRO, options, bases)).training
    assert (training.bf16, training.precision) == (bf16, precision)
    dtypes = []
    training.model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _layer, _inputs, output: dtypes.append(output.dtype)
    )
    training.step()
    assert dtypes == [torch.bfloat16 if bf16 else torch.float32]


def test_parameters_that_are_shared_out_on_cpus_compute_in_fp32(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "computes_in_bf16", lambda kind: True)
    for kind, expected in (("cpu", False), ("cuda", True)):
        place = torch.device(kind)
        assert passes_in_bf16(place, optimizer.precision_of_shares(place, "auto")) is expected
        assert not passes_in_bf16(place, optimizer.precision_of_shares(place, "fp32"))
    with pytest.raises(InvariantViolation, match="fp16 is no precision"):
        passes_in_bf16(torch.device("cpu"), "fp16")
