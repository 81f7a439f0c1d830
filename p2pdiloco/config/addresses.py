"""Checks of addresses (multiaddrs) that a person gives."""

from __future__ import annotations

import ipaddress
import re

from p2pdiloco.errors import ConfigError

_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")
_PEER_HINT = "copy a whole line that a bootstrap or node printed: /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."


DNSADDR = "/dnsaddr/"


def check_join_address(address: str) -> None:
    """Check a --join address: one of a peer, or /dnsaddr/NAME, which lists several, perhaps with /p2p/ID.

    Raises:
        ConfigError: says which part is wrong.
    """
    if not address.startswith(DNSADDR):
        check_peer_address(address)
        return
    name, found, peer = address.removeprefix(DNSADDR).partition("/p2p/")
    if not re.fullmatch(r"[^/\s]+", name):
        raise ConfigError(f'--join must look like /dnsaddr/NAME or /dnsaddr/NAME/p2p/ID, it is "{address}"')
    if found and not _PEER.fullmatch(peer):
        raise ConfigError(f'--join has a mistyped peer id "{peer}" in "{address}"', _PEER_HINT)


def check_peer_address(address: str) -> None:
    """Check the address of a peer: a multiaddr that ends in /p2p/ID.

    Raises:
        ConfigError: says which part is wrong.
    """
    check_multiaddr(address, "--join")
    head, found, peer = address.rpartition("/p2p/")
    if not found or not head:
        raise ConfigError(f'--join needs the peer\'s id at the end (/p2p/ID), it is "{address}"', _PEER_HINT)
    if not _PEER.fullmatch(peer):
        raise ConfigError(f'--join has a mistyped peer id "{peer}" in "{address}"', _PEER_HINT)


def check_multiaddr(address: str, flag: str) -> None:
    """Check a multiaddr's form: a known host protocol, a valid host, tcp or udp, a port.

    Raises:
        ConfigError: says which part is wrong.
    """
    hint = "" if flag == "--listen" else _PEER_HINT
    parts = address.split("/")
    if len(parts) < 5 or parts[0] or parts[1] not in {"ip4", "ip6", "dns", "dns4", "dns6"}:
        raise ConfigError(f'{flag} must look like /ip4/HOST/tcp/PORT, it is "{address}"', hint)
    kind, host, transport, port = parts[1:5]
    if kind in {"ip4", "ip6"}:
        try:
            right = ipaddress.ip_address(host).version == int(kind[2])
        except ValueError:
            right = False
        if not right:
            raise ConfigError(f'{flag} has no valid {kind} address "{host}" in "{address}"', hint)
    if transport not in {"tcp", "udp"}:
        raise ConfigError(f'{flag} must use tcp or udp, not "{transport}", in "{address}"', hint)
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f'{flag} has no valid port "{port}" in "{address}"', hint)


def peer_in(address: str) -> str:
    """Return the peer id at the end of a checked address."""
    return address.rpartition("/p2p/")[2]


def is_public(address: str) -> bool:
    """Tell whether a multiaddr (checked) is one that the whole Internet can dial, or a name."""
    kind, host = address.split("/")[1:3]
    return not kind.startswith("ip") or ipaddress.ip_address(host).is_global


def is_loopback(address: str) -> bool:
    """Tell whether a multiaddr (checked) is one that only this machine can dial."""
    kind, host = address.split("/")[1:3]
    return kind.startswith("ip") and ipaddress.ip_address(host).is_loopback
