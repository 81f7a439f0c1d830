"""Tools of deliberate bugs: patches that are taken back, and the list that `mutation_list` fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.base import Outbox
from p2pdiloco.core.node import Core


class Patch:
    """Replaces attributes, and puts them back at the end."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value` from now on."""
        self._undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)


@dataclass(frozen=True)
class Mutation:
    """One bug: how to make it, the weather in which to look for it, and the rules that it may break."""

    apply: Callable[[Patch], None]
    mix: str
    nodes: int
    within_seeds: int
    rules: frozenset[str]
    first_seed: int

    @property
    def name(self) -> str:
        """Name the mutation for people."""
        return self.apply.__name__.replace("_", " ")


MUTATIONS: list[Mutation] = []
Make = Callable[[Patch], None]


def mutation(
    mix: str, nodes: int, within_seeds: int, *rules: str, first_seed: int = 0
) -> Callable[[Make], Make]:
    """Add a bug to the list. `first_seed`: where a rare one is looked for."""

    def add(apply: Make) -> Make:
        MUTATIONS.append(Mutation(apply, mix, nodes, within_seeds, frozenset(rules), first_seed))
        return apply

    return add


def each_effect(patch: Patch, alter: Callable[[Core, Any], list[Any]]) -> None:
    """Make something else of what a core wants done. What is made of an effect that is asked for answers in
    its place, if it is of its kind."""
    handle = Core.handle

    def asked(self: Core, ask: ev.Ask) -> list[ev.Effect]:
        made, kind = alter(self, ask.effect), type(ask.effect)
        return [ev.Ask(ask.token, new) if type(new) is kind else new for new in made]

    def altered(self: Core, event: ev.Event, now: float) -> list[ev.Effect]:
        return [
            new
            for effect in handle(self, event, now)
            for new in (asked if isinstance(effect, ev.Ask) else alter)(self, effect)
        ]

    patch.set(Core, "handle", altered)


def each_event(patch: Patch, alter: Callable[[Core, Any], Any]) -> None:
    """Make something else of what a core hears."""
    handle = Core.handle
    patch.set(Core, "handle", lambda self, event, now: handle(self, alter(self, event), now))


def each_answer(patch: Patch, alter: Callable[[Any, Any], Any]) -> None:
    """Make something else of what comes of an effect. `alter`: (effect, answer) to answer."""
    usual = Outbox.ask

    def ask(self: Outbox, effect: Any, heard: Callable[[Any, float], None], *more: Any) -> None:
        usual(self, effect, lambda answer, now: heard(alter(effect, answer), now), *more)

    patch.set(Outbox, "ask", ask)
