"""Holes in NATs: whose word is taken, and whom it is passed on to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network import holes
from p2pdiloco.daemon.network.holes import WISHES, WORDS, Holes
from p2pdiloco.errors import PeerUnreachable, RemoteError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PeerConnections
from p2pdiloco.util import cancelled

A, B, BOOTSTRAP, LIAR = (Identity.generate().peer_id for _ in range(4))
AT_A, AT_B = "/ip4/7.0.1.1/udp/4001/quic-v1", "/ip4/7.0.1.2/udp/4002/quic-v1"


class World:
    """A transport of whoever is asked; `ends`: of the connections to others; `there`: who takes its words."""

    def __init__(self, ends: dict[str, Sequence[str]], there: dict[str, Holes] | None = None) -> None:
        self.ends, self.there = ends, there or {}
        self.me, self.hidden = "", True
        self.dialled: list[tuple[str, Sequence[str]]] = []
        self.opens = True

    async def link(self, peer: str) -> PeerConnections | None:
        if peer not in self.ends:
            return None
        return PeerConnections(("7.0.0.1",) if self.ends[peer] else (), tuple(self.ends[peer]))

    def connected(self) -> list[str]:
        return sorted(self.ends)

    def direct(self) -> list[str]:
        return [peer for peer, ends in self.ends.items() if ends]

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        query = wire.decode(data[1:], wire.Punch)
        if peer not in self.there:
            raise PeerUnreachable("gone")
        return wire.encode(await self.there[peer].answer(self.me, query))

    async def dial_anew(self, peer: str, addresses: Sequence[str]) -> None:
        self.dialled.append((peer, addresses))
        if not self.opens:
            raise PeerUnreachable("no answer")
        self.ends[peer] = addresses


def three() -> tuple[dict[str, World], dict[str, Holes]]:
    """Two hidden members and a bootstrap, which both are connected to."""
    worlds = {
        A: World({BOOTSTRAP: ("x",), B: ()}),
        B: World({BOOTSTRAP: ("x",)}),
        BOOTSTRAP: World({A: (AT_A,), B: (AT_B,)}),
    }
    made = {
        peer: Holes(cast(Any, world), frozenset() if peer == BOOTSTRAP else frozenset([BOOTSTRAP]))
        for peer, world in worlds.items()
    }
    for peer, world in worlds.items():
        world.me, world.there, world.hidden = peer, made, peer != BOOTSTRAP
    return worlds, made


async def test_both_dial_where_the_bootstrap_sees_the_other() -> None:
    worlds, made = three()
    assert await made[A].punch(B)
    await asyncio.sleep(0)
    assert worlds[A].dialled == [(B, [AT_B])] and worlds[B].dialled == [(A, [AT_A])]
    assert not worlds[BOOTSTRAP].dialled


@asynccontextmanager
async def watching(
    made: Holes, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A node that looks for B again and again; gives what waits for some more looks."""
    monkeypatch.setattr(holes, "LOOK_S", 0.0)
    task = asyncio.create_task(made.watch(lambda: {B}))

    async def looks() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()

    try:
        yield looks
    finally:
        await cancelled([task])


async def test_a_hole_that_does_not_come_about_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, made = three()
    worlds[A].opens = False
    async with watching(made[A], monkeypatch) as looks:
        await looks()
        assert len(worlds[A].dialled) == 1, "it rests"
        made[A]._rests.clear()
        worlds[A].opens = True
        await looks()
        assert len(worlds[A].dialled) == 2 and B in worlds[A].direct(), "there is nothing left to do"
        await looks()
        assert len(worlds[A].dialled) == 2


async def test_a_node_that_others_can_dial_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds, made = three()
    worlds[A].hidden = False
    async with watching(made[A], monkeypatch) as looks:
        await looks()
        assert not worlds[A].dialled


@pytest.mark.parametrize("gone", [A, B], ids=["asker", "wanted"])
async def test_a_bootstrap_that_sees_only_one_by_udp_tells_neither(gone: str) -> None:
    worlds, made = three()
    worlds[BOOTSTRAP].ends[gone] = ()
    assert not await made[A].punch(B)
    assert not worlds[A].dialled and not worlds[B].dialled


async def test_one_who_does_not_hear_of_the_wish_is_not_dialled() -> None:
    worlds, made = three()
    del worlds[BOOTSTRAP].there[B]
    assert not await made[A].punch(B)
    assert not worlds[A].dialled


async def test_nobody_is_made_to_dial_by_whom_no_person_named() -> None:
    worlds, made = three()
    with pytest.raises(RemoteError, match="not-chosen"):
        await made[B].answer(LIAR, wire.Punch(A, ("/ip4/9.9.9.9/udp/53/quic-v1",)))
    assert not worlds[B].dialled


async def test_a_flood_of_one_peer_keeps_no_other_from_a_hole() -> None:
    worlds, made = three()
    for _ in range(WORDS):
        await made[B].answer(BOOTSTRAP, wire.Punch(LIAR, (AT_A,)))
    with pytest.raises(RemoteError, match="too-often"):
        await made[B].answer(BOOTSTRAP, wire.Punch(LIAR, (AT_A,)))
    await asyncio.sleep(0)
    assert worlds[B].dialled == [(LIAR, [AT_A])], "one dial at a time"
    for _ in range(WISHES):
        with pytest.raises(RemoteError, match="not-connected"):
            await made[BOOTSTRAP].answer(LIAR, wire.Punch(B, ()))
    with pytest.raises(RemoteError, match="too-often"):
        await made[BOOTSTRAP].answer(LIAR, wire.Punch(B, ()))
    assert await made[A].punch(B)


async def test_a_hidden_node_tells_nobody_where_its_peers_are() -> None:
    worlds, made = three()
    worlds[A].ends |= {B: (AT_B,), LIAR: (AT_B,)}
    with pytest.raises(RemoteError, match="not-connected"):
        await made[A].answer(LIAR, wire.Punch(B, ()))


@pytest.mark.parametrize("inside", ["192.168.1.1", "127.0.0.1", "999.1.1.1"])
async def test_addresses_of_no_internet_are_not_dialled(inside: str) -> None:
    worlds, made = three()
    await made[B].answer(BOOTSTRAP, wire.Punch(A, (f"/ip4/{inside}/udp/53/quic-v1",)))
    await asyncio.sleep(0)
    assert worlds[B].dialled == [(A, [])]


@pytest.mark.parametrize(
    "address",
    ["/ip4/7.0.1.1/tcp/22", "/dns4/there/udp/1/quic-v1", f"{AT_A}/p2p-circuit", "x" * 200],
    ids=["tcp", "name", "relay", "long"],
)
def test_only_plain_addresses_of_udp_are_read(address: str) -> None:
    with pytest.raises(RemoteError, match="garbage"):
        wire.decode(wire.encode(wire.Punch(A, (address,))), wire.Punch)
