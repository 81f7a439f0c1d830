"""A keeper whose chain is replaced: it counts the new line, and gets what it lacks of it from others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from credits_kit import chain, record
from daemon_kit import until
from kit import RUN, child

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import HeadRef, HistoryRecord, HistoryStore, VersionLine
from p2pdiloco.daemon import history, wire
from p2pdiloco.daemon.history import FalseHistory, Filling, HistoryKeeper, check_page
from p2pdiloco.daemon.wire import PullHistory
from p2pdiloco.errors import RemoteError, StorageError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(history, "AGAIN_S", 0.01)


class Others:
    """Peers: one that has versions, one that gives others than it is asked for, one that is gone."""

    def __init__(self, versions: Sequence[SignedVersion]) -> None:
        self.versions = {version.header.digest(): version for version in versions}
        self.asked: list[tuple[str, int]] = []

    async def pull(self, peer: str, asked: PullHistory) -> list[HistoryRecord]:
        self.asked.append((peer, asked.number))
        if peer == "gone":
            raise RemoteError("not-here")
        digest, page = asked.digest, []
        while len(page) < 2 and digest in self.versions:  # pages of two
            page.append(record(self.versions[digest]))
            digest = self.versions[digest].header.parent
        if peer == "liar":
            page = [record(version) for version in list(self.versions.values())[:2]]
        check_page(asked, page)
        return page


@asynccontextmanager
async def keeper_in(folder: Path, others: Others) -> AsyncIterator[HistoryKeeper]:
    keeper = HistoryKeeper(RUN, 1, folder, {"p3": "cleo"})
    task = asyncio.create_task(keeper.watch(lambda: Filling(RUN, others.pull, ["gone", "liar", "good"])))
    try:
        yield keeper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        keeper.close()


def branch() -> tuple[list[SignedVersion], list[SignedVersion]]:
    """Two branches that part after version 5: one of 8 versions, a heavier one of 11."""
    versions = chain(8, ("p1", "p2"))
    other = [child(versions[4].header, "p3", ("p1", "p3"))]
    for _ in range(5):
        other.append(child(other[-1].header, "p3", ("p1", "p3")))
    return versions, other


async def test_the_line_of_the_new_head_is_counted(tmp_path: Path) -> None:
    versions, other = branch()
    others = Others(other)
    async with keeper_in(tmp_path, others) as keeper:
        for version in versions:
            keeper.note(version)
        await until(lambda: keeper.credits.fragment_tokens == versions[-1].header.tokens, "all is counted")
        assert {row.peer: row.tokens for row in keeper.credits.rows} == {"p1": 320, "p2": 320}
        keeper.note(other[-1])  # a state was copied: what lies between is not here
        await until(lambda: keeper.credits.fragment_tokens == other[-1].header.tokens, "the new line")
        await until(lambda: not keeper.credits.missing, "the rest of it")
        assert {row.peer: row.tokens for row in keeper.credits.rows} == {"p1": 440, "p2": 200, "p3": 240}
        assert keeper.answer(0).rows[1].name == "cleo" and not keeper.credits.doubts
        numbers = [number for peer, number in others.asked if peer == "good"]
        assert sorted(set(numbers), reverse=True)[:3] == [10, 8, 6] and min(numbers) == 6, (
            "no more than is missing"
        )
        keeper.note(child(other[-1].header, "p3", ("p3",)))
        await until(lambda: keeper.credits.fragment_tokens == other[-1].header.tokens + 40, "it goes on")


async def test_a_disk_that_is_full_for_a_while_costs_nothing_that_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, _ = branch()
    real = HistoryStore.append
    full = [True]

    def append(self: HistoryStore, saved: HistoryRecord) -> None:
        if full[0] and saved.version.header.number > 3:
            raise StorageError("cannot save: the disk is full")
        real(self, saved)

    monkeypatch.setattr(HistoryStore, "append", append)
    async with keeper_in(tmp_path, Others(versions)) as keeper:
        for version in versions[:-1]:
            keeper.note(version)
        await until(lambda: keeper.credits.fragment_tokens == versions[2].header.tokens, "what had room")
        full[0] = False
        keeper.note(versions[-1])
        await until(lambda: keeper.credits.fragment_tokens == versions[-1].header.tokens, "all")
        await until(lambda: not keeper.credits.missing, "the gap is filled")


async def test_what_cannot_be_written_takes_nothing_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, real = chain(4), HistoryStore.append

    def append(self: HistoryStore, saved: HistoryRecord) -> None:
        if saved.version.header.number > 3:
            raise StorageError("cannot save: the disk is full")
        real(self, saved)

    monkeypatch.setattr(HistoryStore, "append", append)
    async with keeper_in(tmp_path, Others([])) as keeper:
        for version in versions:
            keeper.note(version)
        await until(lambda: 0 in keeper._incomplete, "nobody has the last one")
        await until(lambda: keeper.credits.fragment_tokens == versions[2].header.tokens, "the others count")


async def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    versions, sizes = chain(4), []
    for _ in range(2):
        keeper = HistoryKeeper(RUN, 1, tmp_path, {})
        keeper.begin(versions)
        keeper.close()
        sizes.append(await asyncio.to_thread((tmp_path / "history.db").stat))
    assert sizes[0].st_size == sizes[1].st_size > 0


async def test_a_peer_that_gives_false_records_is_not_asked_again() -> None:
    versions, other = branch()
    others = Others(versions)
    head = versions[-1].header
    asked = PullHistory(RUN, 0, head.number, head.digest())
    with pytest.raises(FalseHistory):
        await others.pull("liar", asked)
    good = await others.pull("good", asked)
    for wrong in ([*good, good[0]], good[::-1], [], [good[0], record(versions[0])], [record(other[2])]):
        with pytest.raises(FalseHistory):
            check_page(asked, wrong)
    with pytest.raises(FalseHistory):
        check_page(PullHistory("other", 0, head.number, head.digest()), good)
    with pytest.raises(FalseHistory):
        check_page(PullHistory(RUN, 1, head.number, head.digest()), good)


async def test_who_has_others_to_serve_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BUSY_S", 0.0)
    versions = chain(3, ("p1",))
    others, busy = Others(versions), 2

    async def pull(peer: str, asked: PullHistory) -> list[HistoryRecord]:
        nonlocal busy
        if peer == "good" and busy:
            busy -= 1
            raise wire.PullRefused(PullRefusal.BUSY)
        return await others.pull(peer, asked)

    store, head = HistoryStore(tmp_path), versions[-1].header

    class Into:
        async def line(self, fragment: int, tip: HeadRef) -> VersionLine:
            return store.line(fragment, tip)

        async def add(self, records: Sequence[HistoryRecord]) -> None:
            for one in records:
                store.append(one)

    filling = Filling(RUN, pull, ["gone", "good"])
    assert await filling.fill(Into(), 0, HeadRef(head.number, head.digest())) == 1 and not busy
    busy = history.TRIES
    assert await Filling(RUN, pull, ["good"]).fill(Into(), 0, HeadRef(9, b"x" * 32)) > 1, "not for ever"
