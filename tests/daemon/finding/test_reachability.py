"""Finding out whether others can dial us: what is asked, answered, and concluded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from p2pdiloco.core.api.types import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.reach import (
    AGAIN_S,
    KEEP_S,
    MAX_A_MINUTE,
    MAX_NAMED,
    ROUNDS_ALONE,
    STRANGERS_A_MINUTE,
    DialBack,
    NamedPlaces,
    Reachability,
    Voice,
    decisive,
)
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PeerConnections

OWN = {"192.168.1.2", "127.0.0.1"}


def voice(peer: str, at: str, *reached: str) -> Voice:
    """A peer at that address, which says that it reached us there, at port 4001."""
    return Voice(peer, (at,), tuple((ip, 4001) for ip in reached))


def test_those_who_know_most_of_the_world_decide_and_our_own_connection_says_who_does() -> None:
    far, far_too = voice("a", "8.8.8.8"), voice("b", "9.9.9.9", "1.1.1.1")
    near, here = voice("c", "192.168.1.9", "192.168.1.2"), voice("d", "127.0.0.1")
    assert decisive([near, far, here, far_too], OWN) == [far, far_too]
    assert decisive([here, near], OWN) == [near]
    assert decisive([], OWN) == []


def test_an_address_that_is_not_ours_is_told_to_others_once_two_at_different_places_named_it() -> None:
    named, one = NamedPlaces(), voice("a", "8.8.8.8", "1.1.1.1", "192.168.1.2")
    assert named.add([one], OWN, 0.0) == [("1.1.1.1", 4001)]
    named.add([one, voice("b", "8.8.8.8", "1.1.1.1")], OWN, 1.0)
    assert named.addresses() == [], "many names at one place are one voice"
    assert named.add([voice("c", "9.9.9.9", "1.1.1.1")], OWN, 2.0) == []
    assert named.addresses() == ["/ip4/1.1.1.1/tcp/4001"]
    named.add([one], OWN, 3.0 + KEEP_S)
    assert named.addresses() == [], "what the others said is old"
    named.proved(("1.1.1.1", 4001), 4.0 + KEEP_S)
    assert named.addresses() == ["/ip4/1.1.1.1/tcp/4001"]
    for i in range(3 * MAX_NAMED):
        named.add([voice(f"x{i}", "9.9.9.9", f"1.1.{i}.1")], OWN, 5.0 + KEEP_S)
    assert len(named.add([], OWN, 5.0 + KEEP_S)) <= MAX_NAMED


def test_a_liar_with_many_addresses_does_not_keep_us_from_trying_an_honest_ones() -> None:
    named, many = NamedPlaces(), [f"1.0.0.{i}" for i in range(8)]
    liar, honest = voice("a", "8.8.8.8", *many), voice("b", "9.9.9.9", "198.51.100.1")
    assert named.add([honest, liar], OWN, 0.0) == [("1.0.0.7", 4001), ("198.51.100.1", 4001)]
    assert named.add([honest], OWN, 1.0) == [("198.51.100.1", 4001), ("1.0.0.7", 4001)], "the newest first"


def test_all_addresses_of_one_ipv6_customer_are_one_voice() -> None:
    places = ("2a00:1450:1:2::1", "2a00:1450:1:2:ffff::1", "2a00:1450:1:3::1")
    one, same, other = (voice(f"p{i}", at).name for i, at in enumerate(places))
    assert one == same != other


class World:
    """A transport that says what the test makes it say."""

    peer_id = "me"

    def __init__(self, reached: bool = True, ips: tuple[str, ...] = ("8.8.8.8",)) -> None:
        self.reached, self.ips = reached, ips
        self.peers = {"a": "8.8.8.8", "b": "9.9.9.9", "c": "9.9.9.10", "d": "9.9.9.11"}
        self.liars: set[str] = set()
        """Say the opposite."""
        self.dialled: list[tuple[str, str, int]] = []
        self.told: list[str] = []
        self.hidden = 0

    def addresses(self) -> list[str]:
        return ["/ip4/192.168.1.2/tcp/4001/p2p/12D3KooWEBBr1MJK5k5YUrB9z3dH8GBq4JyrDoWXMRzmYkJyfDS8"]

    def connected(self) -> list[str]:
        return sorted(self.peers)

    async def link(self, peer: str) -> PeerConnections | None:
        return PeerConnections((self.peers[peer],) if peer in self.peers else self.ips)

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
        reached = self.reached is not (peer in self.liars)
        return wire.encode(wire.ReachAnswer(tuple(("1.1.1.1", port) for port in query.ports if reached)))


def among_members(world: World, now: Callable[[], float] = time.monotonic) -> Reachability:
    """Reachability of a node to whom all peers but strangers are members of its run."""
    reach = Reachability(world, now=now)  # type: ignore[arg-type]
    reach.believe(lambda peer: not peer.startswith("stranger"))
    return reach


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


def test_strangers_leave_members_their_part_of_what_a_node_dials() -> None:
    door, query = DialBack(World(), lambda: 0.0), wire.ReachQuery((4001,))  # type: ignore[arg-type]
    for i in range(STRANGERS_A_MINUTE):
        asyncio.run(door.answer(f"stranger {i}", query, stranger=True))
    with pytest.raises(RemoteError, match="too-often"):
        asyncio.run(door.answer("one more", query, stranger=True))
    for i in range(MAX_A_MINUTE - STRANGERS_A_MINUTE):
        assert asyncio.run(door.answer(f"member {i}", query)).reached


def test_one_bad_round_does_not_hide_a_node_that_could_be_dialled() -> None:
    world = World()
    reach = among_members(world)
    assert reach.reach is Reach.UNKNOWN
    asyncio.run(reach.check())
    assert reach.reach is Reach.DIRECT
    assert world.told == ["/ip4/1.1.1.1/tcp/4001"]
    world.reached = False
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.DIRECT, 0)
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.OUTBOUND, 1)
    world.reached = True
    asyncio.run(reach.check())
    assert reach.reach is Reach.DIRECT


def test_one_liar_demotes_nobody_and_makes_nobody_announce_an_address() -> None:
    world = World()
    world.liars = {"a"}
    reach = among_members(world)
    for _ in range(20):
        asyncio.run(reach.check())
        assert (reach.reach, world.hidden) == (Reach.DIRECT, 0)
    world.peers, world.liars = {"a": "8.8.8.8", "a again": "8.8.8.8", "b": "9.9.9.9"}, {"a", "a again"}
    reach = among_members(world)
    for _ in range(3):
        asyncio.run(reach.check())
        assert (reach.reach, world.hidden) == (Reach.DIRECT, 0), "two names of one voice"
    world = World(reached=False)
    world.peers = {"liar": "8.8.8.8"}
    world.liars = {"liar"}
    reach = among_members(world)
    asyncio.run(reach.check())
    assert world.told == [] and world.dialled == [("me", "1.1.1.1", 4001)], "we do not answer there"
    world.reached, world.liars = True, set()
    asyncio.run(reach.check())
    assert world.told == ["/ip4/1.1.1.1/tcp/4001"], "now we do: one peer is enough"


def test_the_only_one_who_knows_the_world_is_believed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(reached=False)
    world.peers = {"a": "8.8.8.8", **{peer: f"192.168.1.{ord(peer)}" for peer in "bcd"}}
    world.liars = {"b", "c", "d"}  # neighbours, who reach us at home
    monkeypatch.setattr(random, "sample", lambda peers, count: peers[:count])
    now = [0.0]
    reach = among_members(world, lambda: now[0])
    for _ in range(ROUNDS_ALONE - 1):
        asyncio.run(reach.check())
        assert reach.reach is Reach.UNKNOWN
    asyncio.run(reach.check())
    assert reach.reach is Reach.OUTBOUND
    monkeypatch.setattr(random, "sample", lambda peers, count: peers[-count:])
    asyncio.run(reach.check())
    assert reach.reach is Reach.OUTBOUND, "the neighbours do not know better"
    now[0] += KEEP_S
    asyncio.run(reach.check())
    assert reach.reach is Reach.DIRECT, "there is nobody else any more"


def test_strangers_that_only_hold_a_connection_hide_nobody() -> None:
    world, now = World(), [0.0]
    home = {peer: f"192.168.1.{ord(peer)}" for peer in "abc"}
    strangers = {f"stranger {i}": f"9.9.9.{i}" for i in range(40)}  # at public addresses, at many places
    world.peers, world.liars = home | strangers, set(strangers)
    reach = among_members(world, lambda: now[0])
    for _ in range(40):
        asyncio.run(reach.check())
        assert (reach.reach, world.hidden) == (Reach.DIRECT, 0)
        now[0] += AGAIN_S
    world.peers = strangers  # nobody else is connected, for hours
    for _ in range(40):
        asyncio.run(reach.check())
        assert (reach.reach, world.hidden) == (Reach.DIRECT, 0)
        now[0] += AGAIN_S
    world.peers, world.reached = strangers | {"a": "192.168.1.97"}, False
    asyncio.run(reach.check())
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.OUTBOUND, 1), "a member is believed again, wherever it is"
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.OUTBOUND, 1), "strangers are not asked beside it"


def test_who_has_no_run_yet_asks_whom_a_person_named_and_believes_of_others_only_a_yes() -> None:
    world = World(reached=False)
    world.peers = {"host": "8.8.8.8", **{f"stranger {i}": f"9.9.9.{i}" for i in range(40)}}
    reach = Reachability(world, chosen=["host"])  # type: ignore[arg-type]
    asyncio.run(reach.check())
    assert (reach.reach, world.hidden) == (Reach.OUTBOUND, 1), "the one that was named"
    del world.peers["host"]
    reach = Reachability(world, chosen=["host"])  # type: ignore[arg-type]
    for _ in range(2 * ROUNDS_ALONE):
        asyncio.run(reach.check())
        assert (reach.reach, world.hidden) == (Reach.UNKNOWN, 1), "nobody knows them"
    world.reached = True
    asyncio.run(reach.check())
    assert reach.reach is Reach.DIRECT


@pytest.mark.parametrize(("wish", "reach"), [("public", Reach.DIRECT), ("private", Reach.OUTBOUND)])
def test_who_is_told_asks_nobody(wish: str, reach: Reach) -> None:
    world = World(reached=wish == "private")
    found = Reachability(world, wish)  # type: ignore[arg-type]
    asyncio.run(found.check())
    assert found.reach is reach
