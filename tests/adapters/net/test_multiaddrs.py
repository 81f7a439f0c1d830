from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadlines import within_s
from dns.resolver import Resolver
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.adapters import dns, multiaddrs
from p2pdiloco.adapters.dns import ips_behind, peers_behind
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity

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


def test_addresses_of_ipv6_and_of_vpns_come_before_those_of_the_home() -> None:
    own = {
        "ip4": ["172.17.0.1", "100.101.1.1", "127.0.0.1"],
        "ip6": ["fd00::5", "fd7a:115c:a1e0::5", "2600:1::5"],
    }
    observed = ["/ip6/2600:1::abcd/tcp/1", f"/ip6/2600:9::1/tcp/2/p2p/{PEER}/p2p-circuit"]
    told = multiaddrs.reachable_order(["/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1"], (), observed, PEER, own)
    hosts = [multiaddrs.parse(text)[0][1] for text in told]
    vpn, home = ["100.101.1.1", "fd7a:115c:a1e0::5"], ["172.17.0.1", "fd00::5"]
    assert hosts == ["2600:1::5", *vpn, *home, "2600:9::1", "127.0.0.1"], "p2pd's own choice may pass"


def test_of_ipv6_the_addresses_that_last_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["2600:1::5", "2600:1::77", "2600:1::78", "::1"]
    monkeypatch.setattr(
        multiaddrs, "interface_addresses", lambda family: found if family == "ip6" else ["7.0.0.1"]
    )
    listed = tmp_path / "if_inet6"
    flags = zip(found, ("80", "01", "20", "80"), strict=True)
    lines = (f"{int(ipaddress.ip_address(ip)):032x} 02 40 00 {flag}     eth0\n" for ip, flag in flags)
    listed.write_text("".join(lines))
    monkeypatch.setattr(multiaddrs, "IF_INET6", listed)
    assert multiaddrs.own_addresses() == {"ip4": ["7.0.0.1"], "ip6": found[:1]}
    assert multiaddrs.own_ips() == {*found, "7.0.0.1"}, "all are ours"
    monkeypatch.setattr(multiaddrs, "IF_INET6", tmp_path / "none")
    assert multiaddrs.own_addresses()["ip6"] == found[:3], "a system that does not tell"


def test_interface_addresses_of_this_machine_are_addresses() -> None:
    found = multiaddrs.interface_addresses("ip4")
    assert "127.0.0.1" in found and all(socket.inet_aton(address) for address in found)


@pytest.mark.net
def test_ports_are_chosen_and_checked() -> None:
    chosen = multiaddrs.claim_ports(["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"])
    assert all(int(multiaddrs.parse(text)[1][1]) for text in chosen)
    assert chosen[1].endswith("/quic-v1")
    if socket.has_dualstack_ipv6():
        both = multiaddrs.claim_ports(multiaddrs.of_both_families(["/ip4/0.0.0.0/tcp/0"]))
        assert len({multiaddrs.parse(text)[1] for text in both}) == 1 and len(both) == 2
    with pytest.raises(UserError, match="not an address of this machine"):
        multiaddrs.claim_ports(["/ip4/203.0.113.7/tcp/0"])
    with pytest.raises(UserError, match="listen address"):
        multiaddrs.claim_ports(["/dns4/localhost/tcp/0"])


# Several peers behind one name of the DNS, asked of a name server of our own.

PEERS = [Identity.generate().peer_id for _ in range(3)]
ADDRESSES = [f"/ip4/203.0.113.{i}/tcp/31337/p2p/{peer}" for i, peer in enumerate(PEERS, 1)]


def answer(query: bytes, texts: Sequence[str] | None, cut: bool) -> bytes:
    number = query[:2]
    end = query.index(b"\0", 12) + 5
    flags = 0x8180 | (0x0200 if cut else 0) | (3 if texts is None else 0)
    records = b""
    kind = int.from_bytes(query[end - 4 : end - 2], "big")
    if texts and kind != 16:
        texts = [text for text in texts if (":" in text) == (kind == 28)]
    for text in texts or ():
        pieces = [text.encode()[i : i + 255] for i in range(0, len(text), 255)]
        data = b"".join(bytes((len(piece),)) + piece for piece in pieces)
        if kind != 16:
            data = ipaddress.ip_address(text).packed
        records += b"\xc0\x0c" + struct.pack("!2HIH", kind, 1, 60, len(data)) + data
    count = 0 if cut else len(texts or ())
    return number + struct.pack("!5H", flags, 1, count, 0, 0) + query[12:end] + (b"" if cut else records)


