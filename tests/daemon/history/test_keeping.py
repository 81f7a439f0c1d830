"""Members that keep their run's history: from its beginning, from later on, over restarts, and when a chain
is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from credits_kit import chain, record
from daemon_kit import FORGETFUL, QuickMember, neighbours, until
from kit import RUN, child

from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import HeadRef, HistoryRecord, HistoryStore, Signatures, VersionLine, count_line
from p2pdiloco.daemon import history, wire
from p2pdiloco.daemon.budgets import HISTORY_BYTES
from p2pdiloco.daemon.history import (
    LEAST_BYTES,
    MAX_GIVEN,
    FalseHistory,
    Filling,
    HistoryKeeper,
    check_page,
    pull_page,
)
from p2pdiloco.daemon.wire import CreditsAnswer, CreditsQuery, PullHistory
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.identity import verify
from p2pdiloco.ports import PullSource, Refusal


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(history, "AGAIN_S", 0.1)


def run_tokens(member: QuickMember) -> int:
    return sum(fragment.chain.head.tokens for fragment in member.core.fragments)


async def counted(member: QuickMember) -> CreditsAnswer:
    """The credits that a keeper tells, once they are of all that it holds."""
    keeper = member.keeper
    assert keeper is not None
    await until(lambda: keeper.credits.fragment_tokens == run_tokens(member) > 0, "all is counted")
    return keeper.answer(0)


async def asked(peer: Any, member: QuickMember, offset: int = 0) -> CreditsAnswer:
    query = wire.QUERY + wire.encode(CreditsQuery(member.run.id, offset))
    return wire.decode(await peer.transport.send(member.core.shared.me, query, 2.0), CreditsAnswer)


def _id(member: QuickMember) -> str:
    return member.core.shared.me


def tip_of(member: QuickMember, fragment: int = 0) -> HeadRef:
    return HeadRef.of(member.core.fragments[fragment].chain.head)


async def test_whoever_keeps_the_history_tells_anybody_who_did_what(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two", keep_history=True) as (hood, one, two):
        two_id = two.core.shared.me
        one.presence.names[two_id] = "two"  # as its record in the DHT says
        await hood.round(one, two)
        await hood.round(one, two, fragment=1)
        told = await counted(one)
        assert sum(row.fragment_tokens for row in told.rows) == told.fragment_tokens == run_tokens(one)
        assert told.fragments == len(one.core.fragments) and not told.missing and not told.doubts
        assert {row.peer: row.name for row in told.rows}[two_id] == "two"
        assert {row.contributions for row in told.rows} == {2} and all(row.first_s for row in told.rows)
        stranger = await hood.rogue()
        assert one.keeper is not None and await asked(stranger, one) == one.keeper.answer(0)
        assert (await asked(stranger, one, offset=1)).rows == told.rows[1:]
        with pytest.raises(RemoteError, match="keeps-no-history"):
            await asked(stranger, two)
        # Names outlive those who bore them, and a restart.
        saved = lambda: [p for p in (tmp_path / "one").rglob("names.json") if two_id in p.read_text()]  # noqa: E731
        await until(saved, "names are saved")
        await hood.end(two)
        await hood.end(one)
        one = await hood.member("one", genesis=True, keep_history=True)
        again = await counted(one)
        assert {row.peer: row.name for row in again.rows}[two_id] == "two"
        assert {r.peer: r.contributions for r in again.rows} == {r.peer: r.contributions for r in told.rows}


async def test_a_stranger_reads_and_checks_the_history_itself(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two", keep_history=True) as (hood, one, two):
        await hood.round(one, two)
        await hood.round(one, two)
        await counted(one)
        stranger, tip, me = await hood.rogue(), tip_of(one), one.core.shared.me
        wanted = PullHistory(one.run.id, 0, tip.number, tip.digest)
        for giver in (two, one):  # whoever keeps none has its newest versions
            page = await pull_page(stranger.transport, giver.core.shared.me, wanted)
            assert [r.version.header.number for r in page] == list(range(tip.number, 0, -1))
            assert all(bool(r.at_s) == (giver is one) for r in page), "only a keeper knows when"
        budget = one.peer.door._history._budget  # type: ignore[union-attr]
        assert budget._left(stranger.id) < HISTORY_BYTES and budget._left(_id(two)) == HISTORY_BYTES
        history = HistoryStore(tmp_path / "asker")
        for record in page:
            history.append(record)
        signatures = Signatures(one.run.id, 0, verify)
        ledger = count_line(history, one.run.id, 0, tip, signatures=signatures)
        assert ledger.tokens == one.core.fragments[0].chain.head.tokens and not ledger.doubts
        assert signatures.checked == sum(1 + len(r.version.header.contributors) for r in page)
        for unknown in (
            PullHistory(one.run.id, 0, tip.number, bytes(32)),
            PullHistory(one.run.id, 99, 1, tip.digest),
        ):
            before = budget._left(stranger.id)
            with pytest.raises(RemoteError, match="not-here"):
                await pull_page(stranger.transport, me, unknown)
            assert budget._left(stranger.id) < before - LEAST_BYTES / 2, "a question costs, too"
        with pytest.raises(RemoteError, match="other-run"):
            await pull_page(stranger.transport, me, PullHistory("0" * 64, 0, tip.number, tip.digest))
        door = one.peer.door._history
        assert door is not None
        going_out = [await door.serve(f"p{n}", wanted, False) for n in range(MAX_GIVEN)]
        for asking in ("p0", "p9"):  # one at a time each, and a few together
            assert isinstance(await door.serve(asking, wanted, False), Refusal)
        for source in going_out:
            assert isinstance(source, PullSource)
            source.release()
        assert isinstance(await door.serve("p0", wanted, False), PullSource)
        one.peer.door._history._budget.take(stranger.id, 2 * HISTORY_BYTES)  # type: ignore[union-attr]
        with pytest.raises(RemoteError, match="busy"):
            await pull_page(stranger.transport, me, wanted)
        assert await pull_page(two.peer.transport, me, wanted), "members have no bound"


async def test_who_begins_to_keep_later_gets_the_rest_from_another_keeper(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two", group=FORGETFUL, keep_history=True) as (hood, one, two):
        for _ in range(4):
            await hood.round(one, two)
        await hood.end(two)
        two = await hood.member("two", keep_history=True)
        assert two.keeper is not None
        await until(lambda: two.keeper.credits.rows and not two.keeper.credits.missing, "the rest has come")
        told = await counted(two)
        assert (await two.keeper.line(0, tip_of(two))).is_whole
        assert not told.missing and not told.doubts
        assert sum(row.fragment_tokens for row in told.rows) == run_tokens(two)


async def test_what_nobody_keeps_is_said_to_be_missing(tmp_path: Path) -> None:
    async with neighbours(tmp_path, "one", "two", group=FORGETFUL) as (hood, one, two):
        for _ in range(6):
            await hood.round(one, two)
        await hood.end(two)
        two = await hood.member("two", keep_history=True)
        told = await counted(two)
        assert dict(told.missing)[0] > 1 and told.before_fragment_tokens > 0
        rest = sum(row.fragment_tokens for row in told.rows)
        assert rest + told.before_fragment_tokens == run_tokens(two)
        await hood.round(one, two)
        more = await counted(two)
        assert sum(row.fragment_tokens for row in more.rows) > rest


# A keeper whose chain is replaced: it counts the new line, and gets what it lacks of it from others.


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
