"""Addresses of peers: multiaddrs as text, who is known where, and who answers there.

Only the parts of the format that p2pd speaks are known here. `claim_ports` binds and releases ports;
`AddressBook` remembers peers; `peer_answers` checks that a certain peer answers at a certain address;
`Announcer` and `look_nearby` find peers in the local network by multicast DNS.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import base58
import psutil
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from p2pdiloco.config.values import check_peer_address
from p2pdiloco.errors import ConfigError, UserError, install_hint
from p2pdiloco.identity import public_of, verify
from p2pdiloco.util import BoundedDict, Frozen

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"
MAX_ADDRESSES = 16
HOSTS = {"ip4", "ip6", "dns", "dns4", "dns6"}
_PORTS = {"tcp", "udp"}
_BARE = {"quic", "quic-v1", "ws", "wss", "tls", "webtransport", "p2p-circuit"}
_CODES = {
    4: ("ip4", 4),
    6: ("tcp", 2),
    41: ("ip6", 16),
    53: ("dns", -1),
    54: ("dns4", -1),
    55: ("dns6", -1),
    273: ("udp", 2),
    290: ("p2p-circuit", 0),
    421: ("p2p", -1),
    448: ("tls", 0),
    460: ("quic", 0),
    461: ("quic-v1", 0),
    465: ("webtransport", 0),
    477: ("ws", 0),
    478: ("wss", 0),
}
"""Codes of the binary form: protocol, and bytes of its value; -1: its length stands before it. Source:
https://github.com/multiformats/multicodec/blob/master/table.csv"""
Parts = list[tuple[str, str]]
ANY_IP4, ANY_IP6 = "/ip4/0.0.0.0/", "/ip6/::/"
FAR_AWAY = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses of documentation: nothing is sent there, it is only asked which way it would go."""
SHARED = tuple(map(ipaddress.ip_network, ("100.64.0.0/10", "fd7a:115c:a1e0::/48")))
"""Addresses of networks wider than a home, that are no Internet: of Tailscale, and of providers' own NATs."""
IF_INET6 = Path("/proc/net/if_inet6")
PASSING = 0x29
"""Flags of an IPv6 address that is temporary (1), a duplicate (8) or deprecated (0x20): linux/if_addr.h."""


def parse(text: str) -> Parts:
    """Parse into (protocol, value) pairs; the value of a protocol without one is empty.

    Raises:
        UserError: not a multiaddr that p2pd can use; says which part is wrong.
    """
    words = text.strip().split("/")
    if not text.strip().startswith("/") or len(words) < 2:
        raise _wrong(text, "it must begin with a slash")
    parts: Parts = []
    rest = iter(words[1:] if words[-1] else words[1:-1])
    for protocol in rest:
        if protocol in _BARE:
            parts.append((protocol, ""))
            continue
        if protocol == "ipfs":
            protocol = "p2p"
        if protocol not in HOSTS | _PORTS | {"p2p"}:
            raise _wrong(text, f"'{protocol}' is not a known protocol")
        value = next(rest, "")
        _check(text, protocol, value)
        parts.append((protocol, value))
    if not parts or (parts[0][0] not in HOSTS and parts[0][0] != "p2p"):
        raise _wrong(text, "it must begin with a host, as in /ip4/203.0.113.7")
    return parts


def split_peer(text: str) -> tuple[str, str]:
    """Split into (address without the last peer id, peer id). Raises: UserError (malformed, or no peer
    id)."""
    parts = parse(text)
    if parts[-1][0] != "p2p":
        raise _wrong(text, "the peer id (/p2p/12D3KooW…) is missing at its end")
    return join(parts[:-1]), parts[-1][1]


def join(parts: Iterable[tuple[str, str]]) -> str:
    """Join parsed parts to text."""
    return "".join(f"/{protocol}/{value}" if value else f"/{protocol}" for protocol, value in parts)


