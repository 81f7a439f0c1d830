"""Real tensors through the death of all: nothing saved is lost, one chain remains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from daemon_kit import QUICK, Neighbourhood, QuickMember, until


def same(*members: QuickMember) -> bool:
    return len({member.head() for member in members}) == 1


async def test_when_all_died_the_heaviest_saved_state_goes_on(tmp_path: Path) -> None:
    timing = msgspec.structs.replace(QUICK, resume_alone_s=5.0, member_ttl_s=1.0, suspect_s=0.5)
    async with Neighbourhood(tmp_path, timing) as around:
        one = await around.member("one", genesis=True)
        two, three = await around.member("two"), await around.member("three")
        await around.round(one, two, three)
        await until(lambda: same(one, two, three), "one head")
        await around.end(three)  # it will know less than the others
        await around.round(one, two)
        await until(lambda: same(one, two), "one head")
        heaviest = two.head()
        # Who follows keeps an update on the disk a moment after it holds it.
        await until(lambda: two._store.load_update(0, heaviest.number), "the newest version on two's disk")
        await around.end(one)
        await around.end(two)
        (tmp_path / "new").mkdir()
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
