"""Detection of another process with this node's identity: its data folder was copied, and both run.

Before it listens anywhere itself, a node looks whether this identity answers where the folder was last, or
where it is told to join: a copy that can reach the original ends at once. Else both go on for a while.

Others take the two for lives of one node. They listen to whoever began last, if to either: the one that they
do not hear trains alone and cannot know it. Both keep one record on the DHT, in turns, and so find out: the
earlier one ends, or the one whose record is never seen.

Rules: docs/protocol/membership.md, section 7.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from p2pdiloco.adapters import multiaddrs
from p2pdiloco.errors import UserError
from p2pdiloco.ports import Transport

logger = logging.getLogger(__name__)
HINT = "give each node a --data-dir of its own: a copy of another node's folder is that node"
MIN_TURNS = 3
"""Number of times that another's record has to come in the place of ours, over a record's lifetime at
least."""
STANDS_FOR = 2.0
"""Lifetimes of a record after which another's stands in the place of ours because it is renewed. Of two
clocks that are seconds apart the DHT believes the faster one, and there are no turns."""
FORGOTTEN_AFTER = 20.0
"""Lifetimes after which a turn is forgotten: whoever ran beside us before that may have been gone long
since."""


LOOKS, PAUSE_S = 4, 1.0
"""Looks at the start, which all must find it: p2pd of a node that was killed answers for a moment longer."""
ANSWER_S = 1.0


async def refuse_beside_a_twin(transport: Transport, addresses: Sequence[str]) -> None:
    """Look whether our identity answers at one of these addresses already. Only before we listen ourselves.

    Raises:
        UserError: it does, so another process has it.
    """
    me = transport.peer_id
    places = {place for text in addresses if (place := multiaddrs.endpoint_of(text)) is not None}
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(PAUSE_S)
        tries = [transport.answers_at(me, host, port, ANSWER_S) for host, port in sorted(places)]
        answers = await asyncio.gather(*tries)
        places = {place for place, answered in zip(sorted(places), answers, strict=True) if answered}
        if not places:
            return
    host, port = min(places)
    raise UserError(
        f"another node runs with this node's identity, at {host} port {port}: this one ends", HINT
    )


class Twins:
    """Judge of the record of our own name, as the DHT has it."""

    def __init__(self, incarnation: int, lifetime_s: float) -> None:
        """`lifetime_s`: lifetime of a record that is not renewed. One of an earlier life of ours is gone
        by then."""
        self._incarnation = incarnation
        self._lifetime_s = lifetime_s
        self._ours = False
        """True: the record seen last was ours, so what is there now was written after it."""
        self._turns = 0
        self._first_s = self._last_s = 0.0
        self._stands_since_s: float | None = None

    def look(self, incarnation: int, name: str, now: float) -> None:
        """Judge the record that is there now.

        Raises:
            UserError: another process of this identity is here in our place.
        """
        if incarnation == self._incarnation:
            self._ours, self._stands_since_s = True, None
            return
        called = f"another node{f' ({name})' if name else ''} runs with this node's identity"
        if self._stands_since_s is None:
            self._stands_since_s = now
        if now - self._stands_since_s > STANDS_FOR * self._lifetime_s:
            raise UserError(f"{called}, and others see that one: this one ends", HINT)
        if not self._turn(now):
            return
        if incarnation > self._incarnation:
            raise UserError(f"{called} and began later: this one ends", HINT)
        self._turns = 0
        logger.warning("%s, and ends when it notices; %s", called, HINT)

    def _turn(self, now: float) -> bool:
        """Count another's record, perhaps in the place of ours; return whether it was so often enough."""
        if not self._ours:
            return False
        self._ours = False
        if now - self._last_s > FORGOTTEN_AFTER * self._lifetime_s:
            self._turns = 0
        self._turns += 1
        self._last_s = now
        if self._turns == 1:
            self._first_s = now
        return self._turns >= MIN_TURNS and now - self._first_s >= self._lifetime_s
