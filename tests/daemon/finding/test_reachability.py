"""Finding out whether others can dial us: what is asked, answered, and concluded."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import daemon_kit
import pytest
from daemon_kit import Neighbourhood, QuickMember, Rogue, until

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.cli.owner_notice import reach_members
from p2pdiloco.core.api.messages import Progress
from p2pdiloco.core.api.types import Reach
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import MAX_LOSS, PeerRow, sane_loss
from p2pdiloco.daemon.member import OwnPeer
from p2pdiloco.daemon.network.discovery import LATELY_S, Names
from p2pdiloco.daemon.network.discovery import MAX_NAMED as MAX_DISCOVERED
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
from p2pdiloco.daemon.network.router import Router
from p2pdiloco.errors import RemoteError
from p2pdiloco.ports import PeerConnections
from p2pdiloco.release import WIRE_VERSION

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


def test_who_is_connected_by_ipv4_decides_and_our_own_prefix_of_ipv6_is_no_outside() -> None:
    own = OWN | {"2600:1::2"}
    far, six, home = voice("a", "8.8.8.8"), voice("b", "2600:9::1"), voice("c", "2600:1::3")
    assert decisive([home, six, far], own) == [far] and decisive([home, six], own) == [six]
    assert six.outlook(own)[0] and not home.outlook(own)[0], "no router is between us and a neighbour"


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
        self.own = ["/ip4/192.168.1.2/tcp/4001"]

    def addresses(self) -> list[str]:
        return [f"{own}/p2p/12D3KooWEBBr1MJK5k5YUrB9z3dH8GBq4JyrDoWXMRzmYkJyfDS8" for own in self.own]

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


async def test_nobody_is_hidden_before_the_router_has_answered() -> None:
    world, router = World(reached=False), Router(Mock())
    reach = Reachability(world, router=router)  # type: ignore[arg-type]
    reach.believe(lambda _peer: True)
    for _ in range(3):
        await reach.check()
    assert reach.reach is Reach.UNKNOWN and not world.hidden
    router.answered.set()
    await reach.check()
    assert world.hidden == 1


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


PEER = "12D3KooWEBBr1MJK5k5YUrB9z3dH8GBq4JyrDoWXMRzmYkJyfDS8"
FORWARDED, RELAYED = "/ip4/7.0.1.1/tcp/4001", f"/ip4/7.0.0.9/tcp/1/p2p/{PEER}/p2p-circuit"
SIX, NAME = "/ip6/2600:1::2/tcp/4001", "/dns4/me.example/tcp/4001"


@pytest.mark.parametrize(
    ("own", "reached", "reach", "words"),
    [
        ([SIX], True, Reach.OUTBOUND, "outbound only (direct by IPv6)"),  # IPv4 is behind a NAT
        ([SIX, RELAYED], True, Reach.RELAYED, "relayed (direct by IPv6)"),
        ([SIX], False, Reach.OUTBOUND, "outbound only"),
        ([SIX, FORWARDED], True, Reach.DIRECT, "direct"),
        ([SIX, FORWARDED], False, Reach.DIRECT, "direct"),  # the router forwards, and lets no IPv6 through
        ([SIX, NAME], False, Reach.DIRECT, "direct"),  # so a person says
        ([SIX, "/ip4/8.8.4.4/tcp/4001"], True, Reach.DIRECT, "direct"),  # its own address
        ([SIX, "/ip4/8.8.4.4/tcp/4001"], False, Reach.OUTBOUND, "outbound only"),  # and a firewall
    ],
)
async def test_who_is_dialled_by_ipv6_alone_is_no_syncer_for_those_who_have_ipv4(
    own: list[str], reached: bool, reach: Reach, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiaddrs, "own_ips", lambda: {"192.168.1.2", "8.8.4.4", "2600:1::2"})
    world = World(reached)
    world.own = ["/ip4/192.168.1.2/tcp/4001", *own]
    world.peers = {peer: f"2600:{i}::1" for i, peer in enumerate("abc", 2)}
    found = among_members(world)
    await found.check()
    assert (found.reach, found.words, world.hidden) == (reach, words, reach is not Reach.DIRECT)


async def test_what_voices_over_ipv4_say_counts_and_over_ipv6_is_told() -> None:
    world = World(reached=False)
    world.peers = {"a": "8.8.8.8", "b": "9.9.9.9", "six": "2600:2::1"}
    world.liars = {"six"}  # it can dial us
    found = among_members(world)
    await found.check()
    assert (found.reach, found.words) == (Reach.OUTBOUND, "outbound only (direct by IPv6)")


@pytest.mark.parametrize(("wish", "reach"), [("public", Reach.DIRECT), ("private", Reach.OUTBOUND)])
def test_who_is_told_asks_nobody(wish: str, reach: Reach) -> None:
    world = World(reached=wish == "private")
    found = Reachability(world, wish)  # type: ignore[arg-type]
    asyncio.run(found.check())
    assert found.reach is reach


# Names of peers: who has one now, and who had it lately.


def test_who_took_a_name_off_again_had_it_for_a_while() -> None:
    now = [0.0]
    names = Names(lambda: now[0])
    names["eve"], names["bob"] = "bob", "bob"
    now[0] = 5.0
    names["eve"] = "nobody"
    assert names == {"eve": "nobody", "bob": "bob"}
    assert set(names.lately("bob")) == {"eve", "bob"} and names.lately("nobody") == ("eve",)
    now[0] = LATELY_S
    names["bob"] = "bob"
    assert names.lately("bob") == ("bob",) and names.lately("ann") == ()


def test_what_is_remembered_is_bounded_and_so_is_an_answer() -> None:
    names = Names()
    for i in range(MAX_DISCOVERED + 9):
        names["eve"] = f"name {i}"
    assert names.lately("name 8") == () and names.lately("name 9") == ("eve",)
    many = tuple(f"peer{i}" for i in range(wire.MAX_BEARERS + 1))
    assert len(wire.decode(wire.encode(wire.NameAnswer(many[1:])), wire.NameAnswer).peers) == len(many) - 1
    with pytest.raises(RemoteError, match="garbage"):
        wire.decode(wire.encode(wire.NameAnswer(many)), wire.NameAnswer)


@pytest.mark.long
async def test_members_say_who_took_a_name_off_again(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("a",)) as swarm:
        a, rogue, owner = await swarm.member("a", genesis=True), await swarm.rogue(), await swarm.rogue()
        key = wire.members_key(swarm.run.id)
        for name in ("bob", "somebody"):
            record = wire.Presence(WIRE_VERSION, 1, name, ("/memory/p2p/x",))
            await rogue.transport.put_record(key, wire.encode(record), 60.0)
            await until(lambda n=name: a.presence.names.get(rogue.id) == n, "it to be seen")
        reached = await reach_members(owner.transport, swarm.run.id, [a.transport.peer_id], "bob")
        assert reached.names[rogue.id] == "somebody" and reached.lately == {rogue.id}
        for name in ("", "x" * 64):
            assert not (
                await reach_members(owner.transport, swarm.run.id, [a.transport.peer_id], name)
            ).lately


# What strangers say of the world in an open run: nobody listens, once somebody counts by work.


def heartbeat(loss: float) -> Progress:
    """Heartbeat of somebody who says that it learns."""
    said: dict[str, Any] = dict.fromkeys(("learning", "stands"), True)
    said |= dict.fromkeys(("confirmed", "saved", "thin", "votes"), False)
    return Progress(1, 0.1, 1, 1, 1.0, loss, heads=(), offices=(), reach=Reach.DIRECT, **said)


async def tell(rogue: Rogue, member: QuickMember, merges: int) -> None:
    """A stranger's records: a loss, data that all are begun, and heartbeats."""
    heldout = wire.HeldoutLoss(merges, -1.0, 1)
    record = wire.Presence(WIRE_VERSION, 1, "rogue", ("/memory/p2p/x",), True, heldout)
    await rogue.transport.put_record(wire.members_key(rogue.run.id), wire.encode(record), 60.0)
    reading = wire.encode(wire.Reading("data", 1, b"\xff"))
    await rogue.transport.put_record(wire.reading_key(rogue.run.id), reading, 60.0)
    await rogue.say(member, heartbeat(-1.0))
    await until(lambda: rogue.id in member.core.shared.view.members(asyncio.get_running_loop().time()))


