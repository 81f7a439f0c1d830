"""Router between this network and the Internet: it is asked to forward the node's port.

UPnP is spoken by miniupnpc, NAT-PMP (RFC 6886) here. p2pd could do both, but takes another port outside at
every start, and links would not hold. Here it is the one on which the node listens, which it has again when
it starts again, unless the router gives another. Where it listens by UDP, too (`daemon.network.holes`), that
port of UDP is asked for beside it, and may be refused. A forwarding is renewed while the node runs, ends with
it, and lapses within `LEASE_S` where it could not be ended, but for routers that know permanent ones only.

What a router says is a claim. Whether others reach us there, peers say (`daemon.network.reach`).

Rules: docs/protocol/links.md, section 1.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.adapters.endpoint import report_end
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.daemon.budgets import apart
from p2pdiloco.errors import clean
from p2pdiloco.util import Frozen, T, cancelled

LEASE_S, RENEW_S = 3600, 1200.0
SEARCH_MS = 2000
ANSWER_S = 12.0
"""Longest wait for the first answer, by whoever tells others an address."""
END_S = 2.0
NAME = "p2pdiloco"
NO_ROUTER = "no router here forwards a port when it is asked (UPnP, NAT-PMP)"
ROUTES = Path("/proc/net/route")
logger = logging.getLogger(__name__)


class NotForwarded(Exception):
    """Error: there is a router, and it does not forward the port."""


class Forwarding(Frozen):
    """Port of a router that leads to this node."""

    ip: str
    """Address of the router outside, as it says."""
    port: int
    end: Callable[[], object]
    """Function that ends it. It waits for the router."""
    lacks_udp: bool = False
    """True: the port of UDP was wished, and is not forwarded."""

    @property
    def addresses(self) -> list[str]:
        """Addresses for others to dial: none, where the router is behind another NAT."""
        public = ipaddress.IPv4Address(self.ip).is_global
        return [f"/ip4/{self.ip}/tcp/{self.port}"] if public else []

    @property
    def words(self) -> str:
        """Words for people."""
        of_tcp = " (of TCP alone, so nobody gets a direct line by this node's help)" if self.lacks_udp else ""
        words = f"the router forwards its port {self.port} to this node{of_tcp}"
        if self.addresses:
            return f"{words}, as {self.ip}"
        return (
            f"{words}, but its own address is {self.ip}: it is behind another NAT, of the provider perhaps, "
            "where a forwarded port cannot help"
        )


class Router:
    """Router of this network, asked again and again."""

    def __init__(self, transport: HivemindTransport, wanted: bool = True) -> None:
        self._transport = transport
        self._wanted = wanted
        self._forwarding: Forwarding | None = None
        self._task: asyncio.Task[None] | None = None
        self.words = ""
        """Words on its answer, for people; empty: it is not asked, or has not answered."""
        self.answered = asyncio.Event()
        """Event that is set once it has answered, or is not asked."""

    async def begin(self) -> None:
        """Begin to ask, if the transport listens behind one."""
        own = await asyncio.to_thread(multiaddrs.interface_addresses, "ip4")
        if self._wanted and multiaddrs.behind_router(self._transport.listening, own):
            self._task = asyncio.create_task(self._keep())
            self._task.add_done_callback(partial(report_end, "router's task"))
        else:
            self.answered.set()

    async def answer(self) -> None:
        """Wait for its first answer, for `ANSWER_S` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self.answered.wait()

    async def end(self) -> None:
        """End the forwarding, in `END_S` at most."""
        await cancelled([self._task] if self._task is not None else [])
        if self._forwarding is not None:
            try:
                async with asyncio.timeout(END_S):
                    await apart(self._forwarding.end)
            except (TimeoutError, NotForwarded) as error:
                logger.warning("%s still, perhaps: it could not be ended (%s)", self.words, error)

    async def _keep(self) -> None:
        places = filter(None, map(multiaddrs.tcp_of, self._transport.listening))
        port = next(port for ip, port in places if ":" not in ip)
        while True:
            try:
                by_udp = self._transport.helps_with_holes
                self._forwarding = await apart(partial(forward, port, by_udp))
                words = self._forwarding.words if self._forwarding else NO_ROUTER
            except NotForwarded as error:
                self._forwarding, words = None, f"the router does not forward a port: {error}"
            if words != self.words:
                logger.info("%s", words)
            self.words = words
            found = self._forwarding
            self._transport.forwarded_at(found.addresses if found else [])
            self.answered.set()
            await asyncio.sleep(RENEW_S)


