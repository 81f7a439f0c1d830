"""Approval: a run is shown, and refused or asked about, before anything is made of its manifest."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from daemon_kit import peer_on, published, signed_run
from deadlines import within_s

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import PRESETS, for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import size_text
from p2pdiloco.daemon import member, wire
from p2pdiloco.daemon.budgets import apart, free_memory_bytes, is_working
from p2pdiloco.daemon.display.logs import ask_terminal, at_terminal
from p2pdiloco.daemon.front_door import FrontDoor
from p2pdiloco.daemon.member import Approval
from p2pdiloco.daemon.payloads import least_bytes
from p2pdiloco.daemon.run_files import run as find
from p2pdiloco.daemon.run_files import run as runs
from p2pdiloco.daemon.run_files.footprint import DAEMON_BYTES, LEARNER_BYTES, UPDATES_IN_MEMORY, footprint_of
from p2pdiloco.daemon.run_files.known_runs import PublishedRun, WaysIn, change_ways
from p2pdiloco.daemon.run_files.run import find_run
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.own_tasks import OWN_LOOP as OWN_LOOP
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import CODECS
from p2pdiloco.tensors.layout import exchange_bytes, plan_fragments
from p2pdiloco.tensors.sizes import ENCODINGS, shared_bytes
from p2pdiloco_lab.memory_net import MemoryNetwork, MemoryTransport

GIB = 2**30


def manifest_of(preset: str = "micro", **model: Any) -> Manifest:
    """A preset with other values in `[model]`."""
    base = for_run(preset, "run")
    inner = msgspec.structs.replace(base.inner, tokens_per_step=1 << 20)
    return msgspec.structs.replace(base, model=base.model | model, inner=inner)


def own_loop(*parameters: str) -> Manifest:
    base = for_run("micro", "run")
    section = msgspec.structs.replace(base.run, task=OWN_LOOP, initial="0" * 64)
    return msgspec.structs.replace(base, run=section, model={"parameters": list(parameters)})


LARGE = manifest_of(layers=24, width=3072, heads=16, hidden_width=8192)
ABSURD = {
    "24 x 3072": LARGE,
    "the largest that the table allows": manifest_of(
        layers=256, width=65536, heads=256, hidden_width=1 << 20, vocabulary=1 << 20
    ),
    "256 x 1024 experts": manifest_of(layers=256, experts=1024, width=8, heads=1, hidden_width=8),
    "two dimensions that overflow": own_loop("w 999999999999x999999999999"),
    "eight dimensions that overflow": own_loop("w " + "x".join(["999999999999"] * 8)),
    "4096 tensors that overflow": own_loop(*(f"w{i} 999999999999x9999" for i in range(2048))),
    "images": msgspec.structs.replace(
        for_run("digits", "run"),
        model=for_run("digits", "run").model
        | {"layers": 256, "width": 65536, "heads": 256, "architecture": "cnn"},
    ),
}


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 16 GiB of memory and 100 GiB of disk, without a GPU."""
    monkeypatch.setattr(member, "free_memory_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(member, "free_disk_bytes", lambda _: 100 * GIB)
    monkeypatch.setattr(member, "accelerators", lambda: ())


def approval_of(folder: Path, said: list[str] | None = None, ask: Any = None, **settings: Any) -> Approval:
    lines: list[str] = [] if said is None else said
    return Approval(NodeSettings(data_dir=folder, **settings), lambda line, _: lines.append(line), ask)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("name", ABSURD)
async def test_absurd_shapes_are_refused_by_arithmetic(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        await approval_of(tmp_path).approve(published(ABSURD[name]), is_new=True)
    assert not WaysIn.load(tmp_path).runs


def test_numbers_that_overflow_are_no_model() -> None:
    with pytest.raises(ConfigError, match=r"at most 2\^46 parameters, this one has 1e\+24"):
        task_of(ABSURD["two dimensions that overflow"])


LOOKS = """
import sys, tracemalloc
sys.modules["torch"] = None  # importing it is an error
import msgspec
from p2pdiloco.config.manifest import manifest_from_canonical
from p2pdiloco.daemon.run_files.footprint import footprint_of
from p2pdiloco.errors import ConfigError
for number, line in enumerate(sys.stdin):
    tracemalloc.start()
    try:
        footprint_of(manifest_from_canonical(bytes.fromhex(line)))
    except ConfigError:
        pass
    assert tracemalloc.get_traced_memory()[1] < 50 * 2**20, number
    tracemalloc.stop()
print("looked at", number + 1)
"""


@pytest.mark.process
def test_looking_needs_no_torch_and_little_memory() -> None:
    from p2pdiloco.config.manifest import canonical_bytes

    most = manifest_of(layers=256, experts=40, width=8, heads=1, hidden_width=8)
    manifests = [*ABSURD.values(), most, *(for_run(preset, "run") for preset in PRESETS)]
    text = "".join(canonical_bytes(manifest).hex() + "\n" for manifest in manifests)
    done = subprocess.run(
        [sys.executable, "-c", LOOKS], input=text, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"looked at {len(manifests)}\n", done.stderr


async def beside_a_bootstrap(run: PublishedRun, hub: MemoryNetwork) -> MemoryTransport:
    """Our transport, where another peer serves and lists the run."""
    door = FrontDoor()
    door.add_run(run)
    bootstrap = await peer_on(hub, door)
    await bootstrap.put_record(wire.RUNS_KEY, wire.encode(wire.RunList((run.summary(),))), 60.0)
    return await peer_on(hub)


@pytest.mark.usefixtures("small_machine")
async def test_a_run_beyond_the_machine_is_refused_with_its_figures_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hub = published(LARGE), MemoryNetwork()
    me = await beside_a_bootstrap(run, hub)
    monkeypatch.setattr(runs, "fresh_vault", pytest.fail)
    monkeypatch.setattr(find, "given_parameters", pytest.fail)
    said: list[str] = []
    look = approval_of(tmp_path, said).approve
    with pytest.raises(
        UserError, match=r"takes more than this machine has: at least \S+ GiB of memory, of which"
    ) as e:
        await find_run(me, Identity.generate(), "", tmp_path, said.append, (), look)
    assert "16 GiB are free" in str(e.value) and "of disk, of which 100 GiB are free" in str(e.value)
    text = "\n".join(said)
    for words in (
        f"run run ({run.id[:12]}) of owner {run.signed.owner}, task causal-lm",
        "model: 2.72G parameters in 218 tensors",
        "memory: at least ",
        "disk: about ",
        "data: what the task brings along; to download: ",
    ):
        assert words in text
    assert len(said) == 5


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("has_learner", [True, False])
async def test_what_programs_take_is_said_and_figures_are_told_once(
    has_learner: bool, tmp_path: Path
) -> None:
    run, said = published(for_run("tiny", "run")), list[tuple[str, Mapping[str, object]]]()
    settings = NodeSettings(data_dir=tmp_path, learner_socket=None if has_learner else tmp_path / "s")
    await Approval(settings, lambda *line: said.append(line), None).approve(run, is_new=True)
    programs = DAEMON_BYTES + LEARNER_BYTES * has_learner
    assert f"beside it {size_text(programs)} for the programs themselves" in said[2][0]
    (_, figures), *others = said
    assert not any(told for _, told in others)
    assert (figures["run"], figures["memory_free_bytes"], figures["disk_free_bytes"]) == (
        run.id,
        16 * GIB,
        100 * GIB,
    )
    assert figures["parameters"] == footprint_of(run.manifest).parameters
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "events.md").read_text()
    assert [name for name in figures if f"`{name}`" not in documented] == []


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_disk": "1MiB"}, "of disk, and --max-disk is 1 MiB"),
        ({"max_memory": "1MiB"}, "--max-memory is too little for this run"),
    ],
)
async def test_limits_of_the_person_count_too_for_a_run_of_before(
    settings: dict[str, str], words: str, tmp_path: Path
) -> None:
    run = published(for_run("tiny", "run"))
    for is_new in (True, False):
        with pytest.raises(UserError, match=words):
            await approval_of(tmp_path, **settings).approve(run, is_new)
    await approval_of(tmp_path).approve(run, is_new=True)


