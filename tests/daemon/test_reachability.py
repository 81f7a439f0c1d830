"""Finding out whether others can dial us: what is asked, answered, and concluded."""

from __future__ import annotations

import asyncio

import pytest

from p2pdiloco.core.reach import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.reach import MAX_A_MINUTE, DialBack, Reachability, judge, outside_addresses
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import Link

OWN = {"192.168.1.2", "127.0.0.1"}


def answer(seen: str, *ports: int) -> wire.ReachAnswer:
    return wire.ReachAnswer((seen,), tuple((seen, port) for port in ports))


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([], None),
        ([answer("8.8.8.8", 4001)], True),
        ([answer("8.8.8.8")], False),
        # A neighbour in the same network reaches us, and knows nothing of the rest of the world.
        ([answer("192.168.1.2", 4001), answer("8.8.8.8")], False),
        ([answer("192.168.1.2", 4001), answer("127.0.0.1")], True),
        ([answer("8.8.8.8", 4001), answer("8.8.8.8"), answer("8.8.8.8")], False),
        ([answer("8.8.8.8", 4001), answer("8.8.8.8", 4001), answer("8.8.8.8")], True),
        ([answer("10.0.0.9"), answer("192.168.1.2", 4001)], False),
    ],
)
def test_those_who_know_most_of_the_world_decide(
    answers: list[wire.ReachAnswer], verdict: bool | None
) -> None:
    assert judge(answers, OWN) is verdict


def test_an_address_that_is_not_ours_is_told_to_others_if_two_agree() -> None:
    true, false = answer("8.8.8.8", 4001), answer("8.8.4.4", 4001)
    assert outside_addresses([true], OWN) == ["/ip4/8.8.8.8/tcp/4001"]
    assert outside_addresses([true, true, false], OWN) == ["/ip4/8.8.8.8/tcp/4001"]
    assert outside_addresses([answer("192.168.1.2", 4001)], OWN) == []


class World:
    """A transport that says what the test makes it say."""

    peer_id = "me"

    def __init__(self, reached: bool = True, ips: tuple[str, ...] = ("8.8.8.8",)) -> None:
        self.reached, self.ips = reached, ips
        self.dialled: list[tuple[str, str, int]] = []
        self.told: list[str] = []
        self.hidden = 0

    def addresses(self) -> list[str]:
        return ["/ip4/192.168.1.2/tcp/4001/p2p/12D3KooWEBBr1MJK5k5YUrB9z3dH8GBq4JyrDoWXMRzmYkJyfDS8"]

    def connected(self) -> list[str]:
        return ["a", "b", "c", "d"]

    async def link(self, peer: str) -> Link | None:
        return Link(self.ips)

    async def answers_at(self, peer: str, ip: str, port: int, timeout_s: float) -> bool:
        self.dialled.append((peer, ip, port))
        return self.reached

    def found_outside(self, addresses: list[str]) -> None:
        self.told = list(addresses)

    async def hide(self) -> None:
        self.hidden += 1

    async def send(self, peer: str, data: bytes, timeout_s: float) -> bytes:
        query = wire.decode(data[1:], wire.ReachQuery)
        assert query.ports == (4001,)
        return wire.encode(answer("8.8.8.8", *(query.ports if self.reached else ())))


def test_only_where_the_asker_is_connected_from_is_dialled_and_not_often() -> None:
    world = World()
    now = [0.0]
    door = DialBack(world, lambda: now[0])  # type: ignore[arg-type]
    query = wire.ReachQuery((4001, 5001))
    found = asyncio.run(door.answer("asker", query))
    assert world.dialled == [("asker", "8.8.8.8", 4001), ("asker", "8.8.8.8", 5001)]
    assert found.reached == (("8.8.8.8", 4001), ("8.8.8.8", 5001))
    with pytest.raises(RemoteError, match="too-often"):
        asyncio.run(door.answer("asker", query))
    for i in range(MAX_A_MINUTE - 1):
        asyncio.run(door.answer(f"peer {i}", query))
    with pytest.raises(RemoteError, match="too-often"):
        asyncio.run(door.answer("one too many", query))
    now[0] = 61.0
    asyncio.run(door.answer("one too many", query))
    world.ips = ()
    with pytest.raises(RemoteError, match="not-connected"):
        asyncio.run(door.answer("through a relay", query))


def test_one_bad_round_does_not_hide_a_node_that_could_be_dialled() -> None:
    world = World()
    reach = Reachability(world)  # type: ignore[arg-type]
    assert reach.reach is Reach.UNKNOWN
    asyncio.run(reach.check())
    assert reach.reach is Reach.DIRECT
    assert world.told == ["/ip4/8.8.8.8/tcp/4001"]
    world.reached = False
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.DIRECT, 0)
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.OUTBOUND, 1)
    world.reached = True
    asyncio.run(reach.check())
    assert reach.reach is Reach.DIRECT


@pytest.mark.parametrize(("wish", "reach"), [("public", Reach.DIRECT), ("private", Reach.OUTBOUND)])
def test_who_is_told_asks_nobody(wish: str, reach: Reach) -> None:
    world = World(reached=wish == "private")
    found = Reachability(world, wish)  # type: ignore[arg-type]
    asyncio.run(found.check())
    assert found.reach is reach
