"""Members that keep their run's history: from its beginning, from later on, over restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_kit import FORGETFUL, QuickMember, neighbours, until

from p2pdiloco.credits import HeadRef, HistoryStore, Signatures, count_line
from p2pdiloco.daemon import history, wire
from p2pdiloco.daemon.budgets import HISTORY_BYTES
from p2pdiloco.daemon.history import LEAST_BYTES, MAX_GIVEN, pull_page
from p2pdiloco.daemon.wire import CreditsAnswer, CreditsQuery, PullHistory
from p2pdiloco.errors import RemoteError
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
