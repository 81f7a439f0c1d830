"""Merged contributions that may have to be sent again: onto the disk, back as one, and gone when released."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import KeptFiles
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api.effects import Combine, Spill
from p2pdiloco.core.api.events import Combined, CombineFailed, Event
from p2pdiloco.daemon.payloads import Compute, KeptPayloads, Tickets
from p2pdiloco.errors import InvariantViolation
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import Exchange, TensorSpec, plan_fragments
from p2pdiloco.tensors.vault import Vault

LAYOUTS = plan_fragments([TensorSpec("w", (64, 48))], 1)
NUMEL = LAYOUTS[0].numel


class Fickle(Files):
    """A disk that can be full."""

    full = False

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


class Rig:
    """Kept payloads, and what it works with."""

    def __init__(self, folder: Path, codec_name: str) -> None:
        self.folder = folder
        self.codec = codec(codec_name)
        self.disk = Fickle()
        self.tickets = Tickets()
        self.io = ThreadPoolExecutor(1)
        vault = Vault(LAYOUTS, OuterSection(), 24, codec_name, "int8")
        self.exchange = Exchange.create(LAYOUTS)
        self.compute = Compute(vault, self.exchange)
        self.told: list[Event] = []
        files = KeptFiles(folder, self.disk)
        self.kept = KeptPayloads(files, self.tickets, self.compute, self.io, self.told.append)

    def add(self, seed: int) -> tuple[int, torch.Tensor]:
        """An encoded contribution, and what it decodes to."""
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        payload = self.codec.encode(values)
        return self.tickets.put(payload), self.decoded(payload)

    def decoded(self, payload: bytes | bytearray | memoryview) -> torch.Tensor:
        out = torch.empty(NUMEL)
        self.codec.decode(payload, out)
        return out

    def spill(self, effect: Spill) -> Coroutine[Any, Any, None]:
        writing = self.kept.spill(effect)
        assert writing is not None, "there is no room in memory"
        return writing

    async def combine(self, *tickets: int) -> Event:
        effect = Combine(0, 7, tickets)
        await self.kept.run_combine(effect, self.kept.sources(effect))
        return self.told.pop()

    async def disk_is_done(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.io, int)

    def close(self) -> None:
        self.compute.close()
        self.io.shutdown()
        self.exchange.close()


@pytest.fixture(params=["fp32", "int8"])
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "kept", request.param)
    yield made
    made.close()


async def test_the_sum_of_what_is_on_the_disk_and_what_is_not(rig: Rig) -> None:
    parts = [rig.add(seed) for seed in range(4)]
    for ticket, _ in parts[:3]:
        await rig.spill(Spill(0, ticket))
    assert len(rig.tickets) == 1 and len(list(rig.folder.iterdir())) == 3
    with pytest.raises(InvariantViolation):
        rig.tickets.get(parts[0][0])
    event = await rig.combine(*(ticket for ticket, _ in parts))
    assert isinstance(event, Combined) and (event.fragment, event.attempt) == (0, 7)
    payload = rig.tickets.get(event.ticket)
    assert event.payload_digest == content_digest(payload) and event.payload_bytes == len(payload)
    wanted = sum((values for _, values in parts), torch.zeros(NUMEL))
    tolerance = 1e-6 if rig.codec.name == "fp32" else wanted.abs().max().item() / 200
    assert torch.allclose(rig.decoded(payload), wanted, atol=tolerance)


async def test_a_contribution_is_read_from_wherever_it_is(rig: Rig) -> None:
    (here, _), (away, _), (lost, _) = (rig.add(seed) for seed in range(3))
    wanted = bytes(rig.tickets.get(away))
    for ticket in (away, lost):
        await rig.spill(Spill(0, ticket))
    (rig.folder / f"{lost}.payload").write_bytes(b"damaged")
    assert await rig.kept.read(here) is rig.tickets.get(here)
    assert await rig.kept.read(away) == wanted and not rig.tickets.is_open(away)
    assert await rig.kept.read(lost) is None


async def test_one_alone_is_sent_again_bit_by_bit(rig: Rig) -> None:
    ticket, _ = rig.add(1)
    before = bytes(rig.tickets.get(ticket))
    await rig.spill(Spill(0, ticket))
    event = await rig.combine(ticket)
    assert isinstance(event, Combined) and event.ticket != ticket
    assert bytes(rig.tickets.get(event.ticket)) == before


async def test_what_is_released_leaves_the_disk(rig: Rig) -> None:
    first, second, third = (rig.add(seed)[0] for seed in (1, 2, 3))
    late = rig.spill(Spill(0, third))
    rig.tickets.release(third)  # before the writing has begun
    await late
    await rig.spill(Spill(0, first))
    rig.tickets.release(first)
    spilling = asyncio.ensure_future(rig.spill(Spill(0, second)))
    await asyncio.sleep(0)
    rig.tickets.release(second)  # while it is being written
    await spilling
    await rig.disk_is_done()
    assert not list(rig.folder.iterdir()) and not len(rig.tickets)


async def test_on_a_full_disk_it_stays_in_memory(rig: Rig) -> None:
    ticket, values = rig.add(1)
    rig.disk.full = True
    await rig.spill(Spill(0, ticket))
    assert not list(rig.folder.iterdir())
    event = await rig.combine(ticket)
    assert isinstance(event, Combined)
    assert torch.equal(rig.decoded(rig.tickets.get(event.ticket)), values)


@pytest.mark.parametrize("damage", ["gone", "changed"])
async def test_what_cannot_be_read_back_is_told(rig: Rig, damage: str) -> None:
    first, second = rig.add(1)[0], rig.add(2)[0]
    await rig.spill(Spill(0, first))
    (path,) = rig.folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    event = await rig.combine(first, second)
    assert isinstance(event, CombineFailed) and (event.fragment, event.attempt) == (0, 7)


async def test_a_new_process_finds_an_empty_folder(rig: Rig) -> None:
    await rig.spill(Spill(0, rig.add(1)[0]))
    KeptFiles(rig.folder)
    assert not list(rig.folder.iterdir())


async def test_what_there_is_room_for_stays_in_memory(rig: Rig) -> None:
    tickets = [rig.add(seed)[0] for seed in range(4)]
    size = len(rig.tickets.get(tickets[0]))
    rig.kept._most_bytes = 2 * size
    assert rig.kept.spill(Spill(0, tickets[0])) is None and rig.kept.spill(Spill(0, tickets[1])) is None
    await rig.spill(Spill(0, tickets[2]))
    assert len(list(rig.folder.iterdir())) == 1
    rig.tickets.release(tickets[1])
    rig.tickets.release(tickets[1])
    assert rig.kept.spill(Spill(0, tickets[3])) is None, "there is room again"
    assert isinstance(await rig.combine(tickets[0], tickets[2], tickets[3]), Combined)
    assert len(list(rig.folder.iterdir())) == 1