@pytest.mark.usefixtures("small_machine")
async def test_a_run_of_before_is_not_kept_out_by_what_is_short_now(tmp_path: Path) -> None:
    await approval_of(tmp_path).approve(published(LARGE), is_new=False)


@pytest.mark.usefixtures("small_machine")
async def test_the_learner_counts_where_its_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published(for_run("350m", "run"))
    takes = footprint_of(run.manifest)
    room = takes.daemon_bytes + takes.payload_bytes + takes.learner_bytes + takes.pass_bytes - 1
    monkeypatch.setattr(member, "free_memory_bytes", lambda: room)
    for settings in ({}, {"device": "cpu"}, {"device": "mps"}):
        with pytest.raises(UserError, match="takes more than this machine has"):
            await approval_of(tmp_path, **settings).approve(run, is_new=True)
    for settings in ({"device": "cuda:1"}, {"learner_socket": tmp_path / "s"}):
        await approval_of(tmp_path, **settings).approve(run, is_new=True)
    monkeypatch.setattr(member, "accelerators", lambda: ("cuda",))
    await approval_of(tmp_path).approve(run, is_new=True)


@pytest.mark.usefixtures("small_machine")
async def test_a_person_is_asked_once(tmp_path: Path) -> None:
    run, asked = published(for_run("micro", "run")), list[str]()

    def answering(answer: bool) -> Callable[[str], Any]:
        async def ask(question: str) -> bool:
            asked.append(question)
            return answer

        return ask

    with pytest.raises(UserError, match="run run is not joined") as caught:
        await approval_of(tmp_path, ask=answering(False)).approve(run, is_new=True)
    assert "--yes" in caught.value.hint and not WaysIn.load(tmp_path).runs
    await approval_of(tmp_path, ask=answering(True)).approve(run, is_new=True)
    assert asked == [f"join run run ({run.id[:12]})?"] * 2
    # Not a second time, nor with --yes, nor where nobody is.
    await approval_of(tmp_path, ask=answering(False)).approve(run, is_new=False)
    await approval_of(tmp_path, ask=answering(False), yes=True).approve(run, is_new=True)
    await approval_of(tmp_path).approve(run, is_new=True)
    assert len(asked) == 2


