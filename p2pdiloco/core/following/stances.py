"""Stances: heads of one fragment on which members stand.

A member stands on the last heads that it named: its newest one, and ancestors of that. So members some
versions apart count together, and a liar that names a true head gives a forged one no voice.

Rules: docs/protocol/trust.md, sections 4 and 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from p2pdiloco.core.api.types import Head

STOOD_ON = 8
"""Heads of one member that are remembered."""


class Stances:
    """Stances of those members whose heads are noted here."""

    def __init__(self) -> None:
        self._heads: dict[str, deque[Head]] = {}
        self._on: dict[Head, set[str]] = {}
        """Members that stand on each head."""

    def named(self, peer: str, head: Head) -> bool:
        """Note the head of a member. Tell whether that is news."""
        heads = self._heads.setdefault(peer, deque())
        if heads and heads[-1] == head:
            return False
        heads.append(head)
        self._on.setdefault(head, set()).add(peer)
        if len(heads) > STOOD_ON and (left := heads.popleft()) not in heads:
            self._leaves(peer, left)
        return True

    def gone(self, peer: str) -> None:
        """Forget a member."""
        for head in set(self._heads.pop(peer, ())):
            self._leaves(peer, head)

    def clear(self) -> None:
        """Forget all."""
        self._heads.clear()
        self._on.clear()

    def of(self, peer: str) -> Sequence[Head]:
        """List the heads on which that member stands, the newest last."""
        return self._heads.get(peer, ())

    def on(self, head: Head) -> AbstractSet[str]:
        """List who stands on that head."""
        return self._on.get(head, frozenset())

    def _leaves(self, peer: str, head: Head) -> None:
        on = self._on[head]
        on.discard(peer)
        if not on:
            del self._on[head]
