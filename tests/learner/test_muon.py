"""Muon: torch's, and what is done where bf16 is slow."""

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
from p2pdiloco.learner.optimizer import Muon, hidden_matrices
from p2pdiloco.learner.ranks import computes_in_bf16, multiplies_bf16, passes_in_bf16


def test_our_muon_is_torchs_bit_for_bit(monkeypatch) -> None:
    theirs_class = getattr(torch.optim, "Muon", None)
    if theirs_class is None:
        pytest.skip("this torch has no Muon")
    monkeypatch.setattr(optimizer, "multiplies_bf16", lambda kind: True)  # as torch's does everywhere
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(7, 5, bias=False)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    a = Muon(list(ours.parameters()), lr=0.01, weight_decay=0.1, momentum=0.95)
    b = theirs_class(
        theirs.parameters(), lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        for stepped, layer in ((a, ours), (b, theirs)):
            layer.zero_grad()
            batch = torch.arange(7.0).reshape(1, 7) + step
            torch.autograd.backward(layer(batch).square().sum())
            stepped.step()
        assert torch.equal(ours[0].weight, theirs[0].weight)
    two = torch.nn.Sequential(torch.nn.Embedding(3, 7), torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    assert [tuple(p.shape) for p in hidden_matrices(two)] == [(5, 7)], "neither embedding nor head"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_where_bf16_is_slow_matrices_are_orthogonalised_in_fp32(monkeypatch, fast, shape) -> None:
    asked = []
    monkeypatch.setattr(optimizer, "multiplies_bf16", lambda kind: asked.append(kind) or fast)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    found = optimizer.orthogonal(matrix)
    assert found.dtype == (torch.bfloat16 if fast else torch.float32) and asked == ["cpu"]
    assert found.shape == shape and torch.equal(matrix, before), "a gradient is not written to"
    singular = torch.linalg.svdvals(found.float())
    assert float(singular.min()) > 0.5 and float(singular.max()) < 1.5


# Which devices compute in bf16, and who is told.


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
