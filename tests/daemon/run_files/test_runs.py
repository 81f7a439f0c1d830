"""Finding a run: what its manifest must be, and what a newcomer is told when it is not."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from daemon_kit import peer_on, served_runs, signed_run, until, write_given
from deadlines import within_s

from p2pdiloco.adapters.result_file import checksum
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.config.manifest import (
    AdmissionSection,
    WeightSection,
    encode_signed,
    load_signed,
    run_id,
    sign_manifest,
)
from p2pdiloco.config.presets import for_run
from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import Stamp, Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.payloads import UpdateLog
from p2pdiloco.daemon.run_files import known_runs, run
from p2pdiloco.daemon.run_files import run as find
from p2pdiloco.daemon.run_files import run as runs
from p2pdiloco.daemon.run_files import served_runs as signing
from p2pdiloco.daemon.run_files.known_runs import ListedRun, choose_run
from p2pdiloco.daemon.run_files.run import (
    Run,
    core_config,
    find_run,
    fresh_vault,
    genesis_versions,
    given_on_disk,
    given_parameters,
    sign_run,
)
from p2pdiloco.daemon.run_files.saved_state import Found, restore
from p2pdiloco.daemon.run_files.served_runs import kept_run_toml
from p2pdiloco.daemon.run_files.shared_files import MAX_GIVEN, Giving, kept_initial, version_0_from
from p2pdiloco.daemon.wire import refuse
from p2pdiloco.errors import (
    ConfigError,
    InvariantViolation,
    RemoteError,
    StorageError,
    TransportError,
    UserError,
)
from p2pdiloco.identity import Identity, verify
from p2pdiloco.ports import PullSource, Refusal
from p2pdiloco.tasks.registry import load_manifest, render_toml, task_of
from p2pdiloco.tensors.vault import Vault
from p2pdiloco_lab.memory_net import MemoryNetwork


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "SEARCH_PAUSE_S", 0.01)


async def server(hub: MemoryNetwork, *served: Run, listed: tuple[Run, ...] | None = None) -> FrontDoor:
    """A peer that serves runs, and lists these."""
    door = FrontDoor()
    for each in served:
        door.add_run(each)
    transport = await peer_on(hub, door)
    summaries = [run.summary() for run in listed] if listed is not None else door.runs()
    await transport.put_record(wire.RUNS_KEY, wire.encode(wire.RunList(tuple(summaries))), 60.0)
    return door


def ignore(sentence: str) -> None:
    """Drop what would be said to the person."""


def serve_instead(door: FrontDoor, run: Run, manifest: bytes) -> None:
    door._runs[run.id] = (run, manifest)


def changed(run: Run, what: str, other: Run) -> bytes:
    """The bytes of a manifest that is not what it says."""
    signed = run.signed
    if what == "a changed byte":
        text = bytearray(encode_signed(signed))
        text[len(text) // 3] ^= 1
        return bytes(text)
    if what == "a changed field":
        text = signed.manifest.replace(b"micro", b"macro", 1) if b"micro" in signed.manifest else b"{}"
        return encode_signed(msgspec.structs.replace(signed, manifest=text))
    if what == "a wrong signature":
        return encode_signed(msgspec.structs.replace(signed, signature=bytes(64)))
    if what == "another owner":
        return encode_signed(msgspec.structs.replace(signed, owner=Identity.generate().peer_id))
    if what == "another run":
        return encode_signed(other.signed)
    return b"garbage"


@pytest.mark.parametrize(
    "what",
    ["a changed byte", "a changed field", "a wrong signature", "another owner", "another run", "garbage"],
)
async def test_a_false_manifest_is_refused_with_a_sentence_and_the_true_one_taken(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    door = await server(hub, run)
    serve_instead(door, run, changed(run, what, signed_run(tmp_path, "other")))
    transport = await peer_on(hub)
    search = asyncio.create_task(find_run(transport, Identity.generate(), "test", tmp_path, ignore))
    await until(lambda: "the manifest of test from" in caplog.text, "a refusal")
    assert not search.done()  # it goes on looking
    await server(hub, run)  # an honest one
    found, vault = await asyncio.wait_for(search, within_s(10.0))
    assert found.id == run.id and vault.version(0) == 0


async def test_an_honest_peer_is_asked_when_the_first_ones_refuse_lie_or_are_gone(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    refusing, lying, honest = FrontDoor(), FrontDoor(), FrontDoor()
    for door in (lying, honest):
        door.add_run(run)
    serve_instead(lying, run, changed(run, "a wrong signature", run))
    asked = [(await peer_on(hub, door)).peer_id for door in (refusing, lying, honest)]
    asked.insert(2, Identity.generate().peer_id)
    listed = ListedRun(run.id, ["test"], [])
    found = await known_runs.pull_run(await peer_on(hub), listed, asked)
    assert found is not None and found.id == run.id
    assert await known_runs.pull_run(await peer_on(hub), listed, asked[:3]) is None


async def test_a_run_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "LIST_PATIENCE_S", 0.0)
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    await server(hub, run)
    with pytest.raises(UserError, match='the peers know no run "tset"') as caught:
        await find_run(await peer_on(hub), Identity.generate(), "tset", tmp_path, ignore)
    assert run.id[:12] in caught.value.hint and "test" in caught.value.hint

    monkeypatch.setattr(find, "SEARCH_PAUSE_S", 0.05)
    monkeypatch.setattr(find, "LIST_PATIENCE_S", 3.2)
    said: list[str] = []
    with pytest.raises(UserError, match='the peers know no run "tset"'):
        await find_run(await peer_on(hub), Identity.generate(), "tset", tmp_path, said.append)
    (line,) = said
    assert line.startswith('no run "tset" is listed by these peers yet') and f"test ({run.id[:12]})" in line


async def test_a_peer_that_is_gone_gave_no_false_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, gone = signed_run(tmp_path), Identity.generate().peer_id
    assert (
        await known_runs.pull_run(await peer_on(MemoryNetwork()), ListedRun(run.id, ["test"], [gone])) is None
    )
    assert f"the manifest of test cannot be fetched from {gone}" in caplog.text
    assert "refused" not in caplog.text


async def test_two_runs_of_one_name_need_an_id(tmp_path: Path) -> None:
    hub = MemoryNetwork()
    first, second = signed_run(tmp_path, seed=1), signed_run(tmp_path, seed=2)
    await server(hub, first)
    await server(hub, second)
    transport = await peer_on(hub)
    with pytest.raises(UserError, match='the name "test" has more than one run') as caught:
        await find_run(transport, Identity.generate(), "test", tmp_path, ignore)
    assert first.id[:12] in str(caught.value) and second.id[:12] in str(caught.value)
    found, _ = await find_run(transport, Identity.generate(), second.id[:10], tmp_path, ignore)
    assert found.id == second.id


async def test_no_list_yet_is_said_once_and_waited_for(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    transport = await peer_on(hub)
    said: list[str] = []
    search = asyncio.create_task(find_run(transport, Identity.generate(), "", tmp_path, said.append))
    await until(lambda: said, "it to say that it waits")
    await server(hub, run)
    found, _ = await asyncio.wait_for(search, within_s(10.0))
    assert found.id == run.id and len(said) == 1


def test_a_beginning_of_an_id_must_be_long_enough(tmp_path: Path) -> None:
    run = signed_run(tmp_path)
    found = {run.id: ListedRun(run.id, ["test"], ["peer"])}
    assert choose_run(found, run.id[:8]) is not None
    assert choose_run(found, run.id[:7]) is None


async def test_an_unreadable_list_is_no_list(tmp_path: Path) -> None:
    hub, run = MemoryNetwork(), signed_run(tmp_path)
    rogue = await peer_on(hub)
    await rogue.put_record(wire.RUNS_KEY, b"\xff\xff", 60.0)
    await server(hub, run)
    assert list(await known_runs.known_runs(await peer_on(hub))) == [run.id]


# --- the door of a peer that is no member ---------------------------------------------------------------


async def test_a_bootstrap_serves_manifests_and_the_list_and_nothing_else(tmp_path: Path) -> None:
    run = signed_run(tmp_path)
    door = FrontDoor()
    door.add_run(run)
    listed = wire.decode(await door.on_message("peer", b"q" + wire.encode(wire.RunsQuery())), wire.RunList)
    assert [summary.run for summary in listed.runs] == [run.id]
    with pytest.raises(RemoteError, match="not-a-member"):
        await door.on_message("peer", b"q" + wire.encode(wire.StatusQuery(run.id)))
    with pytest.raises(RemoteError, match="not-ready"):
        await door.on_message("peer", wire.MESSAGE + b"anything")

    source = await door.on_pull("peer", wire.encode(wire.PullManifest(run.id)))
    assert isinstance(source, PullSource) and source.header == encode_signed(run.signed)
    for pull, reason in (
        (wire.PullManifest("f" * 64), PullRefusal.UNKNOWN_RUN),
        (wire.PullUpdate(run.id, 0, 1), PullRefusal.NOT_READY),
        (wire.PullState(run.id, 0, 1), PullRefusal.NOT_READY),
        (wire.PullContribution(run.id, 0, bytes(32)), PullRefusal.NOT_READY),
    ):
        refusal = await door.on_pull("peer", wire.encode(pull))
        assert isinstance(refusal, Refusal)
        assert wire.decode(refusal.answer, wire.Refused).reason is reason
    with pytest.raises(RemoteError, match="garbage"):
        await door.on_pull("peer", b"\x91\xa3???")
    with pytest.raises(RemoteError, match="garbage"):
        await door.on_push("peer", b"\x91\xa3???")


def test_the_manifest_says_how_many_groups_version_0_has(tmp_path: Path) -> None:
    manifest = for_run("micro", "grouped")
    group = msgspec.structs.replace(manifest.group, size=2, expected_members=5)
    path = tmp_path / "run.toml"
    path.write_text(render_toml(msgspec.structs.replace(manifest, group=group)))
    run, vault = runs.sign_run(path, Identity.generate())
    genesis = runs.genesis_versions(run, vault)
    assert [(v.header.epoch, v.header.groups) for v in genesis] == [(0, 3)] * 4
    plain = signed_run(tmp_path)
    assert {v.header.groups for v in runs.genesis_versions(plain, vault)} == {1}


# --- runs that start from given parameters ------------------------------------------------------------


class Givers:
    """A transport to peers that are called what they do."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.asked: list[tuple[str, int]] = []

    async def pull_into(self, peer: str, request: bytes, sink: Any, pause_s: float) -> Refusal | bytes:
        offset, half = wire.decode(request, wire.PullInitial).offset, len(self._content) // 2
        self.asked.append((peer, offset))
        if peer == "busy":
            return refuse(PullRefusal.BUSY)
        rest = self._content[offset:]
        sink.begin(wire.encode(wire.InitialHeader(offset)), len(rest))
        if peer == "honest":
            sink.write(0, memoryview(rest))
            return b""
        sink.write(0, memoryview(rest[:half] if peer == "cut" else bytes(half)))
        raise TransportError("cut")