def from_bytes(raw: bytes) -> Parts:
    """Parse a binary multiaddr into parts. hivemind's own decoding does not read /p2p/ID as libp2p writes it.

    Raises:
        ValueError: not a multiaddr, or of a kind that is not known here.
    """
    parts: Parts = []
    at = 0
    while at < len(raw):
        code, at = varint(raw, at)
        if code not in _CODES:
            raise ValueError(f"protocol {code} is not known")
        protocol, size = _CODES[code]
        if size < 0:
            size, at = varint(raw, at)
        value, at = raw[at : at + size], at + size
        if len(value) != size:
            raise ValueError("cut short")
        parts.append((protocol, _text(protocol, value)))
    return parts


def _text(protocol: str, value: bytes) -> str:
    if protocol in {"ip4", "ip6"}:
        return str(ipaddress.ip_address(value))
    if protocol in _PORTS:
        return str(int.from_bytes(value, "big"))
    return base58.b58encode(value).decode() if protocol == "p2p" else value.decode("ascii")


def varint(raw: bytes, at: int) -> tuple[int, int]:
    """Read a number as multiaddrs and protobuf write it, of 35 bits at most; returns where it ends, too.

    Raises:
        ValueError: cut short, or longer.
    """
    number = shift = 0
    while at < len(raw) and shift < 35:
        number |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if raw[at - 1] < 0x80:
            return number, at
    raise ValueError("cut short")


def relayed(address: str) -> bool:
    """Tell whether an address leads through another peer."""
    return ("p2p-circuit", "") in parse(address)


def tcp_of(address: str) -> tuple[str, int] | None:
    """Read (IP, port) of a plain TCP address such as /ip4/203.0.113.7/tcp/31337[/p2p/ID]; None for all
    others."""
    return endpoint_of(address) if address.startswith(("/ip4/", "/ip6/")) else None


def endpoint_of(address: str) -> tuple[str, int] | None:
    """Read (IP or host name, port) of a plain TCP address; None for all others."""
    try:
        parts = parse(address)
    except UserError:
        return None
    if parts[-1][0] == "p2p":
        parts = parts[:-1]
    if len(parts) != 2 or parts[0][0] not in HOSTS or parts[1][0] != "tcp":
        return None
    return parts[0][1], int(parts[1][1])


def with_quic(addresses: Iterable[str]) -> list[str]:
    """List these addresses, each of plain TCP after the one of UDP with the same port. By IPv6 nobody needs
    that."""
    found = []
    for text in addresses:
        if endpoint_of(text) is not None and not text.startswith("/ip6/"):
            host, (_, port), *rest = parse(text)
            found.append(join([host, ("udp", port), ("quic-v1", ""), *rest]))
        found.append(text)
    return found


def direct_ips(ends: Iterable[str]) -> tuple[str, ...]:
    """List the IP addresses among the other ends of connections, without those of relays; each once."""
    hosts = [parse(end)[0] for end in ends if not relayed(end)]
    return tuple(dict.fromkeys(value for protocol, value in hosts if protocol in {"ip4", "ip6"}))


def of_both_families(listen: Sequence[str]) -> Sequence[str]:
    """Add ::, with the same port, to each 0.0.0.0, where this machine can do IPv6 and no IPv6 address is
    named."""
    if not socket.has_dualstack_ipv6() or any(text.startswith("/ip6/") for text in listen):
        return listen
    return [*listen, *(text.replace(ANY_IP4, ANY_IP6) for text in listen if text.startswith(ANY_IP4))]


