"""Payloads that the core knows by ticket only: encoded contributions and outer updates in host memory."""

from __future__ import annotations

from p2pdiloco.errors import invariant
from p2pdiloco.ports import Buffer


class Tickets:
    """Ticket -> payload. What the core released is gone; what a running job still reads stays alive."""

    def __init__(self) -> None:
        self._payloads: dict[int, Buffer] = {}
        self._next = 1

    def put(self, payload: Buffer) -> int:
        """A new ticket for a payload."""
        ticket = self._next
        self._next += 1
        self._payloads[ticket] = payload
        return ticket

    def get(self, ticket: int) -> Buffer:
        """The payload behind a ticket that is not released."""
        invariant(ticket in self._payloads, f"ticket {ticket} is not open")
        return self._payloads[ticket]

    def release(self, ticket: int) -> None:
        """Forget a ticket; a second time is without effect."""
        self._payloads.pop(ticket, None)

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def held_bytes(self) -> int:
        """Payload bytes that are held."""
        return sum(memoryview(p).nbytes for p in self._payloads.values())
