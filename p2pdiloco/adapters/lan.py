"""Discovery in the local network: nodes and bootstraps announce themselves by multicast DNS, others look.

Service `_p2pdiloco._tcp`, text records `id` (peer id) and `runs` (first digits of run ids). What is heard is
anybody's claim: a place to dial, no more. Needs the extra `lan` (zeroconf).
"""

from __future__ import annotations

import ipaddress
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from p2pdiloco.config.values import check_peer_address
from p2pdiloco.errors import ConfigError, UserError, install_hint
from p2pdiloco.identity import public_of

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf

SERVICE = "_p2pdiloco._tcp.local."
DIGITS = 12
MAX_FOUND = 32
MAX_RUNS = 8
MAX_ADDRESSES = 4
LOOK_S = 3.0
SETTLE_S = 0.5
"""Time for which others may still answer after the first."""
ANSWER_MS = 1000
_RUN = re.compile(r"[0-9a-f]{12}")


class Nearby(Struct, frozen=True):
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
    """Announcer of one peer, on the event loop."""

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
        wanted = tuple(run[:DIGITS] for run in runs[:MAX_RUNS])
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
            SERVICE,
            f"{self._peer}.{SERVICE}",
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
    """Find the hosts of this network in addresses, all of one port. None of the loopback beside others."""
    found: list[tuple[str, int]] = []
    for address in addresses:
        kind, host, transport, port = address.split("/")[1:5]
        if kind in ("ip4", "ip6") and transport == "tcp" and "/p2p-circuit" not in address:
            found.append((host, int(port)))
    near = [(host, port) for host, port in found if ipaddress.ip_address(host).is_private]
    others = [(host, port) for host, port in near if not ipaddress.ip_address(host).is_loopback]
    chosen = others or near
    first = chosen[0][1] if chosen else 0
    return tuple(host for host, its in chosen if its == first)[:MAX_ADDRESSES], first


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
        for text in info.parsed_addresses()[:MAX_ADDRESSES]:
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
        ServiceBrowser(zeroconf, SERVICE, heard)  # type: ignore[arg-type]
        if heard.any.wait(seconds):
            threading.Event().wait(min(SETTLE_S, seconds))
    finally:
        zeroconf.close()
    return list(heard.found.values())[:MAX_FOUND]
