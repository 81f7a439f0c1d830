"""Every pair of state and signal of the four transition tables, written down a second time by hand."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import diagrams
from p2pdiloco.core.base import AnswerTime, answer_bound_s, grace_window_s
from p2pdiloco.core.distrust import backoff_s
from p2pdiloco.core.election import OFFICE_TABLE, OfficeSignal, OfficeState
from p2pdiloco.core.follower import FOLLOW_TABLE, FollowSignal, FollowState
from p2pdiloco.core.pending import SEND_TABLE, SendSignal, SendState
from p2pdiloco.core.round import ROUND_TABLE, RoundSignal, RoundState
from p2pdiloco.errors import InvariantViolation
from p2pdiloco.util import BoundedDict, Machine, MovingAverage, Rests, Table

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
    lines = diagrams.mermaid(SEND_TABLE, SendState.WAITING).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> WAITING"]
    assert "    OFFERED --> HELD: ACCEPT" in lines
    assert len(lines) == 2 + len(SEND_TABLE)


# A table that forgets what was set longest ago.


def test_who_is_set_again_is_kept_longer() -> None:
    table: BoundedDict[str, int] = BoundedDict(2)
    table["a"] = 1
    table["b"] = 2
    table["a"] = 3
    table["c"] = 4
    assert dict(table) == {"a": 3, "c": 4}


def test_rests_double_up_to_the_longest_for_each_key() -> None:
    now_s, lengths_s = 0.0, []
    rests: Rests[str] = Rests(30.0, 3600.0, lambda: now_s)
    for _ in range(9):
        rests.lengthen("liar")
        began_s = now_s
        while rests.rests("liar"):
            now_s += 10
        lengths_s.append(now_s - began_s)
        assert not rests.rests("honest")
    assert lengths_s == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    del rests["liar"]
    rests.lengthen("liar")
    assert rests["liar"] == (now_s + 30, 30)


def test_a_default_counts_like_what_is_set() -> None:
    table: BoundedDict[str, int] = BoundedDict(1)
    assert table.setdefault("a", 1) == 1
    assert table.setdefault("b", 2) == 2
    assert list(table) == ["b"]


# Moving averages, back-off and the grace window (arXiv 2604.21428).

seconds = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("tau", "step_s", "quorum_s", "sync_s", "gamma", "cap_s", "expected_s"),
    [
        (2, 1.0, 0.5, 0.5, 0.8, 10.0, 0.8),  # gamma x slack
        (2, 1.0, 0.5, 0.5, 0.8, 0.3, 0.3),  # the cap
        (2, 1.0, 1.5, 0.5, 0.8, 10.0, 0.0),  # no slack
        (2, 1.0, 9.0, 0.5, 0.8, 10.0, 0.0),  # less than none
        (2, 0.0, 0.0, 0.0, 0.8, 10.0, 0.0),  # nobody has made a step yet
    ],
)
def test_grace_window(
    tau: int, step_s: float, quorum_s: float, sync_s: float, gamma: float, cap_s: float, expected_s: float
) -> None:
    assert grace_window_s(tau, step_s, quorum_s, sync_s, gamma, cap_s) == pytest.approx(expected_s)


@given(st.integers(1, 100), seconds, seconds, seconds, st.floats(0, 0.99), st.floats(0, 100))
def test_the_result_is_back_in_time(
    tau: int, step_s: float, quorum_s: float, sync_s: float, gamma: float, cap_s: float
) -> None:
    grace_s = grace_window_s(tau, step_s, quorum_s, sync_s, gamma, cap_s)
    assert 0 <= grace_s <= cap_s
    assert grace_s == 0 or quorum_s + sync_s + grace_s <= tau * step_s * (1 + 1e-9)


def test_an_average_starts_at_the_first_sample_and_moves_by_a_fifth() -> None:
    average = MovingAverage()
    average.add(10.0)
    assert average.value == 10.0
    average.add(20.0)
    assert average.value == pytest.approx(12.0)


def test_backoff_doubles_and_is_bounded() -> None:
    assert [backoff_s(0.3, n) for n in (0, 1, 2, 3)] == pytest.approx([0.0, 0.3, 0.6, 1.2])
    assert backoff_s(0.3, 5) == backoff_s(0.3, 10_000) == pytest.approx(16 * 0.3)


@given(st.floats(-10, 10), st.floats(0, 100), seconds)
def test_the_answer_time_is_a_floor_of_the_window_below_the_cap(
    slack_s: float, cap_s: float, answer_s: float
) -> None:
    grace_s = grace_window_s(1, max(slack_s, 0.0), max(-slack_s, 0.0), 0.0, 0.8, cap_s, answer_s)
    assert min(answer_s, cap_s) <= grace_s <= cap_s
    assert grace_s == pytest.approx(min(cap_s, max(answer_s, 0.8 * slack_s)))


def test_the_answer_time_covers_nearly_all_answers_and_forgets() -> None:
    answers = AnswerTime()
    assert answers.expected_s == math.inf  # a new syncer waits as long as it may
    samples_s = [0.05 + 0.01 * (n % 7) for n in range(200)]
    for sample_s in samples_s:
        answers.add(sample_s)
    assert sum(s <= answers.expected_s for s in samples_s) >= 0.99 * len(samples_s)
    for _ in range(60):
        answers.add(0.01)
    assert answers.expected_s < 0.02
    assert answer_bound_s(8, 0.1) == pytest.approx(0.6)


# The state machines that people read (docs/reference/states.md) are those of the code.


@pytest.mark.skipif(not diagrams.DOCUMENT.parent.exists(), reason="no documents here")
def test_the_committed_diagrams_are_fresh() -> None:
    assert diagrams.main(["--check"]) == 0, "run python scripts/diagrams.py"


def test_a_stale_document_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "states.md"
    monkeypatch.setattr(diagrams, "DOCUMENT", document)
    assert diagrams.main(["--check"]) == 1
    document.write_text("old\n")
    assert diagrams.main(["--check"]) == 1
    assert diagrams.main([]) == 0
    assert diagrams.main(["--check"]) == 0
    text = document.read_text()
    assert text.count("stateDiagram-v2") == 4 and "COLLECTING --> CLOSING: QUORUM" in text
    assert "| COLLECTING | QUORUM | CLOSING |" in text


@pytest.mark.parametrize("machine", diagrams.MACHINES, ids=lambda machine: machine[0])
def test_every_state_is_explained_and_in_the_table(machine: tuple) -> None:  # type: ignore[type-arg]
    text = diagrams.machine(*machine)
    for state in type(machine[-1][0]):
        assert f"- **{state.name}**: " in text and f"| {state.name} |" in text
