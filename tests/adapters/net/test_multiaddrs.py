from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.errors import UserError

PEER = "12D3KooWLmKkAJsqwL54Lg3nCKQxe3s4mdSukVJaDRbvC4BbTdYN"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/203.0.113.7/tcp/31337",
        f"/ip6/2001:db8::1/udp/4001/quic-v1/p2p/{PEER}",
        f"/dns4/node.example.org/tcp/443/wss/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_usable_addresses_keep_their_text(text: str) -> None:
    assert multiaddrs.join(multiaddrs.parse(f" {text}/ ")) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("203.0.113.7:31337", "slash"),
        ("", "slash"),
        ("/ip4/203.0.113/tcp/31337", "'203.0.113' is not an ip4"),
        ("/ip4/203.0.113.7/tpc/31337", "'tpc' is not a known"),
        ("/ip4/203.0.113.7/tcp/70000", "'70000' is not a port"),
        ("/ip4/203.0.113.7/tcp", "'' is not a port"),
        ("/tcp/31337", "host"),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{PEER[:-3]}", "peer id"),
        ("/dns4//tcp/1", "host name"),
    ],
)
def test_a_mistyped_address_is_named_and_explained(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        multiaddrs.parse(text)
    assert repr(text) in str(refused.value) and complaint in str(refused.value)
    assert "/ip4/" in refused.value.hint


def test_an_initial_peer_needs_its_peer_id() -> None:
    assert multiaddrs.split_peer(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}") == ("/ip4/1.2.3.4/tcp/1", PEER)
    with pytest.raises(UserError, match="peer id"):
        multiaddrs.split_peer("/ip4/1.2.3.4/tcp/1")


@given(
    st.lists(st.sampled_from(["ip4", "1.2.3.4", "tcp", "1", "p2p", PEER, "ws", "x", "", "\0"]), max_size=8)
)
def test_parsing_raises_nothing_else(words: list[str]) -> None:
    try:
        parts = multiaddrs.parse("/" + "/".join(words))
    except UserError:
        return
    assert multiaddrs.parse(multiaddrs.join(parts)) == parts


def test_everywhere_becomes_the_interfaces_and_loopback_is_last() -> None:
    own = {"ip4": ["127.0.0.1", "192.168.1.5", "9.9.9.9", "169.254.1.1"]}
    observed = [f"/ip4/8.8.8.8/tcp/2/p2p/{PEER}/p2p-circuit", "/ip4/192.168.1.5/tcp/31337"]
    announced = ["/dns4/me.example/tcp/1"]
    told = multiaddrs.reachable_order(["/ip4/0.0.0.0/tcp/31337"], announced, observed, PEER, own)
    assert told == [
        f"{address}/p2p/{PEER}"
        for address in (
            "/dns4/me.example/tcp/1",
            "/ip4/9.9.9.9/tcp/31337",
            "/ip4/192.168.1.5/tcp/31337",
            f"/ip4/8.8.8.8/tcp/2/p2p/{PEER}/p2p-circuit",
            "/ip4/169.254.1.1/tcp/31337",
            "/ip4/127.0.0.1/tcp/31337",
        )
    ]


def test_interface_addresses_of_this_machine_are_addresses() -> None:
    found = multiaddrs.interface_addresses("ip4")
    assert "127.0.0.1" in found and all(socket.inet_aton(address) for address in found)


@pytest.mark.net
def test_ports_are_chosen_and_checked() -> None:
    chosen = multiaddrs.claim_ports(["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"])
    assert all(int(multiaddrs.parse(text)[1][1]) for text in chosen)
    assert chosen[1].endswith("/quic-v1")
    with pytest.raises(UserError, match="not an address of this machine"):
        multiaddrs.claim_ports(["/ip4/203.0.113.7/tcp/0"])
    with pytest.raises(UserError, match="listen address"):
        multiaddrs.claim_ports(["/dns4/localhost/tcp/0"])
