"""Programs that come by themselves: which daemon takes them, and whose they are."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from deadlines import within_s
from learner_kit import BASES, LAYOUTS, filled_exchange

from p2pdiloco import Session
from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment
from p2pdiloco.daemon import learner_host
from p2pdiloco.daemon.learner_host import GuestHost, LearnerExited
from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import (
    CopiedOut,
    FollowCourse,
    LearnerEnd,
    LearnerOptions,
    SpareMachine,
    Start,
    StateSaved,
    join_daemon,
)
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.registry import render_toml, task_of
from p2pdiloco.tensors.layout import Exchange

pytestmark = pytest.mark.process

PATIENCE_S = 20.0
MERGED_TOKENS = 50_000


@asynccontextmanager
async def waiting(folder: Path) -> AsyncIterator[tuple[GuestHost, Path, asyncio.Queue[Any]]]:
    """The part of a daemon of that folder that has a learner, its socket, and what it reports."""
    exchange, events = filled_exchange(), asyncio.Queue[Any]()
    path = socket_folder(folder) / "learner.sock"
    host = GuestHost(
        path, MICRO, LAYOUTS, exchange, LearnerOptions(peer="p"), events.put_nowait, folder / "log"
    )
    try:
        await host.start(BASES)
        yield host, path, events
    finally:
        host.close()
        exchange.close()
        shutil.rmtree(path.parent)  # p2pd's to remove in a whole daemon


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Program in a daemon's place, so that what a session would end is not this test."""
    started = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def test_a_second_session_leaves_the_first_one_its_daemon(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    with DataDir(folder):
        (folder / "session.log").write_text("the first one's")
        async with waiting(folder) as (host, path, events):
            first, descriptor = await asyncio.to_thread(join_daemon, path, within_s(PATIENCE_S))
            assert await asyncio.to_thread(LearnerEnd(first).arrived, within_s(PATIENCE_S))
            with pytest.raises(UserError, match="is in use by another running node"):
                await asyncio.to_thread(Session, torch.nn.Linear(1, 1), None, "micro", data_dir=folder)
            assert (folder / "session.log").read_text() == "the first one's"
            first.close()
            os.close(descriptor)
            assert isinstance(await asyncio.wait_for(events.get(), within_s(PATIENCE_S)), LearnerExited)
            await host.start(BASES)
            successor, descriptor = await asyncio.to_thread(join_daemon, path, within_s(PATIENCE_S))
            assert await asyncio.to_thread(LearnerEnd(successor).arrived, within_s(PATIENCE_S))
            successor.close()
            os.close(descriptor)


async def test_a_program_that_comes_late_begins_with_the_course_that_the_run_has_by_then(
    tmp_path: Path,
) -> None:
    async with waiting(tmp_path) as (host, path, _):
        host.follow(FollowCourse((), "paused"))
        host.follow(SpareMachine(True, 0.5))
        connection, descriptor = await asyncio.to_thread(join_daemon, path, within_s(PATIENCE_S))
        program = LearnerEnd(connection)
        assert await asyncio.to_thread(program.arrived, within_s(PATIENCE_S))
        (start,) = program.poll()
        assert isinstance(start, Start) and start.course == FollowCourse((), "paused")
        assert start.spare == SpareMachine(True, 0.5)
        connection.close()
        os.close(descriptor)


async def test_a_session_begins_with_what_the_one_before_had_not_contributed(tmp_path: Path) -> None:
    state, models = tmp_path / "state", [task_of(MICRO).model() for _ in range(2)]
    steps = 0
    async with waiting(tmp_path) as (host, _, events):
        for life, model in enumerate(models):
            with process() as daemon:
                (tmp_path / "lock").write_text(str(daemon.pid))
                session = await asyncio.to_thread(Session, model, None, "micro", data_dir=tmp_path)
                ready = await asyncio.wait_for(events.get(), within_s(PATIENCE_S))
                if life:
                    for name, value in named_parameters(models[0]).items():
                        torch.testing.assert_close(named_parameters(model)[name], value)
                    assert ready.restored and (ready.inner_step, session.inner_step) == (steps, 0)
                # The run's clock, which others have moved on meanwhile.
                merged = MERGED_TOKENS if life else 0
                assert session.run_tokens == merged + 256 * steps
                assert session.schedule_tokens == MICRO.inner.schedule_tokens
                before, steps, ends = session.run_tokens, 0, None
                while await asyncio.to_thread(session.step, 256, 1.0):
                    with torch.no_grad():
                        for value in named_parameters(model).values():
                            value += 0.01
                    steps += 1
                    assert session.run_tokens == before + 256 * steps
                    if ends is None and steps > 4:  # some fragments are copied out by now
                        ends = asyncio.create_task(host.stop(state, within_s(PATIENCE_S)))
                assert daemon.stdin is not None
                daemon.stdin.close()
                await asyncio.to_thread(session.close)
                assert ends is not None and await ends == 0
            seen = []
            while not events.empty():
                seen.append(events.get_nowait())
            assert StateSaved(state, True, last=True) in seen and any(
                isinstance(event, CopiedOut) for event in seen
            )
            steps += 1
            later = tuple(msgspec.structs.replace(base, tokens=MERGED_TOKENS) for base in BASES)
            await host.start(later, state, ("all",) * len(BASES))


async def test_a_session_that_comes_when_the_run_has_ended_makes_no_step(tmp_path: Path) -> None:
    amended = (Amendment(1, 0, schedule_tokens=999_936),)
    async with waiting(tmp_path) as (host, _, _):
        host.follow(FollowCourse(amended, "ended"))
        with process() as daemon:
            (tmp_path / "lock").write_text(str(daemon.pid))
            model = task_of(MICRO).model()
            session = await asyncio.to_thread(Session, model, None, "micro", data_dir=tmp_path)
            assert session.schedule_tokens == 999_936
            assert not await asyncio.to_thread(session.step, 256, 1.0)
            assert session.inner_step == 0
            ends = asyncio.create_task(host.stop(None, within_s(PATIENCE_S)))
            assert daemon.stdin is not None
            daemon.stdin.close()
            await asyncio.to_thread(session.close)
            assert await ends == 0


async def test_a_daemon_of_another_run_is_not_taken(tmp_path: Path) -> None:
    """Tell the daemon's run by its name and by its run.toml; the program goes on waiting."""
    other, same = tmp_path / "other.toml", tmp_path / "same.toml"
    text = render_toml(MICRO)
    same.write_text(text)
    other.write_text(text.replace('name = "micro"', 'name = "another"'))
    with process() as daemon:
        async with waiting(tmp_path) as (host, _, events):
            (tmp_path / "lock").write_text(str(daemon.pid))
            for run, words in (
                ("another", "is in the run micro, which is not another"),
                (other, "is in the run micro, which is not "),
                (same, "trains another model than yours"),  # its run, so its parameters are compared
            ):
                with pytest.raises(UserError, match=words):
                    await asyncio.to_thread(Session, torch.nn.Linear(1, 1), None, run, data_dir=tmp_path)
                assert isinstance(await asyncio.wait_for(events.get(), within_s(PATIENCE_S)), LearnerExited)
                if run != same:
                    assert daemon.poll() is None
                    await host.start(BASES)


def put(path: Path, what: str, listener: socket.socket) -> None:
    """Put something at a path that is not a daemon's to remove."""
    if what == "file":
        path.write_text("dear")
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("elsewhere")
    else:
        listener.bind(str(path))
        listener.listen()


def host_at(path: Path, exchange: Exchange) -> GuestHost:
    return GuestHost(path, MICRO, LAYOUTS, exchange, LearnerOptions(peer="p"), print, path.parent / "log")


@pytest.mark.parametrize("what", ["file", "folder", "link", "socket of another program"])
async def test_what_is_at_the_sockets_path_stays(what: str, tmp_path: Path) -> None:
    path, exchange = tmp_path / "s", filled_exchange()
    with socket.socket(socket.AF_UNIX) as listener:
        put(path, what, listener)
        before = path.lstat()
        host = host_at(path, exchange)
        with pytest.raises(UserError, match="cannot listen for a learner at") as refused:
            await host.prepare()
        host.close()
        exchange.close()
        assert "\n" not in str(refused.value) and "--learner-socket" in refused.value.hint
        assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


async def test_a_socket_that_nobody_listens_on_is_replaced_and_only_ours_goes(
    tmp_path: Path,
) -> None:
    path, exchange = tmp_path / "s", filled_exchange()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    for replaced in (False, True):
        host = host_at(path, exchange)
        await host.prepare()
        if replaced:
            path.unlink()
            path.write_text("dear")
        host.close()
        assert path.exists() == replaced
    exchange.close()


async def test_a_connection_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learner_host, "ACCEPT_PAUSE_S", 0.0)
    sent, times = learner_host.socket.send_fds, iter([OSError("too many open files")])

    def fails_once(*arguments: Any) -> int:
        for error in times:
            raise error
        return sent(*arguments)

    monkeypatch.setattr(learner_host.socket, "send_fds", fails_once)
    accepts = asyncio.get_running_loop().sock_accept
    refused = iter([OSError("no descriptors")])

    class Loop:
        async def sock_accept(self, listener: Any) -> Any:
            for error in refused:
                raise error
            return await accepts(listener)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = asyncio.get_running_loop()
    monkeypatch.setattr(learner_host.asyncio, "get_running_loop", lambda: Loop())
    async with waiting(tmp_path) as (_, path, _):
        with pytest.raises(UserError, match="waits for a learner"):
            await asyncio.to_thread(join_daemon, path, within_s(PATIENCE_S))
        connection, descriptor = await asyncio.to_thread(join_daemon, path, within_s(PATIENCE_S))
        connection.close()
        os.close(descriptor)
    assert "no descriptors" in caplog.text and "too many open files" in caplog.text


async def test_who_is_no_daemon_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, (tmp_path / "file").open("wb") as file:
        listener.bind(str(path))
        listener.listen()

        def greet_wrongly() -> None:
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [b"something else here\n"], [file.fileno()])

        before = psutil.Process().num_fds()
        greeting = asyncio.create_task(asyncio.to_thread(greet_wrongly))
        with pytest.raises(UserError, match="is no daemon that waits for a learner"):
            await asyncio.to_thread(join_daemon, path, within_s(PATIENCE_S))
        await greeting
        assert psutil.Process().num_fds() == before
