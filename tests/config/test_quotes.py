"""What stands where quotes are missing is answered with the line as it was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.config.values import intended_line, read_toml
from p2pdiloco.errors import ConfigError

TEXT = "text stands in quotes: "


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("name = Zo and more", TEXT + 'name = "Zo and more"'),
        ("max_upload = 20Mbit  # of 50", TEXT + 'max_upload = "20Mbit"'),
        ("data_dir = ~/x", TEXT + 'data_dir = "~/x"'),
        ('name = "x', TEXT + 'name = "x"'),
        ("name = “x”", TEXT + 'name = "x"'),
        ('join = [/ip4/1.2.3.4/tcp/1, "b"]', TEXT + 'join = ["/ip4/1.2.3.4/tcp/1", "b"]'),
        ("join = /ip4/1.2.3.4/tcp/1", TEXT + 'join = "/ip4/1.2.3.4/tcp/1"'),
        ("genesis = Yes", "true and false are written small, without quotes: genesis = true"),
        ("relay = off", "true and false are written small, without quotes: relay = false"),
        ("name =", TEXT + 'name = ""'),
        ('name = a"b', ""),
        ("[node", ""),
        ("seed = 1", ""),
    ],
)
def test_a_line_is_written_as_it_was_meant(line: str, answer: str) -> None:
    assert intended_line(line) == answer


@pytest.mark.parametrize("line", ["name = shake\n", "name = shake", "name = shake\r\n", 'name = "shake'])
def test_a_settings_file_without_quotes_is_told_how(line: str, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(f"[node]\n{line}".encode())
    with pytest.raises(ConfigError, match="line 2 is not valid TOML") as told:
        read_toml(path)
    assert told.value.hint == TEXT + 'name = "shake"'
