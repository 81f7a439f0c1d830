"""What a node finds its run again by: members met before, and what was joined."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.run_files.known_runs import (
    JOINED,
    MAX_JOINED_THROUGH,
    MAX_PEERS,
    Joined,
    load_peers,
    peers_file,
    remember_joined,
    save_peers,
)
from p2pdiloco.errors import StorageError
from p2pdiloco.identity import Identity


def address(port: int) -> str:
    return f"/ip4/192.0.2.7/tcp/{port}/p2p/{Identity.generate().peer_id}"


def test_round_trip_keeps_the_newest(tmp_path: Path) -> None:
    peers = [[address(port)] for port in range(1, MAX_PEERS + 5)]
    save_peers(tmp_path, peers)
    assert load_peers(tmp_path) == [addresses[0] for addresses in peers[-MAX_PEERS:]]


def test_nothing_but_addresses_is_read(tmp_path: Path) -> None:
    good = address(4001)
    peers_file(tmp_path).write_bytes(b"garbage\n\xff\xfe\n/ip4/1.2.3.4/tcp/1\n" + good.encode() + b"\n")
    assert load_peers(tmp_path) == [good]


def test_a_missing_file_and_a_missing_folder_are_ordinary(tmp_path: Path) -> None:
    assert load_peers(tmp_path / "absent") == []
    save_peers(tmp_path / "absent", [[address(1)]])
    assert not peers_file(tmp_path / "absent").exists()


def test_who_meets_one_peer_does_not_forget_the_others(tmp_path: Path) -> None:
    old, new = [address(1), address(2)], address(3)
    save_peers(tmp_path, [[old[0]], [old[1]]])
    save_peers(tmp_path, [[new]])
    assert load_peers(tmp_path) == [*old, new]
    moved = new.replace("/tcp/3/", "/tcp/4/")
    save_peers(tmp_path, [[moved]])
    assert load_peers(tmp_path) == [*old, moved]


def test_what_was_joined_is_kept_in_private_until_something_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("/dnsaddr/boot.example", *map(address, range(1, MAX_JOINED_THROUGH + 5)))
    settings = NodeSettings(data_dir=tmp_path, join=given, data=Path("texts"), hours="22-7", yes=True)
    assert Joined.load(tmp_path) == Joined()
    remember_joined(settings, "aa")
    kept = Joined.load(tmp_path)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Files, "save", Mock(side_effect=StorageError("the disk is full")))
        remember_joined(settings, "aa")
        with pytest.raises(StorageError):
            remember_joined(settings, "bb")
    assert kept.join == given[:MAX_JOINED_THROUGH] and kept.runs == ("aa",)
    assert kept.settings == {"data": str(Path("texts").absolute()), "hours": "22-7", "run": "aa"}
    assert (tmp_path / JOINED).stat().st_mode & 0o777 == 0o600
    remember_joined(NodeSettings(data_dir=tmp_path), "bb")
    assert Joined.load(tmp_path) == Joined(("bb", "aa"), kept.join, {"run": "bb"}), "no address: none changes"
    remember_joined(NodeSettings(data_dir=tmp_path, join=given[-1:]), "aa")
    assert Joined.load(tmp_path) == Joined(("aa", "bb"), given[-1:], {"run": "aa"})
    remember_joined(NodeSettings(data_dir=tmp_path, learner_socket=tmp_path / "s", hours="22-7"), "cc")
    assert Joined.load(tmp_path) == Joined(("cc", "aa", "bb"), given[-1:], {"run": "aa"}), "a program's own"
