"""The control socket: for this user, bounded, and what a person reads when nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from deadlines import within_s

from p2pdiloco.daemon.owner import control
from p2pdiloco.daemon.owner.control import (
    MAX_CLIENTS,
    MAX_LINE_BYTES,
    ControlServer,
    ControlState,
    NodeSilent,
    Request,
    ask,
    decode_reply,
    socket_path,
)
from p2pdiloco.errors import UserError

pytestmark = pytest.mark.process


class Told:
    """Controls that note what they are told."""

    def __init__(self) -> None:
        self.words: list[str] = []

    async def pause(self) -> str:
        self.words.append("pause")
        return "paused"

    async def resume(self) -> str:
        raise UserError("it cannot be", "a hint")

    def finish(self) -> str:
        return "finishing"

    async def limits(self, changes: dict[str, str]) -> str:
        self.words.append(str(changes))
        return "changed"

    def state(self) -> ControlState:
        return ControlState(peer="p", state="training", recent=("learner: /tmp/Zo\udceb",))


async def asked(folder: Path, request: Request):
    return await asyncio.to_thread(ask, folder, request, 5.0)


@contextlib.asynccontextmanager
async def served(folder: Path, controls: Told | None = None) -> AsyncIterator[ControlServer]:
    server = ControlServer(folder, controls or Told())
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def raw(folder: Path, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(socket_path(folder)))
    writer.write(line)
    try:
        return await asyncio.wait_for(reader.read(), within_s(20))
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_every_word_arrives_and_is_answered_in_one_line(tmp_path: Path) -> None:
    controls = Told()
    async with served(tmp_path, controls):
        path = socket_path(tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path == tmp_path / "control.sock"
        reply = await asked(tmp_path, Request("pause"))
        assert (reply.ok, reply.said, reply.state.state) == (True, "paused", "training")
        reply = await asked(tmp_path, Request("resume"))
        assert (reply.ok, reply.said, reply.hint) == (False, "it cannot be", "a hint")
        assert (await asked(tmp_path, Request("limits", {"hours": "22-7"}))).said == "changed"
        assert (await asked(tmp_path, Request("state"))).state.peer == "p"
        assert (await asked(tmp_path, Request("finish"))).said == "finishing"
        assert controls.words == ["pause", "{'hours': '22-7'}"]
    assert not path.exists()
    with pytest.raises(NodeSilent, match="does not answer"):
        await asked(tmp_path, Request("state"))


async def test_garbage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path):
        words = (b"", b"[]", b'{"do":"shout"}', b'{"do":"pause","more":1}', b"\xff\xfe", b"[" * 9000)
        for line in words:
            reply = decode_reply(await raw(tmp_path, line + b"\n"))
            assert not reply.ok and "not a request" in reply.said
        assert await raw(tmp_path, b"x" * (4 * MAX_LINE_BYTES)) == b"", "a line without an end"
        with monkeypatch.context() as hurried:
            hurried.setattr(control, "PATIENCE_S", 0.2)
            assert await raw(tmp_path, b'{"do":"pau') == b"", "half a line, and nothing more"
        assert (await asked(tmp_path, Request("pause"))).ok


async def test_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controls = Told()
    async with served(tmp_path, controls):
        monkeypatch.setattr(control, "is_owner", lambda _connection: False)
        reply = await asked(tmp_path, Request("pause"))
        assert (reply.ok, reply.said) == (False, "this node belongs to another user") and not controls.words


@pytest.mark.parametrize(("user", "is_taken"), [(0, True), (4711, False)])
async def test_a_socket_of_another_user_is_root_s_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, is_taken: bool
) -> None:
    async with served(tmp_path):
        # The server sees asyncio's view of its socket, and takes it for its owner's; the client does not.
        monkeypatch.setattr(control, "is_owner", lambda connection: not isinstance(connection, socket.socket))
        monkeypatch.setattr(control.os, "geteuid", lambda: user)
        if is_taken:
            assert (await asked(tmp_path, Request("state"))).ok
        else:
            with pytest.raises(UserError, match="belongs to another user"):
                await asked(tmp_path, Request("state"))


async def test_so_many_at_once_and_no_more(tmp_path: Path) -> None:
    async with served(tmp_path):
        silent = [await asyncio.open_unix_connection(str(socket_path(tmp_path))) for _ in range(MAX_CLIENTS)]
        reply = await asked(tmp_path, Request("pause"))
        assert (reply.ok, reply.said) == (False, "too many ask this node at once")
        for _, writer in silent:
            writer.close()


async def test_a_socket_that_a_killed_node_left_is_made_anew(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path(tmp_path)))
    async with served(tmp_path):
        assert (await asked(tmp_path, Request("pause"))).ok


async def test_something_else_at_its_path_stays_and_the_node_runs_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    socket_path(tmp_path).write_text("dear to somebody")
    async with served(tmp_path):
        assert "no control socket at" in caplog.text and "do not reach this node" in caplog.text
    assert socket_path(tmp_path).read_text() == "dear to somebody"


async def test_a_long_path_has_its_socket_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 20) / ("longer" * 10)
    folder.mkdir(parents=True)
    path = socket_path(folder)
    assert len(os.fsencode(path)) < 104 and path != folder / "control.sock"
    assert socket_path(folder.parent / "other" / folder.name) != path
    async with served(folder):
        assert (await asked(folder, Request("pause"))).ok and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
