"""Addresses of peers: of those that we were connected to, and of those that we only heard of.

Bounded; whom we only heard of goes first. Nobody is dialled for being in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2pdiloco.util import BoundedDict

MAX_PEERS = 4096


class AddressBook:
    """Addresses that can be dialled, by peer, the one met last at the end."""

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
