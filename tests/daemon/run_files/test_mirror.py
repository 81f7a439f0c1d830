"""A second bootstrap serves the same signed runs as the first, and outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import pytest
from daemon_kit import served_runs, until, write_given
from msgspec import structs

from p2pdiloco.adapters.endpoint import Endpoint
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.daemon import start, wire
from p2pdiloco.daemon.bootstrap import _Bootstrap
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.network.reach import DialBack
from p2pdiloco.daemon.run_files import served_runs as mirror
from p2pdiloco.daemon.run_files.known_runs import JOINED, PublishedRun, saved_runs
from p2pdiloco.daemon.run_files.served_runs import (
    Mirror,
    changed_keys,
    look_at_saved,
    name_in,
    refuse_to_split,
    words_of_edits,
)
from p2pdiloco.daemon.run_files.shared_files import fetched_tokenizer, kept_initial, size_bounds
from p2pdiloco.errors import StorageError, TransportError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import Refusal
from p2pdiloco.tasks.registry import load_manifest, render_toml
from p2pdiloco.web.sources import StartingSource, Views
from p2pdiloco_lab.memory_net import MemoryNetwork

VIEWS = Views(StartingSource("bootstrap", "", ""))


@pytest.fixture
def hub() -> MemoryNetwork:
    return MemoryNetwork()


async def serving(hub: MemoryNetwork, folder: Path, *runs: PublishedRun) -> Endpoint:
    """A bootstrap that serves these from its folder."""
    transport = hub.transport(Identity.generate().peer_id)
    door = FrontDoor(DialBack(transport))
    for run in runs:
        door.add_run(run, folder)
    await transport.start(door)
    return transport


async def first_and_second(
    hub: MemoryNetwork, tmp_path: Path, *runs: PublishedRun
) -> tuple[Endpoint, Endpoint, Path]:
    first = await serving(hub, tmp_path / "first", *runs)
    second = await serving(hub, tmp_path / "second")
    await second.connect(first.peer_id, first.addresses())
    return first, second, tmp_path / "second"


def micro(tmp_path: Path, name: str = "test", seed: int = 0) -> Path:
    path = tmp_path / f"{name}-{seed}.toml"
    path.write_text(render_toml(for_run("micro", name, seed)))
    return path


async def test_the_second_serves_the_same_signed_run_also_when_the_first_is_gone(
    hub: MemoryNetwork, tmp_path: Path
) -> None:
    write_given(tmp_path / "given.toml", "given")
    runs = await served_runs(tmp_path / "first", tmp_path / "given.toml", micro(tmp_path))
    given, drawn = sorted(runs, key=lambda run: run.name)
    first, second, folder = await first_and_second(hub, tmp_path, given, drawn)
    fetched = await Mirror(second, folder, [first.peer_id], []).first_runs()
    assert {run.id: run.signed for run in fetched} == {run.id: run.signed for run in (given, drawn)}
    assert (
        kept_initial(folder, given.id).read_bytes() == kept_initial(tmp_path / "first", given.id).read_bytes()
    )
    await first.close()
    assert {run.id for run in look_at_saved(folder).runs} == {given.id, drawn.id}  # as its next start does
    assert await served_runs(folder) == sorted(fetched, key=lambda run: run.id)


async def test_what_is_wanted_by_its_id_is_fetched_and_nothing_else(
    hub: MemoryNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "LOOK_S", 0.0)
    monkeypatch.setattr(mirror, "PATIENCE_S", 0.0)
    one, two = await served_runs(tmp_path / "first", micro(tmp_path, "one"), micro(tmp_path, "two"))
    first, second, folder = await first_and_second(hub, tmp_path, one, two)
    for wanted in (two.id, two.id[:9]):
        assert [run.id for run in await Mirror(second, folder, [first.peer_id], [wanted]).first_runs()] == [
            two.id
        ]
    with pytest.raises(UserError, match="know no run"):
        await Mirror(second, folder, [first.peer_id], ["0" * 64]).first_runs()


async def given_run(hub: MemoryNetwork, tmp_path: Path) -> tuple[Endpoint, Mirror, Path, Path]:
    """A peer that serves a run of a given version 0, a mirror, the file there and an unfinished one here."""
    write_given(tmp_path / "given.toml", "given")
    (run,) = await served_runs(tmp_path / "first", tmp_path / "given.toml")
    first, second, folder = await first_and_second(hub, tmp_path, run)
    part = kept_initial(folder, run.id).with_suffix(".safetensors" + mirror.PART)
    part.parent.mkdir(parents=True)
    return first, Mirror(second, folder, [first.peer_id], []), kept_initial(tmp_path / "first", run.id), part


async def test_a_version_0_that_was_cut_is_gone_on_with_and_a_wrong_one_fetched_anew(
    hub: MemoryNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, look, theirs, part = await given_run(hub, tmp_path)
    whole, mine = theirs.read_bytes(), part.with_suffix("")
    offsets: list[int] = []
    pull = look._transport.pull_into

    async def noted(peer: str, request: bytes, *others: Any) -> Refusal | None:
        asked = wire.decode(request, cast(Any, wire.OpenPull))
        if isinstance(asked, wire.PullInitial):
            offsets.append(asked.offset)
        return await pull(peer, request, *others)

    monkeypatch.setattr(look._transport, "pull_into", noted)
    theirs.write_bytes(whole[:500])
    part.write_bytes(whole[:1000])  # no such file is as short as they say
    assert await look.look([]) == [] and part.read_bytes() == whole[:1000]
    theirs.write_bytes(whole)
    for begun, asked in (
        (whole[:1000], [1000]),
        (whole[:99] + b"x" + whole[100:1000], [1000, 0]),  # its sum is wrong
        (whole + b"more", [len(whole) + 4, 0]),  # more than there is
        (whole + bytes(1 << 20), [0]),  # more than any such file has
    ):
        part.write_bytes(begun)
        offsets.clear()
        assert len(await look.look([])) == 1 and offsets == asked
        assert mine.read_bytes() == whole and not part.exists()
        mine.unlink()


async def test_a_version_0_that_fits_neither_model_nor_disk_is_not_taken(
    hub: MemoryNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, look, theirs, part = await given_run(hub, tmp_path)
    whole = theirs.read_bytes()
    theirs.write_bytes(whole + bytes(1 << 20))
    assert await look.look([]) == [] and part.stat().st_size == 0
    theirs.write_bytes(whole)
    free = mirror.DISK_MARGIN_BYTES + len(whole)
    monkeypatch.setattr(mirror, "free_disk_bytes", lambda _folder: free - 1)
    assert await look.look([]) == [] and part.stat().st_size == 0
    monkeypatch.setattr(mirror, "free_disk_bytes", lambda _folder: free)
    assert len(await look.look([])) == 1


def test_a_version_0_of_a_task_that_is_not_built_in_may_be_as_large_as_any_model() -> None:
    base = for_run("micro", "test")
    least, most = size_bounds(base)
    elsewhere = structs.replace(base, run=structs.replace(base.run, task="elsewhere"))
    assert size_bounds(elsewhere)[0] == 0 < least < most < size_bounds(elsewhere)[1]


async def test_who_gave_a_wrong_file_is_asked_for_it_ever_more_rarely(
    hub: MemoryNetwork, tmp_path: Path
) -> None:
    first, look, theirs, part = await given_run(hub, tmp_path)
    whole, now_s = theirs.read_bytes(), 0.0
    look = Mirror(look._transport, look._data_dir, [first.peer_id], [], lambda: now_s)
    theirs.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert await look.look([]) == [] and part.with_name(theirs.name + ".corrupt").exists()
    theirs.write_bytes(whole)
    now_s = mirror.WRONG_S - 1
    assert await look.look([]) == []  # it is not even asked
    now_s = mirror.WRONG_S
    assert len(await look.look([])) == 1


async def test_who_gave_a_wrong_tokenizer_is_told_of(hub: MemoryNetwork, tmp_path: Path) -> None:
    first, second, _ = await first_and_second(hub, tmp_path)
    base, file = for_run("micro", "test"), tmp_path / "tokenizer.json"
    file.write_bytes(b"{}")
    data = structs.replace(base.data, tokenizer="file.json", tokenizer_digest="0" * 64)
    cast(Any, first)._handlers._files[wire.PullTokenizer, "run"] = file
    liars: list[str] = []
    with pytest.raises(TransportError, match="wrong-digest"):
        await fetched_tokenizer(
            second, None, "run", structs.replace(base, data=data), [first.peer_id], liars.append
        )
    assert liars == [first.peer_id]


async def test_another_owner_s_run_of_the_same_name_is_refused_before_anything_is_signed(
    hub: MemoryNetwork, tmp_path: Path
) -> None:
    (run,) = await served_runs(tmp_path / "first", micro(tmp_path))
    first, second, _ = await first_and_second(hub, tmp_path, run)
    file = micro(tmp_path, seed=1)
    name = name_in(file)
    with pytest.raises(UserError, match=f"another owner's run called test .{run.id[:12]}"):
        await refuse_to_split(second, [first.peer_id], name, second.peer_id)
    await refuse_to_split(second, [first.peer_id], name, run.signed.owner)  # its owner's next
    await refuse_to_split(second, [first.peer_id], "other", second.peer_id)
    (tmp_path / "node").mkdir()
    with pytest.raises(UserError, match="another owner's run"):
        await start._own_run(tmp_path / "node", file, load_manifest(file), second, [first.peer_id])
    assert not (tmp_path / "node" / JOINED).exists()


def test_a_bootstrap_is_told_files_and_ids(tmp_path: Path) -> None:
    named_so = tmp_path / "deadbeef"
    named_so.write_text("")
    settings = BootstrapSettings(run=(Path("run.toml"), Path("0123456789abcdef"), named_so))
    assert settings.run_files() == [Path("run.toml"), named_so] and settings.run_ids() == ["0123456789abcdef"]


@asynccontextmanager
async def running(hub: MemoryNetwork, data_dir: Path, *runs: PublishedRun) -> AsyncIterator[FrontDoor]:
    """The front door of a bootstrap of this folder that joins one which serves these runs."""
    first = await serving(hub, data_dir.parent / "first", *runs)
    second = hub.transport(Identity.generate().peer_id)
    await second.start(door := FrontDoor(DialBack(second)))
    settings = BootstrapSettings(data_dir=data_dir, join=(f"/memory/p2p/{first.peer_id}",))
    bootstrap = _Bootstrap(settings, cast(Any, second), door, VIEWS, asyncio.Event())
    task = asyncio.create_task(bootstrap.run())
    try:
        yield door
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("is_full", [True, False])
async def test_kept_runs_are_served_whatever_a_peer_or_the_disk_does(
    is_full: bool,
    hub: MemoryNetwork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data_dir = tmp_path / "second"
    (kept,) = await served_runs(data_dir, micro(tmp_path))
    asked = asyncio.Event()

    async def look(_mirror: Mirror, _served: object) -> list[PublishedRun]:
        asked.set()
        if is_full:
            raise StorageError("the disk is full")
        return await asyncio.Future()

    monkeypatch.setattr(Mirror, "look", look)
    async with running(hub, data_dir) as door:
        await until(asked.is_set, "the peer is asked")
        await until(lambda: ("the disk is full" in caplog.text) == is_full, "a word of it")
        assert [run.run for run in door.runs()] == [kept.id]


async def test_another_owner_s_run_of_the_name_of_a_kept_one_is_told_of(
    hub: MemoryNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (theirs,) = await served_runs(tmp_path / "first", micro(tmp_path))
    (kept,) = await served_runs(tmp_path / "second", micro(tmp_path))
    async with running(hub, tmp_path / "second", theirs) as door:
        await until(lambda: len(door.runs()) == 2, "both are served")
    assert "this folder has another run called test too" in caplog.text
    assert str(run_folder(tmp_path / "second", kept.id)) in caplog.text


async def test_a_wanted_id_needs_somebody_to_fetch_from_or_to_be_kept(
    hub: MemoryNetwork, tmp_path: Path
) -> None:
    (kept,) = await served_runs(tmp_path, micro(tmp_path))
    for wanted, is_kept in (("0123456789abcdef", False), (kept.id, True), (kept.id[:12], True)):
        settings = BootstrapSettings(data_dir=tmp_path, run=(Path(wanted),))
        refused = pytest.raises(UserError, match=f"--run {wanted} is no file here, and there is nobody to")
        with nullcontext() if is_kept else refused:
            _Bootstrap(settings, cast(Any, hub.transport("me")), FrontDoor(None), VIEWS, asyncio.Event())


async def test_no_more_runs_are_fetched_than_are_listed_nor_two_into_one_folder(
    hub: MemoryNetwork, tmp_path: Path
) -> None:
    _, look, theirs, _ = await given_run(hub, tmp_path)
    folder = theirs.parent.name
    assert await look.look([f"{number:016x}".ljust(64, "0") for number in range(wire.MAX_RUNS)]) == []
    assert await look.look([folder.ljust(64, "0")]) == []
    assert len(await look.look([f"{number:016x}".ljust(64, "0") for number in range(wire.MAX_RUNS - 1)])) == 1


# An edited run.toml makes another run, and whoever serves it is told before.

FIRST = for_run("micro", "mine")


def longer(manifest: Manifest, factor: int) -> Manifest:
    inner = manifest.inner
    inner = msgspec.structs.replace(inner, schedule_tokens=factor * inner.schedule_tokens, learning_rate=1e-3)
    return msgspec.structs.replace(manifest, inner=inner)


async def test_who_serves_an_edited_file_is_told_that_it_is_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file, data_dir = tmp_path / "run.toml", tmp_path / "data"

    async def serve(manifest: Manifest) -> None:
        caplog.clear()
        file.write_text(render_toml(manifest))
        await served_runs(data_dir, file)

    await serve(FIRST)
    first = next(iter(saved_runs(data_dir)))
    assert "another run" not in caplog.text
    await serve(longer(FIRST, 2))
    assert f"another run than mine {first[:12]}" in caplog.text
    assert "inner.learning_rate, inner.schedule_tokens differ" in caplog.text
    assert f"p2pdiloco run amend {first[:12]}" in caplog.text
    assert len(saved_runs(data_dir)) == 2
    await serve(FIRST)  # the file as it was is the first run again
    await serve(for_run("micro", "another"))
    assert "another run" not in caplog.text
    owner = Identity.load_or_create(data_dir / "owner.key").peer_id
    assert words_of_edits(longer(FIRST, 3), data_dir, owner)
    assert not words_of_edits(longer(FIRST, 3), data_dir, Identity.generate().peer_id)
    await start._own_run(data_dir, file, longer(FIRST, 3), mock.Mock(), ())
    assert "another run than mine" in caplog.text


def test_keys_are_named_as_in_the_file() -> None:
    other = msgspec.structs.replace(FIRST, model=FIRST.model | {"width": 64})
    assert changed_keys(FIRST, other) == ["model.width"]
    assert changed_keys(FIRST, FIRST) == []
