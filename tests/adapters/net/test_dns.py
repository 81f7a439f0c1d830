"""Several peers behind one name of the DNS, asked of a name server of our own."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest

from p2pdiloco.adapters import dns
from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity

PEERS = [Identity.generate().peer_id for _ in range(3)]
ADDRESSES = [f"/ip4/203.0.113.{i}/tcp/31337/p2p/{peer}" for i, peer in enumerate(PEERS, 1)]


def answer(query: bytes, texts: Sequence[str] | None, cut: bool) -> bytes:
    number = query[:2]
    end = query.index(b"\0", 12) + 5
    flags = 0x8180 | (0x0200 if cut else 0) | (3 if texts is None else 0)
    records = b""
    for text in texts or ():
        pieces = [text.encode()[i : i + 255] for i in range(0, len(text), 255)]
        data = b"".join(bytes((len(piece),)) + piece for piece in pieces)
        records += b"\xc0\x0c" + struct.pack("!2HIH", 16, 1, 60, len(data)) + data
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