def claim_ports(listen: Sequence[str]) -> list[str]:
    """Claim ports: the listen addresses with every port 0 replaced by a free one, the same one for 0.0.0.0
    and :: if these are all, and every other one found free.

    p2pd binds with SO_REUSEPORT: a second one on the same port would start without a word and take half of
    the first one's connections. Binding here without that option tells.

    Raises:
        UserError: malformed, port in use, not allowed, or not an address of this machine.
    """
    if list(listen) == [f"{ANY_IP4}tcp/0", f"{ANY_IP6}tcp/0"]:
        with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as probe:
            listen = [f"{text[:-1]}{probe.getsockname()[1]}" for text in listen]
    claimed: list[str] = []
    probes: list[socket.socket] = []
    try:
        for text in listen:
            parts = parse(text)
            if parts[0][0] not in {"ip4", "ip6"} or len(parts) < 2 or parts[1][0] not in _PORTS:
                raise _wrong(
                    text, "a listen address is an IP address and a port, as in /ip4/0.0.0.0/tcp/31337"
                )
            probe, port = _bind(text, parts)
            probes.append(probe)
            claimed.append(join([parts[0], (parts[1][0], str(port)), *parts[2:]]))
    finally:
        for probe in probes:
            probe.close()
    return claimed


def reachable_order(
    listen: Sequence[str],
    announce: Sequence[str],
    observed: Sequence[str],
    peer_id: str,
    own: Mapping[str, Sequence[str]],
) -> list[str]:
    """Order the addresses to tell others, most reachable first: announced, public, of a VPN, private,
    relayed, loopback.

    `listen` may hold 0.0.0.0 or ::, which become the interfaces' addresses (`own`, by family). `observed` is
    what libp2p believes of itself (relays, mapped ports): of its IPv6 addresses relays only, since others of
    the machine's may be about to pass. At most 16 are returned, each with /p2p/ID.
    """
    expanded: list[str] = []
    for text in [*listen, *(text for text in observed if text[:5] != "/ip6/" or relayed(text))]:
        host = parse(text)[0]
        if host[0] in {"ip4", "ip6"} and ipaddress.ip_address(host[1]).is_unspecified:
            rest = parse(text)[1:]
            expanded += [join([(host[0], ip), *rest]) for ip in own.get(host[0], ())]
        else:
            expanded.append(text)
    ordered = [*announce, *sorted(expanded, key=_distance)]
    with_peer = (text if text.endswith(f"/p2p/{peer_id}") else f"{text}/p2p/{peer_id}" for text in ordered)
    return list(dict.fromkeys(with_peer))[:MAX_ADDRESSES]


def interface_addresses(family: str) -> list[str]:
    """List this machine's IP addresses of family "ip4" or "ip6", of interfaces that are up."""
    wanted = socket.AF_INET if family == "ip4" else socket.AF_INET6
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address means nothing without its interface: psutil marks it with %.
        found += [a.address for a in addresses if name in up and a.family == wanted and "%" not in a.address]
    return found


def behind_router(listen: Iterable[str], own: Sequence[str]) -> bool:
    """Tell whether these addresses are reached from outside through a router only, which one can ask. `own`:
    of IPv4, of this machine. One that is named is asked for where it leads out: one of a VPN does not."""
    named = {place[0] for place in map(tcp_of, listen) if place and ":" not in place[0]}
    found = map(ipaddress.IPv4Address, own if "0.0.0.0" in named else named & {way_out(socket.AF_INET)})
    inside = [ip for ip in found if not (ip.is_loopback or ip.is_link_local or is_shared(ip))]
    return bool(inside) and not any(ip.is_global for ip in inside)


def way_out(family: socket.AddressFamily) -> str:
    """Find this machine's IP address on the way to the Internet; empty: there is no way. Nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(FAR_AWAY[family])
        return str(asked.getsockname()[0])
    return ""


def is_shared(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Tell whether an address is of a network such as Tailscale's (`SHARED`)."""
    return any(ip in block for block in SHARED)


def own_ips() -> set[str]:
    """List all IP addresses of this machine. It waits for the operating system."""
    return {*interface_addresses("ip4"), *interface_addresses("ip6")}