def row(member: QuickMember, peer: str) -> PeerRow:
    """What a member shows of that peer."""
    rows = member.report.snapshot(asyncio.get_running_loop().time()).peers
    return next(row for row in rows if row.peer == peer)


class Dials:
    """Dial-backs that note whose question is a stranger's."""

    def __init__(self) -> None:
        self.strangers: list[bool] = []

    async def answer(self, _sender: str, _query: wire.ReachQuery, stranger: bool) -> wire.ReachAnswer:
        self.strangers.append(stranger)
        return wire.ReachAnswer(())


async def test_who_has_not_worked_is_not_asked_what_the_world_sees_of_us_and_is_answered_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = Reachability(None, "public")  # type: ignore[arg-type]
    monkeypatch.setattr(daemon_kit, "OwnPeer", lambda *parts: OwnPeer(*parts, reach))
    async with Neighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        monkeypatch.setattr(daemon_kit, "OwnPeer", OwnPeer)
        b, rogue, dials = await swarm.member("b"), await swarm.rogue(), Dials()
        monkeypatch.setattr(a.peer.door, "_dials_back", dials)
        for _ in range(3):
            await swarm.round(a, b)
        assert reach._is_member(b.transport.peer_id) and not reach._is_member(rogue.id)
        for transport in (rogue.transport, b.transport):
            query = wire.QUERY + wire.encode(wire.ReachQuery((4001,)))
            await transport.send(a.transport.peer_id, query, 2.0)
        assert dials.strangers == [True, False]


