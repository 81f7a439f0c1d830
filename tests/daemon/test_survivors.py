"""Real tensors through a partition, the death of all, and full disks: nothing trained is lost, one chain
remains."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from daemon_kit import QUICK, Neighbourhood, QuickMember, neighbours, until

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.daemon.member import UPDATES_IN_MEMORY

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


# A member whose disk is full, alone or beside others.


class FullDisk(Files):
    """ENOSPC while `full`, for all that this member writes of its run."""

    def __init__(self, member: QuickMember) -> None:
        super().__init__()
        self.full = True
        member.store._files = member.store._votes._files = self

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


async def test_older_updates_are_given_from_the_disk(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        for _ in range(UPDATES_IN_MEMORY + 2):
            await around.round(one, two)
        assert one.holdings.updates.get(0, 1) is None, "no longer in memory"
        await until(lambda: (one.store.folder / "updates/000/1.update").exists(), "its file")
        found = await one.chain.update_of(0, 1)
        assert found is not None and found[0] == one.core.fragments[0].chain.logged(1)
        assert one.compute.vault.check_payload(0, found[1], found[0].header.codec) is None
        assert await one.chain.update_of(0, 999) is None


async def test_a_full_disk_costs_an_office_not_a_contribution(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two", "three") as (around, one, *others):
        await around.round(one, *others)
        disk = FullDisk(one)
        published = len([e for e in one.records("publish") if "digest" in e])
        # Whoever is in office, it must end with one that can save; nothing that was made is lost.
        await around.round(one, *others)
        await around.round(one, *others)
        assert one.head().tokens == 9 * 256
        assert len([e for e in one.records("publish") if "digest" in e]) == published
        await one.checkpoints.save()
        assert "not saved" in one.records("checkpoint")[-1]["reason"]
        disk.full = False
        await one.checkpoints.save()
        assert one.records("checkpoint")[-1]["reason"] == "all fragments are saved"
        await around.round(one, *others)


async def test_of_two_members_one_with_a_full_disk_does_not_stop_the_other(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two") as (around, one, two):
        await around.round(one, two)
        disk = FullDisk(two)
        for _ in range(8):  # more than a term: offices are filled again, by one vote of one
            await around.round(one, two)
        assert one.head().tokens == two.head().tokens == 9 * 2 * 256
        assert [row.votes for row in one.report.snapshot(0.0).peers] == [False]
        disk.full = False
        await until(lambda: two.core.shared.vote_disk.works, "the vote that is tried again")
        await until(lambda: [row.votes for row in one.report.snapshot(0.0).peers] == [True], "the word of it")
        for _ in range(8):
            await around.round(one, two)
        assert len(two.records("disk")) == 2


async def test_a_full_disk_alone_waits_and_goes_on(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    async with neighbours(tmp_path) as (around, one):
        await around.round(one)
        disk = FullDisk(one)
        number = one.number()
        one.learner.contribute(0)
        await until(
            lambda: any("could not be saved" in e["reason"] for e in one.records("publish")), "a refused save"
        )
        await until(lambda: len(one.records("election")) > 4, "some tries more")
        told = [r.message for r in caplog.records if "the disk is full" in r.message]
        assert len(told) == 1, "whichever files could not be saved, and however often"
        assert one.number() == number  # nothing that is not durable is announced or applied
        disk.full = False
        await until(lambda: one.number() == number + 1, "the contribution to be merged after all")
        assert one.head().tokens == 2 * 256
