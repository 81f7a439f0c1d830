"""Real tensors through a partition and the death of all: nothing trained is lost, one chain remains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from daemon_kit import QUICK, Neighbourhood, QuickMember, neighbours, until

TOKENS = 256
"""Tokens of every contribution."""


def same(*members: QuickMember) -> bool:
    return len({member.head() for member in members}) == 1


async def saved(member: QuickMember) -> None:
    """Wait for the newest version on the disk: who follows keeps an update there a moment after it holds it,
    and who ends before that returns with less, or with nothing."""
    number = member.number()
    await until(lambda: member.store.load_update(0, number), f"version {number} on the disk")


async def test_a_healed_partition_keeps_the_work_of_both_sides(tmp_path: Path) -> None:
    timing = msgspec.structs.replace(QUICK, suspect_s=0.5, member_ttl_s=1.0, redial_s=0.2)
    async with neighbours(tmp_path, "one", "two", "three", timing=timing) as (around, one, two, three):
        await around.round(one, two, three)
        await until(lambda: same(one, two, three), "one head")
        apart = [(one, three), (two, three)]
        for a, b in apart:
            around.hub.cut(a.core.shared.me, b.core.shared.me)
        for _ in range(4):
            await around.round(one, two)
        for _ in range(3):  # the lighter side
            await around.round(three)
        assert three.head().tokens == (3 + 3) * TOKENS and one.head().tokens == (3 + 8) * TOKENS
        for a, b in apart:
            around.hub.heal(a.core.shared.me, b.core.shared.me)
        await until(lambda: three.records("fork"), "the switch")
        await around.round(one, two, three)
        everything = (3 + 8 + 3 + 3) * TOKENS
        await until(
            lambda: same(one, two, three) and one.head().tokens == everything, "all of it in one chain"
        )
        again = [line for line in three.records("fork") if "sent again" in line["reason"]]
        assert sum(line["tokens"] for line in again) >= 3 * TOKENS
        for member in (one, two, three):  # the tensors thread follows what the core has decided
            await until(lambda m=member: m.compute.vault.version(0) == m.number(), "its tensors")
        states = {m.compute.vault.state_digest_of(0, m.number()) for m in (one, two, three)}
        assert len(states) == 1


@pytest.mark.long
async def test_when_all_died_the_heaviest_saved_state_goes_on(tmp_path: Path) -> None:
    timing = msgspec.structs.replace(QUICK, resume_alone_s=5.0, member_ttl_s=1.0, suspect_s=0.5)
    async with Neighbourhood(tmp_path, timing, seats=("one", "two", "three", "new")) as around:
        one = await around.member("one", genesis=True)
        two, three = await around.member("two"), await around.member("three")
        await around.round(one, two, three)
        await until(lambda: same(one, two, three), "one head")
        await saved(three)
        await around.end(three)  # it will know less than the others
        await around.round(one, two)
        await until(lambda: same(one, two), "one head")
        heaviest = two.head()
        await saved(two)
        await around.end(one)
        await around.end(two)
        names = ("three", "new", "two")
        back = [await around.member(name, trained=False) for name in names]
        three, new, two = back
        assert not new.core.confirmed and three.head().tokens < heaviest.tokens
        for member in back:
            await until(lambda m=member: m.report.state == "training", "everybody trains")
        assert heaviest.tokens == two.head().tokens and same(*back)
        reasons = [line["reason"] for m in (two, three) for line in m.records("join")]
        assert any(reason.endswith("the heaviest of 2 that return") for reason in reasons), reasons
        await around.round(*back)
        await asyncio.gather(*(until(lambda: same(*back), "one head") for _ in back))
