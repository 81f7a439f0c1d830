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
from unittest.mock import AsyncMock, Mock

import pytest
from deadlines import within_s
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.adapters import dns, multiaddrs
from p2pdiloco.adapters.dials import StrangersDials
from p2pdiloco.adapters.dns import ips_behind, peers_behind
from p2pdiloco.adapters.hivemind_net import Meeting
from p2pdiloco.adapters.multiaddrs import AddressBook
from p2pdiloco.errors import ConfigError, NobodyReached, UserError
from p2pdiloco.identity import Identity, verify

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


# Several peers behind one name of the DNS, asked of a name server of our own.

PEERS = [Identity.generate().peer_id for _ in range(3)]
ADDRESSES = [f"/ip4/203.0.113.{i}/tcp/31337/p2p/{peer}" for i, peer in enumerate(PEERS, 1)]


def answer(query: bytes, texts: Sequence[str] | None, cut: bool) -> bytes:
    number = query[:2]
    end = query.index(b"\0", 12) + 5
    flags = 0x8180 | (0x0200 if cut else 0) | (3 if texts is None else 0)
    records = b""
    kind = int.from_bytes(query[end - 4 : end - 2], "big")
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


@pytest.mark.net
@pytest.mark.parametrize("cut", [False, True])
def test_all_peers_behind_a_name_are_found(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = {
        "_dnsaddr.boot.example": [f"dnsaddr={ADDRESSES[0]}", "v=spf1 -all", "dnsaddr=/dnsaddr/eu.example"],
        "_dnsaddr.eu.example": [f"dnsaddr={a}" for a in ADDRESSES[1:]] + ["dnsaddr=/dnsaddr/boot.example"],
        "_dnsaddr.bad.example": ["dnsaddr=/ip4/203.0.113.1/tcp/1", "x" * 600],
    }
    with name_server(zone, cut) as server:
        monkeypatch.setattr(dns, "nameservers", lambda: [server])
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
    with name_server({"host.example": ["203.0.113.7"], "many.example": many}) as server:
        monkeypatch.setattr(dns, "nameservers", lambda: [server])
        until_s = time.monotonic() + within_s(20)
        assert ips_behind("dns4", "host.example", until_s) == ["203.0.113.7"]
        assert ips_behind("dns", "host.example", until_s) == 2 * ["203.0.113.7"], "asked for both kinds"
        assert ips_behind("dns6", "no.example", until_s) == ips_behind("dns4", "a..b", until_s) == []
        assert ips_behind("dns4", "many.example", until_s) == many[: dns.MAX_IPS]
        assert ips_behind("dns4", "host.example", time.monotonic() - 1.0) == [], "in time, or not at all"


@pytest.mark.process
def test_no_name_server_and_no_name_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        server = nobody.getsockname()
    monkeypatch.setattr(dns, "nameservers", lambda: [server])
    with pytest.raises(UserError, match="cannot be looked up"):
        peers_behind(["/dnsaddr/boot.example"])
    with pytest.raises(UserError, match="is not a name"):
        peers_behind([f"/dnsaddr/{'x' * 70}.example"])
    with pytest.raises(ConfigError, match="/dnsaddr/NAME"):
        peers_behind(["/dnsaddr/boot.example/tcp/31337"])
    with pytest.raises(ConfigError, match="mistyped peer id"):
        peers_behind(["/dnsaddr/boot.example/p2p/12D3"])


def test_addresses_are_as_they_were() -> None:
    assert peers_behind(ADDRESSES) == tuple(ADDRESSES)


@pytest.mark.parametrize(
    "noise", [b"", b"\xff" * 40, b"\0\0\0\0\0\1" + bytes(6) + b"\x3f", b"\0\0\x81\x82" + bytes(8)]
)
def test_nonsense_and_a_refusal_are_no_answers(noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "_answer", lambda *_: noise)
    with pytest.raises(UserError, match="no sound answer"):
        peers_behind(["/dnsaddr/boot.example"])


@pytest.mark.net
def test_the_answer_to_another_question_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with name_server({"_dnsaddr.boot.example": [f"dnsaddr={ADDRESSES[0]}"]}) as server:
        monkeypatch.setattr(dns, "nameservers", lambda: [server])
        right = dns._HEADER
        wrong = SimpleNamespace(
            pack=lambda number, *rest: right.pack(number ^ 1, *rest), unpack_from=right.unpack_from
        )
        monkeypatch.setattr(dns, "_HEADER", wrong)
        with pytest.raises(UserError, match="no sound answer"):
            peers_behind(["/dnsaddr/boot.example"])


def test_no_more_peers_are_found_than_anybody_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dns,
        "txt_records",
        lambda name, until_s: [
            f"dnsaddr=/ip4/1.2.3.4/tcp/{i}/p2p/{PEERS[len(name) % 3]}" for i in range(1, 99)
        ],
    )
    assert len(peers_behind(["/dnsaddr/a.example", "/dnsaddr/bb.example"])) == dns.MAX_PEERS


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


