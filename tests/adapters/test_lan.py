"""Discovery in the local network: another process finds what is announced, and what is heard is bounded."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.multiaddrs import Announcer, Nearby, look_nearby, nearby_of
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity

pytest.importorskip("zeroconf")
PEER = Identity.from_seed(bytes(range(32))).peer_id
HERE = f"/ip4/127.0.0.1/tcp/4711/p2p/{PEER}"
RUNS = ["ab" * 32, "cd" * 32]
PROGRAM = f"""
import asyncio, sys, uvloop
from p2pdiloco.adapters.multiaddrs import Announcer

async def main():
    announcer = Announcer({PEER!r}, [{HERE!r}])
    await announcer.announce({RUNS[:1]!r})
    await announcer.announce({RUNS!r})
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await announcer.close()

uvloop.run(main())
"""


@pytest.mark.net
def test_what_one_process_announces_another_finds() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None and other.stdin is not None
            if other.stdout.readline() != "ready\n":
                pytest.skip("this machine has no multicast, not even on its loopback")
            found = {near.peer: near for near in look_nearby()}
        finally:
            other.stdin.close()
    assert found[PEER] == Nearby(PEER, (HERE,), ("ab" * 6, "cd" * 6))
    assert other.returncode == 0


def announced(**changes: Any) -> SimpleNamespace:
    values = {"properties": {b"id": PEER.encode(), b"runs": b"ab" * 6}, "port": 4711} | changes
    hosts = values.pop("hosts", ["192.0.2.1"])
    return SimpleNamespace(**values, parsed_addresses=lambda: hosts)


@pytest.mark.parametrize(
    ("heard", "addresses", "runs"),
    [
        (announced(), [f"/ip4/192.0.2.1/tcp/4711/p2p/{PEER}"], ["ab" * 6]),
        (announced(hosts=["fe80::1", "fd00::1"]), [f"/ip6/fd00::1/tcp/4711/p2p/{PEER}"], ["ab" * 6]),
        (announced(hosts=["192.0.2.1"] * 9), [f"/ip4/192.0.2.1/tcp/4711/p2p/{PEER}"] * 4, ["ab" * 6]),
        (announced(properties={b"id": PEER.encode()}), [f"/ip4/192.0.2.1/tcp/4711/p2p/{PEER}"], []),
        (
            announced(properties={b"id": PEER.encode(), b"runs": b",".join([b"no", b"\x00", b"ab" * 6] * 9)}),
            [f"/ip4/192.0.2.1/tcp/4711/p2p/{PEER}"],
            ["ab" * 6] * 2,
        ),
    ],
)
def test_what_is_heard_is_read(heard: Any, addresses: list[str], runs: list[str]) -> None:
    assert nearby_of(heard) == Nearby(PEER, tuple(addresses), tuple(runs))


@pytest.mark.parametrize(
    "heard",
    [
        announced(properties={}),
        announced(properties={b"id": b"12D3KooWshort"}),
        announced(properties={b"id": b"\xff" * 52}),
        announced(properties={b"id": None}),
        announced(hosts=[]),
        announced(hosts=["nonsense"]),
        announced(port=0),
        announced(port=None),
    ],
)
def test_what_is_not_sound_is_nobody(heard: Any) -> None:
    assert nearby_of(heard) is None


def test_addresses_of_this_network_are_announced() -> None:
    public, near = f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}", f"/ip4/192.168.1.5/tcp/4711/p2p/{PEER}"
    relayed = f"/ip4/192.168.1.9/tcp/2/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
    named = f"/dns4/example.org/tcp/3/p2p/{PEER}"
    for addresses, hosts, port in (
        ([public, relayed, named, near, HERE], ("192.168.1.5",), 4711),
        ([HERE], ("127.0.0.1",), 4711),
        ([public], (), 0),
    ):
        assert multiaddrs._hosts_of(addresses) == (hosts, port)


async def test_who_has_no_address_here_is_not_announced() -> None:
    announcer = Announcer(PEER, [f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}"])
    await announcer.announce(RUNS)
    assert announcer._zeroconf is None
    await announcer.close()


def test_a_crowd_is_cut_and_nobody_speaks_for_another() -> None:
    heard = multiaddrs._Heard()
    peers = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(multiaddrs.MAX_FOUND + 9)]
    said = {f"{peer}.{multiaddrs.LAN_SERVICE}": peer for peer in peers} | {
        f"another.{multiaddrs.LAN_SERVICE}": PEER
    }

    def info(_kind: str, name: str, _ms: int) -> SimpleNamespace:
        return announced(properties={b"id": said[name].encode()})

    network: Any = SimpleNamespace(get_service_info=info)
    heard.add_service(network, multiaddrs.LAN_SERVICE, f"another.{multiaddrs.LAN_SERVICE}")
    assert not heard.found and not heard.any.is_set()
    for name in said:
        heard.add_service(network, multiaddrs.LAN_SERVICE, name)
    heard.update_service(network, multiaddrs.LAN_SERVICE, f"{peers[-1]}.{multiaddrs.LAN_SERVICE}")
    assert list(heard.found) == peers[: multiaddrs.MAX_FOUND] and heard.any.is_set()


def test_without_the_library_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(UserError, match="--lan needs the package zeroconf") as error:
        look_nearby()
    assert "[lan]" in error.value.hint
