"""Strangers who list runs: none of them keeps a newcomer out of its run, or ends it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_kit import peer_on, signed_run, until
from deadlines import within_s
from test_runs import ignore, server

from p2pdiloco.cli.status_command import Search
from p2pdiloco.config import manifest
from p2pdiloco.config.manifest import SignedManifest, encode_signed, run_id
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.run_files import known_runs, run
from p2pdiloco.daemon.run_files.known_runs import (
    HOST_PATIENCE,
    MAX_JOINED,
    RunSearch,
    WaysIn,
    change_ways,
)
from p2pdiloco.daemon.run_files.run import Run, find_run
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.ports import PullSource, Refusal, Transport
from p2pdiloco_lab.memory_net import MemoryNetwork


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SEARCH_PAUSE_S", 0.01)


class Liar(FrontDoor):
    """Gives the same bytes as every run's manifest."""

    def __init__(self, manifest: bytes) -> None:
        super().__init__()
        self._bytes = manifest

    async def on_pull(self, sender: str, request: bytes) -> PullSource | Refusal:
        return PullSource(self._bytes, (), lambda: None)


async def stranger(hub: MemoryNetwork, run: str, name: str, manifest: bytes = b"") -> str:
    """A peer that lists a run by that name. Returns its id."""
    transport = await peer_on(hub, Liar(manifest))
    listed = wire.RunList((wire.RunSummary(run, name, transport.peer_id),))
    await transport.put_record(wire.RUNS_KEY, wire.encode(listed), 60.0)
    return transport.peer_id


async def host(hub: MemoryNetwork, run: Run, listed: bool = True) -> str:
    """A peer that serves a run, and has its record in the DHT or not (yet)."""
    door = FrontDoor()
    door.add_run(run)
    transport = await peer_on(hub, door)
    if listed:
        value = wire.encode(wire.RunList((run.summary(),)))
        await transport.put_record(wire.RUNS_KEY, value, 60.0)
    return transport.peer_id


def signed_bytes(content: bytes) -> SignedManifest:
    """Bytes that their owner signed as if they were a manifest."""
    owner = Identity.generate()
    unsigned = SignedManifest(content, owner.peer_id, bytes(32), b"")
    return msgspec.structs.replace(unsigned, signature=owner.sign(manifest._covered("manifest", unsigned)))


async def joined(
    hub: MemoryNetwork, wanted: str, folder: Path, *hosts: str, say: Callable[[str], None] = ignore
) -> str:
    """The id of the run that a newcomer with that data folder joins."""
    async with asyncio.timeout(within_s(20)):
        found = await find_run(await peer_on(hub), Identity.generate(), wanted, folder, say, hosts)
    return found[0].id


BAD_UTF8 = msgspec.msgpack.encode({"format": 4, "run": "NAME"}).replace(b"NAME", b"\xff\xfe\xfd\xfc")
GARBAGE = [BAD_UTF8, b"\x81" * 3000, b"", b"\xff" * 100, b"\xcf" + b"\xff" * 8]


