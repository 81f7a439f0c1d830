"""Start of a peer's transport: what it looks at before, and what it keeps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from daemon_kit import Neighbourhood

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.daemon.learner_host import open_log
from p2pdiloco.daemon.network import discovery
from p2pdiloco.daemon.network.link import load_uplink
from p2pdiloco.daemon.program import begin
from p2pdiloco.daemon.run_files.known_runs import JOINED, WaysIn, change_ways
from p2pdiloco.errors import StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.learner import loop
from p2pdiloco.learner.samples import SampleStream
from p2pdiloco.util import ASIDE, read_note

ME = Identity.from_seed(bytes(32)).peer_id
TWIN = f"/ip4/192.0.2.7/tcp/7/p2p/{ME}"


class Starting:
    """As much of a transport as a start takes. Beside a twin its identity answers everywhere."""

    peer_id = ME
    listening = ("/ip4/0.0.0.0/tcp/31000",)

    def __init__(self, has_twin: bool) -> None:
        self._has_twin = has_twin
        self.started = False

    async def answers_at(self, *_: object) -> bool:
        return self._has_twin

    async def start(self, *_: object) -> None:
        self.started = True


@pytest.mark.parametrize("is_kept", [True, False])
async def test_nothing_is_started_beside_a_twin_at_the_last_or_at_a_joined_address(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TWINS_PAUSE_S", 0.0)
    if is_kept:
        change_ways(tmp_path, WaysIn.reached_at, [TWIN])
    settings = BootstrapSettings(data_dir=tmp_path, join=() if is_kept else (TWIN,))
    transport: Any = Starting(has_twin=True)
    with pytest.raises(UserError, match=r"at 192\.0\.2\.7 port 7"):
        await begin(transport, transport, settings)
    assert not transport.started


async def test_who_starts_keeps_its_port(tmp_path: Path) -> None:
    change_ways(tmp_path, WaysIn.reached_at, [TWIN])
    transport: Any = Starting(has_twin=False)
    await begin(transport, transport, BootstrapSettings(data_dir=tmp_path))
    assert transport.started and WaysIn.load(tmp_path).port == 31000


# Rotten files in a data folder are set aside with a sentence, and the node starts.

NAME = "a"


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00{\x93garbage\n\xc3\x28" * 9)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "within").write_text("dear")


def types(path: Path) -> None:
    path.write_bytes(b'{"bits_per_s": [], "at_s": "now", "runs": 7, "0": [1, "x"]}\n')


def nan(path: Path) -> None:
    path.write_bytes(b'{"bits_per_s": NaN, "at_s": NaN, "0": NaN}\n')


def text(path: Path) -> None:
    """Bytes that are no UTF-8 where a text is expected: msgspec raises no error of its own at that."""
    path.write_bytes(b'{"bits_per_s": 1.0, "link": "\xff", "\xff\xff": 2.0}')


def superseded(names: set[Path]) -> set[Path]:
    """Checkpoints beside which a newer one of the same fragment is, so that they are not read."""
    newest: dict[Path, tuple[int, Path]] = {}
    checkpoints = [path for path in names if path.name.startswith("checkpoint-")]
    for path in checkpoints:
        number = int(path.stem.partition("-")[2])
        newest[path.parent] = max(newest.get(path.parent, (-1, path)), (number, path))
    return set(checkpoints) - {path for _, path in newest.values()}


ROT = [garbage, empty, folder, types, nan, text]


@pytest.mark.parametrize("rot", ROT)
async def test_a_node_starts_whatever_became_of_a_file(
    rot: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Neighbourhood(tmp_path, seats=(NAME,)) as around:
        member = await around.member(NAME, genesis=True)
        await around.round(member)
        await member.checkpoints.save()
        await around.end(member, orderly=True)
        sound, here = tmp_path / "sound", tmp_path / NAME
        (here / "uplink.json").write_bytes(b'{"bits_per_s": 1.0, "at_s": 1.0}')
        peer = Identity.generate().peer_id
        change_ways(here, WaysIn.having_met, [[f"/ip4/192.0.2.7/tcp/1/p2p/{peer}"]])
        shutil.copytree(here, sound)
        run = run_folder(Path(), around.run.id)
        names = {path.relative_to(sound) for path in sound.rglob("*") if path.is_file()}
        names -= {Path("identity.key"), Path("lock"), run / "learner.safetensors"}  # its learner is none
        assert {run / name for name in ("resume.json", "votes.log", "manifest.signed")} <= names
        assert {path.suffix for path in names} >= {".update", ".safetensors", ".json", ".jsonl"}
        unread = {path for path in names if path.suffix in (".update", ".log")} | superseded(names)
        for name in sorted(names):
            shutil.rmtree(here)
            shutil.copytree(sound, here)
            caplog.clear()
            rot(here / name)
            again = await around.member(NAME, genesis=True)
            WaysIn.load(here)
            await around.round(again)
            if rot is folder:
                aside = [here / name.with_name(name.name + ending) / "within" for ending in ASIDE]
                assert name in unread or any(p.exists() for p in aside), name
            await around.end(again)


@pytest.mark.parametrize("rot", ROT)
@pytest.mark.parametrize("load", [load_uplink, WaysIn.load])
def test_a_rotten_note_is_told_once_and_kept_for_people(
    load: Callable[[Path], object],
    rot: Callable[[Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / ("uplink.json" if load is load_uplink else JOINED)
    nothing = load(tmp_path)
    rot(path)
    assert load(tmp_path) == nothing and load(tmp_path) == nothing
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert not path.exists() and path.with_name(path.name + ".corrupt").exists()


class Numbers:
    """Samples of one number each."""

    def __len__(self) -> int:
        return 64

    def batch(self, indices: object) -> tuple[torch.Tensor]:
        return (torch.as_tensor(indices),)


PLACES = {
    "shard": {"reading": [0, 10**9]},
    "shard below": {"reading": [0, -1]},
    "offset": {"place": [-5, 0, b""]},
    "used": {"used": -1},
    "epoch": {"epoch": 1 << 63},
    "taken": {"taken": b"x"},
    "carry": {"place": [0, 0, "text"]},
}


@pytest.mark.parametrize("rot", [*ROT, *PLACES])
def test_a_rotten_place_in_the_data_begins_the_order_anew(
    rot: Callable[[Path], None] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.place"
    fresh = SampleStream(Numbers(), 1, "p", 4, path)
    first = fresh.take(4)[0]
    if isinstance(rot, str):
        saved = msgspec.msgpack.decode(path.read_bytes()) | PLACES[rot]
        path.write_bytes(msgspec.msgpack.encode(saved))
    else:
        rot(path)
    again = SampleStream(Numbers(), 1, "p", 4, path)
    if rot != "taken":
        assert again.take(4)[0].tolist() == first.tolist()
        assert "is damaged" in capsys.readouterr().err
    assert path.is_file()


@pytest.mark.parametrize("rot", ROT)
def test_a_rotten_learner_state_is_set_aside(rot: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    rot(path)
    start: Any = SimpleNamespace(restore_path=path, restore=())
    taken, why = loop.take_up_checkpoint(start, mock.Mock(), mock.MagicMock())
    assert not taken and "set aside as learner.safetensors.corrupt" in why
    loop._write_atomically(path, lambda temporary: temporary.write_bytes(b"new") and None)
    folder(tmp_path / "learner.safetensors")
    loop._write_atomically(path, lambda temporary: temporary.write_bytes(b"new") and None)
    assert path.read_bytes() == b"new"


def test_a_folder_where_the_learners_log_is_to_be(tmp_path: Path) -> None:
    folder(tmp_path / "learner.log")
    os.close(open_log(tmp_path / "learner.log"))
    assert (tmp_path / "learner.log.corrupt" / "within").exists()


def test_what_is_set_aside_is_bounded_and_never_in_the_way(tmp_path: Path) -> None:
    path, told = tmp_path / "note", []

    def refuse(content: bytes) -> None:
        raise ValueError("not what I wrote")

    for rot in [folder, garbage, folder, garbage, garbage, types, text, empty]:
        rot(path)
        assert read_note(path, refuse, told.append) is None
    assert len(told) == 8 and len(list(tmp_path.iterdir())) <= 1 + len(ASIDE)
    assert all(str(path) in line and "\n" not in line for line in told)


def test_a_folder_where_a_person_wants_a_file_is_not_ours_to_rename(tmp_path: Path) -> None:
    folder(tmp_path / "out.safetensors")
    with pytest.raises(StorageError):
        Files().save(tmp_path / "out.safetensors", [b"new"], durable=True)
    assert (tmp_path / "out.safetensors" / "within").exists()
