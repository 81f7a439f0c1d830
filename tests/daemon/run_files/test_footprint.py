"""Footprint of a run: what a learner takes is counted, whatever it does beside training."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from daemon_kit import published

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import size_text
from p2pdiloco.daemon import member
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.run_files.footprint import footprint_of
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Task
from p2pdiloco.tensors.sizes import ENCODINGS, TensorSpec, kept_bytes, training_bytes


@pytest.mark.parametrize("preset", ["micro", "tiny"])
def test_the_second_instance_in_which_a_learner_evaluates_is_counted(preset: str) -> None:
    manifest: Manifest = for_run(preset, "run")
    takes, model = footprint_of(manifest), task_of(manifest).model()
    second = sum(each.nbytes for each in model.parameters())
    training = training_bytes(takes.parameters, manifest.inner.optimizer)
    assert takes.learner_bytes == training + second


# Memory of loss audits: counted in what a run takes, where they are made.

PLAIN = for_run("350m", "run")
AUDITED = msgspec.structs.replace(PLAIN, audit=msgspec.structs.replace(PLAIN.audit, loss_share=0.01))


async def said(folder: Path, manifest: Manifest, free_bytes: int, **settings: object) -> str:
    """What a node says of the memory of this run, with so much free."""
    lines = list[str]()
    node = NodeSettings(data_dir=folder, **settings)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "free_memory_bytes", lambda: free_bytes)
        patch.setattr(member, "free_disk_bytes", lambda _: 1 << 40)
        await Approval(node, lambda line, _: lines.append(line), None).approve(
            published(manifest), is_new=True
        )
    return lines[2]


def test_only_a_run_with_loss_audits_takes_it() -> None:
    takes = footprint_of(AUDITED)
    given = 4 + 2 * ENCODINGS[AUDITED.codec.contribution].bytes_per_parameter
    fragment = takes.parameters / AUDITED.sync.fragments
    assert takes.loss_audit_bytes == pytest.approx((given + 12) * fragment, rel=1e-3)
    assert footprint_of(PLAIN) == msgspec.structs.replace(takes, loss_audit_bytes=0)


async def test_it_is_said_and_has_to_be_there_whatever_the_learner_s_device_is(tmp_path: Path) -> None:
    takes = footprint_of(AUDITED)
    others = takes.daemon_bytes + takes.payload_bytes
    needed = others + takes.loss_audit_bytes
    words = f", loss audits {size_text(takes.loss_audit_bytes)}, payloads "
    assert words in await said(tmp_path, AUDITED, needed, device="cuda")
    with pytest.raises(UserError, match="takes more than this machine has"):
        await said(tmp_path, AUDITED, needed - 1, device="cuda")
    assert "loss audits" not in await said(tmp_path, PLAIN, others, device="cuda")
    own = await said(tmp_path, AUDITED, others, learner_socket=tmp_path / "s")
    assert "loss audits" not in own, "a program of one's own measures nothing"


# Memory of a training pass: reckoned from shapes, said, and asked about.

LARGER_CNN = {"image_pixels": 32, "width": 32, "layers": 2, "channels": 3}
EVEN_WIDTH = {"width": 256, "layers": 2}  # as many as ids


def with_model(preset: str, **model: object) -> Manifest:
    """The preset, with other values in its [model]."""
    manifest = for_run(preset, "run")
    return msgspec.structs.replace(manifest, model=manifest.model | model)


def kept_by_torch(manifest: Manifest, samples: int) -> int:
    """Bytes that torch keeps for the gradient of a pass, but for parameters."""
    task = task_of(manifest)
    model, table = task.model(), manifest.model
    if manifest.run.task == "causal-lm":
        batch: tuple[torch.Tensor, ...] = (torch.randint(0, 256, (samples, task.tokens_per_sample + 1)),)
    else:
        size = (samples, table["channels"], table["image_pixels"], table["image_pixels"])
        batch = torch.randn(*size), torch.randint(0, 10, (samples,))
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = task.loss(model, batch)
    assert loss.isfinite()
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


@pytest.mark.parametrize(
    ("manifest", "samples"),
    [
        (for_run("micro", "run"), 4),
        (for_run("tiny", "run"), 8),
        (for_run("tiny-moe", "run"), 8),
        (with_model("tiny", key_value_heads=1, tied_head=False, vocabulary=1024), 4),
        (with_model("tiny", **EVEN_WIDTH), 4),
        (for_run("small", "run"), 1),
        (for_run("digits", "run"), 64),
        (with_model("digits-cnn", **LARGER_CNN), 8),
    ],
)
def test_what_a_pass_keeps_is_reckoned_within_a_factor_of_two(manifest: Manifest, samples: int) -> None:
    """Torch keeps about two thirds of a pass's peak; the rest is what it holds for a moment."""
    assert 0.9 < task_of(manifest).pass_bytes(samples) / kept_by_torch(manifest, samples) < 2.2


async def test_a_pass_larger_than_the_machine_is_refused_and_said_where_the_parameters_are_small(
    tmp_path: Path,
) -> None:
    tokens = 131_072
    small = for_run("small", "run")
    inner = msgspec.structs.replace(small.inner, tokens_per_step=tokens)
    manifest = msgspec.structs.replace(with_model("small", context_tokens=tokens), inner=inner)
    takes = footprint_of(manifest)
    assert takes.learner_bytes < 1 << 30 < 25 << 30 < takes.pass_bytes
    words = f"learner {size_text(takes.learner_bytes)} and {size_text(takes.pass_bytes)} for a pass"
    everything = takes.daemon_bytes + takes.learner_bytes + takes.pass_bytes + takes.payload_bytes
    assert words in await said(tmp_path, manifest, everything, device="cpu")
    with pytest.raises(UserError, match="takes more than this machine has"):
        await said(tmp_path, manifest, everything - 1, device="cpu")


async def test_a_pass_is_as_large_as_the_node_wants_it(tmp_path: Path) -> None:
    manifest = for_run("small", "run")
    (few, usual, many), step = (footprint_of(manifest, n).pass_bytes for n in (1, 0, 1 << 24)), 8192
    assert usual == pytest.approx(few * 2048 / 256) and many == pytest.approx(few * step / 256)
    line = await said(tmp_path, manifest, 1 << 40, device="cpu", micro_batch_tokens=256)
    assert f" and {size_text(few)} for a pass" in line


def test_experts_count_as_far_as_they_compute_a_token() -> None:
    all_of_them, stacked = (
        [TensorSpec(f"experts.{index}.w", (10, 6)) for index in range(4)],
        [TensorSpec("experts.w", (4, 10, 6))],
    )
    assert kept_bytes(all_of_them, 3, 0, 2) == kept_bytes(stacked, 3, 0, 2) == 6 * 3 * 2 * 16


def test_of_a_task_of_ones_own_a_pass_is_unknown() -> None:
    assert Task.pass_bytes(task_of(for_run("micro", "run")), 8) == 0