async def test_finding_tells_whether_this_folder_was_in_the_run(tmp_path: Path) -> None:
    run, hub, told = signed_run(tmp_path), MemoryNetwork(), list[bool]()
    me = await beside_a_bootstrap(run, hub)

    async def approve(_run: PublishedRun, is_new: bool) -> None:
        told.append(is_new)

    for _ in range(2):
        await find_run(me, Identity.generate(), "", tmp_path, lambda _: None, (), approve)
        change_ways(tmp_path, WaysIn.joined, NodeSettings(), run.id)
    assert told == [True, False]


@pytest.mark.parametrize(
    ("typed", "expected"), [("yes\n", True), ("Y\n", True), ("\n", False), ("no\n", False)]
)
async def test_the_terminal_is_asked_beside_the_loop(
    typed: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "r", closefd=False) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            answer = asyncio.create_task(ask_terminal("join?"))
            await asyncio.sleep(0)
            assert not answer.done()  # the loop goes on
            os.write(ours, typed.encode())
            assert await asyncio.wait_for(answer, within_s(10)) is expected
            given_up = asyncio.create_task(ask_terminal("join?"))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            assert not asyncio.get_running_loop().remove_reader(theirs)
    finally:
        os.close(ours)
        os.close(theirs)


def test_pipes_and_services_are_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not at_terminal()
    monkeypatch.setattr(sys, "stdin", None)
    assert not at_terminal()


async def test_the_loop_goes_on_while_version_0_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hub = signed_run(tmp_path), MemoryNetwork()
    me = await beside_a_bootstrap(run, hub)
    began, go_on, real = asyncio.Event(), threading.Event(), runs.fresh_vault
    loop = asyncio.get_running_loop()

    def slow(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(20), "the loop stood still"
        return real(*arguments)

    monkeypatch.setattr(runs, "fresh_vault", slow)
    search = asyncio.create_task(find_run(me, Identity.generate(), "", tmp_path, lambda _: None))
    await asyncio.wait_for(began.wait(), within_s(20))
    assert is_working()
    go_on.set()
    assert (await search)[0].id == run.id


async def test_work_apart_raises_what_it_raised() -> None:
    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        await apart(fail)


@pytest.mark.parametrize("preset", PRESETS)
def test_figures_are_those_of_what_is_made_later(preset: str) -> None:
    """Of payloads and shared memory the look gives least figures, close to the true ones."""
    manifest = for_run(preset, "run")
    takes, codecs = footprint_of(manifest), manifest.codec
    layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    truth = least_bytes(layouts, codecs.contribution, codecs.update, UPDATES_IN_MEMORY)
    assert takes.parameters == sum(layout.numel for layout in layouts)
    assert takes.payload_bytes <= truth < 1.5 * takes.payload_bytes + 2**20
    assert (
        shared_bytes(takes.parameters)
        <= exchange_bytes(layouts)
        < 1.1 * shared_bytes(takes.parameters) + 2**20
    )


@pytest.mark.parametrize("name", CODECS)
def test_figures_of_codecs_are_theirs(name: str) -> None:
    numel = 1 << 20
    assert ENCODINGS[name].bytes_per_parameter * numel == CODECS[name].encoded_bytes(numel)
    assert ENCODINGS[name].feedback == CODECS[name].feedback and set(ENCODINGS) == set(CODECS)


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    own, nowhere = tmp_path / "cgroup", tmp_path / "nowhere"
    assert free_memory_bytes(nowhere, nowhere) <= 2 * available
    folder = tmp_path / "fs" / "a.slice" / "b"
    folder.mkdir(parents=True)
    own.write_text("0::/a.slice/b\n")
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("1000\n")
    assert free_memory_bytes(tmp_path / "fs", own) > 10_000
    (folder.parent / "memory.max").write_text("10000\n")
    (folder.parent / "memory.current").write_text("9000\n")
    (folder.parent / "memory.stat").write_text("anon 5\ninactive_file 300\n")
    assert free_memory_bytes(tmp_path / "fs", own) == 1300
    (folder / "memory.max").write_text("1200\n")
    assert free_memory_bytes(tmp_path / "fs", own) == 200
    # The first version of cgroups.
    old = tmp_path / "fs" / "memory" / "c"
    old.mkdir(parents=True)
    own.write_text("5:cpu,memory:/c\n4:pids:/\n")
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("600\n")
    assert free_memory_bytes(tmp_path / "fs", own) == 0
