"""Homes that nobody knows: no HOME, and a user id without a name, as in many containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdiloco.cli.main import run
from p2pdiloco.config.settings import BootstrapSettings, NodeSettings, check_bootstrap, check_node
from p2pdiloco.config.values import expanded, has_home, those_known
from p2pdiloco.daemon.program import data_folder
from p2pdiloco.errors import ConfigError

JOIN = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGrW3c3JmGwPbTbVmn9LrgvmHDiEy2hkrUGWuJgKVCyUq",)


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert not has_home() and those_known([Path("~/x")]) == []


@pytest.mark.usefixtures("homeless")
def test_a_folder_that_is_named_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    node = check_node(NodeSettings(data_dir=Path("node"), join=JOIN))
    bootstrap = check_bootstrap(BootstrapSettings(data_dir=tmp_path / "bootstrap"))
    for settings in (node, bootstrap):
        monkeypatch.delenv("HOME", raising=False)
        with data_folder(settings):
            # Libraries keep what they fetch there, and not in a folder called "~".
            assert Path.home() == tmp_path / settings.data_dir
    monkeypatch.delenv("HOME", raising=False)
    assert run(["run", "new", "x", "--preset", "micro"]) == 0 and run(["run", "check", "run.toml"]) == 0


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    "arguments",
    [
        ("node", "--join", *JOIN),
        ("bootstrap",),
        ("status",),
        ("invite", "x"),
        ("ban", "x", "y"),
        ("can-join", "x"),
        ("export", "--data-dir", "~/x", "--out", "y"),
        ("status", "--data-dir", "~/x"),
    ],
)
def test_else_it_is_one_sentence(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[0] == "export":  # the config's tests run without torch, too
        pytest.importorskip("torch")
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert "HOME is not set, and the user id 987654321 has no name, so there is no home folder\n" in said
    assert "hint: name a folder with --data-dir, or set HOME\n" in said


def test_a_home_is_found_and_that_of_nobody_is_not() -> None:
    assert expanded(Path("~/x")) == Path.home() / "x" and expanded(Path("x")) == Path("x")
    with pytest.raises(ConfigError, match='--out ~nobody-such/x: there is no user "nobody-such"'):
        expanded(Path("~nobody-such/x"), "--out")