@pytest.mark.parametrize("content", GARBAGE)
async def test_a_false_manifest_of_any_bytes_is_refused_counted_and_the_next_peer_asked(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    signed = encode_signed(signed_bytes(content))
    lies = (signed, content, signed[:-7], signed.replace(b"12D3", b"\xff\xff\xff\xff", 1))
    liars = [await stranger(hub, run.id, "test", lie) for lie in lies]
    await server(hub, run)
    monkeypatch.setattr(random, "sample", lambda peers, _: sorted(peers, key=lambda p: p not in liars))
    search = RunSearch(await peer_on(hub), run.id)
    listed = await search.look()
    assert listed is not None
    found = await search.published(listed)
    assert found is not None and found.id == run.id
    assert search.refusals.total() == len(lies) and search.refusals["manifest-run-id"] >= 1
    said: list[str] = []
    assert await joined(hub, "test", tmp_path / "me", say=said.append) == run.id
    assert said == [f"refused on the way: {search.refused_words()}"]


@pytest.mark.parametrize("content", GARBAGE)
async def test_what_another_id_stands_for_is_not_even_decoded(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    await stranger(hub, run.id, "test", encode_signed(signed_bytes(content)))
    search = RunSearch(await peer_on(hub), run.id)
    listed = await search.look()
    assert listed is not None
    monkeypatch.setattr("p2pdiloco.daemon.run_files.known_runs.manifest_from_canonical", pytest.fail)
    monkeypatch.setattr("p2pdiloco.daemon.run_files.known_runs.check_signature", pytest.fail)
    assert await search.published(listed) is None and search.refusals == {"manifest-run-id": 1}


@pytest.mark.parametrize("content", GARBAGE)
async def test_a_run_whose_own_manifest_is_garbage_is_passed_over(content: bytes, tmp_path: Path) -> None:
    """By name the search goes on; who names its id is told that there is nothing to wait for."""
    hub, run, signed = MemoryNetwork(), signed_run(tmp_path), signed_bytes(content)
    await stranger(hub, run_id(signed), "test", encode_signed(signed))
    said: list[str] = []
    search = asyncio.create_task(joined(hub, "test", tmp_path / "me", say=said.append))
    await until(lambda: said, "a refusal")
    assert said[0].startswith("the manifest of test is refused: manifest-")
    await server(hub, run)
    assert await search == run.id
    with pytest.raises(UserError, match="the manifest of test is refused: manifest-"):
        await joined(hub, run_id(signed), tmp_path / "me")


async def test_a_second_run_of_that_name_keeps_nobody_out_who_names_the_id(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    await server(hub, run)
    await stranger(hub, "ab" * 32, "test")
    await stranger(hub, "cd" * 32, run.id[:12])  # a name like another's id
    for wanted in (run.id, run.id[:8], run.id[:12]):
        assert await joined(hub, wanted, tmp_path / "me") == run.id


async def test_a_whole_id_needs_nobody_s_list(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    here = await host(hub, run, listed=False)
    await stranger(hub, "ab" * 32, "test")
    assert await joined(hub, run.id, tmp_path / "me", here) == run.id


async def test_a_name_is_settled_by_what_was_joined_before_then_by_the_peers_to_join_through(
    tmp_path: Path,
) -> None:
    hub, mine = MemoryNetwork(), tmp_path
    first, second = (signed_run(tmp_path, seed=seed) for seed in (1, 2))
    here, there = await host(hub, first), await host(hub, second, listed=False)
    await stranger(hub, "ab" * 32, "test")
    for wanted in ("test", ""):
        assert await joined(hub, wanted, mine, here) == first.id
        assert await joined(hub, wanted, mine, there) == second.id
        for hosts in ((), (here, there)):
            with pytest.raises(UserError, match="has more than one run: ") as caught:
                await joined(hub, wanted, mine, *hosts)
            for known in (first.id, *([second.id] if hosts else ["ab" * 32])):
                assert known[:12] in str(caught.value)
            assert "--run " in caught.value.hint
    change_ways(mine, WaysIn.joined, NodeSettings(), second.id)
    await server(hub, second)
    for hosts in ((), (here,)):
        assert await joined(hub, "test", mine, *hosts) == second.id
    assert await joined(hub, first.id, mine, there) == first.id


async def test_who_starts_a_run_does_not_mean_the_one_that_it_was_in_before(tmp_path: Path) -> None:
    hub, me = MemoryNetwork(), Identity.generate()
    old, new = (signed_run(tmp_path, seed=seed) for seed in (1, 2))
    here = await host(hub, new)
    await server(hub, old)
    change_ways(tmp_path, WaysIn.joined, NodeSettings(), old.id)
    for begins, meant in ((False, old), (True, new)):
        search = find_run(await peer_on(hub), me, "", tmp_path, ignore, (here,), begins=begins)
        assert (await asyncio.wait_for(search, within_s(20)))[0].id == meant.id


async def test_a_host_that_does_not_answer_yet_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    here = await host(hub, run, listed=False)
    for number in "ab", "cd":
        await stranger(hub, number * 32, "test")
    real, silent = known_runs.runs_of, [here] * (HOST_PATIENCE - 1)

    async def runs_of(transport: Transport, peer: str, *refused: Any) -> object:
        return None if silent and silent.pop() else await real(transport, peer, *refused)

    monkeypatch.setattr(known_runs, "runs_of", runs_of)
    assert await joined(hub, "test", tmp_path / "me", here) == run.id and not silent
    silent += [here] * (HOST_PATIENCE + 1)
    with pytest.raises(UserError, match="has more than one run"):
        await joined(hub, "test", tmp_path / "me", here)


async def test_whoever_only_asks_is_settled_the_same_way(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    here = await host(hub, run)
    await stranger(hub, "ab" * 32, "test")
    for wanted, hosts in (("test", [here]), ("", [here]), (run.id[:8], [])):
        search = Search(wanted, hosts)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await search.reports(await peer_on(hub))
        assert "no member of run test answered" in str(search.failure(0.3))
    with pytest.raises(UserError, match="has more than one run"):
        await Search("test", []).reports(await peer_on(hub))


async def test_the_true_id_by_a_false_name_hides_nothing(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    await server(hub, run)
    await stranger(hub, run.id, "other", b"?")
    assert await joined(hub, "test", tmp_path / "me") == run.id
    # And a run is not what a stranger calls it.
    said: list[str] = []
    search = asyncio.create_task(joined(hub, "other", tmp_path / "me", say=said.append))
    await until(lambda: said, "a refusal")
    assert "manifest-name: the run is called test" in said[0]
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)


def test_the_newest_run_that_was_joined_comes_first(tmp_path: Path) -> None:
    ids = [f"{number:064x}" for number in range(MAX_JOINED + 3)]
    for known in (*ids, ids[5]):
        change_ways(tmp_path, WaysIn.joined, NodeSettings(), known)
    newest = [ids[5], *(old for old in reversed(ids) if old != ids[5])]
    assert WaysIn.load(tmp_path).runs == tuple(newest[:MAX_JOINED])