async def test_what_came_of_version_0_is_thrown_away_only_when_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "sample", lambda peers, count: list(peers)[:count])
    base = for_run("micro", "tuned")
    truth = task_of(base).initial_parameters()
    arrays = {name: value.numpy() for name, value in truth.items()}
    manifest = msgspec.structs.replace(base, run=msgspec.structs.replace(base.run, initial=checksum(arrays)))
    content = b"".join(arrays[spec.name].tobytes() for spec in task_of(base).specs())
    half = len(content) // 2
    for first, asked in (
        (["cut", "busy"], [("cut", 0), ("busy", half), ("honest", half)]),
        (["liar"], [("liar", 0), ("honest", half), ("honest", 0)]),
    ):
        givers = Givers(content)
        found = await given_parameters(givers, None, "r", manifest, [*first, "honest"])  # type: ignore[arg-type]
        assert found is not None and all(torch.equal(found[name], value) for name, value in truth.items())
        assert givers.asked == asked


async def test_a_manifest_with_given_parameters_and_a_wrong_model_is_refused(tmp_path: Path) -> None:
    base = for_run("micro", "wrong")
    wrong = msgspec.structs.replace(
        base, run=msgspec.structs.replace(base.run, initial="0" * 64), model={"no": "model"}
    )
    owner, said = Identity.generate(), list[str]()
    signed = sign_manifest(wrong, bytes(32), owner, owner.peer_id)
    run = Run(id=run_id(signed), signed=signed, manifest=wrong, layouts=())
    hub = MemoryNetwork()
    await server(hub, run)
    me = await peer_on(hub)
    search = asyncio.create_task(find_run(me, Identity.generate(), "wrong", tmp_path, said.append))
    await until(lambda: said or search.done(), "a refusal")
    assert not search.done() and "is refused: manifest-invalid" in said[0]
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)


