"""Every pair of state and signal of the four transition tables, written down a second time by hand."""

from __future__ import annotations

from enum import Enum

import pytest

from p2pdiloco.core.election import OFFICE_TABLE, OfficeSignal, OfficeState
from p2pdiloco.core.follower import FOLLOW_TABLE, FollowSignal, FollowState
from p2pdiloco.core.pending import SEND_TABLE, SendSignal, SendState
from p2pdiloco.core.round import ROUND_TABLE, RoundSignal, RoundState
from p2pdiloco.errors import InvariantViolation
from p2pdiloco.util import Machine, Table, mermaid

OFFICE = """
           STAND      LOSE    WIN      FOLLOW     OPEN
VACANT     CANDIDATE  -       -        FOLLOWING  -
FOLLOWING  -          -       -        FOLLOWING  VACANT
CANDIDATE  -          VACANT  HOLDING  FOLLOWING  -
HOLDING    -          -       -        FOLLOWING  VACANT
"""
ROUND = """
            CONTRIBUTION  QUORUM   CALLED   CLOSE    EMPTY  MERGED      FAILED  PUBLISHED  ABANDON
IDLE        COLLECTING    -        CLOSING  -        -      -           -       -          IDLE
COLLECTING  COLLECTING    CLOSING  CLOSING  -        -      -           -       -          IDLE
CLOSING     CLOSING       -        -        MERGING  IDLE   -           -       -          IDLE
MERGING     MERGING       -        -        -        -      PUBLISHING  IDLE    -          IDLE
PUBLISHING  PUBLISHING    -        -        -        -      -           IDLE    IDLE       -
"""
SEND = """
           COMBINED  OFFER    ACCEPT  RETRY
COMBINING  WAITING   -        -       -
WAITING    -         OFFERED  -       -
OFFERED    -         -        HELD    WAITING
HELD       -         -        -       WAITING
"""
FOLLOW = """
          PULL_UPDATE  PULL_STATE  DONE
RESTING   UPDATING     COPYING     -
UPDATING  -            -           RESTING
COPYING   -            -           RESTING
"""
TABLES = [
    (OFFICE, OFFICE_TABLE, OfficeState, OfficeSignal),
    (ROUND, ROUND_TABLE, RoundState, RoundSignal),
    (SEND, SEND_TABLE, SendState, SendSignal),
    (FOLLOW, FOLLOW_TABLE, FollowState, FollowSignal),
]
Row = tuple[Table[Enum, Enum], Enum, Enum, str]


def rows() -> list[Row]:
    """(table, state, signal, name of the next state or "-") of every pair that exists."""
    pairs = []
    for text, table, states, signals in TABLES:
        head, *lines = text.strip("\n").splitlines()
        cells = {}
        for line in lines:
            name, *nexts = line.split()
            cells |= {(name, s): n for s, n in zip(head.split(), nexts, strict=True)}
        assert len(cells) == len(states) * len(signals), "a state or signal has no row or column here"
        pairs += [(table, a, s, cells[(a.name, s.name)]) for a in states for s in signals]
    return pairs


@pytest.mark.parametrize(
    ("table", "state", "signal", "following"), rows(), ids=lambda v: str(v) if isinstance(v, Enum) else ""
)
def test_pair(table: Table[Enum, Enum], state: Enum, signal: Enum, following: str) -> None:
    machine: Machine[Enum, Enum] = Machine(table, state)
    assert machine.may(signal) == (following != "-")
    if following == "-":
        with pytest.raises(InvariantViolation):
            machine.go(signal)
        assert machine.state is state
    else:
        assert machine.go(signal).name == following
        assert machine.state.name == following


@pytest.mark.parametrize(
    ("_text", "table", "states", "signals"), TABLES, ids=["office", "round", "send", "follow"]
)
def test_every_state_can_be_reached_and_left(
    _text: str, table: Table[Enum, Enum], states: type[Enum], signals: type[Enum]
) -> None:
    reached = {after for (before, _), after in table.items() if before is not after}
    assert reached == set(states) - {SendState.COMBINING}, "and that one is where some begin"
    assert {before for (before, _), after in table.items() if before is not after} == set(states)
    assert {signal for _, signal in table} == set(signals)


def test_the_diagram_has_every_arrow() -> None:
    lines = mermaid(SEND_TABLE, SendState.WAITING).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> WAITING"]
    assert "    OFFERED --> HELD: ACCEPT" in lines
    assert len(lines) == 2 + len(SEND_TABLE)
