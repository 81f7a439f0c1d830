"""The life of p2pd and of the transport on it: death, restart, ports, what stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from deadlines import within_s
from net_helpers import Recorder, until

from p2pdiloco.adapters import hivemind_binding, hivemind_net
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.adapters.p2pd import MAX_SOCKET_PATH_BYTES, P2PDaemon, P2PDOptions, socket_folder
from p2pdiloco.core.api.config import Timing
from p2pdiloco.errors import PeerUnreachable, UserError
from p2pdiloco.identity import Identity
from p2pdiloco_lab.namespaces import LinksRefused
from shaped.homes import Shape, ShapedLinks

pytestmark = pytest.mark.net
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
Make = Callable[..., HivemindTransport]


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    return uvloop.EventLoopPolicy()  # the daemon's loop; the contract tests run on asyncio's own


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Builds transports (not started) in folders of their own and closes them at the end."""
    async with AsyncExitStack() as stack:
        count = 0

        def build(listen: str = LOOPBACK, folder: Path | None = None, **more: object) -> HivemindTransport:
            nonlocal count
            count += 1
            folder = folder or tmp_path / f"node {count}"
            key = folder / "identity.key"
            transport = HivemindTransport(Identity.load_or_create(key), key, folder, (listen,), **more)  # type: ignore[arg-type]
            stack.push_async_callback(transport.close)
            return transport

        yield build


def p2pd_processes(folder: Path) -> list[int]:
    """Pids of p2pd of this data folder, whose control socket is elsewhere where that path is too long."""
    found, sockets = [], socket_folder(folder)
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(f"-listen=/unix{sockets}/" in word for word in words) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found


async def test_killed_p2pd_is_replaced_in_place(make: Make, tmp_path: Path) -> None:
    a = make()
    await a.start(Recorder())
    b = make(initial_peers=a.addresses()[:1])
    at_b = Recorder()
    await b.start(at_b)
    assert await b.put_record("members", b"b", 60.0)
    before = b.addresses()
    assert (await a.push(b.peer_id, b"3", [b"abc"], 5.0))[0]
    assert (await b.push(a.peer_id, b"3", [b"abc"], 5.0))[0]  # either keeps a stream that dies now

    at_b.before_reply = asyncio.get_running_loop().create_future
    waiting = asyncio.create_task(a.send(b.peer_id, b"never answered", 30.0))
    pending = asyncio.create_task(b.send(a.peer_id, b"x", 30.0))
    await until(lambda: bool(at_b.messages), "request at b")
    await pending
    assert b.p2pd_pid is not None
    os.kill(b.p2pd_pid, signal.SIGKILL)
    async with asyncio.timeout(within_s(5)):  # far below the call's own 30 s
        with pytest.raises(PeerUnreachable):
            await waiting
    at_b.before_reply = None
    await until(lambda: b.restarts == 1, "restart")
    assert b.addresses() == before  # same ports
    await until(lambda: b.peers_connected() > 0, "reconnected")
    assert await b.send(a.peer_id, b"from b", 5.0) == b"re:from b"
    assert await a.send(b.peer_id, b"to b", 5.0) == b"re:to b"  # same peer id, no back-off: b dialled us
    assert await b.get_records("members") == {b.peer_id: b"b"}
    assert (await a.push(b.peer_id, b"3", [b"abc"], 5.0))[0]
    assert (await b.push(a.peer_id, b"3", [b"abc"], 5.0))[0]


async def test_a_p2pd_that_answers_nothing_when_it_is_started_again_is_started_once_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, asked = make(), 0
    await a.start(Recorder())
    look = hivemind_binding.Attachment.observed_addresses

    async def slow_once(self: hivemind_binding.Attachment, timeout_s: float) -> list[str]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise PeerUnreachable(f"p2pd: no answer within {timeout_s:g} s")
        return await look(self, timeout_s)

    monkeypatch.setattr(hivemind_binding.Attachment, "observed_addresses", slow_once)
    assert a.p2pd_pid is not None
    os.kill(a.p2pd_pid, signal.SIGKILL)
    await until(lambda: a.restarts == 1, "restart")
    assert asked > 1


