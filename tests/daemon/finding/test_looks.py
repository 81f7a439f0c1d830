"""Looks at the DHT: soon after what is new, rarely where nothing is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from deadlines import within_s
from presence_kit import our_record

from p2pdiloco import WIRE_VERSION
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.discovery import (
    AGAIN_S,
    CALMEST,
    COMPLAIN_AFTER,
    FIRST_S,
    LOOK_FAST_S,
    LOOK_S,
    RENEW_S,
    SETTLED_S,
    Presence,
    Sharing,
)
from p2pdiloco.learner.channel import DataShare

LOOKS = 12
PATIENCE_S = 5.0


class Board:
    """A DHT with one key."""

    def __init__(self) -> None:
        self.peer_id = "me"
        self.records: dict[str, bytes] = {}
        self.puts: list[bytes] = []
        self.works, self.others = True, 2

    def enter(self, peer: str) -> None:
        self.records[peer] = wire.encode(wire.Presence(WIRE_VERSION, 1, peer, ("/ip4/1.2.3.4/tcp/1",), True))

    def addresses(self) -> list[str]:
        return []

    async def get_records(self, _key: str) -> dict[str, bytes]:
        return dict(self.records)

    async def put_record(self, _key: str, value: bytes, _lifetime_s: float) -> bool:
        self.puts.append(value)
        return self.works

    def peers_connected(self) -> int:
        return self.others

    def connected(self) -> list[str]:
        return []

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        pass


def paused(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[int], None]) -> list[float]:
    """Lengths of pauses; what happens in each, by its number; after the last one all ends."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        meanwhile(len(pauses))
        if len(pauses) == LOOKS:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    return pauses


async def test_our_record_is_published_no_more_though_it_changed_in_the_moment_of_the_end() -> None:
    board, ours = Board(), our_record()
    presence = Presence(board, "run", ours, lambda event: None)  # type: ignore[arg-type]
    publishing = asyncio.create_task(presence.publish())
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(board.puts) == 1, "it waits for news"
    ours.news.set()
    publishing.cancel()
    done, _ = await asyncio.wait({publishing}, timeout=within_s(PATIENCE_S))
    publishing.cancel()
    assert done and len(board.puts) == 1


async def test_members_are_looked_up_less_often_while_they_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board()
    seen: list[ev.Event] = []
    presence = Presence(board, "run", our_record(), seen.append)  # type: ignore[arg-type]
    settled = False

    def meanwhile(number: int) -> None:
        nonlocal settled
        settled = number >= 2
        if number == 11:
            board.enter("newcomer")

    pauses = paused(monkeypatch, meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await presence.watch(lambda: settled)
    assert pauses[:2] == [LOOK_FAST_S, LOOK_FAST_S]
    assert LOOK_S < pauses[2] < pauses[3] and pauses[10] == CALMEST * LOOK_S
    assert pauses[11] == LOOK_S, "somebody came"
    assert len(seen) == LOOKS, "the core hears of every look"


@pytest.mark.parametrize("work", ["publish", "watch"])
async def test_what_others_read_is_looked_up_less_often_once_our_learner_is_there(
    monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    learner = SimpleNamespace(status=None)

    def meanwhile(number: int) -> None:
        if number == 3:
            learner.status = SimpleNamespace(share=None)

    pauses = paused(monkeypatch, meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await getattr(Sharing(Board(), "run", learner), work)()  # type: ignore[arg-type]
    assert pauses[:3] == [FIRST_S] * 3 and FIRST_S < pauses[3] < pauses[4] and pauses[11] == SETTLED_S


async def test_what_nobody_could_be_told_is_told_again_soon_and_a_person_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board()
    board.works = False
    learner = SimpleNamespace(status=SimpleNamespace(share=DataShare("books", 0, b"\x01")))
    sharing = Sharing(board, "run", learner)  # type: ignore[arg-type]

    def meanwhile(number: int) -> None:
        board.works = number >= 5

    pauses = paused(monkeypatch, meanwhile)
    with pytest.raises(asyncio.CancelledError):
        await sharing.publish()
    assert pauses[:6] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, FIRST_S, FIRST_S, FIRST_S]
    assert len(board.puts) == 6, "then it is there, for a while"
    assert sharing.failures == 5
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and f"could not be told {COMPLAIN_AFTER} times" in said[0]
    board.works, board.others, sharing._renew_s = False, 0, -RENEW_S
    assert not await sharing.tell() and sharing.failures == 5, "alone there is nobody to be told"
    board.works = True
    assert await sharing.tell() and len(board.puts) == 8, "but somebody may have come"
