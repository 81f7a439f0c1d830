"""Transition tables: states and signals as data, from which diagrams and tests come, too."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from p2pdiloco.errors import invariant

EnumClass = TypeVar("EnumClass", bound=Enum)


def direct_members(kind: type[EnumClass]) -> type[EnumClass]:
    """Make the members of a decorated enumeration plain attributes of it, as from Python 3.12 on.

    Python 3.11 finds each anew through a descriptor, fourteen times as slow, and the core asks for its states
    many times an event.
    """
    for name, member in kind.__members__.items():
        type.__setattr__(kind, name, member)
    return kind


State = TypeVar("State", bound=Enum)
Signal = TypeVar("Signal", bound=Enum)
Table = Mapping[tuple[State, Signal], State]


class Machine(Generic[State, Signal]):
    """State and the table of its legal transitions. An unlisted pair is a bug of ours, never a peer's."""

    def __init__(self, table: Table[State, Signal], start: State) -> None:
        self._table = table
        self.state = start

    def go(self, signal: Signal) -> State:
        """Follow one transition.

        Raises:
            InvariantViolation: the table has none.
        """
        after = self._table.get((self.state, signal))
        if after is None:
            invariant(False, f"no transition {signal.name} in {self.state.name}")
        else:
            self.state = after
        return self.state

    def may(self, signal: Signal) -> bool:
        """Tell whether the signal is legal now."""
        return (self.state, signal) in self._table


def mermaid(table: Table[State, Signal], *starts: State) -> str:
    """Draw a Mermaid state diagram of a table, for docs/reference/states.md."""
    lines = ["stateDiagram-v2", *(f"    [*] --> {start.name}" for start in starts)]
    lines += [f"    {a.name} --> {b.name}: {signal.name}" for (a, signal), b in table.items()]
    return "\n".join(lines)
