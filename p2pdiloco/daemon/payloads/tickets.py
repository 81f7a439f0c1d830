"""Tickets by which the core knows payloads: contributions, partial merges and outer updates.

The payloads are in host memory or, of what peers pushed, in scratch on the disk.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.errors import InvariantViolation, invariant
from p2pdiloco.ports import Buffer
from p2pdiloco.tensors.merge import Payload, memory_bytes


class Tickets:
    """Table of payloads by ticket. What the core released is gone; what a running job still reads stays
    alive."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}
        self._pushed: set[int] = set()
        self._spilled: dict[int, Callable[[int], None]] = {}
        self._next = 1
        self._when_released: dict[int, Callable[[], None]] = {}

    def put(
        self, payload: Payload, pushed: bool = False, when_released: Callable[[], None] | None = None
    ) -> int:
        """Give a payload a new ticket.

        `pushed`: by a peer. `when_released`: called then. Whoever refers to the payload beside this table
        must not do so for longer: it counts nowhere from then on.
        """
        ticket = self._next
        self._next += 1
        self._payloads[ticket] = payload
        if pushed:
            self._pushed.add(ticket)
        if when_released is not None:
            self._when_released[ticket] = when_released
        return ticket

    def when_released(self, ticket: int, then: Callable[[], None]) -> None:
        """Register a call for when an open ticket is released, for which nothing is to be called yet."""
        invariant(ticket in self._payloads, f"ticket {ticket} is not open")
        invariant(ticket not in self._when_released, f"ticket {ticket} is looked after twice")
        self._when_released[ticket] = then

    def payload(self, ticket: int) -> Payload:
        """Return the payload behind a ticket that is neither released nor spilled."""
        invariant(ticket in self._payloads, f"ticket {ticket} is not open")
        return self._payloads[ticket]

    def is_open(self, ticket: int) -> bool:
        """Tell whether a ticket's payload counts here: it is neither released nor spilled."""
        return ticket in self._payloads

    def get(self, ticket: int) -> Buffer:
        """Return the payload of a ticket that is in memory, as all are that no peer pushed."""
        payload = self.payload(ticket)
        if not isinstance(payload, Buffer):
            raise InvariantViolation(f"ticket {ticket} is not in memory")
        return payload

    def in_memory(self, ticket: int) -> Buffer | None:
        """Return the payload behind a ticket that is not released; None: it is on the disk."""
        return None if ticket in self._spilled else self.get(ticket)

    def spilled(self, ticket: int, forget: Callable[[int], None]) -> bool:
        """Let go of a payload that has been written to the disk. False: its ticket was released already.

        `forget` removes it from the disk when the ticket is released.
        """
        if self._payloads.pop(ticket, None) is None:
            return False
        self._pushed.discard(ticket)
        self._spilled[ticket] = forget
        return True

    def release(self, ticket: int) -> None:
        """Forget a ticket; a second time is without effect."""
        self._payloads.pop(ticket, None)
        self._pushed.discard(ticket)
        self._when_released.pop(ticket, lambda: None)()
        if ticket in self._spilled:
            self._spilled.pop(ticket)(ticket)

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def held_bytes(self) -> int:
        """Payload bytes that are held in memory."""
        return sum(map(memory_bytes, self._payloads.values()))

    @property
    def pushed_bytes(self) -> int:
        """Payload bytes in memory that peers pushed."""
        return sum(memory_bytes(self._payloads[ticket]) for ticket in self._pushed)