async def test_whom_we_only_heard_of_is_dialled_when_something_is_sent(make: Make) -> None:
    a, b, c = make(), make(), make()
    for transport in (a, b, c):
        await transport.start(Recorder())
    with pytest.raises(PeerUnreachable):
        await a.send(b.peer_id, b"x", 2.0)
    a.learn(b.peer_id, ["nonsense", *b.addresses()])
    a.learn(c.peer_id, c.addresses())
    assert a.peers_connected() == b.peers_connected() == 0
    assert await a.send(b.peer_id, b"hello", 5.0) == b"re:hello"
    assert (await a.push(c.peer_id, b"3", [b"abc"], 5.0))[0]
    await c.close()
    a._meeting.connected.discard(c.peer_id)  # as maintenance finds out
    with pytest.raises(PeerUnreachable):
        await a.send(c.peer_id, b"gone", 2.0)


async def test_calls_while_p2pd_is_down_fail_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hivemind_net, "RESTART_BACKOFF_S", (60.0,))
    silent = Recorder()
    silent.before_reply = asyncio.get_running_loop().create_future
    b = make()
    await b.start(silent)
    a = make(initial_peers=b.addresses()[:1])
    await a.start(Recorder())
    await a.put_record("key", b"ours", 60.0)
    pending = asyncio.create_task(a.send(b.peer_id, b"never answered", 30.0))
    await until(lambda: bool(silent.messages), "request at b")
    assert a.p2pd_pid is not None
    os.kill(a.p2pd_pid, signal.SIGKILL)
    async with asyncio.timeout(within_s(5)):  # in hivemind it hangs
        with pytest.raises(PeerUnreachable, match="p2pd is gone"):
            await pending
    await until(lambda: not a._up(), "noticed")
    peer = Identity.generate().peer_id
    async with asyncio.timeout(within_s(1)):
        for call in (a.send(peer, b"", 30.0), a.push(peer, b"", [], 30.0), a.connect(peer, [LOOPBACK])):
            with pytest.raises(PeerUnreachable):
                await call
        assert await a.get_records("key") == {a.peer_id: b"ours"}
        assert not await a.put_record("key", b"newer", 60.0)
        await a.close()


async def test_port_in_use(make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=str(port)) as refused:
            await make(f"/ip4/127.0.0.1/tcp/{port}").start(Recorder())
        assert refused.value.hint


async def test_port_in_use_by_another_p2pd(make: Make) -> None:
    """p2pd itself would share the port silently (SO_REUSEPORT)."""
    a = make()
    await a.start(Recorder())
    port = a.addresses()[0].split("/")[4]
    with pytest.raises(UserError, match=port):
        await make(f"/ip4/127.0.0.1/tcp/{port}").start(Recorder())


