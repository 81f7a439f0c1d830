"""The real learner process under its host."""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import uvloop
from deadlines import within_s
from launcher import CAN_NURSE, Nursery
from learner_kit import BASES, DEVICES, LAYOUTS, alone, filled_exchange
from safetensors import safe_open

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.config.presets import MICRO
from p2pdiloco.core.api.config import Amendment
from p2pdiloco.daemon import learner_host
from p2pdiloco.daemon.learner_host import ENVIRONMENT, WAITING, LearnerExited, LearnerHost, _environment
from p2pdiloco.learner import loop
from p2pdiloco.learner.channel import (
    Applied,
    CopiedOut,
    CopyOut,
    DataShare,
    Evaluate,
    Evaluated,
    FollowCourse,
    FreeSlot,
    Install,
    LearnerOptions,
    Note,
    NothingToCopy,
    Ready,
    Save,
    ShareData,
    SpareMachine,
    Start,
    StateSaved,
    Status,
    StopStepping,
    frame,
)
from p2pdiloco.learner.lifeline import EXIT_DATA, EXIT_RANK_KILLED
from p2pdiloco.learner.optimizer import moments
from p2pdiloco.learner.ranks import computes_in_bf16
from p2pdiloco.learner.samples import SavedPlace

pytestmark = pytest.mark.process

OPTIONS = LearnerOptions(
    peer="peer-a", device="cpu", threads=1, status_interval_s=0.1, evaluation_tokens=1024
)
PATIENCE_S = 120


@pytest.fixture(scope="module")
def nursery():
    with Nursery.apart() if CAN_NURSE else contextlib.nullcontext() as found:
        yield found


@pytest.fixture
def forked(nursery, monkeypatch):
    """Learners begin as forks of a process that has imported what they import."""
    if nursery is not None:
        monkeypatch.setattr(learner_host, "begin", nursery.begin)


class Daemon:
    """A host, and the events that it reported."""

    def __init__(self, folder, manifest=MICRO, options=OPTIONS):
        self.exchange = filled_exchange(manifest)
        self.events = []
        self._more = asyncio.Event()
        self.host = LearnerHost(
            manifest, LAYOUTS, self.exchange, options, self._on_event, folder / "learner.log"
        )

    def _on_event(self, event):
        self.events.append(event)
        self._more.set()

    async def begin(self, *restored):
        """Start a learner, and wait until it says that it is there."""
        await self.host.start(BASES, *restored)
        return await self.expect(Ready)

    async def expect(self, kind, condition=lambda event: True):
        """The first event of this kind that fulfils the condition; seen events are used up."""
        async with asyncio.timeout(within_s(PATIENCE_S)):
            while True:
                while self.events:
                    event = self.events.pop(0)
                    if isinstance(event, kind) and condition(event):
                        return event
                    assert not isinstance(event, LearnerExited), event
                self._more.clear()
                await self._more.wait()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        if self.host.running:
            self.host.kill()
            await self.host.stop(None, within_s(PATIENCE_S))
        self.exchange.close()


@pytest.mark.parametrize("kind", DEVICES)
def test_a_learner_s_life_on_uvloop(tmp_path, kind):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_life(tmp_path, kind))