def own_addresses() -> dict[str, list[str]]:
    """List this machine's IP addresses that others may be told, by family: of IPv6 those that last, where
    the system tells, and not the loopback's. It waits for the operating system."""
    passing = {"::1"}
    with suppress(OSError):
        found = re.findall(r"(\w{32}) \w+ \w+ \w+ (\w+)", IF_INET6.read_text())
        passing |= {
            str(ipaddress.IPv6Address(int(ip, 16))) for ip, flags in found if int(flags, 16) & PASSING
        }
    own = {family: interface_addresses(family) for family in ("ip4", "ip6")}
    return own | {"ip6": [ip for ip in own["ip6"] if ip not in passing]}


def _distance(text: str) -> int:
    parts = parse(text)
    protocol, host = parts[0]
    if ("p2p-circuit", "") in parts:
        return 3
    if protocol not in {"ip4", "ip6"}:
        return 0
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return 5
    if address.is_link_local:
        return 4
    return 0 if address.is_global else 1 if is_shared(address) else 2


def _bind(text: str, parts: Parts) -> tuple[socket.socket, int]:
    (family, host), (protocol, port) = parts[:2]
    probe = socket.socket(
        socket.AF_INET if family == "ip4" else socket.AF_INET6,
        socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM,
    )
    try:
        if protocol == "tcp":  # connections in TIME_WAIT are no obstacle; a listening socket still is
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == "ip6":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((host, int(port)))
        if protocol == "tcp":
            probe.listen(1)
        return probe, probe.getsockname()[1]
    except OSError as error:
        probe.close()
        raise _cannot_listen(text, port, host, error) from error


def _cannot_listen(text: str, port: str, host: str, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"Port {port} of {host} is in use by another program.",
            "Stop that program, or choose another port with --listen; port 0 picks a free one.",
        )
    if error.errno == errno.EACCES:
        return UserError(f"Port {port} may not be used by this user.", "Use a port above 1023.")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(
            f"{host} is not an address of this machine.",
            "Listen on 0.0.0.0, and name a public address with the announce option.",
        )
    return UserError(f"Cannot listen on {text}: {error.strerror}.", "Try another address or port.")


class PortInUse(UserError):
    """Error: a port to listen on is taken."""


def _check(text: str, protocol: str, value: str) -> None:
    if protocol in {"ip4", "ip6"}:
        kind = ipaddress.IPv4Address if protocol == "ip4" else ipaddress.IPv6Address
        try:
            kind(value)
        except ValueError:
            raise _wrong(text, f"'{value}' is not an {protocol} address") from None
    elif protocol in _PORTS:
        if not (value.isascii() and value.isdigit() and len(value) <= 5 and int(value) <= 65535):
            raise _wrong(text, f"'{value}' is not a port")
    elif protocol == "p2p":
        if not _plausible_peer(value):
            raise _wrong(text, f"'{value}' is not a peer id")
    elif not value:
        raise _wrong(text, f"'{protocol}' needs a host name")


def _plausible_peer(value: str) -> bool:
    """Tell whether the text is any libp2p peer id: an Ed25519 key itself, or the SHA-256 of another kind of
    key."""
    if not 40 <= len(value) <= 80:
        return False
    try:
        raw = base58.b58decode(value.encode("ascii"))
    except ValueError:
        return False
    return (raw[:2] == b"\x00\x24" and len(raw) == 38) or (raw[:2] == b"\x12\x20" and len(raw) == 34)


def _wrong(text: str, reason: str) -> UserError:
    return UserError(f"'{text}' is not a usable address: {reason}.", f"An address looks like {EXAMPLE}")


MAX_PEERS = 4096


