"""Names on the DHT that nobody ever heard of: dialled ever more rarely, and nothing to the core."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from presence_kit import our_record

from p2pdiloco import WIRE_VERSION
from p2pdiloco.core.api import events as ev
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.discovery import DIAL_PATIENCE_S, MOST_REST_S, REST_S, UNKNOWN_DIALS, Presence
from p2pdiloco.errors import PeerUnreachable
from p2pdiloco_lab.bulk_world.bulk_plan import in_virtual_time

GHOSTS = 300


class Board:
    """A DHT with one key, and peers of whom some answer."""

    def __init__(self) -> None:
        self.peer_id = "me"
        self.records: dict[str, bytes] = {}
        self.answering: set[str] = set()
        self.came: list[str] = []
        """Peers that dialled us."""
        self.dialled: dict[str, list[float]] = {}

    def enter(self, peer: str, dialable: bool = True) -> None:
        record = wire.Presence(WIRE_VERSION, 1, peer, ("/ip4/1.2.3.4/tcp/1",), dialable)
        self.records[peer] = wire.encode(record)

    async def get_records(self, _key: str) -> dict[str, bytes]:
        return dict(self.records)

    def connected(self) -> list[str]:
        return self.came

    def learn(self, peer: str, addresses: Any) -> None:
        pass

    async def connect(self, peer: str, addresses: Any) -> None:
        self.dialled.setdefault(peer, []).append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        if peer not in self.answering:
            raise PeerUnreachable("connection refused")


def presence_on(board: Any, worked: set[str], seen: list[ev.PresenceSeen], at_once: int = 4096) -> Presence:
    return Presence(
        board, "run", our_record(), seen.append, dial_at_once=at_once, has_worked=worked.__contains__
    )  # type: ignore[arg-type]


async def looks(presence: Presence, seconds: float) -> None:
    end_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end_s:
        await presence.look()
        await asyncio.sleep(3.0)


@pytest.mark.parametrize("dialable", [True, False])
@pytest.mark.parametrize("at_once", [16, 4096])
def test_the_core_hears_of_no_ghost_and_ghosts_keep_no_member_waiting(dialable: bool, at_once: int) -> None:
    async def run() -> None:
        board, seen = Board(), list[ev.PresenceSeen]()
        for number in range(GHOSTS):
            board.enter(f"ghost {number}", dialable)
        presence = presence_on(board, {"worked"}, seen, at_once)
        await looks(presence, 30.0)
        for peer in ("answers", "worked", "came", "me"):
            board.enter(peer)
        board.answering, board.came = {"answers"}, ["came"]
        await looks(presence, 180.0)
        assert {peer for look in seen for peer, _ in look.members.members} == {
            "answers",
            "worked",
            "came",
        } | {"me"}
        assert dict(seen[-1].members.members).keys() == {"answers", "worked", "came", "me"}
        assert seen[-1].unreached == GHOSTS
        dials = sum(len(times) for peer, times in board.dialled.items() if peer.startswith("ghost"))
        assert dials <= UNKNOWN_DIALS + UNKNOWN_DIALS * 210 / 12 + 16
        assert presence._dials == {} and DIAL_PATIENCE_S < 3.0

    in_virtual_time(run())


def test_who_could_not_be_dialled_is_dialled_ever_more_rarely_until_it_answers() -> None:
    async def run() -> None:
        board, seen = Board(), list[ev.PresenceSeen]()
        board.enter("late")
        presence = presence_on(board, set(), seen)
        await looks(presence, 600.0)
        times = board.dialled["late"]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert REST_S <= pauses[0] < REST_S + 3.1 and pauses == sorted(pauses)
        assert MOST_REST_S <= pauses[-1] < MOST_REST_S + 3.1 and len(times) < 12
        board.answering = {"late"}
        await looks(presence, MOST_REST_S + 3.0)
        assert dict(seen[-1].members.members).keys() == {"late"} and "late" not in presence._rests

    in_virtual_time(run())
