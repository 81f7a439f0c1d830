"""Footprint of a run: what a learner takes is counted, whatever it does beside training."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2pdiloco.config.manifest import Manifest, run_id, sign_manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import size_text
from p2pdiloco.daemon import member
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.run_files.footprint import footprint_of
from p2pdiloco.daemon.run_files.known_runs import PublishedRun
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.sizes import ENCODINGS, training_bytes


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
    owner, lines = Identity.generate(), list[str]()
    signed = sign_manifest(manifest, bytes(32), owner, owner.peer_id)
    run = PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)
    node = NodeSettings(data_dir=folder, **settings)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "free_memory_bytes", lambda: free_bytes)
        patch.setattr(member, "free_disk_bytes", lambda _: 1 << 40)
        await Approval(node, lambda line, _: lines.append(line), None).approve(run, is_new=True)
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
