"""Members in rotating groups, with everything real but the learners and the network."""

from __future__ import annotations

from pathlib import Path

import torch
from daemon_kit import Neighbourhood, QuickMember, until

NAMES = ("one", "two", "three", "four", "five")


async def gather(around: Neighbourhood) -> list[QuickMember]:
    members = [await around.member(NAMES[0], genesis=True)]
    return members + [await around.member(name) for name in NAMES[1:]]


async def test_every_contribution_of_every_group_is_merged_once(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, size=2, expected_members=5, term_versions=2) as around:
        members = await gather(around)
        rounds = 6
        for _ in range(rounds):
            await around.round(*members)
        await until(lambda: len({m.head() for m in members}) == 1, "equal heads")
        assert members[0].head().tokens == rounds * len(members) * 256
        partials = [e for m in members for e in m.records("partial") if "contributors" in e]
        assert len({e["group"] for e in partials}) > 2
        assert any(e["contributors"] > 2 for m in members for e in m.records("merge") if "contributors" in e)
        epochs = {e["epoch"] for m in members for e in m.records("groups")}
        assert epochs, "the groups rotate"

        row = members[1].report.status(members[1]._loop.time()).fragments[0]
        assert (
            row.groups == 3
            and row.levels == 3
            and row.epoch == members[1].core.fragments[0].chain.header.epoch
        )
        assert row.root in {m.core.shared.me for m in members}
        for member in members:
            await until(lambda m=member: m.compute.vault.version(0) == m.number(), "the commit")
        thetas = [m.compute.vault.theta(0) for m in members]
        assert all(torch.equal(thetas[0], theta) for theta in thetas)
        for member in members:
            held = member.tickets
            await until(lambda t=held: len(t) <= 4 * 3, "what was merged to be let go of")
            assert member.runner.transfers.arrivals._arriving_bytes == 0


async def test_a_vanished_root_costs_no_contribution_of_the_others(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, size=2, expected_members=5, term_versions=3) as around:
        members = await gather(around)
        await around.round(*members)
        header = members[0].core.fragments[0].chain.header
        root = next(m for m in members if m.core.shared.me == header.syncer)
        survivors = [m for m in members if m is not root]
        around.hub.kill(root.core.shared.me)
        before = survivors[0].head().tokens
        for _ in range(2):
            await around.round(*survivors)
        await until(lambda: len({m.head() for m in survivors}) == 1, "equal heads")
        assert survivors[0].head().tokens == before + 2 * len(survivors) * 256


async def test_a_run_that_outgrows_one_group_falls_into_several_by_itself(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, size=2, term_versions=2) as around:
        members = await gather(around)
        assert {m.core.fragments[0].chain.header.groups for m in members} == {1}
        rounds = 5
        for _ in range(rounds):
            await around.round(*members)
        await until(lambda: len({m.head() for m in members}) == 1, "equal heads")
        assert members[0].core.fragments[0].chain.header.groups == 3
        assert members[0].head().tokens == rounds * len(members) * 256
