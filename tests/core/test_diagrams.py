"""The state machines that people read (docs/reference/states.md) are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import diagrams


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