async def _life(folder, kind):
    options = msgspec.structs.replace(OPTIONS, device=kind)
    async with Daemon(folder, options=options) as daemon:
        ready = await daemon.begin()
        assert os.getsid(daemon.host.pid) == daemon.host.pid  # a Ctrl-C does not reach it
        where, *precision = ready.device.split(", ")
        assert where.partition(":")[0] == kind and precision == ["bf16"] * computes_in_bf16(kind)
        assert (ready.threads, ready.restored, ready.appraises) == (1, False, True)
        assert ready.parameters == sum(layout.numel for layout in LAYOUTS)

        copied = await daemon.expect(CopiedOut, lambda event: event.fragment == 1)
        assert (copied.base_number, copied.base_buffer, copied.due) == (0, 0, True)
        delta = daemon.exchange.base(1, 0) - daemon.exchange.sent(1)
        assert 0 < delta.norm() < math.inf
        daemon.exchange.base(1, 1).copy_(daemon.exchange.base(1, 0) - delta)
        assert daemon.host.send(Install(1, 1, 1, "merged"))
        assert (await daemon.expect(Applied)).number == 1
        again = await daemon.expect(CopiedOut, lambda event: event.fragment == 1)
        assert (again.base_number, again.base_buffer) == (1, 1)

        daemon.host.send(FreeSlot(1))
        resent = await daemon.expect(CopiedOut, lambda event: event.fragment == 1)
        assert resent.inner_steps > again.inner_steps

        daemon.host.send(Evaluate())
        evaluated = await daemon.expect(Evaluated)
        assert evaluated.tokens == 1024 and evaluated.took_s > 0
        status = await daemon.expect(Status)
        assert status.step_time_s > 0
        assert status.cpu_s > 0

        assert await daemon.host.stop(folder / "state", within_s(PATIENCE_S)) == 0
        assert (await daemon.expect(StateSaved)).ok
        assert daemon.events[-1] == LearnerExited(0, "stopped")
        assert not daemon.host.running
        daemon.events.clear()

        # The next one goes on from the state. Its end is the daemon's to say, not whoever's who ends a group.
        ready = await daemon.begin(folder / "state", ["rest"] * len(LAYOUTS))
        os.kill(daemon.host.pid, signal.SIGTERM)
        daemon.host.send(Evaluate())
        assert (await daemon.expect(Evaluated)).tokens == 1024
        assert await daemon.host.stop(folder / "again", within_s(PATIENCE_S)) == 0
        assert (await daemon.expect(StateSaved)).ok
        assert ready.restored
        assert ready.inner_step >= status.inner_step


@pytest.mark.usefixtures("forked")
async def test_the_first_call_is_answered_before_the_first_step_ends(tmp_path):
    inner = msgspec.structs.replace(MICRO.inner, tokens_per_step=1 << 17)
    async with Daemon(tmp_path, msgspec.structs.replace(MICRO, inner=inner)) as daemon:
        await daemon.begin()
        daemon.host.send(CopyOut(3))
        answer = await daemon.expect(CopiedOut | NothingToCopy, lambda event: event.fragment == 3)
        assert answer == NothingToCopy(3, slot_in_use=False), "the next boundary would have one step to copy"


@pytest.mark.usefixtures("forked")
async def test_a_learner_in_a_long_step_ends_at_once_and_saves_what_it_had(tmp_path):
    inner = msgspec.structs.replace(MICRO.inner, tokens_per_step=1 << 19)
    place = tmp_path / "data.place"
    options = msgspec.structs.replace(OPTIONS, place_path=place)
    async with Daemon(tmp_path, msgspec.structs.replace(MICRO, inner=inner), options) as daemon:
        await daemon.begin()
        async with asyncio.timeout(within_s(PATIENCE_S)):
            while True:
                if place.exists():  # it has taken the first step's samples
                    break
                await asyncio.sleep(0.01)
        daemon.host.send(StopStepping())
        assert await daemon.host.stop(tmp_path / "state", within_s(PATIENCE_S)) == 0
        assert (await daemon.expect(StateSaved)).ok
        assert daemon.events == [LearnerExited(0, "stopped")]
    with safe_open(tmp_path / "state", framework="pt") as file:
        assert msgspec.json.decode(file.metadata()["learner"])["inner_step"] == 0, "it was given up"
    saved = msgspec.msgpack.decode(place.read_bytes(), type=SavedPlace)
    assert (saved.place.offset, saved.used) == (0, 0), "its samples are taken again"


@pytest.mark.usefixtures("forked")
async def test_a_killed_learner_is_reported_and_had_written_down_its_place(tmp_path):
    place = tmp_path / "data.place"
    async with Daemon(tmp_path, options=msgspec.structs.replace(OPTIONS, place_path=place)) as daemon:
        await daemon.host.start(BASES)
        share = DataShare("other", 0, b"", ("peer-b",))
        daemon.host.send(ShareData(share))
        await daemon.expect(Ready)
        share = (await daemon.expect(Status)).share
        # What others have begun is begun, and the learner goes on elsewhere.
        full = bytes(len(share.taken) - 1) + b"\xff"
        daemon.host.send(ShareData(msgspec.structs.replace(share, taken=full, readers=("peer-b",))))
        await daemon.expect(Status, lambda status: status.share.taken[-1] == 255)
        saved = msgspec.msgpack.decode(place.read_bytes(), type=SavedPlace)
        assert (saved.data, saved.epoch) == (share.data, 0) and saved.used > 0
        os.kill(daemon.host.pid, signal.SIGKILL)
        exited = await daemon.expect(LearnerExited)
        assert exited == LearnerExited(-signal.SIGKILL, "killed by SIGKILL")
        assert not daemon.host.send(Evaluate())