def forward(port: int, by_udp: bool = False) -> Forwarding | None:
    """Ask the router to forward its port of that number to us, of UDP, too, if that is wished and it may be.
    None: there is none that can be asked. It waits for the network.

    Raises: NotForwarded.
    """
    why = ""
    for ask in (by_upnp, by_nat_pmp):
        try:
            if (found := ask(port, by_udp)) is not None:
                return found
        except NotForwarded as error:
            why = why or str(error)
    if why:
        raise NotForwarded(why)
    return None


def by_upnp(port: int, by_udp: bool = False) -> Forwarding | None:
    """Ask by UPnP. Raises: NotForwarded."""
    try:
        import miniupnpc
    except ImportError:  # it has no wheel for this Python
        return None
    client = miniupnpc.UPnP()
    client.discoverdelay = SEARCH_MS

    def told(ask: Callable[..., T], *words: object) -> T:
        try:
            return ask(*words)
        except Exception as error:  # the library raises nothing else
            raise NotForwarded(clean(str(error))[:80]) from error

    try:
        told(client.discover)
        told(client.selectigd)
    except NotForwarded:  # so it says that there is none
        return None
    ip = told(lambda: str(ipaddress.IPv4Address(client.externalipaddress())))

    def ask(kind: str, lease_s: int = LEASE_S) -> None:
        try:
            told(client.addportmapping, port, kind, client.lanaddr, port, NAME, "", lease_s)
        except NotForwarded as error:
            if "Permanent" not in str(error) or not lease_s:
                raise
            ask(kind, 0)

    def end() -> None:
        if by_udp:
            with suppress(NotForwarded):
                told(client.deleteportmapping, port, "UDP")
        told(client.deleteportmapping, port, "TCP")

    ask("TCP")
    lacks_udp = by_udp
    if by_udp:
        with suppress(NotForwarded):
            ask("UDP")
            lacks_udp = False
    return Forwarding(ip, port, end, lacks_udp)


_WANT_ADDRESS, _FORWARD_UDP, _FORWARD_TCP = 0, 1, 2
_PMP_PORT = 5351
_PMP_WAITS_S = 0.25, 0.5, 1.0
_PMP_ERRORS = {2: "not authorized", 3: "it has no address itself", 4: "out of resources"}


def by_nat_pmp(port: int, by_udp: bool = False, gateway: tuple[str, int] | None = None) -> Forwarding | None:
    """Ask by NAT-PMP. `gateway`: that one. Raises: NotForwarded."""
    there = gateway or default_gateway()
    if there is None:
        return None

    def asked(kind: int, lease_s: int) -> int | None:
        wish = struct.pack("!BBHHHI", 0, kind, 0, port, port if lease_s else 0, lease_s)
        told = _pmp(there, wish, 16)
        return None if told is None else struct.unpack_from("!H", told, 10)[0]

    def udp(lease_s: int) -> int | None:
        with suppress(NotForwarded):
            return asked(_FORWARD_UDP, lease_s)
        return None

    def end() -> None:
        if by_udp:
            udp(0)
        asked(_FORWARD_TCP, 0)

    said = _pmp(there, bytes((0, _WANT_ADDRESS)), 12)
    outside = asked(_FORWARD_TCP, LEASE_S) if said else None
    if said is None or outside is None:
        return None
    lacks_udp = by_udp and udp(LEASE_S) != outside
    return Forwarding(str(ipaddress.IPv4Address(said[8:12])), outside, end, lacks_udp)


def _pmp(gateway: tuple[str, int], request: bytes, size: int) -> bytes | None:
    """Ask a gateway once more after each pause; None: it says nothing that fits. Raises: NotForwarded."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for wait_s in _PMP_WAITS_S:
            asking.settimeout(wait_s)
            try:
                asking.connect(gateway)
                asking.send(request)
                answer = asking.recv(64)
            except OSError:
                continue
            if len(answer) >= 4 and answer[:2] == bytes((0, 128 + request[1])):
                code = struct.unpack_from("!H", answer, 2)[0]
                if code:
                    raise NotForwarded(_PMP_ERRORS.get(code, f"error {code}"))
                return answer if len(answer) >= size else None
    return None


def default_gateway() -> tuple[str, int] | None:
    """Find the default gateway of IPv4, where the system lists routes in a file."""
    with suppress(OSError, ValueError, IndexError):
        for line in ROUTES.read_text().splitlines()[1:]:
            _, target, gateway, flags = line.split()[:4]
            if int(target, 16) == 0 and int(flags, 16) & 2:
                return socket.inet_ntoa(struct.pack("=I", int(gateway, 16))), _PMP_PORT
    return None
