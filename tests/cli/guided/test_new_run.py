"""`p2pdiloco run new --guide` at a pseudo-terminal: the flags of `run new` as questions."""

from __future__ import annotations

from pathlib import Path

import pytest
from terminal_kit import CTRL_C, Terminal

from p2pdiloco.cli import main as cli_main
from p2pdiloco.tasks.registry import load_manifest


@pytest.mark.process
def test_the_guide_asks_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    with Terminal(["-m", "p2pdiloco", "run", "new", "--guide", "--out", str(out)]) as terminal:
        for question, line in (
            ("Name of the run", "no good"),
            ("a name has", "ours"),
            ("Model to start from", "huge"),
            ("answer one of", "micro"),
            ("Data:", "back"),
            ("Model to start from", "tiny"),
            ("Data:", "hub:owner/texts"),
            ("Length", "demo"),
            ("Members at the start", "many"),
            ("answer a number", "12"),
            ("Who may be", ""),
        ):
            terminal.expect(question)
            terminal.type(line)
        assert terminal.end() == 0, terminal.shown
    manifest = load_manifest(out)
    assert (manifest.run.name, manifest.data.source, manifest.data.dataset) == ("ours", "hub", "owner/texts")
    assert manifest.group.expected_members == 12 and manifest.admission.mode == "invite"
    for command in (f"p2pdiloco bootstrap --run {out}", "p2pdiloco invite ours", "node --genesis INVITE"):
        assert command in terminal.shown


@pytest.mark.process
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    with Terminal(["-m", "p2pdiloco", "run", "new", "ours", "--guide", "--out", str(out)]) as terminal:
        terminal.expect("Name of the run")
        terminal.expect(": ")
        terminal.press(CTRL_C)
        # readline sees a signal that comes just before it waits only with the next key.
        assert terminal.end(pressing=b"\n") == 130 and "Traceback" not in terminal.shown
    assert not out.exists()


def test_without_a_terminal_or_a_name_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run.toml")
    assert cli_main.run(["run", "new", "--guide", "--out", out]) == 2
    assert "nobody at a terminal" in capsys.readouterr().err
    assert cli_main.run(["run", "new", "--out", out]) == 2
    assert "--guide" in capsys.readouterr().err
    assert cli_main.run(["run", "new", "ours", "--data", "hub:what", "--out", out]) == 2
    assert "data are embedded" in capsys.readouterr().err
    assert cli_main.run(["run", "new", "ours", "--data", "jsonl", "--out", out]) == 0
    assert load_manifest(Path(out)).data.source == "jsonl"
