"""Loss audits over the network: what the learner is given, and that nothing is left when it is not."""

from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_kit import AuditNode, AuditTown, memory_town
from daemon_kit import until

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.daemon.bulk import merge_audits
from p2pdiloco.daemon.bulk.merge_audits import LossAuditing
from p2pdiloco.hashing import content_digest
from p2pdiloco.learner.channel import Appraise, Appraised
from p2pdiloco.tensors import vault
from p2pdiloco.tensors.codecs import codec

Room = namedtuple("Room", "total used free")


class PaperLearner:
    """Learner that looks at what it is given, and says what the test wants."""

    def __init__(self) -> None:
        self.asked: list[Appraise] = []
        self.given: list[vault.Appraisable] = []
        self.figures: tuple[Any, ...] | None = ((0.25, 0.5), (0.5, 0.5), True, 3.0)
        self.codec, self.numel = "int8", 0
        self.hangs, self.appraises = False, True

    async def appraise(self, question: Appraise) -> Appraised | None:
        self.asked.append(question)
        self.given.append(vault.read_appraisal(question.path, self.codec, self.numel))
        if self.hangs:
            await asyncio.Event().wait()
        return None if self.figures is None else Appraised(question.path, *self.figures)


class Scene:
    """An auditor whose newest version of fragment 0 has a contribution of its own and one of a learner."""

    def __init__(self, town: AuditTown, folder: Path) -> None:
        self.town, self.node, self.folder = town, town.auditor, folder
        node = self.node
        self.learner, manifest = PaperLearner(), node.run.manifest
        self.learner.codec, self.learner.numel = manifest.codec.contribution, node.run.layouts[0].numel
        self.start = node.vault.theta(0).clone()
        self.rate = manifest.outer.learning_rate
        numel = self.learner.numel
        self.delta = torch.randn(numel, generator=torch.Generator().manual_seed(7)) * 0.01
        update = codec(manifest.codec.update).encode(self.delta.clone())
        self.theirs, self.ours = town.payloads[0], node.contribute(99)
        self.parts = [self._part(town.learners[0], self.theirs), self._part(node, self.ours)]
        node.vault.apply(0, 1, update, 24)
        node.vault.commit(0, 1)
        self.version = town.named(update_digest=content_digest(update), contributors=tuple(self.parts))
        node.chain.updates[1] = (self.version, update)
        parts: Any = (node.chain, node.compute, node.transfers.auditing, self.learner)
        self.auditing = LossAuditing(*parts, folder, manifest)

    def _part(self, node: AuditNode, payload: Any) -> Contributor:
        return Contributor(node.name, Stamp(1, 1), 200, 20, payload_digest=content_digest(payload))

    async def audit(self) -> ev.LossAudited:
        found = await self.auditing.audit(ev.LossAudit(0, self.version, *self.parts))
        assert not list(self.folder.glob(f"{merge_audits.FILE}*")), "the file is gone"
        return found


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    folder = tmp_path / "run"
    folder.mkdir()
    async with await memory_town(tmp_path) as town:
        made = Scene(town, folder)
        yield made
        await until(lambda: not made.node.transfers.auditing.held_bytes, "all is released")


async def test_the_learner_is_given_the_start_and_both_contributions(scene: Scene) -> None:
    found = await scene.audit()
    assert (found.theirs, found.ours, found.same_data, found.took_s) == ((0.25, 0.5), (0.5, 0.5), True, 3.0)
    (question,), (given,) = scene.learner.asked, scene.learner.given
    assert (question.fragment, question.peer) == (0, scene.parts[0].learner)
    assert torch.allclose(given.start, scene.start, atol=1e-3 * float(scene.delta.abs().max()))
    for payload, way in ((scene.theirs, given.theirs), (scene.ours, given.ours)):
        decoded = torch.empty(len(way))
        codec(scene.learner.codec).decode(payload, decoded)
        assert torch.equal(decoded, way)
    assert scene.town.learners[0].given_bytes == len(scene.theirs)


async def nothing_measured(scene: Scene, asked: int = 0) -> None:
    found = await scene.audit()
    assert (found.theirs, found.ours, found.took_s) == ((), (), 0.0)
    assert len(scene.learner.asked) == asked


async def test_a_contribution_that_nobody_gives_is_not_measured(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_audits, "SOURCE_S", 0.05)
    monkeypatch.setattr(merge_audits, "AUDIT_S", 1.0)
    await scene.town.gone(scene.town.learners[0])
    await nothing_measured(scene)


async def test_no_audit_of_a_merge_waits_for_a_contribution_that_comes_slowly(scene: Scene) -> None:
    """Regression: it had to, so learners that give slowly could hide a false merge."""
    giver, asked, gives = scene.town.learners[0], asyncio.Event(), asyncio.Event()
    find = giver.chain.contribution_of

    async def slowly(*wanted: Any) -> Any:
        asked.set()
        await gives.wait()
        return await find(*wanted)

    merged = await scene.town.version([scene.node.contribute(seed) for seed in (5, 6, 7)])
    giver.chain.contribution_of = slowly
    measured = asyncio.create_task(scene.audit())
    await asked.wait()
    assert await scene.node.audit(merged) is AuditOutcome.SAME
    assert not measured.done()
    gives.set()
    assert (await measured).theirs == (0.25, 0.5)


async def test_where_the_fragment_has_moved_on_nothing_is_fetched(scene: Scene) -> None:
    scene.node.vault.apply(0, 2, scene.node.chain.updates[1][1], 24)
    scene.node.vault.commit(0, 2)
    await nothing_measured(scene)
    assert not scene.town.learners[0].given_bytes


async def test_where_no_learner_can_measure_nothing_is_fetched(scene: Scene) -> None:
    scene.learner.appraises = False
    await nothing_measured(scene)
    assert not scene.town.learners[0].given_bytes and not scene.node.transfers.bytes_in


async def test_without_our_own_one_nothing_is_fetched(scene: Scene) -> None:
    del scene.node.chain.contributions[scene.parts[1].payload_digest]
    await nothing_measured(scene)
    assert not scene.town.learners[0].given_bytes


async def test_where_the_disk_is_full_nothing_is_fetched(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Room(0, 0, merge_audits.FREE_BYTES)
    monkeypatch.setattr(merge_audits.shutil, "disk_usage", lambda _path: full)
    await nothing_measured(scene)
    assert not scene.town.learners[0].given_bytes


async def test_a_disk_that_fails_ends_the_audit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(merge_audits.shutil, "disk_usage", fails)
    monkeypatch.setattr(Path, "unlink", fails)
    await nothing_measured(scene)
    monkeypatch.undo()


async def test_what_a_killed_node_left_is_removed(scene: Scene) -> None:
    left = scene.folder / f"{merge_audits.FILE}7"
    left.write_bytes(b"left")
    parts: Any = (scene.node.chain, scene.node.compute, scene.node.transfers.auditing, scene.learner)
    LossAuditing(*parts, scene.folder, scene.node.run.manifest)
    assert not left.exists()


async def test_a_learner_that_ends_or_does_not_answer_has_measured_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.learner.figures = None
    await nothing_measured(scene, asked=1)
    monkeypatch.setattr(merge_audits, "ANSWER_S", 0.05)
    scene.learner.hangs = True
    await nothing_measured(scene, asked=2)
    first, second = (question.path for question in scene.learner.asked)
    assert first != second, "what is left of the first is not taken for the second"
