"""Meeting peers: those to join through, those known from before, and who of them is connected.

Rules: docs/protocol/membership.md, section 6.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Sequence

from p2pdiloco.adapters.net import multiaddrs
from p2pdiloco.adapters.net.address_book import AddressBook
from p2pdiloco.adapters.net.hivemind_binding import Attachment
from p2pdiloco.adapters.net.hivemind_dht import ClockSkew, RecordTable
from p2pdiloco.errors import NobodyReached, UserError

DIAL_TIMEOUT_S = 10.0
MAX_DIALS = 16
FEW_PEERS = 3
"""Number of connections below which peers from earlier are dialled too."""
OURS_ONLY = (
    "every address to join through is this node's own, so it joins nobody; if its data folder is a copy of "
    "another node's, give it an empty one"
)
DIALLED_BEFORE = "it could not be dialled a moment ago"
PEER_ID = re.compile(r"12D3KooW\w{38}(\w{6})")
MAX_REASON = 160
logger = logging.getLogger(__name__)


class Meeting:
    """Peers that a transport knows, and those that it is connected to.

    Args:
        initial_peers, remembered: multiaddrs that end in /p2p/ID. It is no error when of `remembered` none is
            there any more.
    """

    def __init__(self, me: str, initial_peers: Sequence[str], remembered: Sequence[str]) -> None:
        self._initial = [multiaddrs.split_peer(text) for text in initial_peers]
        self._initial = [(address, peer) for address, peer in self._initial if peer != me]
        self._is_told_of_us_only = bool(initial_peers) and not self._initial
        self.book = AddressBook()
        for address, peer in (multiaddrs.split_peer(text) for text in remembered):
            if peer != me:
                self.book.met(peer, [*self.book.addresses_of(peer), address])
        self.connected: set[str] = set()
        """Ids of connected peers, as the transport last said."""

    def met(self, peer: str) -> None:
        """Note that a peer is connected."""
        self.connected.add(peer)

    def connected_to(self, peers: Iterable[str]) -> None:
        """Take in who is connected, and that no other is."""
        self.connected = set(peers)

    async def join_initial(
        self, attachment: Attachment, records: RecordTable | None, may_be_alone: bool = False
    ) -> None:
        """Reach at least one initial peer. `may_be_alone`: nobody is no error.

        Raises: UserError (none; names them and says why).
        """
        if self._is_told_of_us_only:
            logger.warning("%s", OURS_ONLY)
        if not self._initial:
            await self.rejoin(attachment, records)
            return
        by_peer: dict[str, list[str]] = {}
        for address, peer in self._initial:
            by_peer.setdefault(peer, []).append(address)
        peers = list(by_peer)
        dials = [attachment.connect(peer, by_peer[peer], DIAL_TIMEOUT_S) for peer in peers]
        results = await asyncio.gather(*dials, return_exceptions=True)
        reached = [peer for peer, result in zip(peers, results, strict=True) if result is None]
        named = ", ".join(f"{address}/p2p/{peer}" for address, peer in self._initial)
        if not reached:
            await self.rejoin(attachment, records)
            if self.connected:
                logger.warning("none of the initial peers can be reached: joined through a remembered one")
                return
            why = why_unreached(results, [address for address, _ in self._initial])
            if may_be_alone:
                logger.warning("none of the initial peers can be reached yet: %s (%s)", named, why)
                return
            raise NobodyReached(
                f"None of the initial peers can be reached: {named} ({why}).",
                "Check the addresses, that a node runs there, and that no firewall is between.",
            )
        try:
            answered = await records.join(reached) if records is not None else []
        except ClockSkew as error:
            raise UserError(
                f"This machine's clock differs from the peers' by more than 3 s: {error}.",
                "Synchronise the clock (for example: timedatectl set-ntp true), then start again.",
            ) from error
        if not answered and may_be_alone:
            logger.warning("the initial peers can be reached, and none of them answers yet: %s", named)
        elif not answered:
            raise NobodyReached(
                f"The initial peers can be reached, but none of them answers as a DHT peer: {named}.",
                "Do the addresses belong to p2pdiloco nodes or bootstrap peers?",
            )
        self.connected.update(reached)

    async def rejoin(self, attachment: Attachment, records: RecordTable | None) -> None:
        """Dial the peers that we knew, best effort, and enter their routing tables."""
        wanted: dict[str, list[str]] = {}
        for address, peer in self._initial:
            wanted.setdefault(peer, []).append(address)
        for peer, addresses in self.book.latest(MAX_DIALS):
            wanted.setdefault(peer, []).extend(addresses)
        reached = await self._dial_all(attachment, wanted)
        if reached and records is not None:
            try:
                await records.join(reached)
            except ClockSkew as error:
                logger.warning("clock skew: %s", error)

    async def look_for_lost(self, attachment: Attachment) -> None:
        """Dial peers that we are not connected to any more and must not lose.

        They are the initial peers (a bootstrap that came back knows nobody, and nobody else would tell it of
        us) and, while we know hardly anybody, those met before. Without it a swarm and a newcomer could stay
        two swarms for ever.
        """
        wanted: dict[str, list[str]] = {}
        for address, peer in self._initial:
            if peer not in self.connected:
                wanted.setdefault(peer, []).append(address)
        if len(self.connected) < FEW_PEERS:
            for peer, addresses in self.book.latest(MAX_DIALS):
                if peer not in self.connected:
                    wanted.setdefault(peer, []).extend(addresses)
        if wanted:
            await self._dial_all(attachment, wanted)

    async def _dial_all(self, attachment: Attachment, wanted: dict[str, list[str]]) -> list[str]:
        """Dial these addresses at once, best effort; returns who was reached."""
        peers = list(wanted)[: 2 * MAX_DIALS]
        dials = [attachment.connect(peer, wanted[peer], DIAL_TIMEOUT_S) for peer in peers]
        results = await asyncio.gather(*dials, return_exceptions=True)
        reached = [peer for peer, result in zip(peers, results, strict=True) if result is None]
        self.connected.update(reached)
        return reached

    async def reach(self, attachment: Callable[[], Attachment], peer: str, timeout_s: float) -> None:
        """Connect to a peer of which we only heard: p2pd dials by itself whom it was connected to, and cannot
        know others.

        Raises:
            PeerUnreachable: nobody answers there.
        """
        addresses = [] if peer in self.connected else self.book.addresses_of(peer)
        if addresses:
            await attachment().connect(peer, addresses, min(timeout_s, DIAL_TIMEOUT_S))
            self.connected.add(peer)


def dialable_addresses(peer: str, addresses: Sequence[str]) -> list[str]:
    """Addresses as a peer gave them, without its own id at the end; malformed ones are left out."""
    found = []
    for text in addresses[: multiaddrs.MAX_ADDRESSES]:
        try:
            parts = multiaddrs.parse(text)
        except UserError:
            continue
        if parts[-1] == ("p2p", peer):
            parts = parts[:-1]
        if parts:
            found.append(multiaddrs.join(parts))
    return found


def why_unreached(results: Sequence[BaseException | None], addresses: Sequence[str]) -> str:
    """Say in a few words why none of these addresses could be reached."""
    texts = " ".join(str(result) for result in results)
    names = [
        host for kind, host in (multiaddrs.parse(text)[0] for text in addresses) if kind.startswith("dns")
    ]
    if "no good addresses" in texts and names:  # p2pd's word for it
        return f"no address is known for the host name {' or '.join(dict.fromkeys(names))}"
    for sign, meaning in (
        ("connection refused", "connection refused"),
        ("peer id mismatch", "another peer id answers there"),
        ("no route", "no route to host"),
        ("network is unreachable", "no network of this machine leads there"),
        ("no answer within", "no answer"),
        ("i/o timeout", "no answer"),
        ("no reply from", "no answer"),
        ("no such host", "unknown host name"),
        ("dial backoff", DIALLED_BEFORE),
    ):
        if sign in texts:
            return meaning
    words = PEER_ID.sub(r"…\1", texts)  # the end of a text of p2pd says most
    return words if len(words) <= MAX_REASON else f"…{words[-MAX_REASON:].lstrip('…')}"
