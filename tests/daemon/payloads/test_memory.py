"""--max-memory: what does not fit is put off and counted, and the node goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from daemon_kit import Neighbourhood, until

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.config.presets import PRESETS
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.daemon.bulk import merge_audits
from p2pdiloco.daemon.payloads import OUT_OF_BUDGET, Memory, check_budget, fetched_bytes, least_bytes
from p2pdiloco.errors import RemoteError, UserError
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments


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
    async with Neighbourhood(tmp_path) as town:
        member = await town.member("a", genesis=True, max_memory="300MB")
        assert member.holdings.memory.most_bytes == 300e6
        with pytest.raises(UserError, match="too little for this run"):
            await town.member("b", max_memory="1kB")


async def test_a_push_that_fits_neither_memory_nor_disk_is_put_off_and_counted_and_later_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Neighbourhood(tmp_path) as town:
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
    async with Neighbourhood(tmp_path) as town:
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
    async with Neighbourhood(tmp_path) as town:
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
