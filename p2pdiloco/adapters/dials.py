"""Dials to strangers: the one place that says which of their addresses may be dialled now.

Anybody may write a record on the DHT, and name any address in it: of a third party, or of a service in our
own network. Of a peer that is a stranger, only addresses that pass `StrangersDials.choose` are dialled.

- One that is not of the Internet (`LOCAL`) passes only if an address of ours is in the same block. Ours are
  those at which this node listens or is told to be, and those that a person named to join through: a name by
  where it led.
- A host name is looked up here, and its addresses are judged in its place.
- What passes has a budget: one for each block of addresses, however many peers name it, and one for all.
- A relay that we are connected to is not dialled, so addresses through it are free.

Rules: docs/protocol/links.md, section 7. Bounds: docs/reference/bounds.md, section 2.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from p2pdiloco.adapters import dns, multiaddrs
from p2pdiloco.errors import PeerUnreachable
from p2pdiloco.util import BoundedDict, Now, loop_s

Block = IPv4Network | IPv6Network
LOCAL = tuple(
    ip_network(text)
    for text in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Blocks in which networks of their own are: the same address is another machine in each."""
PREFIX = {4: 24, 6: 48}
"""Bits of an address of the Internet that make its block: what one customer may have."""
MAX_ADDRESSES = 8
"""Addresses of one stranger that are looked at: a node tells no more (`daemon.network.discovery`)."""
DIALS, DIALS_S = 128, 32.0
"""Addresses of all strangers that are dialled at once, and the time in which as many are dialled again."""
BLOCK_DIALS, BLOCK_DIALS_S = 32, 64.0
"""The same for one block."""
MAX_BLOCKS = 4096
LOOKUP_S = 3.0


class Attempts:
    """Bucket of attempts: so many at once, and as many again after a time."""

    def __init__(self, most: int, full_again_s: float) -> None:
        self._full_again_s, self._each_s = full_again_s, full_again_s / most
        self._full_s = 0.0
        """Time at which it is full again."""

    def wait_s(self, now: float) -> float:
        """Compute the time until one more is allowed."""
        return max(0.0, max(self._full_s, now) + self._each_s - self._full_again_s - now)

    def take(self, now: float) -> bool:
        """Take one; False: there is none left now."""
        if self.wait_s(now) > 0.0:
            return False
        self.use(now)
        return True

    def use(self, now: float) -> None:
        """Take one, of those to come if none is left."""
        self._full_s = max(self._full_s, now) + self._each_s

    def give_back(self) -> None:
        """Give one back."""
        self._full_s -= self._each_s


class NotNow(PeerUnreachable):
    """Error: the budget of dials is used up, which says nothing of the peer."""


class StrangersDials:
    """Judge of strangers' addresses."""

    def __init__(self, told: Iterable[str], now: Now = time.monotonic) -> None:
        """`told`: multiaddrs that a person gave, to be announced or to join through."""
        self._now = now
        self._told = {block_of(ip) for ip in _ips_in(told)}
        self._ours = self._told
        self._all = Attempts(DIALS, DIALS_S)
        self._blocks: BoundedDict[Block, Attempts] = BoundedDict(MAX_BLOCKS)
        self._looking_up = asyncio.Lock()

    def listening(self, listen: Sequence[str], interfaces: Mapping[str, Sequence[str]]) -> None:
        """Learn where this node listens, and the machine's addresses by family, which 0.0.0.0 and :: stand
        for. Of these loopback counts only where there is nothing else."""
        ours = {block_of(ip) for ip in _ips_in(listen)}
        for family, everywhere in (("ip4", "0.0.0.0"), ("ip6", "::")):
            if everywhere in _ips_in(listen):
                blocks = {block_of(ip) for ip in interfaces.get(family, ())}
                ours |= {block for block in blocks if block and not block.is_loopback} or blocks
        self._ours = self._told | ours

    def told(self, ips: Iterable[str]) -> None:
        """Learn to where a name led that a person gave."""
        self._told |= {block_of(ip) for ip in ips}

    async def choose(
        self, addresses: Sequence[str], connected: Collection[str], timeout_s: float
    ) -> tuple[list[str], bool]:
        """Choose those of a stranger's addresses that may be dialled now; also tell whether there are more,
        for which the budget is used up or a name could not be looked up in time. `connected`: peers that
        there is a connection to.

        Raises:
            NotNow: there are such only.
            PeerUnreachable: there are none.
        """
        until_s = loop_s() + timeout_s
        chosen: dict[str, None] = {}
        put_off = False
        for text in sorted(addresses[:MAX_ADDRESSES], key=lambda text: text.startswith("/dns")):
            relay = _relay_of(text)
            if relay in connected:
                chosen[f"/p2p/{relay}/p2p-circuit"] = None  # where the relay is, is the stranger's word
                continue
            try:
                async with asyncio.timeout_at(until_s):
                    found = await self._looked_up(text)
            except (NotNow, TimeoutError):
                put_off = True
                continue
            for ip, direct in found:
                block = block_of(ip)
                if block is None or (block in LOCAL and block not in self._ours) or direct in chosen:
                    continue
                if self._takes(block):
                    chosen[direct] = None
                else:
                    put_off = True
        if not chosen:
            raise NotNow("too many dials") if put_off else PeerUnreachable("no address that may be dialled")
        return list(chosen), put_off

    def _takes(self, block: Block) -> bool:
        of_block = self._blocks.get(block) or Attempts(BLOCK_DIALS, BLOCK_DIALS_S)
        self._blocks[block] = of_block
        return of_block.take(self._now()) and self._all.take(self._now())

    async def _looked_up(self, text: str) -> list[tuple[str, str]]:
        """Pairs of an IP address and the multiaddr with it. A lookup counts as a dial; there is one at a
        time. Raises: NotNow."""
        (protocol, host), *rest = multiaddrs.parse(text)
        if any(part in multiaddrs.HOSTS for part, _ in rest):
            return []
        if protocol in ("ip4", "ip6"):
            return [(host, text)]
        if not protocol.startswith("dns"):
            return []
        if not self._all.take(self._now()):
            raise NotNow("too many lookups")
        async with self._looking_up:
            found = await asyncio.to_thread(dns.ips_behind, protocol, host, time.monotonic() + LOOKUP_S)
        return [(ip, multiaddrs.join([("ip6" if ":" in ip else "ip4", ip), *rest])) for ip in found]


def block_of(text: str) -> Block | None:
    """Find the block of an IP address, which shares a budget; None: nobody can be there."""
    ip = ip_address(text)
    if ip.version == 6:
        ip = ip.ipv4_mapped or ip
    local = next((block for block in LOCAL if ip in block), None)
    if local is not None:
        return local
    is_odd = ip.is_multicast or ip.is_reserved or (ip.version == 6 and (ip.is_site_local or ip.sixtofour))
    return None if is_odd or not ip.is_global else ip_network((ip, PREFIX[ip.version]), strict=False)


def _ips_in(addresses: Iterable[str]) -> list[str]:
    hosts = [multiaddrs.parse(text)[0] for text in addresses]
    return [host for protocol, host in hosts if protocol in ("ip4", "ip6")]


def _relay_of(text: str) -> str:
    """Find the peer through which an address leads; empty: through none."""
    before, circuit, _ = text.partition("/p2p-circuit")
    return before.rpartition("/p2p/")[2] if circuit else ""