def memory_score(pid):
    """What the system adds to a process's part of the memory when it looks for one to end."""
    kept = "/proc/self/oom_score_adj"
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip() if os.access(kept, os.W_OK) else "500"


@pytest.mark.usefixtures("forked")
async def test_one_that_the_system_ended_for_lack_of_memory_computes_less_at_a_time(tmp_path, monkeypatch):
    """On a processor nobody refuses memory: three learners in a row were killed, and the node ended."""
    monkeypatch.setattr(learner_host, "memory_kills", itertools.chain([3], itertools.repeat(4)).__next__)
    async with Daemon(tmp_path) as daemon:
        await daemon.begin()
        assert memory_score(daemon.host.pid) == "500", "nobody else's process goes first"
        starved = f"killed by SIGKILL: {learner_host.STARVED}"
        for reason, halvings in ((starved, 1), ("killed by SIGKILL", 1), ("it hung", 1)):
            if reason == "it hung":
                monkeypatch.setattr(learner_host, "memory_kills", lambda: 5)
                daemon.host.kill("it hung")
            else:
                os.kill(daemon.host.pid, signal.SIGKILL)
            exited = await daemon.expect(LearnerExited)
            assert exited == LearnerExited(
                -signal.SIGKILL,
                reason,
                learner_host.MORE_MEMORY if reason == starved else "",
                reason == starved,
            )
            await daemon.begin()
            assert daemon.host.start_command(BASES, None, ()).options.halvings == halvings
        wish = SpareMachine(True, 0.5)
        daemon.host.follow(wish)
        assert daemon.host.start_command(BASES, None, ()).spare == wish, "the next one is told, too"


@pytest.mark.usefixtures("forked")
async def test_two_processes_are_one_learner_and_end_together(tmp_path, monkeypatch):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    monkeypatch.setenv("TMPDIR", str(meeting))
    faster = (Amendment(1, 256, rate_factor=20.0),)  # which both must know: else they train two models
    training, _ = alone(0)
    training.amend(faster)
    kills = learner_host.memory_kills()
    monkeypatch.setattr(learner_host, "memory_kills", lambda: kills)
    options = msgspec.structs.replace(OPTIONS, nproc=2, precision="fp32")
    async with Daemon(tmp_path, options=options) as daemon:
        await daemon.host.prepare()
        daemon.host.follow(SpareMachine(min_step_s=0.05))
        daemon.host.follow(FollowCourse(faster, "paused"))  # told with its start: nothing comes before that
        ready = await daemon.begin()
        assert (await daemon.expect(Status)).inner_step == 0
        daemon.host.follow(FollowCourse(faster))
        assert (ready.device, ready.parameters) == ("2 x cpu", sum(layout.numel for layout in LAYOUTS))
        status = await daemon.expect(Status, lambda s: s.inner_step >= 2)
        daemon.exchange.base(0, 1).copy_(daemon.exchange.base(0, 0))
        daemon.host.send(Install(0, 1, 1, "rebase"))  # moves nothing
        await daemon.expect(Applied)
        assert status.tokens_total == 256 * status.inner_step, "the step's tokens, once"
        daemon.host.send(Save(tmp_path / "state"))
        assert (await daemon.expect(StateSaved)).ok
        found, tensors = loop._read_checkpoint(tmp_path / "state")
        while training.inner_step < found.inner_step:
            training.step()
        for name, moment in moments(training.model, training.optimizer).items():
            torch.testing.assert_close(tensors[name], moment, rtol=0.02, atol=1e-5)

        leader = psutil.Process(daemon.host.pid)
        [sibling] = leader.children()
        assert not list(meeting.iterdir()), "they have met"
        sibling.kill()
        monkeypatch.setattr(learner_host, "memory_kills", lambda: kills + 1)
        exited = await daemon.expect(LearnerExited)
        reason = f"rank 1 of this learner ended (killed by SIGKILL): {learner_host.STARVED}"
        assert exited.reason.endswith(reason), "its last words, where a step on a busy machine takes too long"
        assert exited == LearnerExited(EXIT_RANK_KILLED, exited.reason, learner_host.MORE_MEMORY, True)
        assert not leader.is_running()

        # As the daemon does it: another learner, from the last saved state; here its processes share the
        # model out. Then rank 0 itself dies.
        daemon.host._options = msgspec.structs.replace(options, shard="always")
        ready = await daemon.begin(tmp_path / "state", ["none"] * len(LAYOUTS))
        assert ready.device == "2 x cpu, sharded" and ready.restored and ready.inner_step == found.inner_step
        await daemon.expect(Status, lambda s: s.inner_step > found.inner_step)
        leader = psutil.Process(daemon.host.pid)
        [sibling] = leader.children()
        leader.kill()
        await daemon.expect(LearnerExited)
        sibling.wait(within_s(PATIENCE_S))


