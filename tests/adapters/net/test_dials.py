"""Which of a stranger's addresses are dialled, by the rule alone, and by p2pd to real sockets. Whom we dial
anew must prove that it is the one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s
from net_helpers import Recorder, until
from presence_kit import our_record

from p2pdiloco import WIRE_VERSION
from p2pdiloco.adapters import dials, dns, multiaddrs
from p2pdiloco.adapters.dials import (
    BLOCK_DIALS,
    BLOCK_DIALS_S,
    DIALS,
    DIALS_S,
    MAX_ADDRESSES,
    NotNow,
    StrangersDials,
    block_of,
)
from p2pdiloco.adapters.hivemind_net import OURS_ONLY, HivemindTransport
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.network.discovery import Presence
from p2pdiloco.errors import NobodyReached, PeerUnreachable
from p2pdiloco.identity import Identity

HOME = {"ip4": ["192.168.1.5", "127.0.0.1"], "ip6": ["fd00::5", "::1"]}
EVERYWHERE = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
RELAY = Identity.generate().peer_id


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rule(
    listen: list[str] | None = None, own: dict[str, list[str]] | None = None, told: tuple[str, ...] = ()
) -> StrangersDials:
    made = StrangersDials(told, Clock())
    made.listening(EVERYWHERE if listen is None else listen, HOME if own is None else own)
    return made


async def passes(made: StrangersDials, address: str, connected: tuple[str, ...] = ()) -> bool:
    try:
        return bool((await made.choose([address], connected, 5.0))[0])
    except NotNow:
        raise
    except PeerUnreachable:
        return False


@pytest.mark.parametrize(
    "ip",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("255.255.255.255", "240.0.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1"),
        *("2001:0:a00:1::1", "2001:db8::1"),
    ],
)
async def test_no_address_of_a_network_that_we_are_not_in_passes(ip: str) -> None:
    family = "ip6" if ":" in ip else "ip4"
    assert not await passes(rule(), f"/{family}/{ip}/tcp/22")
    assert not await passes(rule(), f"/{family}/{ip}/tcp/22/p2p/{RELAY}/p2p-circuit"), "nor a relay there"


async def test_addresses_of_the_internet_and_of_our_own_networks_pass() -> None:
    for address in (
        *("/ip4/8.8.8.8/tcp/1", "/ip6/2600::1/tcp/1", "/ip6/::ffff:8.8.8.8/tcp/1", "/ip4/8.8.8.8/udp/1/quic"),
        *("/ip4/192.168.7.7/tcp/1", "/ip6/fd12::1/tcp/1", f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit"),
    ):
        assert await passes(rule(), address), address


async def test_whose_networks_are_ours() -> None:
    loopback, lan = "/ip4/127.0.0.1/tcp/1", "/ip4/10.9.9.9/tcp/1"
    assert await passes(rule(["/ip4/127.0.0.1/tcp/5"]), loopback), "listened on by name"
    assert not await passes(rule(["/ip4/127.0.0.1/tcp/5"]), "/ip4/192.168.1.9/tcp/1"), "and nothing else is"
    assert await passes(rule(own={"ip4": ["127.0.0.1"]}), loopback), "there is nothing else"
    assert await passes(rule(told=("/ip4/10.1.1.1/tcp/5",)), lan) and not await passes(rule(), lan)
    assert not await passes(rule(["/ip4/0.0.0.0/tcp/5"]), "/ip6/fd12::1/tcp/1"), "of that family only"


async def test_an_address_within_an_address_does_not_pass() -> None:
    for address in (
        *("/ip4/8.8.8.8/tcp/1/ip4/127.0.0.1/tcp/22", f"/p2p/{RELAY}/p2p-circuit"),
        f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit/ip4/10.0.0.1/tcp/22",
    ):
        assert not await passes(rule(), address)


async def test_a_relay_that_we_are_connected_to_is_free() -> None:
    made, through = rule(), f"/ip4/10.0.0.1/tcp/1/p2p/{RELAY}/p2p-circuit"
    for _ in range(2 * DIALS):
        assert await passes(made, through, (RELAY,))
    assert not await passes(made, through)


async def test_a_name_is_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    zone = {
        "in.example": ["10.0.0.1"],
        "both.example": ["127.0.0.1", "8.8.4.4", "2600::1"],
        "none.example": [],
    }
    asked: list[str] = []

    def lookup(protocol: str, name: str, until_s: float) -> list[str]:
        asked.append(name)
        return zone[name]

    monkeypatch.setattr(dns, "ips_behind", lookup)
    made = rule()
    assert not await passes(made, "/dns4/in.example/tcp/1") and not await passes(
        made, "/dns/none.example/tcp/1"
    )
    found, _ = await made.choose(["/dns/both.example/tcp/1", "/ip4/8.8.4.4/tcp/1"], (), 5.0)
    assert found == ["/ip4/8.8.4.4/tcp/1", "/ip6/2600::1/tcp/1"], "p2pd looks nothing up again"
    with pytest.raises(NotNow):
        for _ in range(DIALS):
            await passes(made, "/dns4/in.example/tcp/1")
    assert len(asked) < DIALS, "a lookup counts as a dial"


async def test_a_slow_name_keeps_no_address_from_being_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(protocol: str, name: str, until_s: float) -> list[str]:
        looks.wait(within_s(20.0))
        return []

    looks = threading.Event()
    monkeypatch.setattr(dns, "ips_behind", lookup)
    try:
        named = ["/dns4/slow.example/tcp/1", "/dns4/slower.example/tcp/1", "/ip4/8.8.8.8/tcp/1"]
        assert await rule().choose(named, (), 0.05) == (["/ip4/8.8.8.8/tcp/1"], True)
        with pytest.raises(NotNow):
            await rule().choose(named[:1], (), 0.05)
    finally:
        looks.set()


async def test_where_a_relay_is_is_not_the_strangers_to_say() -> None:
    address = f"/ip4/127.0.0.1/tcp/22/p2p/{RELAY}/p2p-circuit"
    assert await rule().choose([address], (RELAY,), 5.0) == ([f"/p2p/{RELAY}/p2p-circuit"], False)
    assert not await passes(rule(), address)


async def test_where_a_persons_name_led_is_a_block_of_ours() -> None:
    made = rule(own={"ip4": ["172.17.0.2"]})
    assert not await passes(made, "/ip4/192.168.1.9/tcp/1")
    made.told(["192.168.1.1"])
    made.listening(EVERYWHERE, {"ip4": ["172.17.0.2"]})
    assert await passes(made, "/ip4/192.168.1.9/tcp/1")


async def test_a_block_has_one_budget_whoever_names_it() -> None:
    made = rule()
    clock: Any = made._now
    dialled = 0
    with pytest.raises(NotNow):
        for _ in range(100):
            named = [f"/ip4/8.8.8.{dialled % 200}/tcp/{n}" for n in range(1, 17)]
            dialled += len((await made.choose(named, (), 5.0))[0])
    assert dialled == BLOCK_DIALS
    assert (
        len((await made.choose([f"/ip4/9.9.9.9/tcp/{n}" for n in range(1, 17)], (), 5.0))[0]) == MAX_ADDRESSES
    )
    with pytest.raises(NotNow):
        await made.choose(["/ip4/8.8.8.8/tcp/1", "/ip4/10.0.0.1/tcp/1"], (), 5.0)
    clock.now_s += 2 * BLOCK_DIALS_S / BLOCK_DIALS
    assert len((await made.choose([f"/ip4/8.8.8.8/tcp/{n}" for n in range(1, 5)], (), 5.0))[0]) == 2


async def test_all_strangers_have_one_budget() -> None:
    made = rule()
    clock: Any = made._now
    addresses = [f"/ip4/8.8.{n}.8/tcp/1" for n in range(256)]
    with pytest.raises(NotNow):
        for address in addresses:
            await made.choose([address], (), 5.0)
    clock.now_s += 10 * DIALS_S
    assert sum([await passes(made, address) for address in addresses[:DIALS]]) == DIALS
    assert len(made._blocks) <= dials.MAX_BLOCKS


def test_blocks() -> None:
    assert block_of("8.8.8.8") == block_of("::ffff:8.8.8.9") != block_of("8.8.9.8")
    assert block_of("2600:0:0:1::1") == block_of("2600:0:0:2::2") != block_of("2600:0:1::1")
    assert block_of("10.0.0.1") == block_of("10.255.0.1")


# p2pd, to sockets that count.


class Door:
    """Sockets of somebody who never asked for it."""

    def __init__(self) -> None:
        self.knocks = 0
        self.addresses: list[str] = []

    def _knock(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        writer.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, ports: int) -> AsyncIterator[Door]:
        self = cls()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(ports):
                server = await asyncio.start_server(self._knock, "127.0.0.1", 0)
                await stack.enter_async_context(server)
                self.addresses.append(f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}")
            yield self


def transport_in(folder: Path, listen: str = "/ip4/127.0.0.1/tcp/0", **more: Any) -> HivemindTransport:
    key = folder / "identity.key"
    return HivemindTransport(Identity.load_or_create(key), key, folder, (listen,), **more)


@contextlib.asynccontextmanager
async def node(folder: Path, *listen: str, **more: Any) -> AsyncIterator[tuple[HivemindTransport, Recorder]]:
    transport, handlers = transport_in(folder, *listen, **more), Recorder()
    transport._meeting.dials._now = Clock()
    await transport.start(handlers)
    try:
        yield transport, handlers
    finally:
        await transport.close()


@pytest.mark.net
async def test_records_of_many_identities_at_one_place_share_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Door.open(16) as door, node(tmp_path / "node") as (transport, handlers):
        record = wire.encode(wire.Presence(WIRE_VERSION, 1, "x", tuple(door.addresses)))
        ghosts = {Identity.generate().peer_id: record for _ in range(30)}

        async def records(_: str) -> dict[str, bytes]:
            return ghosts

        monkeypatch.setattr(transport, "get_records", records)
        presence = Presence(transport, "run", our_record(), lambda event: None)
        for _ in range(3):
            await presence.look()
            await until(lambda: not presence._dials, "the dials end")
        assert 0 < door.knocks <= BLOCK_DIALS
        handlers.members = set(ghosts)
        before = door.knocks
        with contextlib.suppress(PeerUnreachable):
            await transport.connect(next(reversed(ghosts)), door.addresses)
        assert door.knocks > before, "a member is dialled nevertheless"


@pytest.mark.net
async def test_a_node_on_the_internet_dials_nothing_behind_it_for_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"ip4": ["7.0.0.1", "127.0.0.1"], "ip6": []}
    monkeypatch.setattr(multiaddrs, "own_addresses", lambda: own)
    monkeypatch.setattr(dns, "ips_behind", lambda *_: ["127.0.0.1"])
    async with Door.open(2) as door, node(tmp_path / "node", "/ip4/0.0.0.0/tcp/0") as (transport, handlers):
        stranger, port = Identity.generate().peer_id, door.addresses[0].rpartition("/")[2]
        for address in (
            door.addresses[0],
            f"/ip6/::ffff:127.0.0.1/tcp/{port}",
            f"/dns4/localhost/tcp/{port}",
        ):
            with pytest.raises(PeerUnreachable, match="no address that may be dialled"):
                await transport.connect(stranger, [address])
            transport.learn(stranger, [address])
            with pytest.raises(PeerUnreachable, match="no address that may be dialled"):
                await transport.send(stranger, b"x", 5.0)
        assert door.knocks == 0
        handlers.members, handlers.invited = set(), {stranger}
        with pytest.raises(PeerUnreachable):
            await transport.connect(stranger, door.addresses)
        assert door.knocks > 0, "whom the run has admitted is dialled anywhere"


@pytest.mark.net
async def test_whom_a_person_named_is_dialled_and_makes_its_network_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiaddrs, "own_addresses", lambda: {"ip4": ["7.0.0.1", "127.0.0.1"], "ip6": []})
    everywhere = "/ip4/0.0.0.0/tcp/0"
    async with node(tmp_path / "a") as (a, _), node(tmp_path / "b") as (b, _):
        async with node(tmp_path / "c", everywhere, initial_peers=a.addresses()[:1]) as (c, _):
            await c.connect(b.peer_id, b.addresses())
            assert await c.send(b.peer_id, b"hello", 5.0) == b"re:hello"
        quiet = P2PDOptions(listen=False, relay=False)
        async with node(tmp_path / "d", everywhere, options=quiet) as (d, _):
            with pytest.raises(PeerUnreachable, match="may be dialled"):
                await d.connect(b.peer_id, b.addresses())
            d.named(b.addresses())
            await d.connect(b.peer_id, b.addresses())


@pytest.mark.net
async def test_a_peer_that_is_here_costs_nothing_and_names_nothing(tmp_path: Path) -> None:
    async with Door.open(4) as door, node(tmp_path / "a") as (a, _), node(tmp_path / "b") as (b, _):
        await a.connect(b.peer_id, b.addresses())
        for _ in range(BLOCK_DIALS):
            await a.connect(b.peer_id, door.addresses)
        assert door.knocks == 0
        with pytest.raises(NotNow):
            for _ in range(BLOCK_DIALS):
                await a._meeting.dials.choose(door.addresses, (), 5.0)
        await a.connect(b.peer_id, b.addresses())
        with pytest.raises(NotNow):
            await a.connect(Identity.generate().peer_id, door.addresses)
        assert door.knocks == 0


# Who is dialled back.


@pytest.mark.net
async def test_only_the_very_peer_counts_as_reached(tmp_path: Path) -> None:
    async with node(tmp_path) as (transport, _):
        ip, port = multiaddrs.tcp_of(transport.addresses()[0]) or ("", 0)
        assert await multiaddrs.peer_answers(transport.peer_id, ip, port, 20.0)
        assert not await multiaddrs.peer_answers(Identity.generate().peer_id, ip, port, 20.0)
        copy = transport_in(tmp_path)
        assert await copy.answers_at(copy.peer_id, ip, port, 20.0), "a copy sees the original, and may end"
        assert await multiaddrs.peer_answers(transport.peer_id, "localhost", port, 20.0), "by a name, too"
    assert not await multiaddrs.peer_answers(transport.peer_id, ip, port, 20.0)


@pytest.mark.net
async def test_who_joins_through_itself_only_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    itself = Identity.load_or_create(tmp_path / "identity.key").peer_id
    async with node(tmp_path, initial_peers=[f"/ip4/127.0.0.1/tcp/9/p2p/{itself}"]):
        assert OURS_ONLY in caplog.text


@pytest.mark.process
async def test_strangers_and_the_silent_are_not_reached() -> None:
    peer = Identity.generate().peer_id

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(multiaddrs.MULTISTREAM + multiaddrs.NOISE + b"\x00\x70" + bytes(112))
        await writer.drain()
        writer.close()

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    for handler in (babble, silence):
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert not await multiaddrs.peer_answers(peer, "127.0.0.1", port, 0.3)


@pytest.mark.net
async def test_a_host_name_that_nobody_knows_is_named(tmp_path: Path) -> None:
    there = [f"/dns4/nobody.invalid/tcp/9/p2p/{Identity.generate().peer_id}"]
    with pytest.raises(NobodyReached, match=r"no address is known for the host name nobody\.invalid"):
        await transport_in(tmp_path, initial_peers=there).start(Recorder())


@pytest.mark.process
def test_binary_addresses_of_relays_are_read() -> None:
    from p2pdiloco.adapters.hivemind_binding import address_bytes

    relay = Identity.generate().peer_id
    text = f"/ip4/203.0.113.7/tcp/4001/p2p/{relay}/p2p-circuit"
    assert multiaddrs.join(multiaddrs.from_bytes(address_bytes(text))) == text
    assert multiaddrs.relayed(text)
    assert multiaddrs.direct_ips([text, "/ip4/7.0.0.1/tcp/1", "/ip4/7.0.0.1/tcp/2"]) == ("7.0.0.1",)
    for raw in (b"\x04\x01", b"\xff\xff\xff\xff\xff\xff", address_bytes(text)[:-3], b"\x85\x02"):
        with pytest.raises(ValueError):
            multiaddrs.from_bytes(raw)
