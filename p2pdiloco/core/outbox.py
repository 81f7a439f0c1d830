"""Outbox: collects what one `handle` call wants done, and numbers what must be answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from p2pdiloco.core.api.effects import Effect, Persist, Record, Send, UpdateRecord, VoteRecord
from p2pdiloco.core.api.messages import Message


class Outbox:
    """Ordered list of effects with helpers for the commonest ones."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._next_token = 1
        self._answers: dict[int, tuple[Callable[[float], None], Callable[[float, str], None]]] = {}

    def put(self, effect: Effect) -> None:
        """Append one effect."""
        self._effects.append(effect)

    def send(self, peer: str, message: Message) -> None:
        """Append a message."""
        self._effects.append(Send(peer, message))

    def persist(
        self,
        record: VoteRecord | UpdateRecord,
        then: tuple[Effect, ...],
        done: Callable[[float], None],
        failed: Callable[[float, str], None],
    ) -> None:
        """Append a durable write with its continuation. One of `done` and `failed` hears what came of it."""
        token = self._next_token
        self._next_token += 1
        self._answers[token] = done, failed
        self._effects.append(Persist(token, record, then))

    def persisted(self, token: int, now: float) -> bool:
        """Take in that a write is durable. False: nothing was asked under that token."""
        done, _ = self._answers.pop(token, (None, None))
        if done is not None:
            done(now)
        return done is not None

    def persist_failed(self, token: int, why: str, now: float) -> bool:
        """Take in that a write failed. False: nothing was asked under that token."""
        _, failed = self._answers.pop(token, (None, None))
        if failed is not None:
            failed(now, why)
        return failed is not None

    def record(
        self, kind: str, fragment: int | None, reason: str, **fields: str | int | float | bool | None
    ) -> None:
        """Append a line for people."""
        self._effects.append(Record(kind, fragment, reason, tuple(fields.items())))

    def cut(self, fragment: int, learners: Iterable[str], me: str) -> None:
        """Append a line for every one of these learners but us whose contribution was cut."""
        for learner in learners:
            if learner != me:
                self.record("cut", fragment, "too long to count in full: cut", peer=learner)

    def take(self) -> list[Effect]:
        """Take all effects so far, in order; the outbox is empty afterwards."""
        effects, self._effects = self._effects, []
        return effects
