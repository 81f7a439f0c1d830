"""Outbox: collects what one `handle` call wants done, and numbers what must be answered."""

from __future__ import annotations

from p2pdiloco.core.api.effects import Effect, Persist, Record, Send, UpdateRecord, VoteRecord
from p2pdiloco.core.api.messages import Message


class Outbox:
    """Ordered list of effects with helpers for the commonest ones."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._next_token = 1

    def put(self, effect: Effect) -> None:
        """Append one effect."""
        self._effects.append(effect)

    def send(self, peer: str, message: Message) -> None:
        """Append a message."""
        self._effects.append(Send(peer, message))

    def persist(self, record: VoteRecord | UpdateRecord, then: tuple[Effect, ...]) -> int:
        """Append a durable write with its continuation; returns the token that will answer it."""
        token = self._next_token
        self._next_token += 1
        self._effects.append(Persist(token, record, then))
        return token

    def record(
        self, kind: str, fragment: int | None, reason: str, **fields: str | int | float | bool | None
    ) -> None:
        """Append a line for people."""
        self._effects.append(Record(kind, fragment, reason, tuple(fields.items())))

    def take(self) -> list[Effect]:
        """Take all effects so far, in order; the outbox is empty afterwards."""
        effects, self._effects = self._effects, []
        return effects