@contextlib.contextmanager
def name_server(zone: Mapping[str, Sequence[str]], cut: bool = False) -> Iterator[tuple[str, int]]:
    """`cut`: by UDP it only says that there is more."""
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(tcp.getsockname())

    def texts_of(query: bytes) -> Sequence[str] | None:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        return zone.get(".".join(labels))

    def by_udp() -> None:
        with contextlib.suppress(OSError):
            while True:
                query, sender = udp.recvfrom(4096)
                if not query:
                    return
                udp.sendto(answer(query, texts_of(query), cut), sender)

    def by_tcp() -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = tcp.accept()
                with stream:
                    query = stream.recv(4096)[2:]
                    if not query:
                        return
                    reply = answer(query, texts_of(query), False)
                    stream.sendall(struct.pack("!H", len(reply)) + reply)

    threads = [threading.Thread(target=target) for target in (by_udp, by_tcp)]
    for thread in threads:
        thread.start()
    try:
        yield tcp.getsockname()
    finally:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", tcp.getsockname())
        socket.create_connection(tcp.getsockname()).close()
        for thread in threads:
            thread.join()
        tcp.close()
        udp.close()


def asking(server: tuple[str, int]) -> Resolver:
    made = Resolver(configure=False)
    made.nameservers, made.port, made.timeout = [server[0]], server[1], 1.0
    return made


@pytest.mark.net
@pytest.mark.parametrize("cut", [False, True])
def test_all_peers_behind_a_name_are_found(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = {
        "_dnsaddr.boot.example": [f"dnsaddr={ADDRESSES[0]}", "v=spf1 -all", "dnsaddr=/dnsaddr/eu.example"],
        "_dnsaddr.eu.example": [f"dnsaddr={a}" for a in ADDRESSES[1:]] + ["dnsaddr=/dnsaddr/boot.example"],
        "_dnsaddr.bad.example": ["dnsaddr=/ip4/203.0.113.1/tcp/1", "x" * 600],
    }
    with name_server(zone, cut) as server:
        monkeypatch.setattr(dns, "resolver", lambda: asking(server))
        assert sorted(peers_behind(["/dnsaddr/boot.example"])) == ADDRESSES
        assert peers_behind([f"/dnsaddr/boot.example/p2p/{PEERS[2]}"]) == (ADDRESSES[2],)
        assert peers_behind([ADDRESSES[0], "/dnsaddr/no.example"]) == (ADDRESSES[0],)
        for name in ("no.example", "bad.example", f"boot.example/p2p/{Identity.generate().peer_id}"):
            with pytest.raises(UserError, match="found behind the name"):
                peers_behind([f"/dnsaddr/{name}"])
        assert peers_behind(["/dnsaddr/no.example"], may_fail=True) == ()


@pytest.mark.net
def test_addresses_behind_a_host_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"203.0.113.{n}" for n in range(20)]
    with name_server({"host.example": ["203.0.113.7", "2001:db8::7"], "many.example": many}) as server:
        monkeypatch.setattr(dns, "resolver", lambda: asking(server))
        until_s = time.monotonic() + within_s(20)
        assert ips_behind("dns4", "host.example", until_s) == ["203.0.113.7"]
        assert ips_behind("dns", "host.example", until_s) == ["203.0.113.7", "2001:db8::7"]
        assert ips_behind("dns6", "no.example", until_s) == ips_behind("dns4", "a..b", until_s) == []
        assert ips_behind("dns4", "many.example", until_s) == many[: dns.MAX_IPS]
        assert ips_behind("dns4", "host.example", time.monotonic() - 1.0) == [], "in time, or not at all"


@pytest.mark.process
def test_no_name_server_and_no_name_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        server = nobody.getsockname()
    monkeypatch.setattr(dns, "resolver", lambda: asking(server))
    with pytest.raises(UserError, match="cannot be looked up"):
        peers_behind(["/dnsaddr/boot.example"])
    with pytest.raises(UserError, match="is not a name"):
        peers_behind([f"/dnsaddr/{'x' * 70}.example"])
    with pytest.raises(ConfigError, match="/dnsaddr/NAME"):
        peers_behind(["/dnsaddr/boot.example/tcp/31337"])
    with pytest.raises(ConfigError, match="mistyped peer id"):
        peers_behind(["/dnsaddr/boot.example/p2p/12D3"])


def test_no_more_peers_are_found_than_anybody_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(name: str, until_s: float) -> list[str]:
        return [f"dnsaddr=/ip4/1.2.3.4/tcp/{i}/p2p/{PEERS[len(name) % 3]}" for i in range(1, 99)]

    monkeypatch.setattr(dns, "txt_records", many)
    assert len(peers_behind(["/dnsaddr/a.example", "/dnsaddr/bb.example"])) == dns.MAX_PEERS
    assert peers_behind(ADDRESSES) == tuple(ADDRESSES), "of which none is a name"


def test_all_names_together_have_a_bound_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer comes late, and names twenty more."""
    now, asked = 0.0, []

    def slowly(name: str, until_s: float) -> list[str]:
        nonlocal now
        if now >= until_s:
            raise dns.NotListed("late")
        asked.append(name)
        now += 1.5
        return [f"dnsaddr=/dnsaddr/{i}.{len(asked)}.example" for i in range(20)]

    monkeypatch.setattr(dns, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(dns, "txt_records", slowly)
    with pytest.raises(UserError):
        peers_behind(["/dnsaddr/a.example", "/dnsaddr/b.example"])
    assert now < dns.WALK_S + 1.5 and len(asked) == 10