async def test_version_0_that_was_given_comes_from_peers(tmp_path: Path) -> None:
    """Take it from whoever has the true one, and from the own folder at the next start."""
    path = tmp_path / "run.toml"
    parameters, manifest = write_given(path, "tuned"), load_manifest(path)
    run, vault = runs.sign_run(path, Identity.generate())
    hub = MemoryNetwork()
    doors = []
    for name in ("liar", "honest"):
        runs.save_run(tmp_path / name, run, vault)
        doors.append(await server(hub, run))
        doors[-1].add_run(run, tmp_path / name)
    file = kept_initial(tmp_path / "liar", run.id)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found, theirs = await find_run(await peer_on(hub), Identity.generate(), "tuned", tmp_path, ignore)
    assert found.id == run.id
    for layout in run.layouts:
        assert torch.equal(theirs.theta(layout.index), vault.theta(layout.index))
    runs.save_run(tmp_path / "me", found, theirs)
    assert given_on_disk(tmp_path / "me", run.id, manifest) is not None
    # Nobody gives it any more, but the own folder has it.
    await find_run(await peer_on(MemoryNetwork()), Identity.generate(), "", tmp_path / "me", ignore)
    # What is not sound there is fetched again.
    kept_initial(tmp_path / "me", run.id).write_bytes(content)
    assert given_on_disk(tmp_path / "me", run.id, manifest, set_aside=False) is None
    mine = kept_initial(tmp_path / "me", run.id)
    assert mine.exists() and given_on_disk(tmp_path / "me", run.id, manifest) is None
    assert not mine.exists() and mine.with_name("initial.safetensors.corrupt").read_bytes() == content
    # What cannot be read stays: it may be the last copy.
    mine.mkdir()
    assert given_on_disk(tmp_path / "me", run.id, manifest) is None and mine.is_dir()

    # A stream goes on where it is asked to; beyond the end there is nothing, and there are so many at a time.
    file, giving = kept_initial(tmp_path / "honest", run.id), Giving()
    sources = [giving.serve(f"peer {i}", lambda: version_0_from(file, 40)) for i in range(MAX_GIVEN)]
    whole = sum(array.nbytes for array in parameters.values())
    assert all(isinstance(s, PullSource) and memoryview(s.payload[0]).nbytes == whole - 40 for s in sources)
    assert isinstance(giving.serve("late", lambda: version_0_from(file, 40)), Refusal)
    sources[0].release()  # type: ignore[union-attr]
    assert isinstance(giving.serve("late", lambda: version_0_from(file, whole + 1)), Refusal)