class AddressBook:
    """Addresses that can be dialled, by peer, the one met last at the end.

    The peers are those that we were connected to, and those that we only heard of. The book is bounded; peers
    that we only heard of go first. Nobody is dialled for being in here.
    """

    def __init__(self) -> None:
        self._addresses: BoundedDict[str, list[str]] = BoundedDict(MAX_PEERS)

    def met(self, peer: str, addresses: Sequence[str]) -> None:
        """Keep the addresses at which a peer was reached."""
        self._addresses[peer] = list(addresses)

    def heard_of(self, peer: str, addresses: Sequence[str]) -> None:
        """Keep addresses at which a peer may be reached. Without effect for a new peer when the book is
        full."""
        if peer in self._addresses:
            self._addresses[peer][:] = addresses
        elif len(self._addresses) < MAX_PEERS:
            self._addresses[peer] = list(addresses)
            self._addresses.move_to_end(peer, last=False)

    def addresses_of(self, peer: str) -> list[str]:
        """Addresses that are known of a peer; empty if none are."""
        return list(self._addresses.get(peer, ()))

    def latest(self, peers: int) -> Iterator[tuple[str, list[str]]]:
        """Peers met last, oldest of them first."""
        yield from list(self._addresses.items())[-peers:]


MULTISTREAM, NOISE = b"\x13/multistream/1.0.0\n", b"\x07/noise\n"
NOISE_PROTOCOL = b"Noise_XX_25519_ChaChaPoly_SHA256"
SIGNED_PREFIX = b"noise-libp2p-static-key:"
KEY_BYTES, TAG_BYTES = 32, 16
MAX_PAYLOAD_BYTES = 4096


