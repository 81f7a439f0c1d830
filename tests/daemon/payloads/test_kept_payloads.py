"""Merged contributions that may have to be sent again: onto the disk, back as one, and gone when released."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from daemon_kit import Neighbourhood, signed_run, until

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import KeptFiles
from p2pdiloco.adapters.spool import Spool
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.config.presets import PRESETS
from p2pdiloco.core import audits
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.events import Combine, Combined, Spill, Undone
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.daemon import driver
from p2pdiloco.daemon.bulk import merge_audits
from p2pdiloco.daemon.driver import Merging
from p2pdiloco.daemon.payloads import (
    OUT_OF_BUDGET,
    Compute,
    KeptPayloads,
    Memory,
    Tickets,
    check_budget,
    fetched_bytes,
    least_bytes,
)
from p2pdiloco.daemon.run_files.run import open_run
from p2pdiloco.errors import InvariantViolation, RemoteError, UserError
from p2pdiloco.hashing import content_digest
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import Exchange, TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import digest_of
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
        self.kept = KeptPayloads(KeptFiles(folder, self.disk), self.tickets, self.compute, self.io)

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

    async def combine(self, *tickets: int) -> Combined | Undone:
        effect = Combine(0, tickets)
        return await self.kept.run_combine(effect, self.kept.sources(effect))

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
    answer = await rig.combine(*(ticket for ticket, _ in parts))
    assert isinstance(answer, Combined)
    payload = rig.tickets.get(answer.ticket)
    assert answer.payload_digest == content_digest(payload) and answer.payload_bytes == len(payload)
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
    answer = await rig.combine(ticket)
    assert isinstance(answer, Combined) and answer.ticket != ticket
    assert bytes(rig.tickets.get(answer.ticket)) == before


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
    answer = await rig.combine(ticket)
    assert isinstance(answer, Combined)
    assert torch.equal(rig.decoded(rig.tickets.get(answer.ticket)), values)


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
    assert isinstance(await rig.combine(first, second), Undone)


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


# --max-memory: what does not fit is put off and counted, and the node goes on.


def test_room_for_what_peers_push_leaves_room_for_what_we_fetch() -> None:
    inbox = SimpleNamespace(held_bytes=0)
    memory = Memory(100)
    memory.count(inbox)
    memory.fetch_bytes = 40
    assert memory.fits_push(60) and not memory.fits_push(61)
    with memory.fetching(30):
        assert memory.claimed_bytes == 30
        assert memory.fits_push(60) and not memory.fits_push(61)  # of the 40, 30 are in use
        with pytest.raises(RemoteError, match="busy"), memory.fetching(71):
            pass
    assert (memory.claimed_bytes, memory.refused) == (0, 1)
    inbox.held_bytes = 70
    assert not memory.fits_push(1)
    with memory.fetching(30):
        assert memory.claimed_bytes == 100
    assert Memory().fits_push(1 << 60)


def test_a_budget_that_no_node_could_live_in_is_refused_at_the_start() -> None:
    small = PRESETS["small"]
    layouts = plan_fragments(task_of(small).specs(), small.sync.fragments)
    least = least_bytes(layouts, "int8", "int8", 3)
    numel = sum(layout.numel for layout in layouts)
    assert 5 * numel < least < 9 * numel and fetched_bytes(layouts) < least
    check_budget(least, least)
    check_budget(0, least)
    with pytest.raises(UserError, match=r"--max-memory is too little for this run, which needs \d+ MiB"):
        check_budget(least - 1, least)


async def test_the_setting_is_the_budget(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("a", "b")) as town:
        member = await town.member("a", genesis=True, max_memory="300MB")
        assert member.holdings.memory.most_bytes == 300e6
        with pytest.raises(UserError, match="too little for this run"):
            await town.member("b", max_memory="1kB")


async def test_a_push_that_fits_neither_memory_nor_disk_is_put_off_and_counted_and_later_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Neighbourhood(tmp_path, seats=("a",)) as town:
        member = await town.member("a", genesis=True)
        rogue = await town.rogue()
        await until(lambda: member.core.fragments[0].office.holding, "a syncer")
        payload = rogue.payload(member)
        signed = rogue.sign(rogue.header(member, payload))
        memory = member.holdings.memory
        memory.most_bytes = memory.fetch_bytes + memory.claimed_bytes + len(payload) - 1
        with monkeypatch.context() as full_disk:
            full_disk.setattr(Spool, "fits", lambda *_: False)
            answer = await rogue.push(member, signed, payload)
            assert answer.verdict is Verdict.NO_MEMORY
            assert member.report.status(0.0).refusals[OUT_OF_BUDGET] == 1
        taken: list[int] = []
        take = Spool.take
        monkeypatch.setattr(Spool, "take", lambda spool, size: taken.append(size) or take(spool, size))
        assert (await rogue.push(member, signed, payload)).verdict.taken
        assert taken == [len(payload)], "there is room on the disk"


async def test_no_round_loses_a_contributor_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_audits, "KEEP_S", 0.1)
    monkeypatch.setattr(audits, "DRAWN", 0.0)  # an audit has no room, and is counted, too
    async with Neighbourhood(tmp_path, seats=("a", "b", "c")) as town:
        members = [await town.member("a", genesis=True)]
        members += [await town.member(name) for name in "bc"]
        loop = asyncio.get_running_loop()
        for member in members:
            view, memory = member.core.shared.view, member.holdings.memory
            await until(lambda view=view: len(view.members(loop.time())) == 2, "all meet")
            memory.most_bytes = memory.fetch_bytes + memory.claimed_bytes + (1 << 20)
            memory.fits_push = lambda size: False  # type: ignore[method-assign]
        await town.round(*members)
        assert not any(member.holdings.memory.refused for member in members)
        await until(lambda: all(m.transfers.pushes_in.spooled_bytes == 0 for m in members), "freed")


async def test_what_cannot_be_fetched_for_want_of_memory_is_fetched_later(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("a", "b")) as town:
        pair = [await town.member("a", genesis=True), await town.member("b")]
        first = await town.syncer(*pair)
        second = next(member for member in pair if member is not first)
        second.holdings.memory.most_bytes = 1
        first.learner.contribute(0)
        await until(lambda: first.number() >= 1, "a version")
        await until(lambda: second.holdings.memory.refused > 0, "a fetch that did not fit")
        assert second.number() == 0
        second.holdings.memory.most_bytes = 1 << 40
        await until(lambda: second.number() >= 1, "the version is fetched")


# Outer steps that the core asks for: what it hears of our own contribution.


class Merger:
    """The worker, and what it told the core unasked."""

    def __init__(self, folder: Path) -> None:
        run, vault = open_run(signed_run(folder).signed, Identity.generate())
        self.compute, self.tickets = Compute(vault, None), Tickets()
        self.heard: list[ev.Event] = []
        self.damages = False
        """True: an update is damaged here before it is applied."""
        self._merging = Merging(self.compute, self.tickets, self.heard.append)
        self._numel = run.layouts[0].numel

    def put(self, value: float) -> int:
        """Ticket of an update, or a contribution, that is this everywhere."""
        return self.tickets.put(codec("int8").encode(torch.full((self._numel,), value)))

    def input(self, value: float) -> ev.MergeInput:
        """A contribution, as its learner labelled it."""
        ticket = self.put(value)
        digest = digest_of(self.tickets.payload(ticket))
        return ev.MergeInput(Contributor("p1", Stamp(1, 1), 40, 4, payload_digest=digest), ticket)

    async def merge(self, *inputs: ev.MergeInput) -> ev.Merged | ev.Undone:
        return await self._merging.merge(ev.Merge(0, 1, inputs, (), 24))

    async def merge_partial(self, *inputs: ev.MergeInput) -> ev.PartialMerged | ev.Undone:
        return await self._merging.merge_partial(ev.MergePartial(0, inputs, ()))

    async def apply(self, update: int, own: int | None, stated: bytes = b"") -> ev.UpdateApplied:
        digest = digest_of(self.tickets.payload(update))
        if self.damages:
            self.tickets.get(update)[-1] ^= 1  # type: ignore[index]
        return await self._merging.apply(ev.ApplyUpdate(0, 1, update, 24, None, own, stated, digest))


@pytest.fixture
def merger(tmp_path: Path) -> Any:
    made = Merger(tmp_path)
    yield made
    made.compute.close()


async def test_the_core_hears_how_our_own_contribution_goes_with_the_update(merger: Merger) -> None:
    update = merger.put(0.5)
    alone = await merger.apply(update, None)
    assert alone.cosine is None and not alone.unsound
    for value, wanted in ((0.1, 1.0), (-0.3, -1.0)):
        applied = await merger.apply(update, merger.put(value))
        assert applied.cosine == pytest.approx(wanted) and applied.state_digest == alone.state_digest


async def test_what_cannot_be_compared_does_not_stop_the_step(merger: Merger) -> None:
    update = merger.put(0.5)
    spilled, damaged = merger.put(0.5), merger.tickets.put(bytearray(b"damaged"))
    merger.tickets.spilled(spilled, lambda _ticket: None)
    for own in (merger.put(0.0), spilled, damaged):
        applied = await merger.apply(update, own)
        assert applied.cosine is None and applied.state_digest and not applied.unsound


async def test_nothing_is_merged_that_was_damaged_here_since_it_came(merger: Merger) -> None:
    """Under our signature it would be a false merge, and cost us our place for good."""
    whole, damaged = merger.input(0.5), merger.input(0.25)
    merger.tickets.get(damaged.ticket)[-1] ^= 1  # type: ignore[index]
    for failed in (await merger.merge(whole, damaged), await merger.merge_partial(whole, damaged)):
        assert isinstance(failed, ev.Undone)
        assert failed.unusable == ((damaged.ticket, Verdict.DAMAGED),)
    await merger._merging.drop_spare(ev.DropSpare(0))
    assert isinstance(await merger.merge(whole), ev.Merged)
    assert isinstance(await merger.merge_partial(whole), ev.PartialMerged)


# --- a state other than its header says -------------------------------------------------------------------


async def test_a_step_with_another_result_is_made_once_more_and_then_certain(merger: Merger) -> None:
    update = merger.put(0.5)
    right = (await merger.apply(update, None)).state_digest
    assert not (await merger.apply(update, None, right)).certain, "nothing is to be told"
    false = await merger.apply(update, None, bytes(32))
    assert false.certain and false.state_digest == right


async def test_a_step_that_goes_wrong_once_is_made_again(
    merger: Merger, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, apply, made = merger.put(0.5), Vault.apply, []
    right = (await merger.apply(update, None)).state_digest

    def first_wrong(self: Vault, *job: Any) -> bytes:
        made.append(apply(self, *job))
        return bytes(32) if len(made) == 1 else made[-1]

    monkeypatch.setattr(Vault, "apply", first_wrong)
    applied = await merger.apply(update, None, right)
    assert len(made) == 2 and applied.state_digest == right and not applied.certain


@pytest.mark.parametrize("fault", ["state", "update", "arithmetic"])
async def test_a_fault_of_ours_makes_nothing_certain(
    merger: Merger, monkeypatch: pytest.MonkeyPatch, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whose memory was damaged would accuse every honest syncer."""
    if fault == "state":
        merger.compute.vault.theta(0)[0] += 1
    merger.damages = fault == "update"
    if fault == "arithmetic":
        monkeypatch.setattr(driver, "steps_as_everywhere", lambda: False)
    assert not (await merger.apply(merger.put(0.5), None, bytes(32))).certain
    words = "calculates otherwise" if fault == "arithmetic" else "was damaged"
    assert words in caplog.text


async def test_nothing_is_published_over_a_state_that_was_damaged_here(merger: Merger) -> None:
    """Under our signature it would be a false state, and cost us our place for good."""
    theta = merger.compute.vault.theta(0)
    whole = theta[0].clone()
    theta[0] += 1
    failed = await merger.merge(merger.input(0.5))
    assert isinstance(failed, ev.Undone) and not failed.unusable
    assert "damaged in memory" in failed.reason
    await merger._merging.drop_spare(ev.DropSpare(0))
    theta[0] = whole
    assert isinstance(await merger.merge(merger.input(0.5)), ev.Merged)


@pytest.mark.parametrize("exact", [True, False])
async def test_a_machine_that_calculates_otherwise_stands_for_no_office(
    merger: Merger, monkeypatch: pytest.MonkeyPatch, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its versions would be false for all others, and cost it its place though it is honest."""
    monkeypatch.setattr(driver, "steps_as_everywhere", lambda: exact)
    await merger._merging.examine()
    assert merger.heard == ([] if exact else [ev.Miscalculates()])
    assert ("it trains, and stands for no office" in caplog.text) is not exact
