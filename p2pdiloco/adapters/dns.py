"""Names of the DNS behind which several peers are: /dnsaddr/NAME, listed in TXT records of _dnsaddr.NAME.

This is the one place where names are looked up. The hosts of /dns4, /dns6 and /dns p2pd looks up itself where
a person or a member names them, and dials every address that they have; a stranger's are looked up here
(`ips_behind`). Formats: RFC 1035, and
https://github.com/multiformats/multiaddr/blob/master/protocols/DNSADDR.md
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from p2pdiloco.config.values import DNSADDR, check_join_address, check_peer_address
from p2pdiloco.errors import ConfigError, UserError

logger = logging.getLogger(__name__)
RESOLV_CONF = Path("/etc/resolv.conf")
PORT = 53
TIMEOUT_S = 2.0
ROUNDS = 2
WALK_S = 15.0
"""Time for all names that are looked up at one start, those behind names included: whoever owns a name could
let us follow slow ones for hours."""
MAX_SERVERS = 3
MAX_PEERS = 32
MAX_DEPTH = 3
"""Names that lead to names: so many in a row are followed."""
MAX_RECORDS = 128
_A, _TXT, _AAAA, _OPT, _IN = 1, 16, 28, 41, 1
MAX_IPS = 8
_HEADER = struct.Struct("!6H")
_RECORD = struct.Struct("!2HIH")
_TRUNCATED, _NO_SUCH_NAME = 0x0200, 3
_UDP_BYTES = 1232


def peers_behind(addresses: Sequence[str], may_fail: bool = False) -> tuple[str, ...]:
    """Check the addresses of peers to join through, and put in place of each name what is listed behind it.

    `may_fail`: where nothing is found behind names, it is logged, and what is left is returned.

    Raises:
        ConfigError: an address is malformed.
        UserError: nothing is found behind the names, and no other address is given.
    """
    found = []
    faults = []
    until_s = time.monotonic() + WALK_S
    for address in addresses:
        check_join_address(address)
        try:
            found += _listed(address, 0, until_s) if address.startswith(DNSADDR) else [address]
        except NotListed as error:
            faults.append(str(error))
    if faults and not found and not may_fail:
        hint = f"ask whoever gave you the name, or join by an address; it needs TXT records: {EXAMPLE}"
        raise UserError("; ".join(faults), hint)
    for fault in faults:
        logger.warning("%s", fault)
    return tuple(dict.fromkeys(found))[: max(MAX_PEERS, len(addresses))]


EXAMPLE = '_dnsaddr.NAME "dnsaddr=/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."'


class NotListed(Exception):
    """Error: nothing usable is found behind a name."""


def _listed(address: str, depth: int, until_s: float) -> list[str]:
    """List the addresses behind /dnsaddr/NAME, or /dnsaddr/NAME/p2p/ID: of this peer. Raises: NotListed."""
    name, _, peer = address.removeprefix(DNSADDR).partition("/p2p/")
    texts = [
        text.removeprefix("dnsaddr=")
        for text in txt_records(f"_dnsaddr.{name}", until_s)
        if "dnsaddr=" in text[:8]
    ]
    found = []
    for text in texts[:MAX_PEERS]:
        try:
            if text.startswith(DNSADDR):
                check_join_address(text)
                if depth + 1 < MAX_DEPTH:
                    with suppress(NotListed):  # another one may lead somewhere
                        found += _listed(text, depth + 1, until_s)
                continue
            check_peer_address(text)
        except ConfigError as error:
            logger.warning("what %s lists is passed over: %s", name, error)
            continue
        found.append(text)
    found = [text for text in found if not peer or text.endswith(f"/p2p/{peer}")]
    if not found:
        what = f"peer {peer}" if peer else "peers"
        raise NotListed(
            f"no {what} found behind the name {name}: its TXT records of _dnsaddr.{name} list none"
        )
    return found


def nameservers() -> list[tuple[str, int]]:
    """List the name servers of this machine."""
    try:
        lines = RESOLV_CONF.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    words = [line.split() for line in lines]
    found = [word[1] for word in words if len(word) > 1 and word[0] == "nameserver"]
    return [(host, PORT) for host in found[:MAX_SERVERS] or ["127.0.0.1"]]


def txt_records(name: str, until_s: float) -> list[str]:
    """Get the TXT records of a name. Raises: NotListed."""
    return [_joined(data) for data in _records(name, _TXT, until_s)]


def ips_behind(protocol: str, name: str, until_s: float) -> list[str]:
    """Get the first IP addresses of a host that a multiaddr names by dns, dns4 or dns6; empty if there are
    none."""
    found = []
    for kind in {"dns4": (_A,), "dns6": (_AAAA,)}.get(protocol, (_A, _AAAA)):
        with suppress(NotListed, ValueError):
            found += [str(ipaddress.ip_address(data)) for data in _records(name, kind, until_s)]
    return found[:MAX_IPS]


def _records(name: str, kind: int, until_s: float) -> list[bytes]:
    """Ask this machine's name servers for a name's records of a kind, until a time of the monotonic clock.

    Raises: NotListed (none of them answers, or it is no name).
    """
    try:
        asked = b"".join(bytes((len(label),)) + label for label in map(_label, name.rstrip(".").split(".")))
    except ValueError as error:
        raise NotListed(f"{name} is not a name of the DNS") from error
    why = "there is no name server"
    for _ in range(ROUNDS):
        for server in nameservers():
            if time.monotonic() >= until_s:
                raise NotListed(f"the name {name} cannot be looked up in time: {why}")
            try:
                answer = _answer(server, asked + b"\0" + struct.pack("!2H", kind, _IN), until_s)
                return _data_of(answer, kind)
            except OSError as error:
                why = f"{server[0]}: {error.strerror or error}"
            except (ValueError, IndexError, struct.error):
                why = f"{server[0]} gives no sound answer"
    raise NotListed(f"the name {name} cannot be looked up: {why}")


def _label(text: str) -> bytes:
    label = text.encode("idna")
    if not 1 <= len(label) <= 63:
        raise ValueError("empty or too long")
    return label


def _answer(server: tuple[str, int], question: bytes, until_s: float) -> bytes:
    """Ask a server, by TCP if the answer is too long for UDP. Raises: OSError, ValueError."""
    number = secrets.randbits(16)
    more = b"\0" + struct.pack("!2HIH", _OPT, _UDP_BYTES, 0, 0)
    query = _HEADER.pack(number, 0x0100, 1, 0, 0, 1) + question + more
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(_left_s(until_s))
        udp.connect(server)
        udp.send(query)
        answer = udp.recv(1 << 16)
    if struct.unpack_from("!H", answer, 2)[0] & _TRUNCATED:
        until_s = min(until_s, time.monotonic() + TIMEOUT_S)  # for all of it, however it trickles in
        with socket.create_connection(server, _left_s(until_s)) as tcp:
            tcp.sendall(struct.pack("!H", len(query)) + query)
            answer = _exactly(tcp, struct.unpack("!H", _exactly(tcp, 2, until_s))[0], until_s)
    if struct.unpack_from("!H", answer)[0] != number:
        raise ValueError("another question's")
    return answer


def _left_s(until_s: float) -> float:
    """Compute for how long to wait for a server. Raises: TimeoutError."""
    left_s = min(TIMEOUT_S, until_s - time.monotonic())
    if left_s <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
    return left_s


def _exactly(tcp: socket.socket, size: int, until_s: float) -> bytes:
    """Receive so many bytes. Raises: OSError, ValueError (there are fewer)."""
    found = b""
    while len(found) < size:
        tcp.settimeout(_left_s(until_s))
        more = tcp.recv(size - len(found))
        if not more:
            raise ValueError("cut")
        found += more
    return found


def _data_of(answer: bytes, wanted: int) -> list[bytes]:
    """Read the records of a kind. Raises: ValueError, IndexError, struct.error (malformed)."""
    _, flags, questions, answers, _, _ = _HEADER.unpack_from(answer)
    if flags & 0xF == _NO_SUCH_NAME:
        return []
    if flags & 0xF:
        raise ValueError("refused")
    at = _HEADER.size
    for _ in range(questions):
        at = _after_name(answer, at) + 4
    found = []
    for _ in range(min(answers, MAX_RECORDS)):
        at = _after_name(answer, at)
        kind, _, _, size = _RECORD.unpack_from(answer, at)
        at += _RECORD.size
        if kind == wanted:
            found.append(answer[at : at + size])
        at += size
    return found


def _joined(data: bytes) -> str:
    """Join the pieces of one record, of at most 255 bytes each."""
    pieces, at = [], 0
    while at < len(data):
        pieces.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return b"".join(pieces).decode("ascii", "replace")


def _after_name(answer: bytes, at: int) -> int:
    while answer[at]:
        if answer[at] >= 0xC0:
            return at + 2
        at += 1 + answer[at]
    return at + 1
