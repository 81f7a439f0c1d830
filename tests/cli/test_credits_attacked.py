"""`p2pdiloco credits` among members that lie about where they stand, or never stop answering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking_kit import Liar, asked, quick_keepers, settled
from daemon_kit import Neighbourhood, neighbours
from msgspec.structs import replace

from p2pdiloco.cli import credits_report
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.credits import HistoryRecord, frame_record
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.wire import CreditsAnswer
from p2pdiloco.ports import PullSource


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_keepers(monkeypatch)


async def test_a_keeper_that_lies_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with neighbours(tmp_path, "one", "two", keep_history=True) as (hood, one, two):
        await hood.round(one, two)
        tokens = await settled(one)
        liar = Liar(await hood.rogue(), one)
        liar.says = lambda answer: replace(  # type: ignore[method-assign]
            answer, rows=tuple(replace(row, fragment_tokens=7 * row.fragment_tokens) for row in answer.rows)
        )
        visitor = await hood.rogue()
        told = await asked(monkeypatch, visitor, one, liar)
        assert any("disagree: of the same versions" in note for note in told.notes)
        # Its records are not of the versions that were asked for: refused, and another gives them.
        head = one.core.fragments[1].chain.signed
        page = HistoryRecord(1, head)
        liar.gives = PullSource(b"", (frame_record(page),), lambda: None)
        found = await asked(monkeypatch, visitor, liar, one, two, verify=True)
        assert sum(row.fragment_tokens for row in found.credits.rows) == tokens
        assert any("false records" in note for note in found.notes)


class Boaster(Liar):
    """Says that it stands on a version ahead, of which it gives nothing."""

    ahead, digest = 10**9, b"x" * 32

    async def _answer(self, sender: str, data: bytes) -> bytes:
        answer = await super()._answer(sender, data)
        if not isinstance(wire.decode(data[1:], wire.Query), wire.StandsQuery):  # type: ignore[arg-type]
            return answer
        stands = wire.decode(answer, wire.Stands)
        ahead = tuple(replace(v, number=v.number + self.ahead, digest=self.digest) for v in stands.versions)
        return wire.encode(replace(stands, versions=ahead))


async def test_a_member_that_says_it_is_far_ahead_takes_nobodys_credits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, "one", "two", keep_history=True) as (hood, one, two):
        await hood.round(one, two)
        tokens = await settled(one)
        boaster = Boaster(await hood.rogue(), one)
        asked_for: list[Any] = []

        def gives(pull: Any) -> Any:
            asked_for.append(pull)
            return wire.refuse(PullRefusal.NOT_HERE)

        boaster.rogue.pulls = gives
        found = await asked(monkeypatch, await hood.rogue(), one, two, boaster, verify=True)
        assert sum(row.fragment_tokens for row in found.credits.rows) == tokens
        assert any("another branch" in note for note in found.notes) and not asked_for, (
            "it could give for ever"
        )
        assert not found.is_disputed, "one of three keeps nobody from a certificate"
        boasters = [Boaster(await hood.rogue(), one) for _ in range(2)]
        for boaster in boasters:
            boaster.rogue.pulls = gives
        found = await asked(monkeypatch, await hood.rogue(), one, two, *boasters, verify=True)
        assert found.is_disputed


async def test_whom_a_person_names_outweighs_many_that_come_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, "one", "two", keep_history=True) as (hood, one, two):
        await hood.round(one, two)
        tokens, visitor = await settled(one), await hood.rogue()
        crowd = [Boaster(await hood.rogue(), one) for _ in range(5)]
        for digest, boaster in zip(b"zzzxy", crowd, strict=True):
            boaster.ahead, boaster.digest = 1, bytes([digest]) * 32
        found = await asked(monkeypatch, visitor, one, two, *crowd, named=[one], verify=True)
        assert sum(row.fragment_tokens for row in found.credits.rows) == tokens and found.is_disputed
        found = await asked(monkeypatch, visitor, one, two, crowd[0], named=[one], verify=True)
        assert not found.is_disputed
        found = await asked(monkeypatch, visitor, one, two, crowd[0], named=[one, crowd[0]], verify=True)
        assert sum(row.fragment_tokens for row in found.credits.rows) == tokens
        assert found.is_disputed, "of two whom a person named one is wrong"


async def test_a_keeper_that_gives_a_row_at_a_time_for_ever_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbours(tmp_path, keep_history=True) as (hood, one):
        await hood.round(one)
        await settled(one)
        liar = Liar(await hood.rogue(), one)
        asks: list[CreditsAnswer] = []

        def endless(answer: CreditsAnswer) -> CreditsAnswer:
            asks.append(answer)
            assert len(asks) < 5, "asked again and again"
            return replace(answer, learners=10**6, fragment_tokens=10**9)

        liar.says = endless  # type: ignore[method-assign]
        await asked(monkeypatch, await hood.rogue(), one, liar)
        assert len(asks) == 1


async def test_one_keeper_of_three_that_tells_more_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Neighbourhood(tmp_path, seats=("one", "two")) as hood:
        one = await hood.member("one", genesis=True, keep_history=True)
        two = await hood.member("two", keep_history=True)
        await hood.round(one, two)
        tokens = await settled(one)
        await settled(two)
        liar = Liar(await hood.rogue(), one)
        liar.says = lambda answer: replace(  # type: ignore[method-assign]
            answer,
            fragment_tokens=9 * answer.fragment_tokens,
            rows=tuple(replace(row, fragment_tokens=9 * row.fragment_tokens) for row in answer.rows),
        )
        told = await asked(monkeypatch, await hood.rogue(), one, two, liar)
        assert sum(row.fragment_tokens for row in told.credits.rows) == tokens
        assert "one member of 3 that keep" in " ".join(line for line, _ in credits_report.caveats(told))
