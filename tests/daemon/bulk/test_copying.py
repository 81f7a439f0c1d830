"""A newcomer copies states from several holders: in parallel, by their rates, on after cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from copying_kit import LAYOUTS, NUMEL, SIZE, Peer
from daemon_kit import Neighbourhood, until
from deadlines import within_s

from p2pdiloco.adapters.flow import Allowance, Limits
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk import states
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tensors.vault import Vault
from p2pdiloco_lab.memory_net import MemoryNetwork

PIECE = 1 << 16


@pytest.fixture
async def town(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(states, "LEAST_PIECE_BYTES", PIECE)
    hub, made = MemoryNetwork(), []

    async def add(name: str, seed: int | None = 1, bits_per_s: float = 0.0) -> Peer:
        upload = Allowance(bits_per_s / 8, asyncio.get_running_loop().time) if bits_per_s else None
        peer = Peer(hub.transport(name, limits=Limits(upload=upload)), seed)
        made.append(peer)
        await peer.transport.start(peer)  # type: ignore[arg-type]
        return peer

    yield SimpleNamespace(add=add, hub=hub)
    for peer in made:
        await peer.transport.close()
        peer.compute.close()


async def three(town: Any, *bits_per_s: float) -> tuple[Peer, list[Peer]]:
    """A newcomer and three donors."""
    donors = [await town.add(f"d{i}", 1, rate) for i, rate in enumerate(bits_per_s or (0, 0, 0))]
    joiner = await town.add("joiner", None)
    joiner.chain.peers = [donor.name for donor in donors]
    return joiner, donors


async def test_the_bytes_come_from_all_holders_of_the_version_once(town: Any) -> None:
    joiner, donors = await three(town, 80e6, 80e6, 80e6)
    await joiner.copy("d0")
    assert isinstance(joiner.posted[0], ev.StateFetched) and joiner.posted[0].peer == "d0"
    assert joiner.has_state_of(donors[0]) and joiner.transfers.bytes_in == SIZE, "nothing travelled twice"
    assert all(donor.gave for donor in donors), [donor.gave for donor in donors]
    assert joiner.transfers.held_bytes == 0, "it is written straight into the vault"


async def test_a_slow_holder_gives_little_of_it(town: Any) -> None:
    joiner, donors = await three(town, 0.4e6, 80e6, 80e6)
    await asyncio.wait_for(joiner.copy("d0"), within_s(20))
    assert joiner.has_state_of(donors[0])
    assert joiner.transfers.copying.from_others_bytes > SIZE - 3 * PIECE
    assert joiner.transfers.bytes_in < SIZE + PIECE


async def test_a_holder_that_says_nothing_holds_nobody_up(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joiner, donors = await three(town)
    monkeypatch.setattr(states, "SILENT_S", 0.1)
    asked = asyncio.Event()

    async def silent(_sender: str, _request: bytes) -> Refusal:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(donors[1], "on_pull", silent)
    monkeypatch.setattr(states, "LEAST_PIECE_BYTES", SIZE // 4)
    joiner.chain.peers = ["d1"]
    await asyncio.wait_for(joiner.copy("d0"), within_s(10))
    assert asked.is_set() and joiner.has_state_of(donors[0])


async def test_the_first_donor_dies_half_way_and_the_others_finish_it(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6, 20e6)
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 4, "a quarter")
    town.hub.kill("d0")
    await fetching
    assert isinstance(joiner.posted[0], ev.StateFetched) and joiner.has_state_of(donors[1])
    assert joiner.transfers.bytes_in == SIZE, "what had come was not asked for again"


async def test_a_holder_that_fails_is_replaced(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.daemon.bulk.states.MAX_HOLDERS", 2)
    joiner, _ = await three(town, 2e6, 20e6, 20e6)
    copying = joiner.transfers.copying
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: copying.from_others_bytes > 0, "another one helps")
    assert "d2" not in copying._rates
    town.hub.kill("d1")
    await fetching
    assert "d2" in copying._rates and isinstance(joiner.posted[0], ev.StateFetched)


async def test_the_only_donor_dies_and_the_next_one_goes_on(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6)
    joiner.chain.peers = []
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 2, "a half")
    town.hub.kill("d0")
    await fetching
    assert isinstance(joiner.posted[0], ev.FetchFailed)
    await joiner.copy("d1")
    assert isinstance(joiner.posted[1], ev.StateFetched) and joiner.has_state_of(donors[1])
    assert joiner.transfers.bytes_in == SIZE


async def test_what_came_is_worth_nothing_once_the_spare_was_used_or_the_version_is_gone(town: Any) -> None:
    for what in ("used", "gone"):
        joiner, donors = await town.add(f"joiner {what}", None), [await town.add(f"d {what}", 1, 20e6)]
        fetching = asyncio.create_task(joiner.copy(donors[0].name))
        await until(lambda j=joiner: j.transfers.copying.bytes_in > SIZE // 2, "a half")
        town.hub.cut(joiner.name, donors[0].name)
        await fetching
        before, next_donor = (
            joiner.transfers.bytes_in,
            await town.add(f"e {what}", 1 if what == "used" else 2),
        )
        if what == "used":
            joiner.vault.lend_spare(0)
        await joiner.copy(next_donor.name)
        assert joiner.has_state_of(next_donor) and joiner.transfers.bytes_in == before + SIZE


async def test_a_liar_among_the_holders_costs_one_more_copy_and_nobody_is_blamed(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6)
    donors[1].vault._states[0].theta[7] += 1.0
    donors[1].vault._states[0].theta[-1] += 1.0
    donors[1].vault._states[0].momentum += 1.0
    await joiner.copy("d0")
    assert isinstance(joiner.posted[0], ev.StateFetched) and joiner.has_state_of(donors[0])
    assert donors[1].gave and joiner.transfers.bytes_in == 2 * SIZE, "all of it again, from the one named"
    gave = donors[1].gave
    await joiner.copy("d0", 1)
    assert joiner.has_state_of(donors[0], 1) and donors[1].gave == gave, "who may have lied helps nobody"


async def test_where_the_named_holder_lied_those_who_helped_are_not_left_out(town: Any) -> None:
    joiner, donors = await three(town, 20e6, 20e6)
    donors[0].vault._states[0].theta += 1.0
    donors[0].vault._states[0].momentum += 1.0
    await joiner.copy("d0")
    (failed,) = joiner.posted
    assert isinstance(failed, ev.FetchFailed) and failed.detail == "digest-differs"
    before = donors[1].gave
    assert before
    await joiner.copy("d0", 1)
    assert donors[1].gave > before


async def test_all_copies_together_have_a_bound(town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_STREAMS", 2)
    joiner, _ = await three(town, 20e6, 20e6, 20e6)
    found = joiner.transfers.copying
    taken: list[int] = []
    take = found._take_place
    monkeypatch.setattr(found, "_take_place", lambda peer: (take(peer), taken.append(found._streams.total())))
    await joiner.copy("d0")
    assert isinstance(joiner.posted[0], ev.StateFetched) and max(taken) == 2


@pytest.mark.parametrize("lie", ["content", "fragment", "more", "nothing", "offset"])
async def test_a_donor_that_lies_is_told_to_the_core(lie: str, town: Any) -> None:
    joiner, (donor,) = await town.add("joiner", None), [await town.add("d0")]
    if lie == "content":
        donor.vault._states[0].theta[7] += 1.0
    else:
        found = donor.compute._committed[0][0]
        shown = wire.StateHeader(
            donor.compute._committed[1][0] if lie == "fragment" else found, (), 8 if lie == "offset" else 0
        )
        size = {"more": SIZE + 1, "nothing": 0}.get(lie, 8)
        donor.answers = lambda pull: PullSource(wire.encode(shown), (bytes(size),), lambda: None)
    await joiner.copy("d0")
    (failed,) = joiner.posted
    wanted = {
        "content": "digest-differs",
        "fragment": "wrong-fragment",
        "more": "oversized",
        "nothing": "garbage",
        "offset": "garbage",
    }
    assert isinstance(failed, ev.FetchFailed) and failed.detail == wanted[lie]


async def test_the_version_that_is_copied_stays_while_its_donor_moves_on(town: Any) -> None:
    joiner, (donor,) = await town.add("joiner", None), [await town.add("d0", 1, 20e6)]
    before = donor.vault._states[0].theta.clone()
    fetching = asyncio.create_task(joiner.copy("d0"))
    await until(lambda: joiner.transfers.copying.bytes_in > SIZE // 4, "a quarter")
    donor.hold(2)
    donor.hold(3)
    await fetching
    assert isinstance(joiner.posted[0], ev.StateFetched)
    assert joiner.posted[0].version.header.number == 1
    assert torch.equal(joiner.vault._spares[0].theta, before)


async def test_a_joiner_of_many_fragments_asks_a_donor_for_a_few_at_a_time(
    town: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SHARE", 1)
    monkeypatch.setattr(states, "SHARE", 1)
    joiner, donor = await town.add("joiner", None), await town.add("d0", 1, 40e6)
    await asyncio.gather(joiner.copy("d0", 0), joiner.copy("d0", 1))
    assert [type(event) for event in joiner.posted] == [ev.StateFetched, ev.StateFetched]
    assert all(joiner.has_state_of(donor, fragment) for fragment in (0, 1))


def test_a_loan_is_for_one_use() -> None:
    vault = Vault(LAYOUTS, OuterSection(), 24, "int8", "int8")
    loan = vault.lend_spare(0)
    loan.write(0, memoryview(bytes(range(256))))
    assert vault.lend_spare(0, loan) is loan, "it goes on"
    loan.write(4 * NUMEL - 2, memoryview(b"abcd"))
    assert bytes(loan.buffers[0][-2:]) + bytes(loan.buffers[1][:2]) == b"abcd"
    vault._free_spare(0)
    assert vault.lend_spare(0, loan) is not loan
    last = vault.lend_spare(0)
    last.buffers[1][-4:] = b"\0\0\xc0\x7f"
    with pytest.raises(RemoteError, match="non-finite"):
        vault.take_loan(0, 1, last)


async def test_members_copy_from_each_other_and_status_says_so(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, log_versions=1, max_base_age_versions=1) as place:
        members = [await place.member("a", genesis=True), await place.member("b")]
        for _ in range(3):
            await place.round(*members)
        newcomer = await place.member("c")
        await until(lambda: newcomer.number() == members[0].number(), "the newcomer has it")
        bulk = newcomer.report.status(0.0).bulk
        given = sum(member.report.status(0.0).bulk["states_given_bytes"] for member in members)
        assert bulk["states_copied_bytes"] == given > 0
