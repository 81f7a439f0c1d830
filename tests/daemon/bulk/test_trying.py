"""States of others, tried by a program of its own: what passes, what does not, and what is left behind."""

from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch
from daemon_kit import until
from torch import Tensor

from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import trying
from p2pdiloco.daemon.run_files.run import fresh_vault
from p2pdiloco.daemon.trying import Trying
from p2pdiloco.learner.channel import LearnerOptions
from p2pdiloco.learner.loop import heldout_batch
from p2pdiloco.learner.trial import LossComparison
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import gather, scatter
from p2pdiloco.tensors.vault import Vault

pytestmark = pytest.mark.process
Room = namedtuple("Room", "total used free")
States = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def trained() -> list[Tensor]:
    """Parameters of every fragment after some steps."""
    task, (layouts, vault) = task_of(MICRO), fresh_vault(MICRO)
    model = task.model()
    for layout in layouts:
        scatter(vault.theta(layout.index), layout, named_parameters(model))
    batch = heldout_batch(task, task.load_data(None).heldout, 4096)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = [torch.zeros(layout.numel) for layout in layouts]
    for layout, out in zip(layouts, found, strict=True):
        gather({name: p.detach() for name, p in named_parameters(model).items()}, layout, out)
    return found


def put(vault: Vault, number: int, states: States) -> None:
    for fragment, state in enumerate(states):
        theta, momentum = (part.numpy().tobytes() for part in state)
        vault.load_spare(fragment, number, theta, momentum)


@pytest.fixture
def node(trained: list[Tensor], tmp_path: Path) -> Iterator[Any]:
    """A node that holds what was trained, version 1; `put` gives it others' states."""
    _, vault = fresh_vault(MICRO)
    put(vault, 1, [(theta, torch.zeros_like(theta)) for theta in trained])
    for fragment in range(len(trained)):
        vault.commit(fragment, 1)

    async def run(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    compute: Any = SimpleNamespace(vault=vault, run=run)
    (tmp_path / "runs").mkdir()
    options, log = LearnerOptions(peer="x", device="cpu", threads=1), tmp_path / "learner.log"
    one = Trying(compute, tmp_path / "runs", MICRO, options, log)
    yield SimpleNamespace(vault=vault, trying=one, all=ev.TryStates(tuple(range(len(trained)))))
    assert not list((tmp_path / "runs").iterdir()), "nothing is left on the disk"


def noise(like: Tensor, scale: float) -> Tensor:
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("shift", "momentum", "forged", "passed"),
    [
        pytest.param(0.001, 0.001, (), True, id="a-little-other"),
        pytest.param(0.0, 0.0, (2,), False, id="one-forged-fragment"),
        pytest.param(0.0, 3.0, (), False, id="a-forged-momentum"),
    ],
)
async def test_what_is_no_worse_passes(
    node: Any, trained: list[Tensor], shift: float, momentum: float, forged: tuple[int, ...], passed: bool
) -> None:
    states = [
        (theta + noise(theta, 0.5 if fragment in forged else shift), noise(theta, momentum))
        for fragment, theta in enumerate(trained)
    ]
    put(node.vault, 2, states)
    found = await node.trying.tried(node.all)
    assert isinstance(found, ev.Tried) and found.passed == passed and "ours" in found.words


@pytest.mark.parametrize(
    ("losses", "best", "passed"),
    [
        pytest.param([3.04] * 4, None, True, id="a-little-more"),
        pytest.param([3.2] * 4, None, False, id="more"),
        pytest.param([3.0, 3.0, 3.0, 300.0], None, False, id="much-more-on-one-part"),
        pytest.param([3.0, 3.0, 3.0, float("nan")], None, False, id="not-a-number"),
        pytest.param([3.04] * 4, 2.9, False, id="ours-was-better-once"),
        pytest.param([3.0] * 4, 2.0, True, id="no-worse-than-ours-though-that-was-better-once"),
        pytest.param([2.0] * 4, None, True, id="less"),
    ],
)
def test_what_loss_passes(
    losses: list[float], best: float | None, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is 3, version 0's was 4."""
    task = task_of(MICRO)
    said = iter([[3.0] * 4, [3.0] * 4, [4.0] * 4, losses, losses])
    monkeypatch.setattr(LossComparison, "_losses_now", lambda _self: next(said))
    monkeypatch.setattr(LossComparison, "_losses", lambda self, *_: self._losses_now())
    found = LossComparison(task, task.model(), (), (), lambda _name: torch.zeros(1))
    assert found.passes((), best)[0] is passed and found.allowed == pytest.approx(0.05)


@pytest.mark.parametrize(("lacks", "reason"), [("data", "none are given"), ("room", "no room")])
async def test_without_data_or_room_on_the_disk_nothing_is_tried_and_it_is_said(
    node: Any, trained: list[Tensor], lacks: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node.vault, 2, [(theta, theta) for theta in trained])
    if lacks == "data":
        data = msgspec.structs.replace(MICRO.data, source="files")
        monkeypatch.setattr(node.trying, "_manifest", msgspec.structs.replace(MICRO, data=data))
    else:
        monkeypatch.setattr(trying.shutil, "disk_usage", lambda _path: Room(1, 1, trying.FREE_BYTES))
    found = await node.trying.tried(node.all)
    assert isinstance(found, ev.Undone) and reason in found.reason


async def test_one_that_takes_too_long_or_dies_or_is_not_wanted_any_more_ends(
    node: Any, trained: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node.vault, 2, [(theta, theta) for theta in trained])
    before = set(psutil.Process().children())

    def programs() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    task = asyncio.ensure_future(node.trying.tried(node.all))
    await until(programs)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not programs()
    task = asyncio.ensure_future(node.trying.tried(node.all))
    await until(programs)
    programs().pop().kill()
    found = await task
    assert isinstance(found, ev.Undone) and "has ended: see" in found.reason
    monkeypatch.setattr(trying, "ANSWER_S", 0.01)
    assert await node.trying.tried(node.all) == ev.Undone("no answer in time")
    assert not programs()