async def test_nothing_stays_after_close(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "node 1"
    a = make()
    await a.start(Recorder())
    assert p2pd_processes(folder) == [a.p2pd_pid] and (socket_folder(folder) / "p2pd.sock").exists()
    began = time.monotonic()
    await a.close()
    assert time.monotonic() - began < 3
    assert p2pd_processes(folder) == [] and list(folder.iterdir()) == [folder / "identity.key"]
    assert not (socket_folder(folder) / "p2pd.sock").exists()


HERE = Path(__file__).parent
OWNER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {tests!r}
from net_helpers import Recorder
from p2pdiloco.adapters.hivemind_net import HivemindTransport
from p2pdiloco.identity import Identity
folder = Path({folder!r})
key = folder / "identity.key"
async def main():
    transport = HivemindTransport(Identity.load_or_create(key), key, folder, ({listen!r},))
    await transport.start(Recorder())
    print(transport.p2pd_pid, transport.addresses()[0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def owner_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another Python process that owns a p2pd; nothing of it is left at the end."""
    code = OWNER.format(tests=[str(HERE), str(HERE.parents[1])], folder=str(folder), listen=LOOPBACK)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield owner
    finally:
        owner.kill()
        owner.communicate()
        for left in p2pd_processes(folder):
            os.kill(left, signal.SIGKILL)
        shutil.rmtree(socket_folder(folder), ignore_errors=True)


async def test_p2pd_ends_by_itself_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner_process(tmp_path / "owned") as owner:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline)
        owner.kill()
        await until(lambda: p2pd_processes(tmp_path / "owned") == [], "p2pd gone")


async def test_owner_and_wedged_p2pd_are_cleared_away_by_the_next_start(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "owned"
    with owner_process(folder) as owner:
        assert owner.stdout is not None
        pid, address = (await asyncio.to_thread(owner.stdout.readline)).split()
        assert p2pd_processes(folder) == [int(pid)]
        os.kill(int(pid), signal.SIGSTOP)  # the worst case: p2pd cannot end by itself
        owner.kill()
        again = make(address.rsplit("/p2p/", 1)[0], folder)  # same port, at once
        await again.start(Recorder())
        assert p2pd_processes(folder) == [again.p2pd_pid]
        assert again.addresses()[0] == address
        await again.close()
        assert list(folder.iterdir()) == [folder / "identity.key"]


async def test_one_live_initial_peer_of_several_is_enough(make: Make) -> None:
    a = make()
    await a.start(Recorder())
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    b = make(initial_peers=[dead, *a.addresses()[:1]])
    await b.start(Recorder())
    with pytest.raises(UserError, match=r"tcp/9/.*connection refused"):
        await make(initial_peers=[dead]).start(Recorder())
    other = f"{a.addresses()[0].rsplit('/', 1)[0]}/{Identity.generate().peer_id}"
    with pytest.raises(UserError, match="another peer id answers there"):
        await make(initial_peers=[other]).start(Recorder())


async def test_a_bootstrap_that_came_back_is_found_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its DHT is empty and it knows nobody: who joined through it must come back to it, or newcomers at the
    bootstrap and the old swarm would stay two swarms for ever (found by `p2pdiloco chaos`)."""
    monkeypatch.setattr(hivemind_net, "MAINTENANCE_S", 0.2)
    folder = tmp_path / "bootstrap"
    first = make(folder=folder)
    await first.start(Recorder())
    address = first.addresses()[0]
    member, other = make(initial_peers=[address]), make(initial_peers=[address])
    await member.start(Recorder())
    await other.start(Recorder())
    await member.connect(other.peer_id, other.addresses())
    await first.close()
    for number in range(50):  # until the DHT has forgotten the dead one
        if not (member._records and member._records.knows(first.peer_id)):
            break
        await asyncio.gather(member.get_records(f"{number}"), other.get_records(f"{number}"))
    again = make(listen=address.partition("/p2p/")[0], folder=folder)
    await again.start(Recorder())
    newcomer = make(initial_peers=[address])
    await newcomer.start(Recorder())
    found: dict[str, bytes] = {}
    for _ in range(150):
        await member.put_record("key", b"here", 30.0)
        found = await newcomer.get_records("key")
        if found:
            break
        await asyncio.sleep(0.1)
    assert found == {member.peer_id: b"here"}


async def test_who_finds_hardly_anybody_dials_whom_it_met_before(make: Make) -> None:
    swarm = make()
    await swarm.start(Recorder())
    empty = make()
    await empty.start(Recorder())
    back = make(initial_peers=empty.addresses()[:1], remembered=swarm.addresses()[:1])
    await back.start(Recorder())
    await until(lambda: swarm.peer_id in back._meeting.connected, "the remembered peer")


async def test_a_peer_is_found_by_its_id_alone(make: Make) -> None:
    a = make()
    await a.start(Recorder())
    b, c = (make(initial_peers=a.addresses()[:1]) for _ in range(2))
    await b.start(Recorder())
    await c.start(Recorder())
    assert await b.send(c.peer_id, b"x", 10.0) == b"re:x"  # b never heard an address of c


async def test_clock_skew_is_explained(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a = make()
    await a.start(Recorder())
    monkeypatch.setattr("hivemind.dht.protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS", -3600)
    with pytest.raises(UserError, match="clock") as refused:
        await make(initial_peers=a.addresses()[:1]).start(Recorder())
    assert "Synchronise" in refused.value.hint


async def test_forged_records_are_refused(make: Make) -> None:
    a = make()
    await a.start(Recorder())
    b = make(initial_peers=a.addresses()[:1])
    await b.start(Recorder())
    assert await a.put_record("members", b"a", 60.0)
    assert await b.put_record("members", b"b", 60.0)
    records = b._records
    assert records is not None
    node, later = records._node, time.time() + 600

    class Unsigned(hivemind_binding._Validator):
        """A hostile peer: signs with its own key, whatever the subkey, and takes everything itself."""

        def validate(self, record: object) -> bool:
            return True

    node.protocol.record_validator = Unsigned(b._identity)
    honest = {a.peer_id: b"a", b.peer_id: b"b"}
    for subkey in (a.peer_id, "junk", None, 7):  # another's record, no peer, a plain overwrite, not text
        await node.store("members", b"forged", later, subkey=subkey, exclude_self=True)
        assert await a.get_records("members") == honest, subkey
    # Signed by its owner, but a value that would fail every reader's look-up.
    await node.store("members", {"not": "bytes"}, later, subkey=b.peer_id, exclude_self=True)
    await node.store("members", b"b", later + 10 * 86400, subkey=b.peer_id, exclude_self=True)  # for ever
    assert await a.get_records("members") == honest


async def test_a_replayed_older_record_does_not_shorten_the_newer_ones_life(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    await a.start(Recorder())
    assert a._records is not None
    now = time.time()
    a._records._put_here("key", b"new", now + 60)
    a._records._put_here("key", b"old", now + 20)  # hivemind: refuses it, and forgets the new one with it
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 40)
    assert a._records.get_here("key") == {a.peer_id: b"new"}


async def test_a_reply_to_a_cancelled_call_does_not_break_the_later_ones(make: Make) -> None:
    """In hivemind a reply that meets a just cancelled call ends the reading task; all later calls hang."""
    a, at_a = make(), Recorder()
    await a.start(at_a)
    b = make(initial_peers=a.addresses()[:1])
    await b.start(Recorder())
    at_a.before_reply = asyncio.get_running_loop().create_future
    call = asyncio.create_task(b.send(a.peer_id, b"x", 30.0))
    await until(lambda: bool(at_a.messages), "request at a")
    call.cancel()
    assert b._attachment is not None
    calls = b._attachment._control._pending_calls.values()
    [waiting] = [reply for reply in calls if reply.cancelled() or not reply.done()]
    waiting.set_result(b"late")  # what the reading task does when the reply is in just now
    await asyncio.gather(call, return_exceptions=True)
    at_a.before_reply = None
    assert await b.send(a.peer_id, b"y", 5.0) == b"re:y"
    assert b.restarts == 0


def test_long_data_folders_get_a_short_socket_folder(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["long-folder-name"] * 8)
    assert socket_folder(Path("/x")) == Path("/x/run")
    short = socket_folder(deep)
    assert len(str(short / "client99999.sock")) <= MAX_SOCKET_PATH_BYTES
    assert short == socket_folder(deep) != socket_folder(deep / "other")


def test_a_long_folder_for_temporary_files_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("t" * 100)))
    folder = socket_folder(tmp_path / ("d" * 100))
    assert len(str(folder / "client99999.sock")) <= MAX_SOCKET_PATH_BYTES
    assert folder.parent == Path("/tmp")


async def test_the_socket_folder_must_be_ours(tmp_path: Path) -> None:
    folder = socket_folder(tmp_path)
    folder.symlink_to("/tmp")
    try:
        with pytest.raises(UserError, match="belongs to another user"):
            await P2PDaemon(tmp_path / "key", tmp_path, P2PDOptions()).prepare()
    finally:
        folder.unlink()


@pytest.mark.parametrize("wished", [None, "3"])
async def test_p2pd_runs_on_one_processor_unless_somebody_wishes_otherwise(make, monkeypatch, wished):
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if wished:
        monkeypatch.setenv("GOMAXPROCS", wished)
    transport = make()
    await transport.start(Recorder())
    assert psutil.Process(transport.p2pd_pid).environ()["GOMAXPROCS"] == (wished or "1")


# Control before data, over real transports and real links: 1 Mbit/s, 50 ms there and back.
#
# Control messages share the connection to a peer with bulk, and the link with the bulk to others. What lies
# before them is then what is on its way: windows that follow the delay (`adapters.flow`) and nothing else.
# Heartbeats come every half second and a peer is suspected after three seconds at the earliest: no message
# may take so long, and the median has to be far below.

PEER = str(Path(__file__).with_name("shaped_peer.py"))
MEDIAN_S = 0.5
END_S = 10.0
Load = Callable[..., tuple[dict[str, Any], float, float]]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Peers in a home with a fast link, and one with the given link that sends them bulk and control."""
    try:
        links = ShapedLinks()
    except LinksRefused as error:
        pytest.skip(f"{error}; {error.hint}")
    running: list[subprocess.Popen[str]] = []

    def start(words: list[str], what: str, address: str, *more: object) -> subprocess.Popen[str]:
        (tmp_path / what).mkdir()
        command = [*words, sys.executable, PEER, what, str(tmp_path / what), address, *map(str, more)]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return running[-1]

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def measure(
        shape: Shape, peers: int, seconds: float, upload: float, download: float
    ) -> tuple[dict[str, Any], float, float]:
        """What the sender found, and the bytes a second that it sent and was sent."""
        far = Shape(delay_s=shape.delay_s)
        peer = start(*_home(links, "far", far, "serve"), peers)
        addresses = json.loads(line(peer))
        sender = start(*_home(links, "near", shape, "load"), seconds, 100_000, upload, download, *addresses)
        assert line(sender) == "loading\n"
        before, began_s = links.counts(), time.monotonic()
        assert line(sender) == "loaded\n"
        now, took_s = links.counts(), time.monotonic() - began_s
        sent, received = ((now[home]["bytes"] - before[home]["bytes"]) / took_s for home in ("near", "far"))
        return json.loads(line(sender)), sent, received

    try:
        yield measure
    finally:
        for process in running:
            try:
                process.communicate(timeout=within_s(END_S))  # closes stdin, at which it ends
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        links.close()


def _home(links: ShapedLinks, name: str, shape: Shape, what: str) -> tuple[list[str], str, str]:
    words, address = links.add(name, shape)
    return words, what, address


@pytest.mark.timeout(120)
@pytest.mark.parametrize("peers", [3])
def test_control_messages_do_not_wait_behind_bulk(load: Load, peers: int) -> None:
    found, sent, _ = load(Shape.of(1e6, 0.05), peers, 10.0, 0.0, 0.0)
    assert not found["failed"] and not found["lost"] and found["pushes"] >= 1
    assert sent > 0.5 * 125_000, "there was no bulk to wait behind"
    assert statistics.median(found["busy"]) < MEDIAN_S
    assert max(found["busy"]) < Timing().suspect_s


@pytest.mark.timeout(120)
def test_what_a_person_permits_is_kept_on_the_link(load: Load) -> None:
    """Counted on the link, what libp2p, TCP and IP add included; the DHT's own words are not limited."""
    found, sent, received = load(Shape.of(100e6, 0.02), 2, 10.0, 4e6, 4e6)
    assert not found["failed"] and not found["lost"]
    for moved in (sent, received):  # both at once, each with the other's acknowledgements
        assert 0.5 * 5e5 < moved < 1.05 * 5e5
