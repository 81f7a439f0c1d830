"""The port of an earlier start is taken again, unless somebody else has it or another one is asked for."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from p2pdiloco.config.settings import ANY_ADDRESS
from p2pdiloco.daemon.network import discovery
from p2pdiloco.daemon.network.discovery import FILE, keep_port, listen_again


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


@pytest.mark.process
async def test_the_last_port_is_taken_again(tmp_path: Path, free_port: int) -> None:
    assert await listen_again(tmp_path, ANY_ADDRESS) == ANY_ADDRESS
    keep_port(tmp_path, [f"/ip4/0.0.0.0/tcp/{free_port}"])
    assert await listen_again(tmp_path, ANY_ADDRESS) == [f"/ip4/0.0.0.0/tcp/{free_port}"]
    asked_for = ("/ip4/127.0.0.1/tcp/0",)
    assert await listen_again(tmp_path, asked_for) == asked_for


@pytest.mark.process
async def test_a_port_that_somebody_else_has_is_given_up_with_a_word(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "PORT_PAUSE_S", 0.0)
    keep_port(tmp_path, [f"/ip4/0.0.0.0/tcp/{free_port}"])
    with socket.socket() as other:
        other.bind(("0.0.0.0", free_port))
        other.listen()
        assert await listen_again(tmp_path, ANY_ADDRESS) == ANY_ADDRESS
    assert f"port {free_port}, which this peer had, is taken" in caplog.text


@pytest.mark.parametrize("content", ["", "x", "0", "70000", "-1"])
async def test_a_damaged_note_is_as_if_it_had_never_been(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert await listen_again(tmp_path, ANY_ADDRESS) == ANY_ADDRESS
    keep_port(tmp_path, ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/8"])
    assert (tmp_path / FILE).read_text() == "7\n"
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    keep_port(tmp_path, ["/ip4/0.0.0.0/tcp/9"])
    assert (tmp_path / FILE).read_text() == "9\n"
