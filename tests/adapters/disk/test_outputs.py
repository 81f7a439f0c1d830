"""Places for results are tried before the work, and left as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.adapters.data_dir import try_file, try_folder
from p2pdiloco.config.settings import DemoSettings, NodeSettings
from p2pdiloco.daemon.learner_host import try_socket
from p2pdiloco.daemon.start import try_paths
from p2pdiloco.demo import demo
from p2pdiloco.errors import StorageError, UserError

NOWHERE = Path("/proc/self/nothing")
"""Place at which nobody can make anything, root neither."""


@pytest.mark.process
def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("content")
    try_file(tmp_path / "old", "--out")
    try_file(tmp_path / "new", "--out")
    try_folder(tmp_path / "deep" / "results", "--result-dir")
    try_folder(tmp_path, "--result-dir")
    try_socket(tmp_path / "socket")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "content"


@pytest.mark.parametrize("place", ["file/x", "missing/x", "", str(NOWHERE)])
def test_a_file_that_cannot_be_written_is_told_by_its_flag(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^--out .*(cannot be written|is a folder)") as told:
        try_file(tmp_path / place, "--out")
    assert "--out" in told.value.hint


@pytest.mark.parametrize("place", ["file", "file/x", str(NOWHERE)])
def test_a_folder_that_cannot_be_written_is_told_by_its_flag(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^--result-dir .* cannot be written") as told:
        try_folder(tmp_path / place, "--result-dir")
    assert "--result-dir" in told.value.hint


@pytest.mark.process
@pytest.mark.parametrize("place", ["file", "file/x", str(NOWHERE), "long" * 50])
def test_a_socket_that_cannot_be_made_is_told(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot listen for a learner at"):
        try_socket(tmp_path / place)


@pytest.mark.process
@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("result_dir", NOWHERE, "--result-dir"),
        ("learner_socket", NOWHERE, "cannot listen for a learner"),
        ("data", NOWHERE, "the data path .* does not exist"),
    ],
)
def test_a_node_tries_its_paths_at_its_start(flag: str, value: Path, words: str, tmp_path: Path) -> None:
    try_paths(NodeSettings(data_dir=tmp_path))
    with pytest.raises(UserError, match=words):
        try_paths(NodeSettings(data_dir=tmp_path, **{flag: value}))


@pytest.mark.parametrize("flag", ["report", "plot"])
def test_a_demo_tries_its_files_before_it_starts_anything(flag: str) -> None:
    with pytest.raises(StorageError, match=f"--{flag} .* cannot be written"):
        demo.run(DemoSettings(**{flag: NOWHERE}))
