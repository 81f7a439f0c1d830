"""Router that is asked to forward the node's port: what it answers, and what becomes of that."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.daemon.network import router
from p2pdiloco.daemon.network.router import (
    LEASE_S,
    NO_ROUTER,
    Forwarding,
    NotForwarded,
    Router,
    by_nat_pmp,
    by_upnp,
)

OUTSIDE = "45.67.89.7"


class Gateway:
    """A router that speaks NAT-PMP on the loopback. `code`: its refusal, of UDP `udp_code`; `port`: another
    than is wished."""

    def __init__(self, code: int = 0, port: int = 0, udp_code: int = 0) -> None:
        self.code, self.port, self.udp_code = code, port, udp_code
        self.leases: list[tuple[int, int]] = []
        self.by_udp: list[tuple[int, int]] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.place: tuple[str, int] = self._socket.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            said, sender = self._socket.recvfrom(64)
            if not said:
                return
            code = self.udp_code if said[1] == 1 else self.code
            head = struct.pack("!BBHI", 0, 128 + said[1], code, 1)
            if said[1] == 0:
                self._socket.sendto(head + socket.inet_aton(OUTSIDE), sender)
                continue
            inner, outer, lease_s = struct.unpack_from("!HHI", said, 4)
            (self.leases if said[1] == 2 else self.by_udp).append((inner, lease_s))
            self._socket.sendto(head + struct.pack("!HHI", inner, self.port or outer, lease_s), sender)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.place)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def gateways() -> Iterator[list[Gateway]]:
    made: list[Gateway] = []
    yield made
    for gateway in made:
        gateway.close()


@pytest.mark.parametrize(("port", "by_udp"), [(0, False), (5000, True)], ids=["tcp", "another, udp too"])
def test_a_gateway_forwards_by_nat_pmp_until_it_is_ended(
    gateways: list[Gateway], port: int, by_udp: bool
) -> None:
    gateways.append(Gateway(port=port))
    found = by_nat_pmp(4001, by_udp, gateways[0].place)
    assert found is not None and (found.ip, found.port) == (OUTSIDE, port or 4001)
    found.end()
    assert gateways[0].leases == [(4001, LEASE_S), (4001, 0)]
    assert gateways[0].by_udp == gateways[0].leases * by_udp and not found.lacks_udp


def test_a_gateway_that_refuses_says_why(gateways: list[Gateway]) -> None:
    gateways.append(Gateway(code=2))
    with pytest.raises(NotForwarded, match="not authorized"):
        by_nat_pmp(4001, gateway=gateways[0].place)


def test_where_nobody_answers_or_there_is_no_gateway_nothing_is_forwarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "_PMP_WAITS_S", (0.01,))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert by_nat_pmp(4001, gateway=silent.getsockname()) is None
    monkeypatch.setattr(router, "default_gateway", lambda: None)
    assert by_nat_pmp(4001) is None


class Device:
    """Stands in for miniupnpc: a device of this network, or none."""

    lanaddr = "192.168.1.2"

    def __init__(self, fails: dict[str, str]) -> None:
        self._fails = fails
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any) -> str:
            self.asked.append((name, *words))
            mapping = name == "addportmapping"
            if why := self._fails.get(f"{name} {words[-1]}" if mapping else name):
                raise Exception(why)  # as the library does
            if mapping and (why := self._fails.get(f"{name} {words[1]}")):
                raise Exception(why)  # as the library does
            return OUTSIDE

        return call


NONE = {"discover": "Success"}
NO_GATEWAY = {"selectigd": "No UPnP device discovered"}
ADD = f"addportmapping {LEASE_S}"


def upnp(monkeypatch: pytest.MonkeyPatch, fails: dict[str, str]) -> Device:
    device = Device(fails)
    monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=lambda: device))
    return device


@pytest.mark.parametrize(
    ("fails", "lease_s"),
    [({}, LEASE_S), ({ADD: "OnlyPermanentLeasesSupported"}, 0)],
    ids=["lease", "for-ever"],
)
def test_a_device_forwards_by_upnp_until_it_is_ended(
    monkeypatch: pytest.MonkeyPatch, fails: dict[str, str], lease_s: int
) -> None:
    device = upnp(monkeypatch, fails)
    found = by_upnp(4001)
    assert found is not None and (found.ip, found.port) == (OUTSIDE, 4001)
    asked = [each for each in device.asked if each[0] == "addportmapping"][-1]
    assert asked[1:5] == (4001, "TCP", "192.168.1.2", 4001) and asked[-1] == lease_s
    found.end()
    assert device.asked[-1] == ("deleteportmapping", 4001, "TCP")
    assert "UDP" not in str(device.asked)


def test_the_same_port_of_udp_is_asked_for_where_it_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = upnp(monkeypatch, {})
    found = by_upnp(4001, True)
    assert found is not None and "TCP alone" not in found.words
    found.end()
    asked = [each[:3] for each in device.asked if "portmapping" in each[0]]
    add, delete = "addportmapping", "deleteportmapping"
    assert asked == [(add, 4001, "TCP"), (add, 4001, "UDP"), (delete, 4001, "UDP"), (delete, 4001, "TCP")]


def test_who_does_not_get_the_port_of_udp_has_that_of_tcp_and_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, gateways: list[Gateway]
) -> None:
    upnp(monkeypatch, {"addportmapping UDP": "Action not authorized"})
    gateways.append(Gateway(udp_code=2))
    for found in (by_upnp(4001, True), by_nat_pmp(4001, True, gateways[0].place)):
        assert found is not None and found.addresses == [f"/ip4/{OUTSIDE}/tcp/4001"]
        assert "(of TCP alone, so nobody gets a direct line" in found.words
        found.end()
    assert gateways[0].leases[-1] == (4001, 0)


@pytest.mark.parametrize("fails", [NONE, NO_GATEWAY])
def test_where_no_device_is_found_there_is_no_router(
    monkeypatch: pytest.MonkeyPatch, fails: dict[str, str]
) -> None:
    upnp(monkeypatch, fails)
    assert by_upnp(4001) is None


@pytest.mark.parametrize("fails", [{ADD: "Action not authorized"}, {"externalipaddress": "Action Failed"}])
def test_a_device_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch, fails: dict[str, str]) -> None:
    upnp(monkeypatch, fails)
    with pytest.raises(NotForwarded, match="Action"):
        by_upnp(4001)


@pytest.mark.parametrize("said", ["", "not an address", None])
def test_a_device_without_an_address_outside_forwards_nothing(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    """What asks it would end, and whoever waits for its answer would wait for ever."""
    device = upnp(monkeypatch, {})
    monkeypatch.setattr(device, "externalipaddress", lambda: said, raising=False)
    with pytest.raises(NotForwarded):
        by_upnp(4001)
    assert not [each for each in device.asked if each[0] == "addportmapping"]


def test_without_the_library_the_other_protocol_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    assert by_upnp(4001) is None


def test_the_first_that_forwards_is_taken_and_else_the_first_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    upnp(monkeypatch, {ADD: "Action not authorized"})
    forwarding = Forwarding(OUTSIDE, 4001, lambda: None)
    monkeypatch.setattr(router, "by_nat_pmp", lambda *_: forwarding)
    assert router.forward(4001) is forwarding
    monkeypatch.setattr(router, "by_nat_pmp", lambda *_: None)
    with pytest.raises(NotForwarded, match="not authorized"):
        router.forward(4001)
    upnp(monkeypatch, NONE)
    assert router.forward(4001) is None


class Listening:
    """A transport that listens at home, and what it was told."""

    listening: Sequence[str] = ("/ip6/::/tcp/5001", "/ip4/0.0.0.0/tcp/4001")

    helps_with_holes = True

    def __init__(self) -> None:
        self.told: list[Sequence[str]] = []
        self.thrice = asyncio.Event()

    def forwarded_at(self, addresses: Sequence[str]) -> None:
        self.told.append(addresses)
        if len(self.told) == 3:
            self.thrice.set()


def at_home(monkeypatch: pytest.MonkeyPatch, answers: list[Any], own: str = "192.168.1.2") -> None:
    """What `forward` answers, one after the other, without pauses; then it is asked no more."""
    monkeypatch.setattr(multiaddrs, "interface_addresses", lambda _family: ["127.0.0.1", own])
    monkeypatch.setattr(router, "RENEW_S", 0.0)

    def forward(port: int, by_udp: bool) -> Any:
        assert port == 4001 and by_udp
        if len(answers) == 1:
            router.RENEW_S = 3600.0
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(router, "forward", forward)


async def test_others_are_told_while_it_forwards_and_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    good = Forwarding(OUTSIDE, 4001, lambda: ended.append("end"))
    at_home(monkeypatch, [None, NotForwarded("out of resources"), good])
    transport = Listening()
    asked = Router(cast(Any, transport))
    assert not asked.answered.is_set() and not asked.words
    await asked.begin()
    await asked.answer()
    assert asked.words == NO_ROUTER
    await transport.thrice.wait()
    assert transport.told == [[], [], [f"/ip4/{OUTSIDE}/tcp/4001"]]
    assert asked.words == f"the router forwards its port 4001 to this node, as {OUTSIDE}"
    await asked.end()
    assert ended == ["end"]


@pytest.mark.parametrize(
    ("wanted", "own"), [(False, "192.168.1.2"), (True, OUTSIDE)], ids=["unasked", "public"]
)
async def test_it_is_not_asked_where_nobody_wants_it_or_no_router_is_between(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, own: str
) -> None:
    at_home(monkeypatch, [], own)
    asked = Router(cast(Any, Listening()), wanted)
    await asked.begin()
    assert asked.answered.is_set() and not asked.words
    await asked.end()


async def test_a_router_that_does_not_end_it_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    at_home(monkeypatch, [Forwarding(OUTSIDE, 4001, never.wait)])
    monkeypatch.setattr(router, "END_S", 0.01)
    asked = Router(cast(Any, Listening()))
    await asked.begin()
    await asked.answer()
    await asked.end()
    never.set()


@pytest.mark.parametrize("ip", ["100.64.1.2", "192.168.0.4"])
def test_a_router_behind_another_nat_is_told_of(ip: str) -> None:
    found = Forwarding(ip, 4001, lambda: None)
    assert "behind another NAT" in found.words and not found.addresses, "it leads nobody here"


@pytest.mark.parametrize(
    ("listen", "own", "behind"),
    [
        ("/ip4/0.0.0.0/tcp/1", ["127.0.0.1", "192.168.1.2"], True),
        ("/ip4/0.0.0.0/tcp/1", ["127.0.0.1", "100.64.0.2"], False),  # no router of ours is before it
        ("/ip4/0.0.0.0/tcp/1", ["192.168.1.2", "100.64.0.2"], True),
        ("/ip4/0.0.0.0/tcp/1", ["192.168.1.2", OUTSIDE], False),
        ("/ip4/0.0.0.0/tcp/1", ["127.0.0.1", "169.254.1.1"], False),
        ("/ip4/127.0.0.1/tcp/1", ["192.168.1.2"], False),
        ("/ip4/192.168.1.2/tcp/1", [], True),
        ("/ip4/10.8.0.2/tcp/1", ["192.168.1.2", "10.8.0.2"], False),  # a VPN: nothing forwarded arrives there
        ("/ip6/::/tcp/1", ["192.168.1.2"], False),
        ("/ip4/192.168.1.2/udp/1/quic-v1", ["192.168.1.2"], False),
    ],
)
def test_who_listens_at_private_addresses_only_is_behind_a_router(
    listen: str, own: list[str], behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiaddrs, "way_out", lambda _family: "192.168.1.2")
    assert multiaddrs.behind_router([listen], own) is behind


def test_the_default_gateway_is_read_from_the_list_of_routes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    routes = tmp_path / "route"
    monkeypatch.setattr(router, "ROUTES", routes)
    assert router.default_gateway() is None
    gateway = int.from_bytes(socket.inet_aton("192.168.7.1"), sys.byteorder)
    routes.write_text(
        f"Iface Dest Gateway Flags\neth0 0007A8C0 00000000 0001\neth0 00000000 {gateway:08X} 0003\n"
    )
    assert router.default_gateway() == ("192.168.7.1", 5351)
    routes.write_text("Iface Dest Gateway Flags\neth0 x\n")
    assert router.default_gateway() is None
