"""Multiaddrs as text: what a person typed, ports to claim, the order in which others are told.

Only the parts of the format that p2pd speaks are known here. Pure functions except `claim_ports`
(binds and releases) and `interface_addresses` (asks the operating system).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence

import base58
import psutil

from p2pdiloco.errors import UserError

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"
MAX_ADDRESSES = 16
_HOSTS = {"ip4", "ip6", "dns", "dns4", "dns6"}
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
        if protocol not in _HOSTS | _PORTS | {"p2p"}:
            raise _wrong(text, f"'{protocol}' is not a known protocol")
        value = next(rest, "")
        _check(text, protocol, value)
        parts.append((protocol, value))
    if not parts or (parts[0][0] not in _HOSTS and parts[0][0] != "p2p"):
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
    if len(parts) != 2 or parts[0][0] not in _HOSTS or parts[1][0] != "tcp":
        return None
    return parts[0][1], int(parts[1][1])


def direct_ips(ends: Iterable[str]) -> tuple[str, ...]:
    """List the IP addresses among the other ends of connections, without those of relays; each once."""
    hosts = [parse(end)[0] for end in ends if not relayed(end)]
    return tuple(dict.fromkeys(value for protocol, value in hosts if protocol in {"ip4", "ip6"}))


def claim_ports(listen: Sequence[str]) -> list[str]:
    """Claim ports: the listen addresses with every port 0 replaced by a free one, and every other one found
    free.

    p2pd binds with SO_REUSEPORT: a second one on the same port would start without a word and take half of
    the first one's connections. Binding here without that option tells.

    Raises:
        UserError: malformed, port in use, not allowed, or not an address of this machine.
    """
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
    """Order the addresses to tell others, most reachable first: announced, public, private, relayed,
    loopback.

    `listen` may hold 0.0.0.0 or ::, which become the interfaces' addresses (`own`, by family). `observed` is
    what libp2p believes of itself (relays, mapped ports). At most 16 are returned, each with /p2p/ID.
    """
    expanded: list[str] = []
    for text in [*listen, *observed]:
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


def own_addresses() -> dict[str, list[str]]:
    """List this machine's IP addresses by family. It waits for the operating system."""
    return {family: interface_addresses(family) for family in ("ip4", "ip6")}


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
    return 0 if address.is_global else 1


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
