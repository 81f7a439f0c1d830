"""Names beside a history: they outlive restarts, however many and long; a damaged file is set aside."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from p2pdiloco.credits import MAX_NAMES, NamesFile


def test_names_are_kept_however_long(tmp_path: Path) -> None:
    path = tmp_path / "history" / "names.json"
    known = {f"12D3KooW{n:044}": "\N{MATHEMATICAL BOLD CAPITAL A}" * 63 for n in range(MAX_NAMES)}
    NamesFile(path, known).save(known)
    again = NamesFile(path, {})
    assert all(again.get(peer) == name for peer, name in known.items())


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "names.json"
    path.write_bytes(b"[1")
    with caplog.at_level(logging.WARNING):
        names = NamesFile(path, {"p1": "ada"})
    assert "damaged" in caplog.text and (tmp_path / "names.json.corrupt").exists()
    path.mkdir()
    names.save(["p1"])
    assert NamesFile(path, {}).get("p1") == "ada"