async def test_losses_and_shards_are_those_of_whoever_has_worked(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("a", "b")) as swarm:
        a = await swarm.member("a", genesis=True)
        b = await swarm.member("b")
        rogue = await swarm.rogue()
        for _ in range(3):
            await swarm.round(a, b)
        assert a.core.shared.has_seat(b.core.shared.me) and not a.core.shared.has_seat(rogue.id)
        await tell(rogue, a, a.measurements._vault.merges)
        await a.presence.look()
        assert rogue.id in a.presence.names and a.measurements.by != rogue.id
        assert await a.sharing.look() == 0
        assert row(a, rogue.id).loss is None
        # Somebody else, to whom it has a seat, believes it.
        b.core.shared.has_seat = lambda _peer: True  # type: ignore[method-assign]
        await tell(rogue, b, b.measurements._vault.merges)
        await b.presence.look()
        assert b.measurements.by == rogue.id and await b.sharing.look() == 1
        assert row(b, rogue.id).loss == -1.0


async def test_a_number_that_can_be_no_loss_is_none(tmp_path: Path) -> None:
    async with Neighbourhood(tmp_path, seats=("a",)) as swarm:
        a = await swarm.member("a", genesis=True)
        for loss in (math.nan, math.inf, 1e30, -1e30):
            assert sane_loss(loss) is None
            a.measurements.heard("peer", wire.HeldoutLoss(a.measurements._vault.merges + 1, loss, 1))
            a.measurements.measured(loss, 1)
            assert a.measurements.newest is None
        rogue = await swarm.rogue()
        await rogue.say(a, heartbeat(1e308))
        now = asyncio.get_running_loop().time
        await until(lambda: rogue.id in a.core.shared.view.members(now()))
        assert row(a, rogue.id).loss is None and sane_loss(MAX_LOSS) == MAX_LOSS
        assert a.report.status(now()).loss == pytest.approx(a.report.snapshot(now()).loss)