@pytest.mark.net
def test_an_answer_that_trickles_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "TIMEOUT_S", 0.3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"ab")
        with pytest.raises(TimeoutError):
            dns._exactly(ours, 3, time.monotonic() + 0.3)
        theirs.sendall(b"xyz")
        assert dns._exactly(ours, 3, time.monotonic() + 0.3) == b"xyz"
    with pytest.raises(TimeoutError, match="no answer in time"):
        dns._left_s(time.monotonic() - 1.0)


def test_nobody_is_asked_any_more_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(dns, "_answer", lambda *question: asked.append(question))
    with pytest.raises(dns.NotListed, match="cannot be looked up in time"):
        dns.txt_records("_dnsaddr.boot.example", time.monotonic() - 1.0)
    assert not asked


# The address book is bounded, and who was met stays longer than who was only heard of; whom to reach.


def test_the_book_keeps_whom_we_met_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiaddrs, "MAX_PEERS", 3)
    book = AddressBook()
    book.met("met", ["m"])
    book.heard_of("heard", ["h"])
    book.heard_of("heard", ["h2"])
    book.met("again", ["a"])
    assert book.addresses_of("heard") == ["h2"] and book.addresses_of("nobody") == []
    book.heard_of("too many", ["t"])
    assert book.addresses_of("too many") == []
    book.met("fourth", ["f"])
    assert book.addresses_of("heard") == []
    assert list(book.latest(2)) == [("again", ["a"]), ("fourth", ["f"])]


async def test_peers_that_do_not_answer_yet_are_no_error_to_who_may_be_alone() -> None:
    peer = Identity.generate().peer_id
    attachment, records = Mock(connect=AsyncMock(return_value=None)), Mock(join=AsyncMock(return_value=[]))
    named = [f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"]
    meeting = Meeting("me", named, [], StrangersDials(named), lambda _: True)
    with pytest.raises(NobodyReached, match="none of them answers"):
        await meeting.join_initial(attachment, records)
    await meeting.join_initial(attachment, records, may_be_alone=True)
    assert meeting.connected == {peer}, "it is pinged every few seconds from now on"


def test_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    first = Identity.load_or_create(path)
    again = Identity.load_or_create(path)
    assert first.peer_id == again.peer_id and first.peer_id.startswith("12D3Koo")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays


def test_signature_is_bound_to_peer_and_message() -> None:
    ours, other = Identity.generate(), Identity.generate()
    signature = ours.sign(b"message")
    assert other.verify(ours.peer_id, b"message", signature)
    assert not other.verify(other.peer_id, b"message", signature)
    assert not other.verify(ours.peer_id, b"massage", signature)
    assert not other.verify(ours.peer_id, b"message", signature[:-1])
    assert not other.verify(ours.peer_id + " ", b"message", signature)  # one name per peer


@given(st.text(max_size=100), st.binary(max_size=80))
def test_malformed_is_false_never_an_exception(peer: str, signature: bytes) -> None:
    assert not verify(peer, b"message", signature)


def test_loose_permissions_are_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(UserError, match="0644") as refused:
        Identity.load_or_create(path)
    assert f"chmod 600 {path}" in refused.value.hint


@pytest.mark.parametrize("damage", ["short", "other key", "empty", "folder"])
def test_corrupt_file_is_refused_and_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "identity.key"
    whole = Identity.generate().encoded()
    if damage == "folder":
        path.mkdir(mode=0o700)
    else:
        broken = {"short": whole[:-1], "other key": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}[damage]
        path.write_bytes(broken)
        path.chmod(0o600)
    with pytest.raises(UserError) as refused:
        Identity.load_or_create(path)
    assert str(path) in str(refused.value) and refused.value.hint
    assert path.exists()


def test_a_parent_that_is_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        Identity.load_or_create(tmp_path / "file" / "identity.key")
