"""`p2pdiloco limits` where no node runs: what is kept for the next start is changed, and shown."""

from pathlib import Path

import pytest

from p2pdiloco.cli import main as cli_main
from p2pdiloco.daemon.owner.wishes import FILE


def test_what_is_kept_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["limits", "--data-dir", str(tmp_path)]
    assert cli_main.run(line) == 4
    assert "kept for the next start" in (said := capsys.readouterr().out) and said.endswith("nothing\n")
    assert cli_main.run([*line, "--max-upload", "10Mbit", "--hours", "22-7"]) == 0
    capsys.readouterr()
    assert cli_main.run(line) == 4
    said = capsys.readouterr().out
    assert "max-upload 10Mbit" in said and "hours 22-7" in said
    (tmp_path / FILE).write_text('{"changed": ["colour"]}')  # another version's
    assert cli_main.run(line) == 4 and capsys.readouterr().out.endswith("nothing\n")
    assert cli_main.run(["limits", "--data-dir", str(tmp_path / "nowhere")]) == 4
    assert "no node runs here" in capsys.readouterr().err