def test_a_model_larger_than_the_memory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(render_toml(for_run("micro", "large")))
    monkeypatch.setattr(runs.Vault, "of", lambda *_: torch.zeros(10**14))  # more than there are addresses
    with pytest.raises(
        UserError, match=r"run large has 0\.0334 M parameters and needs at least .* GiB"
    ) as ended:
        runs.sign_run(file, Identity.generate())
    assert "run check" in ended.value.hint

    monkeypatch.setattr(runs.Vault, "of", lambda *_: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="must match the size"):
        runs.sign_run(file, Identity.generate())


# Start from a disk with absurd numbers: set aside, then the older checkpoint, or version 0.

USUAL = Stamp(1, 1)


class Disk:
    """A node's folder, with checkpoints of the first fragment."""

    def __init__(self, folder: Path) -> None:
        self.run: Run = signed_run(folder)
        self.vault: Vault = fresh_vault(self.run.manifest)[1]
        self.config: CoreConfig = core_config(self.run, genesis_versions(self.run, self.vault), Timing())
        self.store = RunStore(folder, self.run.id)

    def save(self, number: int, size: float = 0.01, stamp: Stamp = USUAL, **odd: object) -> None:
        """A checkpoint whose parameters are of this size; its digest is right, if there can be one."""
        parts = [np.full(self.run.layouts[0].numel, each, dtype="<f4") for each in (size, 0.0)]
        judge = fresh_vault(self.run.manifest)[1]
        judge._first_lengths[0] = math.inf
        digest = bytes(32)
        if math.isfinite(size):
            digest = judge.load_spare(0, number, *(part.data.cast("B") for part in parts))
        header = self.config.genesis_versions[0].header
        header = msgspec.structs.replace(header, number=number, state_digest=digest, **odd)
        self.store.save_checkpoint(SignedVersion(header, b""), (Watermark("p", stamp, 1),), *parts)

    def start(self) -> Found:
        return restore(self.config, self.store, self.vault, UpdateLog(1))


