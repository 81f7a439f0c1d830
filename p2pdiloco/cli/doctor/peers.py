"""Checks with the peers to join through: reached, clock, versions, and whether they reach us."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.hivemind_net import HivemindTransport, why_unreached
from p2pdiloco.adapters.p2pd import P2PDOptions
from p2pdiloco.cli.doctor.findings import Diagnosis, bad, good, skipped, warning
from p2pdiloco.cli.visitor import visitor
from p2pdiloco.config.settings import ANY_ADDRESS
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.snapshot import counted
from p2pdiloco.daemon.network.discovery import listen_again, presences
from p2pdiloco.daemon.network.reach import tcp_ports
from p2pdiloco.errors import RemoteError, TransportError
from p2pdiloco.ports import Transport
from p2pdiloco.release import WIRE_VERSION

ASK_S = 5.0
NEAR_S, FAR_S = 1.0, 3.0
"""Difference of clocks that is worth a word, and that from which on the DHT lets nobody in."""
MAX_ASKED = 4
MEANWHILE = "the node takes part over connections that it makes itself"
PRIVATE = f"a NAT or firewall: forward the port in the router (docs/topics/doctor.md); until then {MEANWHILE}"
SHARED = ipaddress.ip_network("100.64.0.0/10")


@contextlib.asynccontextmanager
async def dialler(data_dir: Path, listens: bool) -> AsyncIterator[HivemindTransport]:
    """Start a visitor who joins nobody by itself, and can be dialled.

    `listens`: on the port that a node with this data folder would have.

    Raises: UserError.
    """
    listen: Sequence[str] = ANY_ADDRESS
    if listens and await asyncio.to_thread(data_dir.is_dir):
        listen = await listen_again(data_dir, ANY_ADDRESS)
    async with visitor((), listen, P2PDOptions(relay=False)) as transport:
        yield transport


async def dial(
    transport: Transport, addresses: Sequence[str], met: Collection[str] = ()
) -> tuple[list[Diagnosis], list[str]]:
    """Dial the peers to join through; returns findings, and who was reached.

    `met`: those that were met before, and may have left since; the others were named. One peer is enough to
    join through.
    """
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(multiaddrs.split_peer(address)[1], []).append(address)
    found: list[Diagnosis] = []
    reached = []
    began = time.monotonic()
    results = await asyncio.gather(
        *(transport.connect(peer, of_peer) for peer, of_peer in by_peer.items()), return_exceptions=True
    )
    nobody = all(isinstance(result, BaseException) for result in results)
    for (peer, of_peer), result in zip(by_peer.items(), results, strict=True):
        if isinstance(result, TransportError):
            words = f"{' and '.join(of_peer)} cannot be reached ({why_unreached([result], of_peer)})"
            if peer not in met or nobody:
                of_it = bad if nobody else warning
                todo = "is it running, is its address right, is a firewall between?"
                found.append(of_it("peers", words, todo))
            else:
                found.append(skipped("peers", f"met before, perhaps gone since: {words}"))
        elif isinstance(result, BaseException):
            raise result
        else:
            reached.append(peer)
            took_s = time.monotonic() - began
            found.append(good("peers", f"…{peer[-6:]} is reached, and is who it should be ({took_s:.1f} s)"))
    return found, reached


async def check_clock(transport: HivemindTransport, peers: Sequence[str]) -> list[Diagnosis]:
    """Compare our clock with the peers' (the middle one, of several)."""
    ahead = []
    for peer in peers[:MAX_ASKED]:
        with contextlib.suppress(TransportError, TimeoutError):
            ahead.append(await transport.meet(peer))
    if not ahead:
        return [skipped("clock", "no peer says what time it is")]
    middle = sorted(ahead)[len(ahead) // 2]
    words = f"{abs(middle):.1f} s {'behind' if middle > 0 else 'ahead of'} the peers'"
    todo = "synchronise it: timedatectl set-ntp true (if several peers agree; else it may be theirs)"
    if abs(middle) >= FAR_S:
        return [bad("clock", f"{words}: nodes within {FAR_S:g} s of each other are let in", todo)]
    if abs(middle) >= NEAR_S:
        return [warning("clock", words, todo)]
    return [good("clock", f"within {max(0.1, abs(middle)):.1f} s of the peers'")]


async def check_versions(transport: Transport, run: str) -> list[Diagnosis]:
    """Compare our protocol version with that of the run's members."""
    counts = Counter(record.wire_version for record in (await presences(transport, run)).values())
    if not counts:
        return [skipped("versions", "no member of the run is listed")]
    others = {version: number for version, number in counts.items() if version != WIRE_VERSION}
    if not others:
        listed = counted(counts.total(), "listed member")
        return [good("versions", f"{listed}, of protocol version {WIRE_VERSION} as this program")]
    words = ", ".join(f"{number} speak version {version}" for version, number in sorted(counts.items()))
    newest = max(others)
    todo = (
        "update this p2pdiloco" if newest > WIRE_VERSION else "ask the others to update, or use their version"
    )
    if WIRE_VERSION not in counts:
        return [bad("versions", f"members: {words}; we speak {WIRE_VERSION}", todo)]
    return [warning("versions", f"members: {words}; we speak {WIRE_VERSION}", todo)]


async def check_reach(transport: Transport, peers: Sequence[str]) -> list[Diagnosis]:
    """Ask peers to dial us, and tell by that what is between."""
    ports = tcp_ports(transport.addresses())[: wire.MAX_PORTS]
    query = wire.QUERY + wire.encode(wire.ReachQuery(tuple(ports)))
    own = {*multiaddrs.interface_addresses("ip4"), *multiaddrs.interface_addresses("ip6")}
    places: set[tuple[str, int]] = set()
    near: list[bool] = []
    why = ""
    for peer in peers[:MAX_ASKED]:
        try:
            answer = wire.decode(await transport.send(peer, query, ASK_S), wire.ReachAnswer)
            link = await transport.link(peer)
        except (RemoteError, TransportError) as error:
            why = f"…{peer[-6:]}: {error}"
            continue
        places |= {(str(ip), port) for ip, port in answer.reached}
        ips = link.ips if link is not None else ()
        near.append(not any(ipaddress.ip_address(ip).is_global for ip in ips))
    if not near:
        return [skipped("port", f"no peer tells whether it can dial us ({why})")]
    asker = "a peer in our own network" if all(near) else counted(len(near), "peer")
    shown = ", ".join(map(str, ports))
    if places:
        seen = ", ".join(f"{ip} port {port}" for ip, port in sorted(places)[:4])
        found = [good("port", f"{asker} can dial us at {seen}")]
        outside = [ip for ip, _ in places if ip not in own]
        kind = (
            f"a NAT that forwards the port, as {outside[0]}" if outside else "none, as far as these peers see"
        )
        found.append(good("NAT", kind))
        if all(near):
            todo = "ask a peer on the Internet: --join ADDRESS"
            found.append(skipped("NAT", "whether the Internet can dial us, nobody there was asked", todo))
        return found
    return [warning("port", f"{asker} cannot dial us at port {shown}", f"between is {between()}")]


def between() -> str:
    """Word what is likely between us and those who cannot dial us."""
    own = [*multiaddrs.interface_addresses("ip4"), *multiaddrs.interface_addresses("ip6")]
    ips = [ipaddress.ip_address(ip.partition("%")[0]) for ip in own]
    if any(ip in SHARED for ip in ips if ip.version == 4):
        return f"the provider's own NAT, where no port can be forwarded: {MEANWHILE}"
    if any(ip.is_global for ip in ips):
        return f"a firewall: let the port through; until then {MEANWHILE}"
    return PRIVATE