@pytest.mark.usefixtures("forked")
async def test_a_corrupt_state_is_set_aside_and_bad_data_is_one_sentence(tmp_path):
    async with Daemon(tmp_path) as daemon:
        (tmp_path / "state").write_bytes(b"not a state")
        ready = await daemon.begin(tmp_path / "state", ["all"] * len(LAYOUTS))
        assert not ready.restored
        assert "set aside as state.corrupt" in ready.note
        assert (tmp_path / "state.corrupt").read_bytes() == b"not a state"
    manifest = msgspec.structs.replace(MICRO, data=DataSection(source="files"))
    options = msgspec.structs.replace(OPTIONS, data_path=tmp_path / "nowhere")
    async with Daemon(tmp_path, manifest, options) as daemon:
        await daemon.host.start(BASES)
        exited = await daemon.expect(LearnerExited)
        assert exited == LearnerExited(
            EXIT_DATA, f"the data path {tmp_path / 'nowhere'} does not exist", "check --data"
        )
    folder = tmp_path / os.fsdecode(b"f\xeb")  # names of files need not be text
    folder.mkdir()
    (folder / "a.txt").write_text("text\n" * 20_000)
    (folder / "b.txt").write_bytes(b"\xe9 latin")
    options = msgspec.structs.replace(OPTIONS, data_path=folder)
    async with Daemon(tmp_path, manifest, options) as daemon:
        await daemon.host.start(BASES)
        said = await daemon.expect(Note)
        shown = tmp_path / "f\\udceb" / "b.txt"
        assert said.text == f"data: 1 file is not UTF-8 text and left out, such as {shown}"


@pytest.mark.parametrize("moment", ["before-start", "training"])
def test_a_learner_ends_by_itself_when_its_daemon_is_gone(moment):
    exchange = filled_exchange()
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "p2pdiloco.learner", str(theirs.fileno()), str(exchange.fd)],
        pass_fds=(theirs.fileno(), exchange.fd),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        theirs.close()
        if moment == "training":
            ours.settimeout(within_s(PATIENCE_S))
            ours.sendall(frame(Start(MICRO, OPTIONS, BASES)))
            assert ours.recv(4)  # Ready
        ours.close()
        assert process.wait(within_s(PATIENCE_S)) == 70
        assert not psutil.pid_exists(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        ours.close()
        exchange.close()


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="groups of sessions are Linux's")
def test_a_training_learner_steps_back_with_its_whole_session() -> None:
    """A thread's niceness counts within its session's group only: the group has to step back too."""
    code = (
        "import os, threading; os.setsid(); wait = threading.Event()\n"
        "older = threading.Thread(target=wait.wait, daemon=True); older.start()\n"
        "from p2pdiloco.priority import lower_process; assert lower_process(os.getpid(), 7)\n"
        "print({os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')}, end=' ')\n"
        "print(open('/proc/self/autogroup').read(), flush=True); wait.set()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=within_s(60)
    )
    nice, _, group = done.stdout.partition(" ")
    least = max(7, os.getpriority(os.PRIO_PROCESS, 0))
    assert nice == f"{{{least}}}" and group.split()[1:] == ["nice", "7"], done.stdout + done.stderr


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_threads_wait_briefly_unless_the_nodes_environment_says_how(chosen, monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    theirs = _environment()
    assert {name: theirs[name] for name in WAITING if name in theirs} == (chosen or ENVIRONMENT)
    assert theirs["PATH"] == os.environ["PATH"]
