"""Records of strangers in the DHT: so many are dialled in a time, in turn, and none keeps others waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import signed_run
from presence_kit import our_record

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import Attempts
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.discovery import UNKNOWN_DIALS, UNKNOWN_DIALS_S, Presence
from p2pdiloco.identity import Identity
from p2pdiloco.release import WIRE_VERSION
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport


def test_an_allowance_fills_again_with_time() -> None:
    attempts = Attempts(4, 8.0)
    assert [attempts.take(0.0) for _ in range(5)] == [True] * 4 + [False]
    assert attempts.take(2.0) and not attempts.take(2.0)
    assert [attempts.take(1000.0) for _ in range(5)] == [True] * 4 + [False]


class Closed:
    """Guests of a run that has admitted nobody, who do not answer."""

    def admits(self, peer: str) -> bool:
        return False

    def is_banned(self, peer: str) -> bool:
        return False

    async def meet(self, peer: str) -> object | None:
        return None


class Notes(MemoryTransport):
    def __init__(self, hub: MemoryNetwork, peer: str) -> None:
        super().__init__(hub, peer)
        self.dialled: list[str] = []

    async def connect(self, peer: str, addresses: Any) -> None:
        self.dialled.append(peer)


async def test_unknown_authors_are_dialled_in_turn_and_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hub = signed_run(tmp_path), MemoryNetwork()
    me = Notes(hub, Identity.generate().peer_id)
    await me.start(FrontDoor())
    other = hub.transport(Identity.generate().peer_id)
    await other.start(FrontDoor())
    authors = {f"stranger {n:03}" for n in range(100)}
    record = wire.encode(wire.Presence(WIRE_VERSION, 7, "x", ("/memory/p2p/x",)))
    now, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
    other._records[wire.members_key(run.id)] = {author: (record, now + 1e6) for author in authors}
    seen: list[Any] = []
    presence = Presence(me, run.id, our_record(), seen.append, guests=Closed())
    shift = 0.0
    clock = loop.time
    monkeypatch.setattr(loop.__class__, "time", lambda _: clock() + shift)
    for _ in range(6):
        await presence.look()
    assert UNKNOWN_DIALS <= len(me.dialled) == len(set(me.dialled)) <= UNKNOWN_DIALS + 8
    for _ in range(4):
        shift += UNKNOWN_DIALS_S
        for _ in range(3):
            await presence.look()
    assert set(me.dialled) == authors
    assert all(not event.members.members and not event.unreached for event in seen)
    assert not presence.names
