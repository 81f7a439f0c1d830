"""What a node finds its run again by: what was joined and given, whom it met, and where it was itself."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.run_files.known_runs import (
    JOINED,
    MAX_JOINED,
    MAX_JOINED_THROUGH,
    MAX_PEERS,
    RunLink,
    WaysIn,
    change_ways,
    encode_link,
    note_ways,
)
from p2pdiloco.errors import StorageError
from p2pdiloco.identity import Identity


def address(port: int) -> str:
    return f"/ip4/192.0.2.7/tcp/{port}/p2p/{Identity.generate().peer_id}"


WORD = encode_link(RunLink("ab" * 32, (address(1),), Identity.generate().peer_id))
GIVEN = ("/dnsaddr/boot.example", *map(address, range(1, MAX_JOINED_THROUGH + 5)))
FULL = WaysIn(
    tuple(f"{number:064x}" for number in range(MAX_JOINED)),
    GIVEN[:MAX_JOINED_THROUGH],
    {"hours": "22-7"},
    WORD,
    tuple(tuple(address(port) for port in range(4)) for _ in range(MAX_PEERS)),
    tuple(map(address, range(MAX_PEERS))),
    31337,
)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    failing = Mock(side_effect=StorageError("the disk is full"))
    return lambda: monkeypatch.setattr(Files, "save", failing)


def test_what_cannot_be_read_for_a_moment_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_ways(tmp_path, WaysIn.given, WORD)
    with monkeypatch.context() as disk, pytest.raises(StorageError):
        disk.setattr(Path, "open", Mock(side_effect=OSError(errno.EIO, "input/output error")))
        change_ways(tmp_path, WaysIn.listening, [address(31337)])
    change_ways(tmp_path, WaysIn.listening, [address(31337)])
    assert WaysIn.load(tmp_path) == WaysIn(link=WORD, port=31337)


def test_what_was_joined_stays_until_something_else_is(tmp_path: Path) -> None:
    settings = NodeSettings(data_dir=tmp_path, join=GIVEN, data=Path("texts"), hours="22-7", yes=True)
    first = WaysIn().joined(settings, "aa")
    assert first.join == GIVEN[:MAX_JOINED_THROUGH] and first.runs == ("aa",)
    assert first.settings == {"data": str(Path("texts").absolute()), "hours": "22-7", "run": "aa"}
    second = first.joined(NodeSettings(data_dir=tmp_path), "bb")
    assert second == WaysIn(("bb", "aa"), first.join, {"run": "bb"}), "no address: none changes"
    third = second.joined(NodeSettings(data_dir=tmp_path, join=GIVEN[-1:]), "aa")
    assert third == WaysIn(("aa", "bb"), GIVEN[-1:], {"run": "aa"})
    fourth = third.joined(NodeSettings(learner_socket=tmp_path / "s", hours="22-7"), "cc")
    assert fourth == WaysIn(("cc", "aa", "bb"), GIVEN[-1:], {"run": "aa"}), "a program's own"


def test_the_newest_members_and_addresses_stay() -> None:
    peers = [[address(port)] * 9 for port in range(1, MAX_PEERS + 5)]
    met = WaysIn().having_met(peers)
    assert met.members == [each for found in peers[-MAX_PEERS:] for each in found[:4]]
    assert WaysIn(met=((),)).having_met([[], peers[0]]).members == peers[0][:4], "one without addresses"
    own = [address(port) for port in range(MAX_PEERS + 5)]
    assert WaysIn().reached_at(own).own == tuple(own[:MAX_PEERS])


def test_who_meets_one_peer_does_not_forget_the_others() -> None:
    old, new = [address(1), address(2)], address(3)
    ways = WaysIn().having_met([[old[0]], [old[1]]]).having_met([[new]])
    assert ways.members == [*old, new]
    moved = new.replace("/tcp/3/", "/tcp/4/")
    assert ways.having_met([[moved]]).members == [*old, moved]


def test_the_first_port_is_kept_where_there_is_one() -> None:
    ways = WaysIn().listening(["/ip4/0.0.0.0/udp/5/quic-v1", "/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/8"])
    assert ways.port == ways.listening(["/ip4/0.0.0.0/udp/9/quic-v1"]).port == 7


def test_where_a_node_was_itself_leads_nowhere() -> None:
    assert not WaysIn(link=WORD, own=FULL.own, port=FULL.port, settings=FULL.settings).lead_back
    assert all(ways.lead_back for ways in (WaysIn(FULL.runs), WaysIn(join=FULL.join), WaysIn(met=FULL.met)))


def test_all_of_it_is_kept_in_private_and_news_only(
    tmp_path: Path, full_disk: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    settings = NodeSettings(data_dir=tmp_path, join=GIVEN, announce=GIVEN[1:3], hours="22-7")
    for news in ((WaysIn.given, WORD), (WaysIn.having_met, FULL.met), (WaysIn.reached_at, FULL.own)):
        change_ways(tmp_path, *news)
    change_ways(tmp_path, WaysIn.joined, settings, "aa")
    kept = WaysIn.load(tmp_path)
    assert (kept.link, kept.met, kept.own, kept.runs) == (WORD, FULL.met, FULL.own, ("aa",))
    assert [path.name for path in tmp_path.iterdir()] == [JOINED]
    assert (tmp_path / JOINED).stat().st_mode & 0o777 == 0o600
    change_ways(tmp_path, lambda _: FULL)
    assert WaysIn.load(tmp_path) == FULL, "as much as there may be"
    change_ways(tmp_path, WaysIn.joined, settings, "aa")
    full_disk()
    change_ways(tmp_path, WaysIn.joined, settings, "aa")
    with pytest.raises(StorageError):
        change_ways(tmp_path, WaysIn.joined, settings, "bb")
    assert not caplog.records
    note_ways(tmp_path, WaysIn.reached_at, [address(1)])
    assert "not kept for later starts: the disk is full" in caplog.text


def test_what_changes_at_once_in_several_threads_is_all_kept(tmp_path: Path) -> None:
    peers, run = [[address(port)] for port in range(1, MAX_PEERS + 1)], "ab" * 32
    with ThreadPoolExecutor(8) as threads:
        for peer in peers:
            threads.submit(change_ways, tmp_path, WaysIn.having_met, [peer])
        threads.submit(change_ways, tmp_path, WaysIn.joined, NodeSettings(), run)
        threads.submit(change_ways, tmp_path, WaysIn.given, WORD)
    kept = WaysIn.load(tmp_path)
    assert sorted(kept.members) == sorted(peer for (peer,) in peers)
    assert (kept.runs, kept.link) == ((run,), WORD)


def test_a_missing_file_and_a_missing_folder_are_ordinary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert WaysIn.load(tmp_path) == WaysIn.load(tmp_path / "absent") == WaysIn()
    assert not caplog.records
    note_ways(tmp_path / "absent", WaysIn.reached_at, FULL.own)
    assert not (tmp_path / "absent").exists()


def test_what_is_wrong_with_one_way_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = address(4001)
    parts = {"runs": ["aa"], "join": [good], "settings": {"hours": "22-7"}}
    (tmp_path / JOINED).write_text(json.dumps(parts))
    earlier = WaysIn.load(tmp_path)
    assert earlier == WaysIn(("aa",), (good,), {"hours": "22-7"}), "what an earlier release wrote"
    garbage = ["garbage", "\ufffd", "/ip4/1.2.3.4/tcp/1"]
    parts |= {"own": [*garbage, good], "met": [garbage, [*garbage, good]], "link": WORD[:-3], "later": 1}
    (tmp_path / JOINED).write_text(json.dumps(parts))
    ways = WaysIn.load(tmp_path)
    assert ways.own == (good,) and ways.members == [good]
    assert not caplog.records and ways.run_link is None and "is damaged" in caplog.text
    assert (ways.runs, ways.join, ways.settings) == (earlier.runs, earlier.join, earlier.settings)


@pytest.mark.parametrize(
    "part",
    [
        {"port": -1},
        {"port": 1 << 16},
        {"port": "7"},
        {"runs": ["aa"] * 65},
        {"own": [1]},
        {"met": [["a"] * 65]},
        {"met": [["a"]] * 17},
    ],
)
def test_what_nobody_writes_is_set_aside(part: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / JOINED).write_text(json.dumps(part))
    assert WaysIn.load(tmp_path) == WaysIn()
    assert (tmp_path / f"{JOINED}.corrupt").exists()