async def peer_answers(peer: str, ip: str, port: int, timeout_s: float) -> bool:
    """Tell whether that peer, and nobody else, answers there. Never raises for what the other side does.

    A TCP connection of our own is made beside those of p2pd. libp2p's handshake goes on it as far as the
    peer's proof of its identity. p2pd reuses an open connection to a peer, so it cannot tell whether a new
    one could be made. An open port alone proves nothing: behind one NAT it may be forwarded to another node.
    So the first two messages of Noise XX are exchanged: in the second the peer signs the key of this
    handshake with that of its peer id. Then the connection is closed; nothing is sent that the peer had to
    store.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(ip, port, limit=MAX_PAYLOAD_BYTES)
            return await _proves(peer, reader, writer)
    except (OSError, TimeoutError, EOFError, InvalidTag, ValueError):
        return False  # nobody there, somebody else, or no libp2p
    finally:
        if writer is not None:
            with suppress(OSError):
                writer.transport.abort()


async def _proves(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    noise = Initiator()
    writer.write(MULTISTREAM + NOISE)
    for expected in (MULTISTREAM, NOISE):
        if await reader.readexactly(len(expected)) != expected:
            return False
    first = noise.first()
    writer.write(len(first).to_bytes(2, "big") + first)
    size = int.from_bytes(await reader.readexactly(2), "big")
    if size > MAX_PAYLOAD_BYTES:
        return False
    static, payload = noise.second(await reader.readexactly(size))
    return verify(peer, SIGNED_PREFIX + static, _field(payload, 2))


class Initiator:
    """Noise XX from the side of whoever dialled, the first two of its three messages.

    Why by ourselves: p2pd has no call for it, and no kept library does it without much else. py-libp2p brings
    trio and a networking stack of its own; noiseprotocol has had no release for years, and does not know what
    libp2p puts into the handshake. The arithmetic is `cryptography`'s; what is here is the order of one
    handshake, tested against p2pd. Sources: https://github.com/libp2p/specs/tree/master/noise,
    https://noiseprotocol.org/noise.html
    """

    def __init__(self) -> None:
        self._chaining = self._hash = NOISE_PROTOCOL  # exactly as long as a hash
        self._key = bytes(KEY_BYTES)
        self._count = 0
        self._ephemeral = X25519PrivateKey.generate()
        self._mix_hash(b"")  # no prologue

    def first(self) -> bytes:
        """Write message 1: our ephemeral key, and an empty payload in the clear."""
        key = self._ephemeral.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._mix_hash(key)
        self._mix_hash(b"")
        return key

    def second(self, message: bytes) -> tuple[bytes, bytes]:
        """Read message 2: (the other side's static key, its payload). Raises: InvalidTag, ValueError (no
        answer to our first message)."""
        sealed = KEY_BYTES + KEY_BYTES + TAG_BYTES
        if len(message) < sealed + TAG_BYTES:
            raise ValueError("too short")
        ephemeral = message[:KEY_BYTES]
        self._mix_hash(ephemeral)
        self._mix_key(ephemeral)
        static = self._open(message[KEY_BYTES:sealed])
        self._mix_key(static)
        return static, self._open(message[sealed:])

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_key(self, theirs: bytes) -> None:
        shared = self._ephemeral.exchange(X25519PublicKey.from_public_bytes(theirs))
        secret = hmac.digest(self._chaining, shared, "sha256")
        self._chaining = hmac.digest(secret, b"\x01", "sha256")
        self._key = hmac.digest(secret, self._chaining + b"\x02", "sha256")
        self._count = 0

    def _open(self, sealed: bytes) -> bytes:
        nonce = bytes(4) + self._count.to_bytes(8, "little")
        plain = ChaCha20Poly1305(self._key).decrypt(nonce, sealed, self._hash)
        self._count += 1
        self._mix_hash(sealed)
        return plain


def _field(message: bytes, wanted: int) -> bytes:
    """Find the bytes of a length-delimited protobuf field; those of the payload are all of that kind.

    Raises:
        ValueError: not such a message, or the field is missing.
    """
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        size, at = varint(message, at)
        if tag & 7 != 2 or at + size > len(message):
            raise ValueError("not a payload")
        if tag >> 3 == wanted:
            return message[at : at + size]
        at += size
    raise ValueError("no signature")


LAN_SERVICE = "_p2pdiloco._tcp.local."
LAN_RUN_DIGITS = 12
MAX_FOUND = 32
MAX_RUNS = 8
MAX_LAN_ADDRESSES = 4
LOOK_S = 3.0
SETTLE_S = 0.5
"""Time for which others may still answer after the first."""
ANSWER_MS = 1000
_RUN = re.compile(r"[0-9a-f]{12}")


class Nearby(Frozen):
    """Node or bootstrap of this network, as it says."""

    peer: str
    addresses: tuple[str, ...]
    """Multiaddrs with /p2p/ID."""
    runs: tuple[str, ...]
    """First digits of the ids of its runs."""


def check_lan() -> None:
    """Check that the library is here. Raises: UserError."""
    try:
        import zeroconf  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            "--lan needs the package zeroconf, which is not installed here", install_hint("lan")
        ) from error


class Announcer:
    """Announcer of one peer in the local network, on the event loop.

    Nodes and bootstraps announce themselves by multicast DNS, others look. Service `_p2pdiloco._tcp`, text
    records `id` (peer id) and `runs` (first digits of run ids). What is heard is anybody's claim: a place to
    dial, no more. Needs the extra `lan` (zeroconf).
    """

    def __init__(self, peer: str, addresses: Sequence[str]) -> None:
        """`addresses`: under which the peer is reached, with /p2p/ID."""
        self._peer = peer
        self._hosts, self._port = _hosts_of(addresses)
        self._zeroconf: AsyncZeroconf | None = None
        self._runs: tuple[str, ...] | None = None

    async def announce(self, runs: Sequence[str]) -> None:
        """Announce these runs (ids); without effect if they are announced.

        Raises: OSError, zeroconf.Error.
        """
        wanted = tuple(run[:LAN_RUN_DIGITS] for run in runs[:MAX_RUNS])
        if wanted == self._runs or not self._hosts:
            return
        from zeroconf import InterfaceChoice
        from zeroconf.asyncio import AsyncZeroconf

        info = self._info(wanted)
        if self._zeroconf is None:
            local = all(ipaddress.ip_address(host).is_loopback for host in self._hosts)
            self._zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"] if local else InterfaceChoice.All)
            said = await self._zeroconf.async_register_service(info)
        else:
            said = await self._zeroconf.async_update_service(info)
        await said  # a repetition of the first would come after the second
        self._runs = wanted

    def _info(self, runs: Sequence[str]) -> ServiceInfo:
        from zeroconf import ServiceInfo

        return ServiceInfo(
            LAN_SERVICE,
            f"{self._peer}.{LAN_SERVICE}",
            parsed_addresses=list(self._hosts),
            port=self._port,
            properties={"id": self._peer, "runs": ",".join(runs)},
            server=f"{self._peer}.local.",
        )

    async def close(self) -> None:
        """Say good-bye, if anything was said."""
        if self._zeroconf is not None:
            await self._zeroconf.async_close()
            self._zeroconf = None


def _hosts_of(addresses: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Hosts of this network, all of one port. None of the loopback beside others."""
    found: list[tuple[str, int]] = []
    for address in addresses:
        kind, host, transport, port = address.split("/")[1:5]
        if kind in ("ip4", "ip6") and transport == "tcp" and "/p2p-circuit" not in address:
            found.append((host, int(port)))
    near = [(host, port) for host, port in found if ipaddress.ip_address(host).is_private]
    others = [(host, port) for host, port in near if not ipaddress.ip_address(host).is_loopback]
    chosen = others or near
    first = chosen[0][1] if chosen else 0
    return tuple(host for host, its in chosen if its == first)[:MAX_LAN_ADDRESSES], first


