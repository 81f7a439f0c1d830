"""Checks of addresses before anybody dials: names, and IPv6 where there is none."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.dns import peers_behind
from p2pdiloco.cli.doctor.findings import Diagnosis, bad, good, skipped, warning
from p2pdiloco.config.values import DNSADDR, peer_in
from p2pdiloco.daemon.display.snapshot import counted
from p2pdiloco.errors import UserError

NAME_S = 5.0
FAR = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses of documentation: nothing is sent there, it is only asked which way it would go."""
CHECK = "addresses"


def has_way(family: socket.AddressFamily) -> bool:
    """Tell whether this machine has a way to the world of IPv4 or of IPv6. Nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(FAR[family])
            return not ipaddress.ip_address(asked.getsockname()[0].partition("%")[0]).is_link_local
    except OSError:
        return False


async def check_addresses(join: Sequence[str]) -> tuple[list[Diagnosis], tuple[str, ...]]:
    """Check the addresses to join through; returns findings, and the addresses behind the names."""
    found: list[Diagnosis] = []
    ways = [name for family, name in WAYS.items() if has_way(family)]
    if ways:
        found.append(good("network", f"this machine has a way out by {' and '.join(ways)}"))
    else:
        todo = "connect this machine; on a network without a way out, peers of that network can be joined"
        found.append(warning("network", "this machine has no way out", todo))
    addresses: list[str] = []
    for address in join:
        try:
            behind = await asyncio.to_thread(peers_behind, [address])
        except UserError as error:
            found.append(bad(CHECK, str(error), error.hint))
            continue
        if address.startswith(DNSADDR):
            found.append(good(CHECK, f"{address} leads to {counted(len(set(map(peer_in, behind))), 'peer')}"))
        addresses += behind
    for address in dict.fromkeys(addresses):
        found += await _check_one(address, ways)
    return found, tuple(dict.fromkeys(addresses))


WAYS = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
KINDS = {"dns4": ("IPv4",), "dns6": ("IPv6",), "dns": ("IPv4", "IPv6")}


async def _check_one(address: str, ways: Sequence[str]) -> list[Diagnosis]:
    kind, host = multiaddrs.parse(address)[0]
    if kind in ("ip4", "ip6"):
        wanted = "IPv4" if kind == "ip4" else "IPv6"
        ip = ipaddress.ip_address(host)
        if wanted not in ways and ip.is_global:
            return [bad(CHECK, f"{host} is an {wanted} address, and this machine has no {wanted}", NO_WAY)]
        return []
    if kind not in KINDS:
        return []
    try:
        async with asyncio.timeout(NAME_S):
            infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        return [
            bad(CHECK, f"no name server answers for {host}", "look at /etc/resolv.conf, or use an IP address")
        ]
    except OSError as error:
        return [bad(CHECK, f"the name {host} leads nowhere: {error.strerror or error}", SPELLING)]
    return [_judge(address, kind, host, [str(info[4][0]) for info in infos], ways)]


NO_WAY = "ask for an address of the other kind, or a name that has both"
SPELLING = "check its spelling, or use an IP address"


def _judge(address: str, kind: str, host: str, ips: Sequence[str], ways: Sequence[str]) -> Diagnosis:
    """Judge what a name leads to."""
    known = {"IPv6" if ":" in ip else "IPv4" for ip in ips}
    usable = known.intersection(KINDS[kind])
    if not usable:
        only = " and ".join(sorted(known)) or "no"
        todo = f"write /dns/ instead of /{kind}/"
        return bad(
            CHECK, f"/{kind}/{host} asks for {KINDS[kind][0]}, and the name has {only} addresses only", todo
        )
    if not usable.intersection(ways) and any(
        ipaddress.ip_address(ip.partition("%")[0]).is_global for ip in ips
    ):
        only = " and ".join(sorted(usable))
        return bad(CHECK, f"{host} has {only} addresses only, and this machine has no {only}", NO_WAY)
    if all(ipaddress.ip_address(ip.partition("%")[0]).is_loopback for ip in ips) and host != "localhost":
        todo = "look at /etc/hosts: other machines would look for the peer on themselves"
        return warning(CHECK, f"{host} leads to this machine itself", todo)
    return good(CHECK, f"{host} leads to {', '.join(sorted(set(ips))[:4])}")


def none_given() -> Diagnosis:
    """Make the finding where there is nobody to join."""
    return skipped(CHECK, "nobody to join was named", "for checks with a peer: --join ADDRESS")