ABSURD: list[dict[str, object]] = [
    {"size": math.nan},
    {"size": math.inf},
    {"size": 1e9},
    {"tokens": 1 << 62},
    {"unit": 1 << 62},
    {"stamp": Stamp(1 << 62, 1)},
]


@pytest.mark.parametrize("odd", ABSURD, ids=str)
def test_an_absurd_state_is_set_aside_for_the_older_one(tmp_path: Path, odd: dict[str, object]) -> None:
    disk = Disk(tmp_path)
    disk.save(3)
    disk.save(5, **odd)  # type: ignore[arg-type]
    found = disk.start()
    assert found.restored.fragments[0].log[-1].header.number == 3 == disk.vault.version(0)
    (problem,) = found.problems
    assert "checkpoint-5.safetensors" in problem and "set aside" in problem


def test_where_no_state_is_sound_there_is_version_0(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.save(3, size=math.nan)
    disk.save(5, size=1e9)
    found = disk.start()
    assert found.restored.fragments[0].log[-1].header.number == 0 == disk.vault.version(0)
    assert not found.restored.saved and len(found.problems) == 2


# Runs that a bootstrap is told to serve are signed once, by a process that ends.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    toml_of("test", tmp_path / "run.toml")
    return tmp_path / "run.toml"


def toml_of(name: str, file: Path, comment: str = "", seed: int = 0) -> str:
    """Write a micro run's."""
    text = comment + render_toml(for_run("micro", name, seed))
    file.write_text(text)
    return text


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of runs, as often as their version 0 is computed."""
    names: list[str] = []
    real = run.fresh_vault

    def fresh_vault(manifest, given=None):  # type: ignore[no-untyped-def]
        names.append(manifest.run.name)
        return real(manifest, given)

    monkeypatch.setattr(run, "fresh_vault", fresh_vault)
    return names


def manifests(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "runs").glob("*/manifest.signed"))


async def test_what_was_signed_is_not_computed_again(
    tmp_path: Path,
    file: Path,
    computed: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run,) = await served_runs(tmp_path, file)
    assert computed == ["test"] and any("the schedule is" in line for line in caplog.messages)
    with monkeypatch.context() as patch:
        patch.setattr(signing, "sign_all", None)  # nothing is to be signed
        assert await served_runs(tmp_path, file) == await served_runs(tmp_path) == [run]
    other = toml_of("test", file, "# mine\n")
    assert await served_runs(tmp_path, file) == [run] and computed == ["test"]
    assert kept_run_toml(tmp_path, run.id).read_text() == other


async def test_another_owner_s_or_another_manifest_is_another_run_and_what_is_asked_for_comes_first(
    tmp_path: Path, file: Path, computed: list[str]
) -> None:
    runs = await served_runs(tmp_path, file)
    (tmp_path / "owner.key").unlink()
    Identity.load_or_create(tmp_path / "owner.key")
    runs = await served_runs(tmp_path, file)
    assert len(runs) == 2 and len(computed) == 2
    for seed in range(1, 5):
        toml_of("test", file, seed=seed)
        before, runs = runs, await served_runs(tmp_path, file)
        assert len(computed) == len(runs) == seed + 2 and runs[0] not in before


async def test_what_was_signed_is_served_without_the_key_and_nothing_else_is_signed_then(
    tmp_path: Path, file: Path, computed: list[str]
) -> None:
    runs = await served_runs(tmp_path, file)
    (tmp_path / "owner.key").rename(tmp_path / "elsewhere.key")
    assert await served_runs(tmp_path, file) == await served_runs(tmp_path) == runs
    for name in ("test", "other"):
        toml_of(name, file, seed=7)
        with pytest.raises(UserError, match=f"{runs[0].signed.owner}, is not in .*owner.key") as caught:
            await served_runs(tmp_path, file)
        assert "--data-dir" in caught.value.hint
    assert computed == ["test"] and not (tmp_path / "owner.key").exists()
    (tmp_path / "elsewhere.key").rename(tmp_path / "owner.key")
    assert len(await served_runs(tmp_path, file)) == 2


async def test_beside_fetched_runs_a_new_owner_signs_one_of_another_name(tmp_path: Path, file: Path) -> None:
    (run,) = await served_runs(tmp_path, file)
    (tmp_path / "owner.key").unlink()
    kept_run_toml(tmp_path, run.id).unlink()  # as what is fetched has none
    assert await served_runs(tmp_path) == [run] and not (tmp_path / "owner.key").exists()
    with pytest.raises(UserError, match="cannot be signed"):
        await served_runs(tmp_path, file)
    toml_of("mine", file)
    assert [run.name for run in await served_runs(tmp_path, file)] == ["mine", "test"]


async def test_a_given_version_0_is_taken_from_beside_run_toml_again(
    tmp_path: Path, file: Path, computed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_given(file, "given")
    (run,) = await served_runs(tmp_path, file)
    here = kept_initial(tmp_path, run.id)
    content = here.read_bytes()
    for times, damaged in ((2, b""), (3, content[:-1] + b"x"), (4, content[:30]), (5, None)):
        here.unlink() if damaged is None else here.write_bytes(damaged)
        assert await served_runs(tmp_path) == [] and "is not here any more" in caplog.text
        assert await served_runs(tmp_path, file) == [run] == await served_runs(tmp_path, file)
        assert here.read_bytes() == content and computed == ["given"] * times
        caplog.clear()


async def test_a_damaged_manifest_is_made_again_by_its_run_toml_only(tmp_path: Path, file: Path) -> None:
    (run,) = await served_runs(tmp_path, file)
    manifests(tmp_path)[0].write_bytes(b"\xff")
    with pytest.raises(StorageError, match="is damaged") as caught:
        await served_runs(tmp_path)
    assert "run.toml" in caught.value.hint
    assert await served_runs(tmp_path, file) == [run]


async def test_an_edit_while_version_0_is_computed_is_signed_next_time(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.fresh_vault

    def fresh_vault(manifest, given=None):  # type: ignore[no-untyped-def]
        toml_of("second", file)
        return real(manifest, given)

    with monkeypatch.context() as patch:
        patch.setattr(run, "fresh_vault", fresh_vault)
        assert [run.name for run in await served_runs(tmp_path, file)] == ["test"]
    assert [run.name for run in await served_runs(tmp_path, file)] == ["second", "test"]


async def test_a_given_version_0_that_cannot_be_read_is_moved_away(tmp_path: Path, file: Path) -> None:
    write_given(file, "given")
    (run,) = await served_runs(tmp_path, file)
    here = kept_initial(tmp_path, run.id)
    here.unlink()
    here.mkdir()
    assert await served_runs(tmp_path) == [] and here.is_dir()
    assert await served_runs(tmp_path, file) == [run] and here.is_file()


async def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, file: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    with pytest.raises(StorageError, match="cannot create"):
        await served_runs(tmp_path, file)


async def test_what_an_ended_signing_left_is_removed(tmp_path: Path, file: Path) -> None:
    (run,) = await served_runs(tmp_path, file)
    left = kept_initial(tmp_path, run.id).with_suffix(".safetensors.tmp")
    left.write_bytes(b"half of it")
    assert await served_runs(tmp_path) == [run] and not left.exists()


PROBE = """
import asyncio, json, sys, uvloop
from pathlib import Path
import psutil
from p2pdiloco.daemon.run_files.served_runs import sign_apart
from p2pdiloco.errors import UserError

async def main(ends, data_dir, *files):
    signing = asyncio.create_task(sign_apart(Path(data_dir), [Path(f) for f in files], "text"))
    while ends != "itself" and not (children := psutil.Process().children()):
        await asyncio.sleep(0)
    if ends == "cancelled":
        signing.cancel()
    elif ends == "killed":
        children[0].kill()
    await asyncio.wait({signing})
    error = None if signing.cancelled() else signing.exception()
    if error is not None and not isinstance(error, UserError):
        raise error
    # One that was just begun when we let go ends by itself.
    left = [child.pid for child in psutil.wait_procs(psutil.Process().children(), 100)[1]]
    said = [type(error).__name__, str(error), error.hint] if error else []
    print(json.dumps([signing.cancelled(), said, left, "torch" in sys.modules]))

uvloop.run(main(*sys.argv[1:]))
"""


def apart(ends: str, data_dir: Path, *files: Path) -> tuple[list[object], str]:
    """Sign in a process of its own that ends so; return what came of it, and what was logged."""
    command = [sys.executable, "-P", "-c", PROBE, ends, str(data_dir), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s(100), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.process
def test_a_process_of_its_own_signs_and_says_what_is_wrong(tmp_path: Path, file: Path) -> None:
    result, said = apart("itself", tmp_path / "b", file)
    assert result == [False, [], [], False] and "the schedule is" in said
    signed, manifest = load_signed(manifests(tmp_path / "b")[0], verify)
    assert manifest == for_run("micro", "test") and signed.genesis_digest
    strange = tmp_path / os.fsdecode(b"r\xff.toml")
    strange.write_text("no = 1")
    (cancelled, error, left, _), said = apart("itself", tmp_path / "b", strange)
    assert (cancelled, left, said) == (False, [], "")
    assert isinstance(error, list) and error[0] == "ConfigError" and ".toml" in error[1]


@pytest.mark.process
@pytest.mark.parametrize("ends", ["cancelled", "killed"])
def test_it_ends_with_who_waits_for_it_and_its_end_is_a_sentence(
    ends: str, tmp_path: Path, file: Path
) -> None:
    (cancelled, error, left, torch_here), _ = apart(ends, tmp_path / "b", file)
    assert left == [] and not torch_here and cancelled is (ends == "cancelled")
    assert not manifests(tmp_path / "b")
    if ends == "killed":
        assert isinstance(error, list) and error[0] == "UserError" and "lack of memory" in error[1]


def test_the_last_word_is_heeded() -> None:
    signing._heed(b'["", "", ""]', 0)
    for name, kind in (
        ("ConfigError", ConfigError),
        ("StorageError", StorageError),
        ("TheirError", UserError),
    ):
        with pytest.raises(kind, match="wrong") as caught:
            signing._heed(json.dumps([name, "wrong", "mend it"]).encode(), 0)
        assert caught.value.hint == "mend it" and type(caught.value) is kind
    for code, words in ((-9, "killed, probably for lack of memory"), (-11, "ended by signal 11$")):
        with pytest.raises(UserError, match=words):
            signing._heed(b"", code)
    with pytest.raises(InvariantViolation, match="status 1"):
        signing._heed(b"", 1)


# What a learner weighs at most, read off a manifest.


@pytest.mark.parametrize(("mode", "admits"), [("open", False), ("invite", True), ("list", True)])
def test_where_members_are_known_a_whole_period_weighs_in_full(
    mode: str, admits: bool, tmp_path: Path
) -> None:
    weight = WeightSection(largest_share=0.4, most_units=6.0)
    admission = msgspec.convert({"mode": mode}, AdmissionSection)
    plan = for_run("micro", "test")
    manifest = msgspec.structs.replace(plan, admission=admission, weight=weight)
    path = tmp_path / "run.toml"
    path.write_text(render_toml(manifest))
    found = core_config(sign_run(path, Identity.generate())[0], (), Timing())
    assert (found.largest_share, found.most_units, found.admits) == (0.4, 6.0, admits)