class _Heard:
    """Listener of a look: the first `MAX_FOUND` names."""

    def __init__(self) -> None:
        self.found: dict[str, Nearby] = {}
        self.any = threading.Event()

    def add_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
        if len(self.found) < MAX_FOUND:
            self._take_in(zeroconf, kind, name)

    def _take_in(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
        info = zeroconf.get_service_info(kind, name, ANSWER_MS)
        peer = nearby_of(info) if info is not None else None
        if peer is not None and name.startswith(f"{peer.peer}."):  # nobody speaks for another
            self.found[peer.peer] = peer
            self.any.set()

    def update_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
        if name.partition(".")[0] in self.found:
            self._take_in(zeroconf, kind, name)

    def remove_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
        """Good-byes do not matter: dialling finds out."""


def nearby_of(info: Any) -> Nearby | None:
    """Read what somebody announces; None: it is not sound."""
    try:
        peer = (info.properties.get(b"id") or b"").decode("ascii")
        words = (info.properties.get(b"runs") or b"").decode("ascii").split(",")
        if public_of(peer) is None or not info.port:
            return None
        addresses = []
        for text in info.parsed_addresses()[:MAX_LAN_ADDRESSES]:
            host = ipaddress.ip_address(text)
            if not (host.version == 6 and host.is_link_local):  # of no use without a scope
                address = f"/ip{host.version}/{host}/tcp/{info.port}/p2p/{peer}"
                check_peer_address(address)
                addresses.append(address)
    except (ValueError, ConfigError):
        return None
    runs = tuple(word for word in words[:MAX_RUNS] if _RUN.fullmatch(word))
    return Nearby(peer, tuple(addresses), runs) if addresses else None


def look_nearby(seconds: float = LOOK_S) -> list[Nearby]:
    """Look for nodes and bootstraps in this network, for so long at most; not on an event loop.

    Raises: UserError (the library is not here, or this network has no multicast).
    """
    check_lan()
    from zeroconf import InterfaceChoice, ServiceBrowser, Zeroconf

    heard = _Heard()
    try:
        zeroconf = Zeroconf(interfaces=InterfaceChoice.All)
    except OSError as error:
        raise UserError(f"this network cannot be looked through: {error}", "name a peer: --join") from error
    try:
        ServiceBrowser(zeroconf, LAN_SERVICE, heard)  # type: ignore[arg-type]
        if heard.any.wait(seconds):
            threading.Event().wait(min(SETTLE_S, seconds))
    finally:
        zeroconf.close()
    return list(heard.found.values())[:MAX_FOUND]
